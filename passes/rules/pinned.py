"""Rules of placements that the user chose: sharding constraints, and `shard_map`s whose bodies are already local.

A constraint says into how many pieces each dimension is cut, by whichever axes of the plan's mesh. A `shard_map` names
axes, so its program is planned on the very mesh that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from passes.errors import PlanningError, explain
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
    """The axes and sizes that the `shard_map`s of a program name; None where there are none.

    Raises PlanningError where they name several meshes.
    """
    meshes = {tuple(mesh.items()): (mesh, node) for mesh, node in _meshes(graph)}
    if len(meshes) > 1:
        named = [", ".join(f"{name}={size}" for name, size in mesh) for mesh in meshes]
        places = " and ".join(node.source for _, node in meshes.values() if node.source)
        rule = f"they name the meshes ({') and ('.join(named)}), and a program is planned on one"
        remedy = "write them over one mesh, or take the smaller one away and let the plan cut what it computes"
        raise PlanningError(explain("shard_maps of one function", rule, f"at {places}" if places else "", remedy))
    return next((mesh for mesh, _ in meshes.values()), None)


def _meshes(graph: Graph) -> Iterator[tuple[Mapping[str, int], Node]]:
    for node in graph.nodes:
        if node.primitive == "shard_map":
            yield cast("Mapping[str, int]", node.params["mesh"]), node
        for body in node.subgraphs:
            yield from _meshes(body)
