"""What stages of a step would cost, for the search over stages: block by block, equal blocks priced once.

Layers, of which stages are made, are runs of the blocks in which a model repeats itself; where it does not, a layer is
one block. A block is priced as a stage of its own on every mesh that a submesh can be, and hands on what it takes in as
it took it in, if its neighbours are like it. A stage is the sum of its blocks on the one mesh that suits all of them
best. Reshardings between unlike blocks of one stage are left out, as if layouts met: the stages that are chosen are
planned again as they are.

A mesh is given up as soon as the blocks priced on it, with the least that the others can take, gain nothing over the
best mesh so far; blocks that are already priced count first, and then those that weigh most. What the others can take
is bounded from three sides: operators cut over the devices, without any communication; the same block in fewer
microbatches, since smaller ones save nothing; and the same block on fewer devices, since twice as many take at least
half as long. A survey of the block that weighs most finds the bounds that matter before the search begins.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from passes.cluster import Cluster, Mesh, boundary_seconds
from passes.errors import InternalError
from passes.inter_op import Candidate, LowerBound, StageCost, Submesh
from passes.ir import Graph, StatePairs
from passes.layers import Cuts, in_blocks
from passes.pipeline.assemble import body_of
from passes.pipeline.block_costs import Block, Pricer, Wanted, alike
from passes.pipeline.lower_bounds import SLACK, Floors
from passes.transforms import stages

ENOUGH = 0.03
"""A gain that no other mesh is tried for, over a price or from a price to the least that there can be: as much as the
gap at which prices are solved. `python -m benchmarks.planning --pipeline` counts the programs that are left."""

WASTE = 4.0
"""The survey ends where devices spend this many times what the best number of them does: four times as many would then
gain nothing. `python -m benchmarks.planning --pipeline` counts the programs that are left."""

NEAR = 0.03
"""Meshes whose prices differ by less are both tried for a stage that was chosen: prices are sums over its blocks."""

Counted = tuple[Block, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step in microbatches that is there to be priced; after the second of its equal blocks, some are `left_out`."""

    graph: Graph
    state_pairs: StatePairs
    left_out: int = 0


