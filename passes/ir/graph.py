"""The program as planning sees it: nodes over typed values, with plain-data parameters.

A `Graph` is a flattened jaxpr without JAX in it. Values are integers that index `Graph.types`; nodes are in
execution order. Control flow keeps its bodies as `Node.subgraphs`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from passes.device_placement import DevicePlacement
from passes.errors import InternalError

_ITEM_NBYTES = {"bool": 1, "float0": 0, "bfloat16": 2, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}


StatePairs = tuple[tuple[int, int], ...]
"""Positions (output, input) of a step's state: the caller hands the output to the next step as that input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """The shape and dtype of a value, dtype by its NumPy or ml_dtypes name (`float32`, `bfloat16`, `key<fry>`).

    A value that is `fused` is never in memory: a kernel makes it and reads it itself, by as many products as that says.
    """

    shape: tuple[int, ...]
    dtype: str
    fused: int = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def item_nbytes(self) -> int:
        """Bytes of memory of one element; a typed PRNG key counts as the 32-bit words of its data."""
        return 0 if self.fused else item_nbytes(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.size * self.item_nbytes

    @property
    def is_integer(self) -> bool:
        """Whether elements are whole numbers, signed or not; booleans are none."""
        return self.dtype.startswith(("int", "uint"))

    @property
    def is_float(self) -> bool:
        """Whether elements are real floating-point numbers, of any width; `float0` has none."""
        return self.dtype.startswith(("float", "bfloat")) and self.dtype != "float0"

    @property
    def is_inexact(self) -> bool:
        """Whether elements are real or complex floating-point numbers, which sums and quotients round."""
        return self.is_float or self.dtype.startswith("complex")

    @property
    def is_key(self) -> bool:
        """Whether elements are typed keys of JAX's random generators."""
        return self.dtype.startswith("key<")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@lru_cache(maxsize=256)
