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
from dataclasses import dataclass, field, replace

from passes import stages
from passes.cluster import Cluster
from passes.errors import InternalError
from passes.inter_op import Candidate, Submesh
from passes.ir import Graph
from passes.mesh import Mesh
from passes.pipelines import body_of
from passes.pricing import ROUGH, Block, Pricer, Ties, alike
from passes.repeats import Cuts, in_blocks
from passes.simulate import StageCost
from passes.stage_choices import Floor

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
    _leasts: dict[tuple[int, int, int, int], tuple[int, Floor]] = field(
        default_factory=dict[tuple[int, int, int, int], tuple[int, Floor]]
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
            own = [replace(block, fewer=fewer) for block, fewer in zip(found, self._fewer(microbatches), strict=True)]
            self._blocks[microbatches] = tuple(own[part] for part in cuts.blocks)
        ends = (*cuts.layers, len(cuts.blocks))
        return self._blocks[microbatches][ends[first] : ends[last]]

    def _fewer(self, microbatches: int) -> list[tuple[str, ...]]:
        """The kinds of every part in fewer microbatches, where the step is cut there as it is here."""
        cuts = self._cut(microbatches)
        others = [count for count in sorted(self.samples) if count < microbatches and self._cut(count) == cuts]
        kinds = [dict(zip(cuts.blocks, self.blocks(0, self.n_layers, count), strict=True)) for count in others]
        return [tuple(each[part].kind for each in kinds) for part in range(len(cuts.firsts))]

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
        """The stage of some layers on the mesh on which its pace is the least; None if on none it is below `beneath`.

        The pace is in seconds of a microbatch, with its share of the end of a step.
        """
        chosen, n_devices = self._counted(first, last, microbatches), submesh.n_devices
        meshes = list(enumerate(self._meshes(n_devices)))

        def order(one: tuple[int, Mesh]) -> tuple[bool, float, int, int]:
            pace = math.fsum(n * self.pricer.floor(block, one[1])[1] for block, n in chosen)
            return one[1] != self._winners.get(n_devices), pace, max(one[1].sizes, default=1), one[0]

        meshes.sort(key=order)
        best: tuple[float, int, Candidate] | None = None
        least = math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[0] for block, n in chosen)
        for number, mesh in meshes:
            costs = self._costs(chosen, mesh, best[0] / (1 + ENOUGH) if best and self.lazy else beneath)
            if costs is None:
                continue
            found = _together(costs, mesh)
            pace = found.pace(microbatches)
            if pace >= beneath:
                continue
            if best is None or (pace, number) < best[:2]:
                best = pace, number, found
                self._winners[n_devices] = mesh
            if self.lazy and pace <= least * (1 + ENOUGH):
                break
        return best[2] if best else None

    def near(self, first: int, last: int, submesh: Submesh, microbatches: int) -> tuple[Mesh, ...]:
        """The meshes that suit some layers nearly as well as the best; the others are priced for it, if need be."""
        chosen, meshes = self._counted(first, last, microbatches), self._meshes(submesh.n_devices)
        best, found = math.inf, list[tuple[float, Mesh]]()
        for mesh in sorted(meshes, key=lambda mesh: mesh != self._winners.get(submesh.n_devices)):
            costs = self._costs(chosen, mesh, (1 + NEAR) * best)
            if costs is not None:
                found.append((_together(costs, mesh).pace(microbatches), mesh))
                best = min(best, found[-1][0])
        return tuple(mesh for pace, mesh in found if pace <= (1 + NEAR) * best)

    def _costs(self, chosen: Sequence[Counted], mesh: Mesh, beneath: float) -> list[tuple[StageCost, int]] | None:
        """The price of each kind of block; None if one cannot be on the mesh, or if their pace exceeds `beneath`."""
        least = [(n * self.pricer.floor(block, mesh)[1], block, n) for block, n in chosen]
        spent, costs = math.fsum(pace for pace, _, _ in least), list[tuple[StageCost, int]]()
        for pace, block, n in sorted(least, key=lambda one: (not self.pricer.is_known(one[1], mesh), -one[0])):
            if spent > beneath * _SLACK:
                return None
            if (cost := self._price(block, mesh, (beneath * _SLACK - spent + pace) / n)) is None:
                return None
            costs.append((cost, n))
            spent += n * block.pace(cost) - pace
        return costs if spent <= beneath * _SLACK else None

    def _price(self, block: Block, mesh: Mesh, at_most: float) -> StageCost | None:
        if self.pricer.is_known(block, mesh):
            return self.pricer.price(block, mesh)
        self.told(mesh)
        cost = self.pricer.price(block, mesh, at_most)
        self._learnt[mesh.size] += 1
        self.told(None)
        return cost

    def least(self, first: int, last: int, submesh: Submesh, microbatches: int) -> Floor:
        """What no candidate for these layers goes below, on the best mesh for that.

        Of what is known so far: it rises as blocks are priced.
        """
        key = (first, last, submesh.n_devices, microbatches)
        known = self._learnt[submesh.n_devices]
        if key not in self._leasts or self._leasts[key][0] != known:
            self._leasts[key] = known, self._least(*key)
        return self._leasts[key][1]

    def _least(self, first: int, last: int, n_devices: int, microbatches: int) -> Floor:
        chosen, meshes = self._counted(first, last, microbatches), self._meshes(n_devices)
        nbytes = math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[1] for block, n in chosen)
        floors, best = list[tuple[float, float]](), math.inf
        for mesh in meshes:
            each = [(*self.pricer.floor(block, mesh), n) for block, n in chosen]
            seconds, pace = (math.fsum(n * one[part] for *one, n in each) for part in range(2))
            floors.append((seconds, pace))
            if all(self.pricer.is_known(block, mesh) for block, _ in chosen):
                best = min(best, pace)
        seconds = min(seconds for seconds, pace in floors if pace <= best * _SLACK)
        return Floor(seconds=seconds, pace=min(pace for _, pace in floors), nbytes=nbytes)

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
