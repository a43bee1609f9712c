"""Rules of random bits: keys stay whole; a piece of the bits is drawn from its own counters."""

from __future__ import annotations

from dataclasses import replace

from passes.ir import Node
from passes.rules.registry import ShardingRule, Types, build, replicate, rule

_ROUNDS_FLOPS = 100.0
"""Integer operations of Threefry-2x32 for one 32-bit word: 20 rounds of add, rotate and xor, plus key injections."""


@rule("random_bits")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    if operands[0].rank or operands[0].dtype != "key<fry>":
        return replicate(operands, results, f"random bits of {operands[0]} keys depend on the whole shape")
    bits = range(results[0].rank)
    base = build([(operands[0], ())], [(results[0], bits)], flops=_ROUNDS_FLOPS * results[0].size)
    return replace(base, localized=True)


@rule("random_wrap", "random_unwrap", "random_fold_in", "random_split", "random_seed", "random_clone")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Keys are a few bytes: every device derives all of them."""
    return build([(t, [None] * t.rank) for t in operands], [(t, [None] * t.rank) for t in results])


@rule("random_gamma")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """A key's samples are numbered from zero, so only the dimensions that have a key each can be cut."""
    keys, shape = operands
    if not keys.rank:
        return replicate(operands, results, "gamma samples of one key depend on how many are drawn")
    labels = [d if d < keys.rank else None for d in range(shape.rank)]
    return build(
        [(keys, range(keys.rank)), (shape, labels)],
        [(results[0], labels)],
        flops=_ROUNDS_FLOPS * results[0].size,
        light=False,
    )