def item_nbytes(dtype: str) -> int:
    """Bytes of one element of `dtype`. Raises InternalError for a name without a width."""
    if dtype in _ITEM_NBYTES:
        return _ITEM_NBYTES[dtype]
    if dtype.startswith("key<"):
        return 8 if dtype == "key<fry>" else 16  # threefry has two words, rbg and unsafe_rbg four
    if dtype.startswith(("float8_", "float6_", "float4_")):
        return 1
    digits = "".join(c for c in dtype if c.isdigit())
    if not digits:
        raise InternalError(f"dtype {dtype!r} has no known width")
    return int(digits) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation: a primitive by name, the values it reads and writes, and its plain-data parameters.

    `source` is the user's `file:line (function)`; `scope` is JAX's name stack, from which phases are read.
    Recomputation has RECOMPUTED in its scope, as `jax.checkpoint` writes it.
    """

    RECOMPUTED: ClassVar[str] = "rematted_computation"

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, object] = field(default_factory=dict[str, object])
    subgraphs: tuple[Graph, ...] = ()
    source: str = ""
    scope: str = ""

    @property
    def is_recomputed(self) -> bool:
        """Whether it recomputes what the forward pass did not keep."""
        return self.RECOMPUTED in self.scope


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A program: `types[v]` is the type of value v; `literals` are scalars known while planning.

    `input_names` and `output_names` are the user's argument paths (`state.params['wte']`), for messages. `constants`
    are arrays captured by the function; lowering supplies their contents. Inputs at `pinned` positions arrive in
    placements that the user has chosen.
    """

    types: tuple[TensorType, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...] = ()
    literals: Mapping[int, float | int | bool | str] = field(default_factory=dict[int, float | int | bool | str])
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    pinned: Mapping[int, DevicePlacement] = field(default_factory=dict[int, DevicePlacement])

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """The node that writes each value; inputs, constants and literals are absent."""
        return {value: index for index, node in enumerate(self.nodes) for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[int, tuple[int, ...]]:
        """The nodes that read each value, in order, once for every operand that reads it."""
        readers: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                readers.setdefault(value, []).append(index)
        return {value: tuple(nodes) for value, nodes in readers.items()}

    @cached_property
    def returned(self) -> frozenset[int]:
        """The set of values that are outputs."""
        return frozenset(self.outputs)

    @cached_property
    def memo(self) -> dict[object, object]:
        """A cache of results that follow from the graph alone, by the function that computes them.

        It lives as long as the graph, and is not sent to other processes with it.
        """
        return {}

    def __getstate__(self) -> dict[str, object]:
        """The fields, and what is cached of them but the memo."""
        return {name: value for name, value in vars(self).items() if name != "memo"}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that differ where operations, shapes, dtypes or wiring do; names do not count."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()[:16]

    def part(self, nodes: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
        """The subgraph of these nodes, as a program of its own whose values keep their numbers."""
        picked = tuple(self.nodes[i] for i in nodes)
        read = {value for node in picked for value in node.inputs}.union(outputs)
        entering = dict(zip(self.inputs, self.input_names, strict=False))
        leaving = dict(zip(self.outputs, self.output_names, strict=False))
        return Graph(
            types=self.types,
            nodes=picked,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            constants=tuple(value for value in self.constants if value in read),
            literals={value: number for value, number in self.literals.items() if value in read},
            input_names=tuple(entering.get(value, leaving.get(value, "")) for value in inputs),
            output_names=tuple(leaving.get(value, entering.get(value, "")) for value in outputs),
        )

    def verify(self) -> None:
        """Raises InternalError unless every value is written once, before it is read."""
        written: set[int] = set()
        for value in (*self.inputs, *self.constants, *self.literals):
            if value in written:
                raise InternalError(f"value %{value} enters the graph twice")
            written.add(value)
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                if value not in written:
                    raise InternalError(f"node {index} ({node.primitive}) reads %{value} before it is written")
            for value in node.outputs:
                if value in written:
                    raise InternalError(f"node {index} ({node.primitive}) writes %{value} again")
                written.add(value)
            for subgraph in node.subgraphs:
                subgraph.verify()
        for value in self.outputs:
            if value not in written:
                raise InternalError(f"output %{value} is never written")
        if written and max(written) >= len(self.types):
            raise InternalError(f"value %{max(written)} has no type")

    def format(self, *, sources: bool = False) -> str:
        """The graph as text, one line a node, bodies indented; `sources` adds the user's lines."""
        return "\n".join(_lines(self, sources, ""))

    def __str__(self) -> str:
        return self.format()


def _canonical(graph: Graph) -> str:
    """The graph as text with values numbered in order of use: equal graphs have equal texts."""
    names = {value: f"{literal!r}:{graph.types[value]}" for value, literal in graph.literals.items()}
    types: dict[TensorType, str] = {}
    spelled: dict[int, str] = {}  # nodes of equal layers share their parameters

    def name(value: int) -> str:
        if value not in names:
            type = graph.types[value]
            text = types.get(type) or types.setdefault(type, str(type))
            names[value] = f"%{len(names) - len(graph.literals)}:{text}"
        return names[value]

    lines = [" ".join(map(name, graph.inputs)), " ".join(map(name, graph.constants))]
    for node in graph.nodes:
        reads = " ".join(map(name, node.inputs))
        writes = " ".join(map(name, node.outputs))
        bodies = "".join(f"{{{_canonical(body)}}}" for body in node.subgraphs)
        params = spelled.get(id(node.params)) or spelled.setdefault(id(node.params), repr(sorted(node.params.items())))
        lines.append(f"{writes}={node.primitive} {reads} {params}{bodies}")
    lines.append(" ".join(map(name, graph.outputs)))
    lines.extend(f"{position} is {placement}" for position, placement in sorted(graph.pinned.items()))
    return "\n".join(lines)


def _lines(graph: Graph, sources: bool, indent: str) -> list[str]:
    def read(value: int) -> str:
        return repr(graph.literals[value]) if value in graph.literals else f"%{value}"

    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    lines = [f"{indent}graph {{"]
    for kind, values in (("input", graph.inputs), ("constant", graph.constants)):
        for value in values:
            name = f"  # {names[value]}" if names.get(value) else ""
            lines.append(f"{indent}  %{value}: {graph.types[value]} = {kind}{name}")
    for node in graph.nodes:
        writes = ", ".join(f"%{v}: {graph.types[v]}" for v in node.outputs)
        params = ", ".join(f"{key}={value}" for key, value in sorted(node.params.items()))
        where = f"  # {node.source}" if sources and node.source else ""
        reads = ", ".join(map(read, node.inputs))
        lines.append(f"{indent}  {writes} = {node.primitive}({reads})" + (f" {{{params}}}" if params else "") + where)
        for body in node.subgraphs:
            lines.extend(_lines(body, sources, indent + "    "))
    lines.append(f"{indent}  return {', '.join(map(read, graph.outputs))}")
    lines.append(f"{indent}}}")
    return lines
