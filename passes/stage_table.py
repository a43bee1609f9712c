"""What stages of a step would cost, for the search over stages: block by block, equal blocks priced once.

Layers, of which stages are made, are runs of the blocks in which a model repeats itself; where it does not, a layer is
one block. A block is priced as a stage of its own on every mesh that a submesh can be, and hands on what it takes in as
it took it in, if its neighbours are like it. A stage is the sum of its blocks on the one mesh that suits all of them
best. Reshardings between unlike blocks of one stage are left out, as if layouts met: the stages that are chosen are
planned again as they are.

A mesh is given up as soon as the blocks priced on it, with the least that the others can take, are slower than the best
mesh so far; blocks that are already priced count first, and then those that weigh most. No more meshes are tried once
one is near the least that there can be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from passes import stages
from passes.cluster import Cluster
from passes.errors import InternalError
from passes.inter_op import Candidate, Submesh
from passes.ir import Graph
from passes.mesh import Mesh
from passes.pipelines import body_of
from passes.pricing import Block, Pricer, Ties, alike
from passes.repeats import Cuts, in_blocks
from passes.simulate import StageCost

ENOUGH = 0.1
"""No other mesh is tried for a stage whose price is this close to the least that there can be."""

NEAR = 0.03
"""Meshes whose prices differ by less are both tried for a stage that was chosen: prices are sums over its blocks."""

_SLACK = 1 + 1e-9
"""Sums in different orders differ by less: what is slower by more is slower."""


Counted = tuple[Block, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step in microbatches that is there to be priced; after the second of its equal blocks, some are `left_out`."""

    graph: Graph
    tied: Ties
    left_out: int = 0


