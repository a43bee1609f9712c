"""Segments of a stage's program as functions of arrays: the parts that run without waiting, on the stage's submesh.

A partial sum that crosses segments is an array with one more dimension in front, which has a summand for each device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.frontend import Body, Equation
from autopar.jax_compat import Device
from autopar.lowering import OnPieces, walk
from autopar.plan import partition_spec
from autopar.runtime.program import Held, Segment
from passes.ir import Graph, TensorType
from passes.pipeline import subgraph_of
from passes.placement import Layout, Placement, resharding_plan
from passes.plan import Plan
from passes.sharding import Resharder, ShardingSpec
from passes.transforms import Part


@dataclass(slots=True, kw_only=True)
class Stage:
    """A stage with its plan, its submesh and the segments of its program."""

    number: int
    part: Part
    plan: Plan
    body: Body
    mesh: jax.sharding.Mesh | None
    device: Device
    loop_equations: tuple[Equation, ...]

    @property
    def platform(self) -> str:
        """The kind of its devices, as JAX names it: `cpu`, `gpu`."""
        return self.device.platform

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def loop_placement(self) -> Placement:
        return self.layout.placements[self.part.loop]

    def sharding(self, spec: ShardingSpec) -> Sharding:
        """The JAX sharding of an array that crosses segments; partial sums have one more dimension in front."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, partition(spec))


def partition(spec: ShardingSpec) -> PartitionSpec:
    """The spec as a PartitionSpec, the axes of partial sums in front."""
    dims = partition_spec(spec)
    return PartitionSpec(spec.partial, *dims) if spec.partial else dims


def counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """(constants, carries): the numbers of a loop's operands of each kind."""
    return params["num_consts"], params["num_carry"]


def inner_constants(body: Body, graph: Graph) -> tuple[Any, ...]:
    arrays = dict(zip(body.graph.constants, body.constants, strict=True))
    return tuple(arrays[v] for v in graph.constants)


def task_nodes(part: Part, sent: Sequence[int], splits: bool) -> dict[str, list[int]]:
    """The nodes of each kind of task; with a split backward, the first half is what other stages wait for."""
    body = part.body
    forward = [i for i in range(len(body.nodes)) if i in part.forward]
    backward = [i for i in range(len(body.nodes)) if i not in part.forward]
    if not splits:
        return {"forward": forward, "backward": backward}
    late = {v for i in backward for v in body.nodes[i].outputs}
    live = {v for v in sent if v in late}
    first: set[int] = set()
    for index in reversed(backward):
        if not live.isdisjoint(body.nodes[index].outputs):
            first.add(index)
            live.update(body.nodes[index].inputs)
    return {
        "forward": forward,
        "input_gradient": [i for i in backward if i in first],
        "weight_gradient": [i for i in backward if i not in first],
    }


def segment_of(
    stage: Stage,
    name: str,
    body: Body,
    nodes: Sequence[int],
    layout: Layout,
    specs: Mapping[int, ShardingSpec],
    needed: Sequence[Held],
    donated: Iterable[int] = (),
) -> Segment:
    """The segment of the `nodes` of a body that compute `needed`."""
    piece_graph, types = subgraph_of(body.graph, nodes, layout, specs, needed), body.graph.types
    piece = Body(
        graph=piece_graph.graph,
        equations=tuple(body.equations[i] for i in piece_graph.nodes),
        constants=_used_constants(body, piece_graph.nodes, needed),
    )
    inputs = tuple(zip(piece_graph.graph.inputs, piece_graph.layout.inputs, strict=True))
    donated = set(donated)
    return Segment(
        name=name,
        stage=stage.number,
        function=_function(stage, piece, piece_graph.layout),
        inputs=inputs,
        outputs=tuple(needed),
        in_shardings=tuple(stage.sharding(spec) for _, spec in inputs),
        out_shardings=tuple(stage.sharding(spec) for _, spec in needed),
        in_structs=tuple(struct_of(types[v], spec, stage) for v, spec in inputs),
        out_structs=tuple(struct_of(types[v], spec, stage) for v, spec in needed),
        donated=tuple(i for i, (v, _) in enumerate(inputs) if v in donated),
        platform=stage.platform,
    )


def _used_constants(body: Body, nodes: Sequence[int], needed: Sequence[Held]) -> tuple[Any, ...]:
    read = {v for i in nodes for v in body.graph.nodes[i].inputs}.union(v for v, _ in needed)
    numbered = zip(body.graph.constants, body.constants, strict=True)
    return tuple(array for value, array in numbered if value in read)


def _function(stage: Stage, piece: Body, layout: Layout) -> Any:
    """The function of a segment on whole arrays; partial sums have one more dimension in front."""
    reshardings = resharding_plan(piece.graph, layout, Resharder(stage.plan.mesh))
    run = partial(walk, piece, layout, reshardings, OnPieces(stage.plan.mesh))
    if stage.mesh is None:
        return lambda *inputs: run(inputs)

    def local(*inputs: Any) -> tuple[Any, ...]:
        given = [x[0] if spec.partial else x for x, spec in zip(inputs, layout.inputs, strict=True)]
        results = run(given)
        return tuple(x[None] if spec.partial else x for x, spec in zip(results, layout.outputs, strict=True))

    return jax.shard_map(
        local,
        mesh=stage.mesh,
        in_specs=tuple(map(partition, layout.inputs)),
        out_specs=tuple(map(partition, layout.outputs)),
        check_vma=False,
    )


def crossing_shape(type: TensorType, spec: ShardingSpec, stage: Stage) -> tuple[int, ...]:
    if not spec.partial or stage.mesh is None:
        return type.shape
    parts = 1
    for axis in spec.partial:
        parts *= stage.plan.mesh.axis_size(axis)
    return (parts, *type.shape)


def struct_of(type: TensorType, spec: ShardingSpec, stage: Stage) -> jax.ShapeDtypeStruct:
    """The type of an array that crosses segments."""
    return jax.ShapeDtypeStruct(crossing_shape(type, spec, stage), jax_compat.dtype_of(type.dtype))
