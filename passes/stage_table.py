"""What stages of a step would cost, for the search over stages: layer by layer, equal layers solved once.

A layer is priced as a stage of its own on every mesh that a submesh can be; a stage is the sum of its layers on the one
mesh that suits all of them best. Reshardings between layers of one stage are left out, as if layouts met: the stages
that are chosen are planned again as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from passes import stages
from passes.cluster import Cluster
from passes.errors import NoLegalPlanError
from passes.inter_op import Candidate, Submesh
from passes.ir import Graph
from passes.layers import even_cuts
from passes.mesh import Mesh
from passes.pipelines import body_of, stage_cost
from passes.plan import Plan
from passes.simulate import StageCost
from passes.stages import Part

Ties = tuple[tuple[int, int], ...]
Solve = Callable[[Part, Mesh, Ties], Plan]


@dataclass(slots=True, kw_only=True)
class StageCosts:
    """The table of a step given as one graph for each number of microbatches; `meshes(n)` lays out n devices."""

    graphs: Mapping[int, Graph]
    tied: Ties
    cluster: Cluster
    n_layers: int
    meshes: Callable[[int], Sequence[Mesh]]
    solve: Solve
    _parts: dict[int, tuple[Part, ...]] = field(default_factory=dict[int, tuple[Part, ...]])
    _known: dict[tuple[str, Mesh], StageCost | None] = field(default_factory=dict[tuple[str, Mesh], StageCost | None])

    @property
    def solved(self) -> int:
        """How many integer programs it took."""
        return len(self._known)

    def firsts(self, microbatches: int) -> tuple[int, ...]:
        """The body node with which each layer begins."""
        return even_cuts(body_of(self.graphs[microbatches]), self.n_layers)

    def parts(self, microbatches: int) -> tuple[Part, ...]:
        """The layers as stages."""
        if microbatches not in self._parts:
            graph = self.graphs[microbatches]
            self._parts[microbatches] = stages.cut(graph, self.firsts(microbatches), self.tied).parts
        return self._parts[microbatches]

    def candidate(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Candidate | None:
        """The stage of some layers on the mesh that suits them best; None if no mesh does."""
        found: list[Candidate] = []
        for mesh in self.meshes(submesh.n_devices):
            costs = [self._cost(part, mesh, microbatches) for part in self.parts(microbatches)[first:last]]
            if all(costs):
                found.append(_together([cost for cost in costs if cost], mesh))
        return min(found, key=lambda c: c.forward_seconds + c.backward_seconds, default=None)

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        part = self.parts(microbatches)[cut - 1]
        onward = {value for i in part.forward for value in part.body.nodes[i].outputs}
        sent = (inner for v, inner in part.streams.items() if v in part.graph.outputs and inner in onward)
        return sum(part.body.types[inner].nbytes for inner in sent)

    def transfer_seconds(self, sender: Submesh, receiver: Submesh, nbytes: int) -> float:
        """Seconds between two submeshes: every device of the smaller one sends or receives its share."""
        group = self.cluster.group()
        inside = sender.hosts == receiver.hosts == 1
        inside &= sender.n_devices + receiver.n_devices <= group.devices_per_host
        link = group.intra if inside else group.inter
        lanes = min(sender.n_devices, receiver.n_devices)
        return link.alpha_seconds + nbytes / lanes / link.bytes_per_second if nbytes else 0.0

    def _cost(self, part: Part, mesh: Mesh, microbatches: int) -> StageCost | None:
        key = (part.graph.fingerprint, mesh)
        if key not in self._known:
            ties = stages.ties(part, self.graphs[microbatches], self.tied)
            try:
                self._known[key] = stage_cost(part, self.solve(part, mesh, ties))
            except NoLegalPlanError:
                self._known[key] = None
        return self._known[key]


def _together(costs: Sequence[StageCost], mesh: Mesh) -> Candidate:
    return Candidate(
        forward_seconds=math.fsum(c.forward_seconds for c in costs),
        backward_seconds=math.fsum(c.backward_seconds for c in costs),
        finish_seconds=math.fsum(c.finish_seconds for c in costs),
        persistent_nbytes=sum(c.persistent_nbytes for c in costs),
        in_flight_nbytes=sum(c.in_flight_nbytes for c in costs),
        key=mesh,
    )
