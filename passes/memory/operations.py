"""The operations of one device as XLA sees them, and the simplifications that it makes as they are added.

Equal operations are one; what changes nothing is left out; operands of other shapes are broadcast, and what is the same
along a dimension is computed once, before the broadcast. Only what decides memory is kept of an operation: what it
reads and writes, and how it can be fused.

Reference: XLA's algebraic simplifier and CSE, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from passes.ir import TensorType, item_nbytes

Kind = Literal[
    "input",
    "literal",
    "elementwise",
    "expensive",
    "broadcast",
    "iota",
    "bitcast",
    "transpose",
    "rearrange",
    "gather",
    "reduce",
    "update",
    "dot",
    "collective",
    "fresh",
    "carry",
    "loop",
    "opaque",
    "part",
    "result",
]
"""How XLA treats an operation: `expensive` ones are elementwise but never computed twice, `rearrange` takes elements
from other places, `update` and `carry` write into their first operand, `fresh` is room that a loop fills, `part` is
another name for its first operand once the others are there, `result` one of several that its operand makes, and
`opaque` whatever has a kernel of its own."""

Shape = tuple[int, ...]

ELEMENTWISE = frozenset({"elementwise", "expensive"})
"""The kinds of operations that compute each element of their result from the elements at the same place."""

NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0, "maximum": -math.inf, "minimum": math.inf}
)
"""The second operand that changes nothing."""

BY_COLUMNS = (((0,), (0,)), ((), ()))
"""The dimension numbers of a product of columns with columns."""

TRANSPOSED = "transposed"
"""The tag of a product with its sides swapped, which is it transposed: another name for it."""

DRAWN = "threefry2x32"
"""The name of random bits that are computed element by element."""

COMMUTATIVE = frozenset({"add", "and", "maximum", "minimum", "multiply", "or", "xor"})

UNIFORM = frozenset({"literal", "broadcast"})
"""Kinds that may be the same along a dimension: without any of them, and unless it is `SIMPLIFIED`, all is as it is."""

SIMPLIFIED = frozenset({"add", "select"})


class Operation(NamedTuple):
    """One operation; `operands` are positions in the program, `node` and `value` what it stands for in the graph.

    `tag` tells apart what has the same kind, operands and shape. One that `is_moved` was computed behind a reshape, and
    is ahead of it. One that `is_image` lies in tiles of its first and its last dimension, one that `is_batch` in tiles
    of its last two, and one that `is_rows` has its last in whole tiles. A tuple is made in a fifth of the time that a
    frozen dataclass takes, and a deep model has many thousand operations.
    """

    kind: Kind
    operands: tuple[int, ...]
    shape: Shape
    dtype: str
    node: int
    value: int = -1
    tag: object = None
    is_fused: bool = False
    is_moved: bool = False
    is_image: bool = False
    is_batch: bool = False
    is_rows: bool = False

    @property
    def name(self) -> str:
        """The opcode, or the kind of a collective: the first item of the tag."""
        tag = self.tag
        if isinstance(tag, str):
            return tag
        if isinstance(tag, tuple):
            return str(cast("tuple[object, ...]", tag)[0]) if tag else ""
        return str(tag)

    def reading(self, operands: tuple[int, ...]) -> Operation:
        """The operation with other operands; itself where these are its own, which many are in every pass."""
        if operands == self.operands:
            return self
        return self._replace(operands=operands)

    @property
    def is_conversion(self) -> bool:
        """Whether this converts an array to another dtype."""
        return self.kind in ("elementwise", "expensive") and self.name.startswith("convert ")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return 0 if self.is_fused else self.size * item_nbytes(self.dtype)


def elements_nbytes(operation: Operation) -> int:
    """The bytes of what an operation makes, element after element."""
    return operation.nbytes


Compiler = Literal["cpu", "gpu", "tpu"]
"""A compiler of XLA, by the devices that it compiles for."""


class Operations:
    """The operations of a program as they are added; `at` and `value` are what the next ones stand for.

    Those that are fused (`TensorType.fused`) take no memory. Arithmetic on the dtypes `widened` is done in wider ones.
    What they make in the middle of a primitive is `rounded_to` a dtype, if that is narrower than the one computed in.
    They are those of a `compiler`: XLA's for CPUs, GPUs or TPUs. `lying` are the operands, by product and side, that a
    product may read in place of the transposed ones that it has. `divided` is the first that each broadcast divides.
    """

    def __init__(self, widened: Mapping[str, str] = MappingProxyType({}), compiler: Compiler = "gpu") -> None:
        self.widened = widened
        self.compiler = compiler
        self.every: list[Operation] = []
        self.known: dict[tuple[object, ...], int] = {}
        self.wide: dict[tuple[int, Shape, tuple[int, ...] | None], int] = {}
        self.numbers: dict[int, object] = {}
        self.before_rounding: dict[int, int] = {}
        self.rounded: set[int] = set()
        self.lying: dict[tuple[int, int], int] = {}
        self.divided: dict[int, int] = {}
        self.at = self.value = -1
        self.is_fused = False
        self.rounded_to = ""

    def __getitem__(self, operation: int) -> Operation:
        return self.every[operation]

    def add(self, kind: Kind, operands: Iterable[int], shape: Shape, dtype: str, tag: object = None) -> int:
        """The operation, or the equal one that is there already, in whatever order a sum or product reads its two."""
        key = (kind, _sorted(kind, operands := tuple(operands), tag), shape, dtype, tag)
        new = len(self.every)
        index = self.known.setdefault(key, new)
        if index == new:
            self.every.append(Operation(kind, operands, shape, dtype, self.at, self.value, tag, self.is_fused))
            if kind == "literal":
                self.numbers[new] = cast("tuple[str, object]", tag)[1]
            elif kind == "broadcast" and self.every[operands[0]].kind == "literal":
                self.numbers[new] = self.numbers[operands[0]]
        return index

    def literal(self, value: object, dtype: str) -> int:
        """A scalar known while planning."""
        return self.add("literal", (), (), dtype, (type(value).__name__, value))

    def barrier(self, operations: Sequence[int]) -> list[int]:
        """The operations behind an optimization barrier, which all pass at once; nothing is shared across it.

        Several pass it as one tuple, which is made before and taken apart behind it.
        """
        tag = ("barrier", len(self.every))
        if len(operations) == 1 and (source := self.every[operations[0]]).kind != "literal":
            return [self.add("part", operations, source.shape, source.dtype, tag)]
        passed_on = [(o, self.every[o]) for o in operations]
        joined = self.add("opaque", (o for o, source in passed_on if source.kind != "literal"), (0,), "bool", tag)
        passed = self.add("opaque", (joined,), (0,), "bool", tag)
        return [
            o if source.kind == "literal" else self.add("part", (o, passed), source.shape, source.dtype, tag)
            for o, source in passed_on
        ]

    def copied(self, operation: int) -> int:
        """An argument in a place of its own; anything else as it is."""
        source = self.every[operation]
        if source.kind != "input":
            return operation
        return self.add("opaque", (operation,), source.shape, source.dtype, "copy")

    def number(self, operation: int) -> object:
        """The literal that an operation holds everywhere, None for anything else."""
        return self.numbers.get(operation)

    def converted(self, operation: int, dtype: str) -> int:
        """The operation in another dtype; XLA does not round to bfloat16 twice, as that takes a check for NaN."""
        source = self.every[operation]
        if source.dtype == dtype:
            return operation
        if (number := self.numbers.get(operation)) is not None:
            made = self.literal(number, dtype)
            return made if source.kind == "literal" else self.broadcast(made, source.shape, ())
        type = TensorType(shape=source.shape, dtype=dtype)
        narrow = dtype == "bfloat16" and source.dtype == "float32"
        return self.elementwise(f"convert {source.dtype}", (operation,), type, expensive=narrow)

    def step(self, operation: int) -> int:
        """An intermediate result of a primitive as the next operation of the same primitive reads it."""
        narrow, dtype = self.rounded_to, self.every[operation].dtype
        return self.converted(self.converted(operation, narrow), dtype) if narrow else operation

    def reshape(self, operation: int, shape: Shape) -> int:
        """The same bytes under another shape."""
        source = self.every[operation]
        if source.kind == "bitcast":
            operation = source.operands[0]
        if self.every[operation].shape == shape:
            return operation
        return self.add("bitcast", (operation,), shape, source.dtype)

    def broadcast(self, operation: int, shape: Shape, dims: Sequence[int] | None = None) -> int:
        """The operation with more dimensions, its own being `dims`; only a reshape where its size stays."""
        if self.every[operation].shape == shape:
            return operation
        key = (operation, shape, None if dims is None else tuple(dims))
        made = self.wide.get(key)
        if made is None:
            made = self.wide[key] = self._broadcast(operation, shape, dims)
        return made

    def _broadcast(self, operation: int, shape: Shape, dims: Sequence[int] | None) -> int:
        source = self.every[operation]
        if source.kind != "literal" and math.prod(shape) == math.prod(source.shape):
            return self.reshape(operation, shape)
        dims = range(len(shape) - len(source.shape), len(shape)) if dims is None else dims
        wide = tuple(d for d, size in zip(dims, source.shape, strict=True) if size > 1)
        if source.kind == "broadcast" and source.shape == tuple(shape[d] for d in dims):
            inner = cast("tuple[int, ...]", source.tag)
            wide, operation = tuple(dims[d] for d in inner), source.operands[0]
        else:
            operation = self.reshape(operation, tuple(size for size in source.shape if size > 1))
        return self.add("broadcast", (operation,), shape, source.dtype, wide)

    def transpose(self, operation: int, permutation: Sequence[int]) -> int:
        """Dimensions in another order; two transposes are one, and dimensions of size 1 move for free.

        A product of columns with columns is written in whatever order its reader wants, rounded or not.
        """
        source = self.every[operation]
        after = tuple(source.shape[d] for d in permutation)
        moved = [d for d in permutation if source.shape[d] > 1]
        if moved == sorted(moved):
            return self.reshape(operation, after)
        if source.kind == "bitcast" and source.tag == TRANSPOSED and tuple(permutation) == (1, 0):
            return source.operands[0]
        if source.kind == "dot" and source.tag == BY_COLUMNS:
            return self.add("dot", source.operands[::-1], after, source.dtype, BY_COLUMNS)
        if source.is_conversion and self._is_written_either_way(source.operands[0]):
            below, type = self.transpose(source.operands[0], permutation), TensorType(shape=after, dtype=source.dtype)
            return self.elementwise(source.name, (below,), type, expensive=source.kind == "expensive")
        if source.kind == "transpose":
            before = cast("tuple[int, ...]", source.tag)
            return self.transpose(source.operands[0], [before[d] for d in permutation])
        return self.add("transpose", (operation,), after, source.dtype, tuple(permutation))

    def _is_written_either_way(self, operation: int) -> bool:
        """Whether an operation is a product of columns with columns, converted or not."""
        described = self.every[operation]
        while described.is_conversion:
            described = self.every[described.operands[0]]
        return described.kind == "dot" and described.tag == BY_COLUMNS

    def elementwise(self, name: str, operands: Sequence[int], type: TensorType, *, expensive: bool = False) -> int:
        """One operation on every element; what is the same along a dimension is computed once and broadcast."""
        every, shape = self.every, type.shape
        laid = every[operands[0]] if len(operands) == 1 else None
        if laid and laid.kind == "transpose" and _is_sent(self, laid.operands[0]):  # computed as it is laid out
            before = TensorType(shape=every[laid.operands[0]].shape, dtype=type.dtype)
            made = self.elementwise(name, laid.operands, before, expensive=expensive)
            return self.transpose(made, cast("tuple[int, ...]", laid.tag))
        spread = [o if every[o].shape == shape else self.broadcast(o, shape) for o in operands]
        uniform = [o for o in spread if every[o].kind in UNIFORM]
        simplified = None
        if uniform or name in SIMPLIFIED:
            numbers = [self.numbers.get(o) for o in spread]
            simplified = self._neutral(name, spread, numbers, type)
            if simplified is None and uniform:
                simplified = self._narrow(name, spread, numbers, type, expensive)
        if simplified is None:
            simplified = self.add("expensive" if expensive else "elementwise", spread, shape, type.dtype, name)
        return simplified

    def _neutral(self, name: str, spread: list[int], numbers: Sequence[object], type: TensorType) -> int | None:
        """The operand that an operation returns unchanged, or a scatter into the other one; None for anything else."""
        if name in NEUTRAL and len(spread) == 2:
            if is_number(numbers[1], NEUTRAL[name]):
                return spread[0]
            if name in COMMUTATIVE and is_number(numbers[0], NEUTRAL[name]):
                return spread[1]
        if name == "select" and (chosen := _chosen(spread, numbers, type)) is not None:
            return chosen
        return _scattered(self, spread, type) if name == "add" and len(spread) == 2 else None

    def _narrow(
        self, name: str, spread: list[int], numbers: Sequence[object], type: TensorType, expensive: bool
    ) -> int | None:
        """The broadcast of an operation on scalars or on one broadcast operand, computed before it; None for others."""
        sources = {o for o, n in zip(spread, numbers, strict=True) if n is None}
        if not sources and type.shape and spread:
            return self.broadcast(self.literal((name, *numbers), type.dtype), type.shape)
        if len(sources) != 1 or self.every[(source := min(sources))].kind != "broadcast":
            return None
        broadcast = self.every[source]
        narrow = self.every[broadcast.operands[0]].shape
        below = [
            broadcast.operands[0] if n is None else self.broadcast(self.every[o].operands[0], narrow)
            for o, n in zip(spread, numbers, strict=True)
        ]
        inner = TensorType(shape=narrow, dtype=type.dtype)
        made = self.elementwise(name, below, inner, expensive=expensive)
        return self.broadcast(made, type.shape, cast("tuple[int, ...]", broadcast.tag))


def _sorted(kind: Kind, operands: tuple[int, ...], tag: object) -> tuple[int, ...]:
    """The operands, in order where that changes nothing."""
    is_swapped = kind == "elementwise" and tag in COMMUTATIVE and operands[0] > operands[-1]
    return operands[::-1] if is_swapped else operands


def widen(operations: Operations, operation: int) -> int:
    """The operation in the dtype that its readers compute in."""
    wide = operations.widened.get(operations[operation].dtype)
    return operation if wide is None else operations.converted(operation, wide)


def _chosen(spread: Sequence[int], numbers: Sequence[object], type: TensorType) -> int | None:
    """The operand that a selection is: both choices if they are one, the condition itself if it selects what it is."""
    if len(set(spread[1:])) == 1:
        return spread[1]
    return spread[0] if type.dtype == "bool" and tuple(numbers[1:]) == (False, True) else None


def _is_sent(operations: Operations, operation: int) -> bool:
    """Whether an operation is what a collective makes, on GPUs also what follows from that alone by elements."""
    described = operations[operation]
    while operations.compiler == "gpu" and described.kind in ELEMENTWISE and len(described.operands) == 1:
        described = operations[described.operands[0]]
    return described.kind == "collective"


def _scattered(operations: Operations, summands: Sequence[int], type: TensorType) -> int | None:
    """The scatter of a summand that is one onto zeros, onto the other summand; None for anything else.

    Zeros behind a barrier of their own are added first: XLA does not see that they are zeros. Two scatters are one
    where their updates have fewer elements than the result, or else stay apart.
    """
    both = [operations[s] for s in summands]
    if all(each.kind == "update" and "-add" in str(each.tag) for each in both):
        updates = sum(operations[each.operands[-1]].size for each in both)
        if updates >= math.prod(type.shape):
            return None
    for into, scattered in (summands, summands[::-1]):
        update = operations[scattered]
        if scattered in operations.rounded or update.kind != "update" or "-add" not in str(update.tag):
            continue  # XLA rounds between the two when it looks for this, and not later
        if any(scattered in each.operands for each in operations.every[scattered:]):
            continue  # it is there for another reader anyhow
        zeros = update.operands[0]
        if operations[zeros].kind == "part":
            into = operations.elementwise("add", (into, zeros), type)
        elif not is_number(operations.number(zeros), 0.0):
            continue
        return operations.add("update", (into, *update.operands[1:]), type.shape, type.dtype, update.tag)
    return None


def is_number(number: object, value: float) -> bool:
    """Whether a literal is this number."""
    return isinstance(number, int | float) and float(number) == value
