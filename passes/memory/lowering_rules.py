"""The lowering of each primitive to XLA's operations, on the shapes of one device.

The names of primitives end here: what follows speaks of XLA's operations, by their opcodes. What a dot or a
convolution takes is transposed to where its kernel wants it, quotients by a broadcast become products, logistic
functions are expanded, and the transpose of max-pooling finds every window's choice before it scatters.

Reference: XLA's dot decomposer, transpose folding, convolution canonicalization, logistic and select-and-scatter
expanders, as of jaxlib 0.10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from passes.ir import Node, TensorType
from passes.memory import lapack
from passes.memory.expansions import divided, error_inverse, logistic, multiplied, power
from passes.memory.grouped_products import grouped
from passes.memory.operations import DRAWN, TRANSPOSED, Operations, Shape
from passes.memory.pads_and_joins import concatenated, padded, parts_of_joined
from passes.memory.products import contraction, convolution
from passes.memory.reshapes import axes_before
from passes.memory.windows import selected, windowed

CHEAP = frozenset(
    "abs add add_any and ceil clamp clz complex conj convert_element_type cos eq eq_to floor ge gt imag is_finite le "
    "le_to lt lt_to max min mul mulhi ne neg not one_minus_square or polynomial population_count real reduce_precision "
    "round select_n shift_left shift_right_arithmetic shift_right_logical sign sin square sub xor".split()
)
"""Elementwise primitives that XLA computes again for every reader."""

EXPENSIVE = frozenset(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cosh digamma erf erf_inv erfc exp exp2 expm1 "
    "igamma igamma_grad_a igammac lgamma log log1p log2 nextafter polygamma pow regularized_incomplete_beta rem rsqrt "
    "sinh sqrt tan tanh threefry2x32 zeta".split()
)
"""Elementwise primitives that XLA computes once, however many readers they have."""

OPCODES: Mapping[str, str] = MappingProxyType(
    {
        "add_any": "add",
        "clz": "count-leading-zeros",
        "cos": "cosine",
        "div": "divide",
        "exp": "exponential",
        "expm1": "exponential-minus-one",
        "log1p": "log-plus-one",
        "max": "maximum",
        "min": "minimum",
        "mul": "multiply",
        "neg": "negate",
        "pow": "power",
        "rem": "remainder",
        "rev": "reverse",
        "select_n": "select",
        "sin": "sine",
        "sub": "subtract",
    }
)
"""XLA's opcodes, of the primitives that are called otherwise."""

SLICES = frozenset({"slice", "dynamic_slice", "split"})
"""Primitives that take a part of an array."""

NARROW = frozenset(
    "autopar_constrain bitcast_convert_type broadcast_in_dim clz convert_element_type copy copy_p device_put "
    "expand_dims name reshape sharding_constraint shift_left shift_right_arithmetic shift_right_logical squeeze "
    "stop_gradient transpose".split()
)
"""Primitives that take any dtype as it is: views, what makes no operation, and what would mean something else wider."""

WINDOWS: Mapping[str, float] = MappingProxyType(
    {"reduce_window_sum": 0.0, "reduce_window_max": -math.inf, "reduce_window_min": math.inf}
)
"""Primitives that reduce over windows, each with the number that it begins with."""

CONVERSION = "convert_element_type"
PRODUCT = "dot_general"
PRODUCTS = frozenset({PRODUCT, "conv_general_dilated"})
BARRIER = "optimization_barrier"

ToXla = Callable[[Operations, Node, Sequence[int], Sequence[TensorType]], list[int]]


