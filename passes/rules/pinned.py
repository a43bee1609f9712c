"""Rules of placements that the user chose: sharding constraints, and `shard_map`s whose bodies are already local.

A constraint says into how many pieces each dimension is cut, by whichever axes of the plan's mesh. A `shard_map` names
axes, so its program is planned on the very mesh that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from passes.ir import Graph, Node
from passes.rules.registry import ShardingRule, Types, build, rule
from passes.sharding import parse_spec


@rule("sharding_constraint")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    labels = range(results[0].rank)
    base = build([(operands[0], labels)], [(results[0], labels)], flops=0.0, light=False)
    return replace(base, pieces=cast("tuple[int | None, ...]", node.params["pieces"]))


@rule("shard_map")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    sides = (
        tuple(parse_spec(text) for text in cast("tuple[str, ...]", node.params[side]))
        for side in ("in_specs", "out_specs")
    )
    base = build([(t, [None] * t.rank) for t in operands], [(t, [None] * t.rank) for t in results], light=False)
    return replace(base, pinned=tuple(sides), localized=True)


def pinned_mesh(graph: Graph) -> Mapping[str, int] | None:
    """The axes and sizes that the `shard_map`s of a program name; None where there are none."""
    return next(_meshes(graph), None)


def _meshes(graph: Graph) -> Iterator[Mapping[str, int]]:
    for node in graph.nodes:
        if node.primitive == "shard_map":
            yield cast("Mapping[str, int]", node.params["mesh"])
        for body in node.subgraphs:
            yield from _meshes(body)
