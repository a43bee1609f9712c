"""Rules of elementwise primitives: every dimension passes through; a size-1 dimension is a broadcast inside the op."""

from __future__ import annotations

import dataclasses

from passes.ir import Node
from passes.rules.registry import build, rule
from passes.rules.sharding_rule import ShardingRule, Types

_PLAIN = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma "
    "eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le "
    "le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not one_minus_square or polygamma "
    "polynomial population_count pow reduce_precision regularized_incomplete_beta rem round rsqrt shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta"
).split()

_FLOAT_BITS = {
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float32": (8, 23),
    "float64": (11, 52),
    "complex64": (8, 23),
    "complex128": (11, 52),
}
"""The bits of the exponent and of the fraction of a number, or of each part of a complex one: taking the real part is
linear.
"""


def pointwise(operands: Types, results: Types, linear: tuple[tuple[int, ...], ...] = ()) -> ShardingRule:
    """The rule of an operation whose operands and results agree dimension by dimension, scalars and size 1 aside."""
    rank = results[0].rank

    def labels(rank_here: int) -> range | tuple[()]:
        return range(rank) if rank_here == rank else ()

    return build(
        [(t, labels(t.rank)) for t in operands],
        [(t, range(rank)) for t in results],
        linear=linear,
    )


@rule(*_PLAIN)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return pointwise(operands, results)


@rule("complex")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return pointwise(operands, results, linear=((0, 1),))


@rule("add", "sub", "add_any")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    accumulates = node.primitive == "add_any"
    return dataclasses.replace(pointwise(operands, results, linear=((0, 1),)), sums=True, accumulates=accumulates)


@rule("mul")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return pointwise(operands, results, linear=((0,), (1,)))


@rule("neg", "conj", "real", "imag", "copy", "name", "stop_gradient")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return pointwise(operands, results, linear=((0,),))


@rule("div")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    return pointwise(operands, results, linear=((0,),) if results[0].is_inexact else ())


@rule("convert_element_type")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    before, after = (_FLOAT_BITS.get(t.dtype) for t in (operands[0], results[0]))
    # Narrowing rounds each partial sum by itself, which is not the rounding of the whole.
    is_exact = before is not None and after is not None and all(a <= b for a, b in zip(before, after, strict=True))
    base = pointwise(operands, results, linear=((0,),) if is_exact else ())
    return dataclasses.replace(base, casts=True)


@rule("bitcast_convert_type")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The rule of a bitcast: a narrower dtype adds a minor dimension, a wider one takes it away; it is never cut."""
    shared = min(operands[0].rank, results[0].rank)
    labels = [d if d < shared else None for d in range(max(operands[0].rank, results[0].rank))]
    return build([(t, labels[: t.rank]) for t in operands], [(t, labels[: t.rank]) for t in results])


@rule("select_n")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    cases = tuple(range(1, len(operands)))
    return pointwise(operands, results, linear=(cases,) if results[0].is_inexact else ())


@rule("optimization_barrier")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    uncut = build([(t, [None] * t.rank) for t in operands], [(t, [None] * t.rank) for t in results], flops=0.0)
    return dataclasses.replace(uncut, alias=True)