def to_xla(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The XLA operations that hold a node's results, given those of its operands, on local types."""
    if node.primitive in XLA_OPS:
        return XLA_OPS[node.primitive](operations, node, operands, results)
    if node.primitive in CHEAP or node.primitive in EXPENSIVE:
        expensive = node.primitive in EXPENSIVE
        return [operations.elementwise(opcode(node), operands, type, expensive=expensive) for type in results]
    tag = (node.primitive, operations.at)
    return [operations.add("opaque", operands, t.shape, t.dtype, (*tag, i)) for i, t in enumerate(results)]


def opcode(node: Node) -> str:
    """The opcode of the XLA operation that a primitive becomes."""
    return OPCODES.get(node.primitive, node.primitive.replace("_", "-"))


def _same(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    return list(operands)


def _converted(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    return [operations.converted(operands[0], results[0].dtype)]


def _bits(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operation of a bitcast: the same bytes under another dtype of the same width."""
    (type,), operand = results, operations[operands[0]]
    if type.shape != operand.shape:
        return [operations.add("opaque", operands, type.shape, type.dtype, (opcode(node), operations.at))]
    return [operations.elementwise(f"{opcode(node)} {operand.dtype}", operands, type)]


def _reshaped(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    return [operations.reshape(operands[0], results[0].shape)]


def _broadcast(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    dims = cast("tuple[int, ...]", node.params["broadcast_dimensions"])
    return [operations.broadcast(operands[0], results[0].shape, dims)]


def _transposed(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operation of a transpose; a product is transposed by swapping its sides."""
    order, operand = cast("tuple[int, ...]", node.params["permutation"]), operations[operands[0]]
    if operand.kind == "dot" and order == (1, 0):
        return [operations.add("bitcast", operands, results[0].shape, operand.dtype, TRANSPOSED)]
    return [operations.transpose(operands[0], order)]


def _iota(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    return [operations.add("iota", operands, t.shape, t.dtype, node.params.get("dimension")) for t in results]


def _rearranged(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operations of a rearrangement, one a result; a slice of everything is its operand."""
    tag, whole = (opcode(node), repr(node.params)), operations[operands[0]].shape
    parts = parts_of_joined(operations, node, operands[0], results) if node.primitive in SLICES else {}
    return [
        operands[0]
        if node.primitive in SLICES and type.shape == whole
        else parts[i]
        if i in parts
        else operations.add("rearrange", operands, type.shape, type.dtype, (*tag, i))
        for i, type in enumerate(results)
    ]


def _sorted(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a sort, in place or in copies once all operands exist; results live until the last is done."""
    rooms = [
        operations.add(
            "update", (o, *operands[:i], *operands[i + 1 :]), type.shape, type.dtype, ("sort", operations.at, i)
        )
        for i, (o, type) in enumerate(zip(operands, results, strict=True))
    ]
    if len(rooms) == 1:
        return rooms
    return [
        operations.add("part", (room, *rooms), type.shape, type.dtype, ("sort", operations.at, i))
        for i, (room, type) in enumerate(zip(rooms, results, strict=True))
    ]


def _random(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of random bits: two counter words for each word of the result go round a loop, copied once. On
    GPUs and TPUs the rounds are unrolled, and are computed element by element.

    Reference: jax.random, threefry2x32 with partitionable counters.
    """
    (type,) = results
    if operations.compiler != "cpu":
        return [operations.add("expensive", operands, type.shape, type.dtype, (DRAWN, operations.at))]
    words = TensorType(shape=type.shape, dtype="uint64" if type.item_nbytes == 8 else "uint32")
    both = [operations.add("fresh", (), words.shape, words.dtype, ("counter", operations.at, i)) for i in range(2)]
    copies = [operations.add("opaque", (o,), words.shape, words.dtype, ("copy", operations.at)) for o in both]
    loop = operations.add("opaque", (*both, *copies), (0,), "bool", ("threefry2x32", operations.at))
    words_of = [operations.add("part", (o, loop), words.shape, words.dtype, ("words", operations.at)) for o in both]
    return [operations.elementwise("xor", words_of, type)]


def _transformed(
    operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]
) -> list[int]:
    """The operation of a Fourier transform; on CPUs the step passes its result on as rows (`autopar.lowering.lower`),
    which readers cannot write over.
    """
    (type,) = results
    made = operations.add("opaque", operands, type.shape, type.dtype, (node.primitive, operations.at))
    if operations.compiler != "cpu":
        return [made]
    rows = operations.barrier([operations.reshape(made, (math.prod(type.shape),))])
    return [operations.reshape(rows[0], type.shape)]


def _gathered(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a gather; where indices may lie outside, the result is masked."""
    (type,) = results
    gathered = operations.add("gather", operands, type.shape, type.dtype, repr(node.params))
    if "FILL" not in str(node.params.get("mode")):
        return [gathered]
    return [operations.add("elementwise", (gathered, operands[1]), type.shape, type.dtype, "masked")]


def _scattered(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operation of an update; places within each element of a batch are told with those of the elements.

    Reference: XLA's BatchedGatherScatterNormalizer, as of jaxlib 0.10.
    """
    numbers = cast("Mapping[str, Sequence[int]]", node.params.get("dimension_numbers", {}))
    if batch := len(numbers.get("operand_batching_dims", ())):
        target, places, *updates = operands
        within = operations[places]
        counters = [operations.add("iota", (), within.shape, within.dtype, d) for d in range(batch)]
        shape = (math.prod(within.shape[:-1]), batch + within.shape[-1])
        paired = operations.add("rearrange", (*counters, places), shape, within.dtype, ("concatenate", operations.at))
        operands = (target, paired, *updates)
    return [operations.add("update", operands, results[0].shape, results[0].dtype, (opcode(node), operations.at))]


def _reduced(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    """The operations of a reduction: none along dimensions of size 1; a sum of negatives is a negative sum.

    What is reduced is read as it was before dimensions were joined to a reduced one, or brought into another order.
    """
    (type,), operation = results, operations[operands[0]]
    axes = sorted(cast("tuple[int, ...]", node.params["axes"]))
    if all(operation.shape[d] == 1 for d in axes):
        return [operations.reshape(operands[0], type.shape)]
    if node.primitive == "reduce_sum" and operation.tag == "negate":
        reduced = _reduced(operations, node, operation.operands, results)
        return [operations.elementwise("negate", reduced, type)]
    (operand,) = operands
    if operation.kind == "bitcast" and operation.tag is None:
        before = axes_before(operations[operation.operands[0]].shape, operation.shape, axes)
        if before is not None:
            operand, axes = operation.operands[0], before
    operation = operations[operand]
    if operation.name == "transpose" or operation.kind == "transpose":
        tag = cast("tuple[object, ...]", operation.tag)
        order = cast("Shape", tag[1] if operation.kind == "rearrange" else tag)
        kept_dims = [d for position, d in enumerate(order) if position not in axes]
        if kept_dims == sorted(kept_dims):
            operand, axes = operation.operands[0], sorted(order[d] for d in axes)
    return [operations.add("reduce", (operand,), type.shape, type.dtype, (opcode(node), tuple(axes)))]


def _windowed(operations: Operations, node: Node, operands: Sequence[int], results: Sequence[TensorType]) -> list[int]:
    (type,), (operand,) = results, operands
    return [windowed(operations, opcode(node), WINDOWS[node.primitive], operand, type)]


XLA_OPS: Mapping[str, ToXla] = MappingProxyType(
    {
        **dict.fromkeys(
            ("stop_gradient", "copy", "copy_p", "name", "device_put", "sharding_constraint", "constrain"), _same
        ),
        **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
        **dict.fromkeys(("slice", "dynamic_slice", "rev", "split", "unstack", "tile"), _rearranged),
        **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduced),
        **dict.fromkeys(WINDOWS, _windowed),
        **dict.fromkeys("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(), _scattered),
        "bitcast_convert_type": _bits,
        "broadcast_in_dim": _broadcast,
        "cholesky": lapack.cholesky,
        "concatenate": concatenated,
        "conv_general_dilated": convolution,
        CONVERSION: _converted,
        "div": divided,
        PRODUCT: contraction,
        "dynamic_update_slice": _scattered,
        "eig": lapack.general,
        "eigh": lapack.symmetric,
        "erf_inv": error_inverse,
        "fft": _transformed,
        "gather": _gathered,
        "integer_pow": power,
        "iota": _iota,
        "logistic": logistic,
        "lu": lapack.triangles,
        "mul": multiplied,
        "pad": padded,
        "qr": lapack.orthogonal,
        "ragged_dot_general": grouped,
        "random_bits": _random,
        "schur": lapack.schur,
        "select_and_scatter_add": selected,
        "sort": _sorted,
        "stack": concatenated,
        "svd": lapack.singular,
        "transpose": _transposed,
        "triangular_solve": lapack.solved,
    }
)
"""The lowering of each primitive that becomes more or less than one operation."""