@dataclass(slots=True, kw_only=True)
class StageCosts:
    """The table of a step given as a sample for each number of microbatches; `meshes(n)` lays out n devices.

    `told` hears of every mesh that a block is about to be priced on, and of None when it is. Without `lazy`, every
    block is priced on every mesh. Stages may begin where `also` so many even ones do, whatever the layers.
    """

    samples: Mapping[int, Sample]
    cluster: Cluster
    n_layers: int
    meshes: Callable[[int], Sequence[Mesh]]
    pricer: Pricer
    told: Callable[[Mesh | None], None]
    lazy: bool = True
    also: Sequence[int] = ()
    _cuts: dict[int, Cuts] = field(default_factory=dict[int, Cuts])
    _blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict[int, tuple[Block, ...]])
    _counts: dict[tuple[int, int, int], tuple[Counted, ...]] = field(
        default_factory=dict[tuple[int, int, int], "tuple[Counted, ...]"]
    )
    _found: int = 0
    _floors: dict[tuple[int, int], Floors] = field(default_factory=dict[tuple[int, int], Floors])
    _spent: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict[tuple[str, int], tuple[int, float]])
    _laid_out: dict[int, Sequence[Mesh]] = field(default_factory=dict[int, Sequence[Mesh]])
    _winners: dict[int, Mesh] = field(default_factory=dict[int, Mesh])
    _runs: dict[tuple[tuple[tuple[str, int], ...], int], tuple[int, LowerBound]] = field(
        default_factory=dict[tuple[tuple[tuple[str, int], ...], int], "tuple[int, LowerBound]"]
    )

    def restricted(self, pricer: Pricer, meshes: Callable[[int], Sequence[Mesh]]) -> StageCosts:
        """The table of the same blocks by other prices, on other meshes."""
        return replace(
            self,
            pricer=pricer,
            meshes=meshes,
            _found=0,
            _floors={},
            _spent={},
            _laid_out={},
            _winners={},
            _runs={},
        )

    def cuts(self, microbatches: int) -> Cuts:
        """The step in so many microbatches, in blocks and layers."""
        if microbatches not in self._cuts:
            sample = self.samples[microbatches]
            self._cuts[microbatches] = in_blocks(body_of(sample.graph), self.n_layers, sample.left_out, self.also)
        return self._cuts[microbatches]

    def span(self, first: int, last: int, microbatches: int) -> tuple[int, int]:
        """The first block of some layers, and the one after their last."""
        cuts = self.cuts(microbatches)
        ends = (*cuts.layers, len(cuts.blocks))
        return ends[first], ends[last]

    def blocks(self, microbatches: int) -> tuple[Block, ...]:
        """The blocks of a step in order."""
        cuts, sample = self.cuts(microbatches), self.samples[microbatches]
        if microbatches not in self._blocks:
            parts = stages.cut(sample.graph, cuts.firsts, sample.state_pairs).parts
            found = alike(parts, [stages.state_pairs_of(part, sample.graph, sample.state_pairs) for part in parts])
            own = [replace(block, fewer=fewer) for block, fewer in zip(found, self._fewer(microbatches), strict=True)]
            self._blocks[microbatches] = tuple(own[part] for part in cuts.blocks)
        return self._blocks[microbatches]

    def _fewer(self, microbatches: int) -> list[tuple[str, ...]]:
        """The kinds of every part in fewer microbatches, where the step is cut there as it is here."""
        cuts = self.cuts(microbatches)
        others = [count for count in sorted(self.samples) if count < microbatches and self.cuts(count) == cuts]
        kinds = [dict(zip(cuts.blocks, self.blocks(count), strict=True)) for count in others]
        return [tuple(each[part].kind for each in kinds) for part in range(len(cuts.firsts))]

    def firsts(self, graph: Graph, begins: Sequence[int], microbatches: int) -> tuple[int, ...]:
        """The nodes of the whole step's body with which these blocks begin."""
        whole, cuts = in_blocks(body_of(graph), self.n_layers, also=self.also), self.cuts(microbatches)
        if len(whole.blocks) != len(cuts.blocks):
            raise InternalError(f"a step of {len(whole.blocks)} blocks was searched as {len(cuts.blocks)}")
        return tuple(whole.firsts[whole.blocks[block]] for block in begins)

    def _layers(self, first: int, last: int, microbatches: int) -> tuple[Counted, ...]:
        return self._counted(*self.span(first, last, microbatches), microbatches)

    def _counted(self, begin: int, end: int, microbatches: int) -> tuple[Counted, ...]:
        """One block of each kind in a run of blocks, with how many there are."""
        key = (begin, end, microbatches)
        if key not in self._counts:
            chosen = self.blocks(microbatches)[begin:end]
            counts = Counter(block.kind for block in chosen)
            self._counts[key] = tuple((block, counts[kind]) for kind, block in {b.kind: b for b in chosen}.items())
        return self._counts[key]

    def survey(self, n_devices: Sequence[int]) -> None:
        """Prices the block that weighs most, in the fewest microbatches, on ever more devices while they are of use.

        What is found there bounds what more devices can save, and what more microbatches cost, everywhere else.
        """
        count = min((count for count in self.samples if count > 1), default=1)
        every = self._layers(0, self.n_layers, count)
        heaviest, _ = max(every, key=lambda one: one[1] * self.pricer.least(one[0], self.cluster, 1)[0])
        alone, least = ((heaviest, 1),), math.inf
        for n, more in itertools.pairwise((*sorted(n_devices), 0)):
            firsts = [self._order(alone, size)[0][1] for size in (n, more) if size]
            self._find([one for mesh in firsts for one in self._wanted(alone, mesh)])
            found = self._best(alone, n, count, math.inf)
            spent = n * found.period(count) if found else math.inf
            least = min(least, spent)
            if math.isfinite(least) and spent > WASTE * least:
                return

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, beneath: float = math.inf
    ) -> Candidate | None:
        """The stage of some layers on the mesh on which its period is the least; None if on none it is below `beneath`.

        The period is in seconds of a microbatch, with its share of the end of a step.
        """
        return self._best(self._layers(first, last, microbatches), submesh.n_devices, microbatches, beneath)

    def stage(self, begin: int, end: int, n_devices: int, microbatches: int, beneath: float) -> Candidate | None:
        """The stage of some blocks, as `candidate` has that of layers."""
        return self._best(self._counted(begin, end, microbatches), n_devices, microbatches, beneath)

    def floor(self, begin: int, end: int, n_devices: int, microbatches: int) -> LowerBound:
        """What no stage of some blocks goes below, of what is known so far; in any number of microbatches.

        Where the step was not cut in so many, it takes no less than what lies between its steps in fewer and in more:
        each way to do it takes a time of its own, and one for each microbatch.
        """
        if microbatches in self.samples:
            return self._run_floor(self._counted(begin, end, microbatches), n_devices)
        fewer = max((count for count in self.samples if count < microbatches), default=None)
        more = min((count for count in self.samples if count > microbatches), default=None)
        low, high = (self.floor(begin, end, n_devices, n) if n else None for n in (fewer, more))
        if not low or not fewer:
            return high or LowerBound(0.0, 0.0, 0.0)
        if not high or not more:
            share = fewer / microbatches
            return LowerBound(low.seconds * share, low.period * share, low.nbytes)
        part = (microbatches - fewer) / (more - fewer)
        seconds, period = (
            ((1 - part) * fewer * a + part * more * b) / microbatches for a, b in zip(low[:2], high[:2], strict=True)
        )
        return LowerBound(seconds, period, low.nbytes)

    def state_nbytes(self, begin: int, end: int, microbatches: int) -> int:
        """Bytes of the weights of some blocks and of their optimizer's state, all of it."""
        return sum(n * self.pricer.state_nbytes(block) for block, n in self._counted(begin, end, microbatches))

    def kept_nbytes(self, begin: int, end: int, n_devices: int, microbatches: int) -> int:
        """Bytes of one device that the forward of a microbatch keeps at least; from a sample in no more of them."""
        return sum(n * self.pricer.kept_nbytes(b) for b, n in self._counted(begin, end, microbatches)) // n_devices

    def _run_floor(self, chosen: Sequence[Counted], n_devices: int) -> LowerBound:
        key = tuple((block.kind, n) for block, n in chosen), n_devices
        if key not in self._runs or self._runs[key][0] != self._found:
            meshes = self._meshes(n_devices)
            each = [
                [(n * one[0], n * one[1]) for one, n in ((self._floor(b, mesh), n) for b, n in chosen)]
                for mesh in meshes
            ]
            found = LowerBound(
                seconds=min((math.fsum(seconds for seconds, _ in one) for one in each), default=math.inf),
                period=min((math.fsum(period for _, period in one) for one in each), default=math.inf),
                nbytes=math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[1] for block, n in chosen),
            )
            self._runs[key] = self._found, found
        return self._runs[key][1]

    def expect(self, asked: Sequence[tuple[int, int, Submesh, int]]) -> None:
        """Prices at once what `candidate` is going to ask for, one thing after the other, for each of these."""
        runs = [(self._layers(first, last, count), submesh.n_devices, count) for first, last, submesh, count in asked]
        meshes = [[mesh for _, mesh in self._order(chosen, n_devices)] for chosen, n_devices, _ in runs]
        self._find(
            [one for (chosen, *_), (mesh, *_) in zip(runs, meshes, strict=True) for one in self._wanted(chosen, mesh)]
        )
        ahead: list[Wanted] = []
        for (chosen, n_devices, count), (first, *others) in zip(runs, meshes, strict=True):
            costs = self._costs(chosen, first, math.inf)
            period = Candidate.together(costs, first).period(count) if costs else 0.0
            if period > self._enough(chosen, n_devices):
                ahead += [one for mesh in others for one in self._wanted(chosen, mesh, period / (1 + ENOUGH))[:1]]
        self._find(ahead)

    def _order(self, chosen: Sequence[Counted], n_devices: int) -> list[tuple[int, Mesh]]:
        """The meshes by number, in the order in which they are tried."""

        def order(one: tuple[int, Mesh]) -> tuple[bool, float, int, int]:
            period = math.fsum(n * self._floor(block, one[1])[1] for block, n in chosen)
            return one[1] != self._winners.get(n_devices), period, max(one[1].sizes, default=1), one[0]

        return sorted(enumerate(self._meshes(n_devices)), key=order)

    def _enough(self, chosen: Sequence[Counted], n_devices: int) -> float:
        """The period at which no other mesh is tried."""
        least = math.fsum(n * self.pricer.least(block, self.cluster, n_devices)[0] for block, n in chosen)
        return least * (1 + ENOUGH) if self.lazy else 0.0

    def _best(self, chosen: Sequence[Counted], n_devices: int, microbatches: int, beneath: float) -> Candidate | None:
        """The stage of so many blocks of some kinds, as `candidate` has it."""
        meshes = self._order(chosen, n_devices)
        best: tuple[float, int, Candidate] | None = None
        for place, (number, mesh) in enumerate(meshes):
            bound = best[0] / (1 + ENOUGH) if best and self.lazy else beneath
            if place == 1:
                self._look_ahead(chosen, [mesh for _, mesh in meshes[1:]], bound)
            costs = self._costs(chosen, mesh, bound)
            if costs is None:
                continue
            found = Candidate.together(costs, mesh)
            period = found.period(microbatches)
            if period >= beneath:
                continue
            if best is None or (period, number) < best[:2]:
                best = period, number, found
                self._winners[n_devices] = mesh
            if period <= self._enough(chosen, n_devices):
                break
        return best[2] if best else None

    def near(self, begin: int, end: int, n_devices: int, microbatches: int) -> tuple[Mesh, ...]:
        """The meshes that suit some blocks nearly as well as the best; the others are priced for it, if need be."""
        chosen, meshes = self._counted(begin, end, microbatches), self._meshes(n_devices)
        best, found = math.inf, list[tuple[float, Mesh]]()
        meshes = sorted(meshes, key=lambda mesh: mesh != self._winners.get(n_devices))
        for place, mesh in enumerate(meshes):
            if place == 1:
                self._look_ahead(chosen, meshes[1:], (1 + NEAR) * best)
            costs = self._costs(chosen, mesh, (1 + NEAR) * best)
            if costs is not None:
                found.append((Candidate.together(costs, mesh).period(microbatches), mesh))
                best = min(best, found[-1][0])
        return tuple(mesh for period, mesh in found if period <= (1 + NEAR) * best)

    def _look_ahead(self, chosen: Sequence[Counted], meshes: Sequence[Mesh], beneath: float) -> None:
        """Prices what is asked for first on each mesh, all at once."""
        self._find([one for mesh in meshes for one in self._wanted(chosen, mesh, beneath)[:1]])

    def _costs(self, chosen: Sequence[Counted], mesh: Mesh, beneath: float) -> list[tuple[StageCost, int]] | None:
        """The price of each kind of block; None if one cannot be on the mesh, or if their period exceeds `beneath`."""
        while wanted := self._wanted(chosen, mesh, beneath):
            heaviest_first = math.isfinite(beneath) and len(wanted) == len(chosen)
            asked = wanted[:1] if heaviest_first else wanted
            self._find(asked)
            if not all(self.pricer.is_known(block, mesh) for block, _, _ in asked):
                return None
        spent = math.fsum(n * self._floor(block, mesh)[1] for block, n in chosen)
        if spent > beneath * SLACK or math.isinf(spent):
            return None
        costs = ((self.pricer.price(block, mesh), n) for block, n in chosen)
        return [(cost, n) for cost, n in costs if cost]

    def _wanted(self, chosen: Sequence[Counted], mesh: Mesh, beneath: float = math.inf) -> list[Wanted]:
        """The blocks without a price, heaviest first, with the period that each may have; none if it is too much."""
        floors = [(n * self._floor(block, mesh)[1], block, n) for block, n in chosen]
        spent = math.fsum(period for period, _, _ in floors)
        if spent > beneath * SLACK or math.isinf(spent):
            return []
        left = sorted((one for one in floors if not self.pricer.is_known(one[1], mesh)), key=lambda one: -one[0])
        return [(block, mesh, (beneath * SLACK - spent + period) / n) for period, block, n in left]

    def _find(self, asked: Sequence[Wanted]) -> None:
        left = self.pricer.left(asked)
        for _, mesh, _ in left:
            self.told(mesh)
        if left:
            self.pricer.find(left)
            self._found += len(left)
            self.told(None)

    def _floor(self, block: Block, mesh: Mesh) -> tuple[float, float]:
        """As `Pricer.floor`, and no less than half of what half of the devices take at best."""
        seconds, period = self.pricer.floor(block, mesh)
        if self.pricer.is_known(block, mesh):
            return seconds, period
        key = (block.kind, mesh.size)
        if key not in self._spent or self._spent[key][0] != self._found:
            fewer = (n for n in self._laid_out if n < mesh.size and mesh.size % n == 0)
            self._spent[key] = self._found, max((self._least_spent(block, n) for n in fewer), default=0.0)
        return seconds, max(period, self._spent[key][1] / mesh.size)

    def _least_spent(self, block: Block, n_devices: int) -> float:
        """Seconds of so many devices that a microbatch of a block takes at least; 0 if it cannot be on them."""
        least = min((self.pricer.floor(block, mesh)[1] for mesh in self._meshes(n_devices)), default=math.inf)
        return n_devices * least if math.isfinite(least) else 0.0

    def least(self, first: int, last: int, submesh: Submesh, microbatches: int) -> LowerBound:
        """What no candidate for these layers goes below, on the best mesh for that.

        Of what is known so far: it rises as blocks are priced.
        """
        key = (submesh.n_devices, microbatches)
        if key not in self._floors or self._floors[key].found != self._found:
            self._floors[key] = self._floors_of(*key)
        found = self._floors[key]
        seconds, period, nbytes = (float(of[first, last]) for of in (found.seconds, found.periods, found.nbytes))
        return LowerBound(seconds=seconds, period=period, nbytes=nbytes)

    def _floors_of(self, n_devices: int, microbatches: int) -> Floors:
        kinds = [block for block, _ in self._layers(0, self.n_layers, microbatches)]
        numbers = {block.kind: number for number, block in enumerate(kinds)}
        each = np.zeros((self.n_layers + 1, len(kinds)))
        for layer in range(self.n_layers):
            for block, n in self._layers(layer, layer + 1, microbatches):
                each[layer + 1, numbers[block.kind]] = n
        meshes = self._meshes(n_devices)
        floors = np.array([[self._floor(block, mesh) for mesh in meshes] for block in kinds])
        return Floors.of(
            np.cumsum(each, axis=0),
            np.moveaxis(floors, 2, 0),
            np.array([[self.pricer.is_known(block, mesh) for mesh in meshes] for block in kinds]),
            np.array([self.pricer.least(block, self.cluster, n_devices)[1] for block in kinds]),
            self._found,
        )

    def _meshes(self, n_devices: int) -> Sequence[Mesh]:
        if n_devices not in self._laid_out:
            self._laid_out[n_devices] = self.meshes(n_devices)
        return self._laid_out[n_devices]

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        return self.edge_nbytes(self.span(cut, self.n_layers, microbatches)[0], microbatches)

    def edge_nbytes(self, block: int, microbatches: int) -> int:
        """Bytes of one microbatch that a block is sent by the one before it."""
        part = self.blocks(microbatches)[block - 1].part
        onward = {value for i in part.forward for value in part.body.nodes[i].outputs}
        sent = (inner for v, inner in part.streams.items() if v in part.graph.outputs and inner in onward)
        return sum(part.body.types[inner].nbytes for inner in sent)

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        """Seconds of so many bytes from some devices to others."""
        return boundary_seconds(self.cluster.group(), senders, receivers, nbytes)
