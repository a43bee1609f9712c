"""Rules of random bits: a piece of one key's bits is drawn from its own counters; many keys are cut like any batch."""

from __future__ import annotations

from dataclasses import replace

from passes.ir import Node
from passes.rules.registry import build, replicate, rule
from passes.rules.sharding_rule import ShardingRule, Types

_ROUNDS_FLOPS = 100.0
"""Integer operations of Threefry-2x32 for one 32-bit word: 20 rounds of add, rotate and xor, plus key injections."""


@rule("random_bits")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The first dimensions of the bits are those of the keys, each of which draws the others."""
    (keys,), (bits,) = operands, results
    if keys.dtype != "key<fry>":
        return replicate(operands, results, f"random bits of {keys} keys depend on the whole shape")
    base = build([(keys, range(keys.rank))], [(bits, range(bits.rank))], flops=_ROUNDS_FLOPS * bits.size)
    return replace(base, localized=True, draws=True)


@rule("random_wrap", "random_unwrap", "random_split")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """A key's words, and the keys that are split off one, are a few bytes, which every device has together."""
    shared = range(min(operands[0].rank, results[0].rank))
    sides = ((t, [*shared, *(None,) * (t.rank - len(shared))]) for t in (operands[0], results[0]))
    operand, result = sides
    return build([operand], [result])


@rule("random_fold_in", "random_seed", "random_clone")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Each key is made of its own operands, of which one may stand for all."""
    rank = results[0].rank
    return build([(t, range(rank - t.rank, rank)) for t in operands], [(results[0], range(rank))])


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