@dataclass(slots=True, kw_only=True)
class StageCosts:
    """The table of a step given as a sample for each number of microbatches; `meshes(n)` lays out n devices.

    `told` hears of every mesh that a block is about to be priced on, and of None when it is. Without `lazy`, every
    block is priced on every mesh.
    """

    samples: Mapping[int, Sample]
    cluster: Cluster
    n_layers: int
    meshes: Callable[[int], Sequence[Mesh]]
    pricer: Pricer
    told: Callable[[Mesh | None], None]
    lazy: bool = True
    _cuts: dict[int, Cuts] = field(default_factory=dict[int, Cuts])
    _blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict[int, tuple[Block, ...]])
    _counts: dict[tuple[int, int, int], tuple[Counted, ...]] = field(
        default_factory=dict[tuple[int, int, int], "tuple[Counted, ...]"]
    )
    _learnt: Counter[int] = field(default_factory=Counter[int])
    _leasts: dict[tuple[int, int, int, int], tuple[int, tuple[float, float]]] = field(
        default_factory=dict[tuple[int, int, int, int], tuple[int, tuple[float, float]]]
    )
    _laid_out: dict[int, Sequence[Mesh]] = field(default_factory=dict[int, Sequence[Mesh]])
    _winners: dict[int, Mesh] = field(default_factory=dict[int, Mesh])

    def _cut(self, microbatches: int) -> Cuts:
        if microbatches not in self._cuts:
            sample = self.samples[microbatches]
            self._cuts[microbatches] = in_blocks(body_of(sample.graph), self.n_layers, sample.left_out)
        return self._cuts[microbatches]

    def blocks(self, first: int, last: int, microbatches: int) -> tuple[Block, ...]:
        """The blocks of some layers."""
        cuts, sample = self._cut(microbatches), self.samples[microbatches]
        if microbatches not in self._blocks:
            parts = stages.cut(sample.graph, cuts.firsts, sample.tied).parts
            found = alike(parts, [stages.ties(part, sample.graph, sample.tied) for part in parts])
            self._blocks[microbatches] = tuple(found[part] for part in cuts.blocks)
        ends = (*cuts.layers, len(cuts.blocks))
        return self._blocks[microbatches][ends[first] : ends[last]]

    def firsts(self, graph: Graph, microbatches: int) -> tuple[int, ...]:
        """The node of the whole step's body with which each layer begins."""
        whole, cuts = in_blocks(body_of(graph), self.n_layers), self._cut(microbatches)
        if len(whole.blocks) != len(cuts.blocks):
            raise InternalError(f"a step of {len(whole.blocks)} blocks was searched as {len(cuts.blocks)}")
        return tuple(whole.firsts[whole.blocks[block]] for block in cuts.layers)

    def _counted(self, first: int, last: int, microbatches: int) -> tuple[Counted, ...]:
        """One block of each kind in some layers, with how many there are."""
        key = (first, last, microbatches)
        if key not in self._counts:
            chosen = self.blocks(first, last, microbatches)
            counts = Counter(block.kind for block in chosen)
            self._counts[key] = tuple((block, counts[kind]) for kind, block in {b.kind: b for b in chosen}.items())
        return self._counts[key]

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, beneath: float = math.inf
    ) -> Candidate | None:
        """The stage of some layers on the mesh that suits them best; None if on none it takes at most `beneath`.

        `beneath` is in seconds of a microbatch, forward and backward.
        """
        chosen, n_devices = self._counted(first, last, microbatches), submesh.n_devices
        meshes = list(enumerate(self._meshes(n_devices)))
        meshes.sort(key=lambda one: (one[1] != self._winners.get(n_devices), max(one[1].sizes, default=1), one[0]))
        best: tuple[float, int, Candidate] | None = None
        least = math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[0] for block, n in chosen)
        for number, mesh in meshes:
            costs = self._costs(chosen, mesh, best[0] if best and self.lazy else beneath)
            if costs is None:
                continue
            found = _together(costs, mesh)
            seconds = found.forward_seconds + found.backward_seconds
            if seconds > beneath:
                continue
            if best is None or (seconds, number) < best[:2]:
                best = seconds, number, found
                self._winners[n_devices] = mesh
            if self.lazy and seconds <= least * (1 + ENOUGH):
                break
        return best[2] if best else None

    def near(self, first: int, last: int, submesh: Submesh, microbatches: int) -> tuple[Mesh, ...]:
        """The meshes that suit some layers nearly as well as the best; the others are priced for it, if need be."""
        chosen, meshes = self._counted(first, last, microbatches), self._meshes(submesh.n_devices)
        best, found = math.inf, list[tuple[float, Mesh]]()
        for mesh in sorted(meshes, key=lambda mesh: mesh != self._winners.get(submesh.n_devices)):
            costs = self._costs(chosen, mesh, (1 + NEAR) * best)
            if costs is not None:
                found.append((math.fsum(n * (c.forward_seconds + c.backward_seconds) for c, n in costs), mesh))
                best = min(best, found[-1][0])
        return tuple(mesh for seconds, mesh in found if seconds <= (1 + NEAR) * best)

    def _costs(self, chosen: Sequence[Counted], mesh: Mesh, beneath: float) -> list[tuple[StageCost, int]] | None:
        """The price of each kind of block; None if one cannot be on the mesh, or if they take longer than `beneath`."""
        least = [(n * self._seconds(mesh, block), block, n) for block, n in chosen]
        spent, costs = math.fsum(seconds for seconds, _, _ in least), list[tuple[StageCost, int]]()
        for seconds, block, n in sorted(least, key=lambda one: (not self.pricer.is_known(one[1], mesh), -one[0])):
            if spent > beneath * _SLACK:
                return None
            if (cost := self._price(block, mesh)) is None:
                return None
            costs.append((cost, n))
            spent += n * (cost.forward_seconds + cost.backward_seconds) - seconds
        return costs

    def _price(self, block: Block, mesh: Mesh) -> StageCost | None:
        if self.pricer.is_known(block, mesh):
            return self.pricer.price(block, mesh)
        self.told(mesh)
        cost = self.pricer.price(block, mesh)
        self._learnt[mesh.size] += 1
        self.told(None)
        return cost

    def least(self, first: int, last: int, submesh: Submesh, microbatches: int) -> tuple[float, float]:
        """Seconds of a microbatch and bytes of one device that no candidate for these layers goes below.

        On the best mesh for that, of what is known so far: it rises as blocks are priced.
        """
        key = (first, last, submesh.n_devices, microbatches)
        known = self._learnt[submesh.n_devices]
        if key not in self._leasts or self._leasts[key][0] != known:
            self._leasts[key] = known, self._least(*key)
        return self._leasts[key][1]

    def _least(self, first: int, last: int, n_devices: int, microbatches: int) -> tuple[float, float]:
        chosen, meshes = self._counted(first, last, microbatches), self._meshes(n_devices)
        nbytes = math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[1] for block, n in chosen)
        return min(math.fsum(n * self._seconds(mesh, block) for block, n in chosen) for mesh in meshes), nbytes

    def _seconds(self, mesh: Mesh, block: Block) -> float:
        """What a block takes on a mesh if that is known, else the least that it can."""
        if not self.pricer.is_known(block, mesh):
            return self.pricer.least(block, self.cluster, mesh.size)[0]
        cost = self.pricer.price(block, mesh)
        return cost.forward_seconds + cost.backward_seconds if cost else math.inf

    def _meshes(self, n_devices: int) -> Sequence[Mesh]:
        if n_devices not in self._laid_out:
            self._laid_out[n_devices] = self.meshes(n_devices)
        return self._laid_out[n_devices]

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        part = self.blocks(cut - 1, cut, microbatches)[-1].part
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


def _together(costs: Sequence[tuple[StageCost, int]], mesh: Mesh) -> Candidate:
    """So many blocks of each cost as one stage."""
    return Candidate(
        forward_seconds=math.fsum(n * c.forward_seconds for c, n in costs),
        backward_seconds=math.fsum(n * c.backward_seconds for c, n in costs),
        finish_seconds=math.fsum(n * c.finish_seconds for c, n in costs),
        persistent_nbytes=sum(n * c.persistent_nbytes for c, n in costs),
        in_flight_nbytes=sum(n * c.in_flight_nbytes for c, n in costs),
        key=mesh,
    )
