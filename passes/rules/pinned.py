"""Rules of placements that the user chose: sharding constraints, and `shard_map`s whose bodies are already local.

A constraint says which device has which piece, by whichever axes of the plan's mesh; `autopar.constrain` says by which
axes. A `shard_map` names axes, so its program is planned on the very mesh that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from passes.device_placement import DevicePlacement, Runs
from passes.errors import SeveralMeshesError, explain
from passes.ir import Graph, Node
from passes.rules.registry import build, rule
from passes.rules.sharding_rule import ShardingRule, Types
from passes.sharding import parse_spec


@rule("sharding_constraint")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    labels = range(results[0].rank)
    base = build([(operands[0], labels)], [(results[0], labels)], flops=0.0, light=False)
    return replace(base, constrained=constraint_of(node))


@rule("autopar_constrain")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    labels = range(results[0].rank)
    base = build([(operands[0], labels)], [(results[0], labels)], flops=0.0, light=False)
    axes = cast("tuple[tuple[str, ...] | None, ...]", node.params["axes"])
    return replace(base, cut_by=tuple(None if each is None else tuple(each) for each in axes))


@rule("shard_map")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    sides = (
        tuple(parse_spec(text) for text in cast("tuple[str, ...]", node.params[side]))
        for side in ("in_specs", "out_specs")
    )
    base = build([(t, [None] * t.rank) for t in operands], [(t, [None] * t.rank) for t in results], light=False)
    return replace(base, pinned=tuple(sides), localized=True)


def constraint_of(node: Node) -> DevicePlacement:
    """The placement to which a constraint of the user's binds."""
    dims = cast("tuple[Runs | None, ...]", node.params["dims"])
    return DevicePlacement(devices=cast("int", node.params["devices"]), dims=dims)


def pinned_mesh(graph: Graph) -> Mapping[str, int] | None:
    """The axes and sizes that the `shard_map`s of a program name; None where there are none.

    Raises SeveralMeshesError where they name several.
    """
    meshes = {tuple(mesh.items()): (mesh, node) for mesh, node in _meshes(graph)}
    if len(meshes) > 1:
        named = [", ".join(f"{name}={size}" for name, size in mesh) for mesh in meshes]
        places = " and ".join(node.source for _, node in meshes.values() if node.source)
        rule = f"they name the meshes ({') and ('.join(named)}), and a program is planned on one"
        remedy = "write them over one mesh, or take the smaller one away and let the plan cut what it computes"
        raise SeveralMeshesError(explain("shard_maps of one function", rule, f"at {places}" if places else "", remedy))
    return next((mesh for mesh, _ in meshes.values()), None)


def _meshes(graph: Graph) -> Iterator[tuple[Mapping[str, int], Node]]:
    for node in graph.nodes:
        if node.primitive == "shard_map":
            yield cast("Mapping[str, int]", node.params["mesh"]), node
        for body in node.subgraphs:
            yield from _meshes(body)


def boundaries_of(graph: Graph) -> frozenset[int]:
    """The strides between axes that a mesh must have for what the user has placed to lie so on it."""
    inside = (boundaries_of(body) for node in graph.nodes for body in node.subgraphs)
    constraints = (constraint_of(node) for node in graph.nodes if node.primitive == "sharding_constraint")
    return frozenset[int]().union(*inside, *(p.boundaries for p in (*constraints, *graph.pinned.values())))
