"""What a part of a step costs as a stage on a mesh, without its plan, for searches that ask for very many.

Answers come from the first relaxations, rounded and polished, and are not improved until the bound is met: prices are
compared with each other, and what is chosen by them is planned anew. Parts that are equal but for names share their
bundles and their price, problems on one mesh what reshardings cost there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from passes.bundles import Grouping, group
from passes.cluster import Cluster
from passes.errors import NoLegalPlanError
from passes.intra_op import SolverOptions, solve
from passes.ir import Graph
from passes.likeness import likeness
from passes.mesh import Mesh
from passes.mesh_search import best
from passes.moves import moves
from passes.pipelines import priced, stage_cost
from passes.problem import assemble, without_dominated
from passes.read_off import move_seconds
from passes.resharding import Resharder
from passes.rules import pinned_mesh
from passes.simulate import StageCost
from passes.stages import Part

ROUGH = 3e-2
"""The relative gap at which the solve of a price ends."""

Ties = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A part of a step with its ties; parts of one `kind` are the same but for names."""

    part: Part
    ties: Ties
    kind: str

    @classmethod
    def of(cls, part: Part, ties: Ties) -> Self:
        return cls(part=part, ties=ties, kind=likeness(part, ties))


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """The first layer of a kind; `flops` are of one microbatch, `nbytes` of what stays between microbatches."""

    layer: Layer
    grouping: Grouping
    flops: float
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices of layers on meshes; those of plans as `passes.mesh_search` makes them unless `rough`."""

    options: SolverOptions
    rough: bool = True
    _firsts: dict[str, _First] = field(default_factory=dict[str, _First])
    _prices: dict[tuple[str, Mesh], StageCost | None] = field(default_factory=dict[tuple[str, Mesh], StageCost | None])
    _resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])

    @property
    def solved(self) -> int:
        """How many prices there are."""
        return len(self._prices)

    def is_known(self, layer: Layer, mesh: Mesh) -> bool:
        return (layer.kind, mesh) in self._prices

    def price(self, layer: Layer, mesh: Mesh) -> StageCost | None:
        """What a layer costs on a mesh as a stage of its own; None if it cannot be there."""
        key = (layer.kind, mesh)
        if key not in self._prices:
            try:
                self._prices[key] = self._price(self._first(layer), mesh)
            except NoLegalPlanError:
                self._prices[key] = None
        return self._prices[key]

    def least(self, layer: Layer, cluster: Cluster, n_devices: int) -> tuple[float, float]:
        """Seconds of a microbatch and bytes of one device that no price on so many devices goes below."""
        one, device = self._first(layer), cluster.group().device
        rate = max(map(device.matmul_flops_per_second, device.flops_per_second))
        return one.flops / n_devices / rate, one.nbytes / n_devices

    def _first(self, layer: Layer) -> _First:
        if layer.kind not in self._firsts:
            part, graph = layer.part, layer.part.graph
            grouping = group(graph)
            self._firsts[layer.kind] = _First(
                layer=layer,
                grouping=grouping,
                flops=sum(_flops(part.body, inner) for inner in grouping.bodies.get(part.loop, ())),
                nbytes=sum(graph.types[value].nbytes for value in graph.inputs if value not in part.streams),
            )
        return self._firsts[layer.kind]

    def _price(self, one: _First, mesh: Mesh) -> StageCost:
        part, ties = one.layer.part, one.layer.ties
        graph = part.graph
        if not self.rough or pinned_mesh(graph) is not None:
            return stage_cost(part, best("layer", graph, [mesh], ties, (), self.options))
        resharder = self._resharders.setdefault(mesh, Resharder(mesh))
        assembly = assemble(graph, mesh, one.grouping, resharder, ties, refetch=False)
        options = replace(self.options, gap=max(self.options.gap, ROUGH))
        choice = solve(without_dominated(assembly, resharder), options, branch=False).choice
        layout = assembly.layout(choice)
        _, moved = move_seconds(graph, moves(graph, layout, resharder, refetch=False), resharder)
        compute = assembly.root.compute_seconds(choice)
        seconds: dict[str, float] = {name: compute.get(name, 0.0) + moved.get(name, 0.0) for name in (*compute, *moved)}
        return priced(part, layout, mesh, seconds)


def _flops(graph: Graph, grouping: Grouping) -> float:
    """Operations of a graph's bundles, loops in it as often as they run, branches and tests not at all."""
    total = sum(grouping.rules[member].flops for bundle in grouping.bundles for member in bundle.members)
    for index, bodies in grouping.bodies.items():
        node = graph.nodes[index]
        length = node.params.get("length")
        if node.primitive == "scan" and isinstance(length, int):
            total += length * sum(map(_flops, node.subgraphs, bodies))
    return total
