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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from passes.cluster import Cluster, Mesh, boundary_seconds
from passes.inter_op import Candidate, StageCost, Submesh
from passes.pipeline.block_costs import Pricer, Wanted
from passes.pipeline.lower_bounds import SLACK, BlockBounds
from passes.pipeline.step_blocks import Counted, StepBlocks

ENOUGH = 0.03
"""A gain that no other mesh is tried for, over a price or from a price to the least that there can be: as much as the
gap at which prices are solved. `python -m benchmarks.planning --pipeline` counts the programs that are left."""

WASTE = 4.0
"""The survey ends where devices spend this many times what the best number of them does: four times as many would then
gain nothing. `python -m benchmarks.planning --pipeline` counts the programs that are left."""

NEAR = 0.03
"""Meshes whose prices differ by less are both tried for a stage that was chosen: prices are sums over its blocks."""


@dataclass(slots=True, kw_only=True)
class StageCosts:
    """The table of a `step` in blocks; `meshes(n)` lays out n devices.

    `told` hears of every mesh that a block is about to be priced on, and of None when it is. Without `lazy`, every
    block is priced on every mesh.
    """

    step: StepBlocks
    cluster: Cluster
    meshes: Callable[[int], Sequence[Mesh]]
    pricer: Pricer
    told: Callable[[Mesh | None], None]
    lazy: bool = True
    bounds: BlockBounds = field(init=False)
    _winners: dict[int, Mesh] = field(default_factory=dict[int, Mesh])

    def __post_init__(self) -> None:
        self.bounds = BlockBounds(step=self.step, cluster=self.cluster, meshes=self.meshes, pricer=self.pricer)

    def restricted(self, pricer: Pricer, meshes: Callable[[int], Sequence[Mesh]]) -> StageCosts:
        """The table of the same blocks by other prices, on other meshes."""
        return replace(self, pricer=pricer, meshes=meshes, _winners={})

    def survey(self, n_devices: Sequence[int]) -> None:
        """Prices the block that weighs most, in the fewest microbatches, on ever more devices while they are of use.

        What is found there bounds what more devices can save, and what more microbatches cost, everywhere else.
        """
        count = min((count for count in self.step.samples if count > 1), default=1)
        every = self.step.in_layers(0, self.step.n_layers, count)
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
        return self._best(self.step.in_layers(first, last, microbatches), submesh.n_devices, microbatches, beneath)

    def stage(self, begin: int, end: int, n_devices: int, microbatches: int, beneath: float) -> Candidate | None:
        """The stage of some blocks, as `candidate` has that of layers."""
        return self._best(self.step.counted(begin, end, microbatches), n_devices, microbatches, beneath)

    def expect(self, asked: Sequence[tuple[int, int, Submesh, int]]) -> None:
        """Prices at once what `candidate` is going to ask for, one thing after the other, for each of these."""
        runs = [
            (self.step.in_layers(first, last, count), submesh.n_devices, count) for first, last, submesh, count in asked
        ]
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
            period = math.fsum(n * self.bounds.of_block(block, one[1])[1] for block, n in chosen)
            return one[1] != self._winners.get(n_devices), period, max(one[1].sizes, default=1), one[0]

        return sorted(enumerate(self.bounds.meshes_of(n_devices)), key=order)

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
        chosen, meshes = self.step.counted(begin, end, microbatches), self.bounds.meshes_of(n_devices)
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
        spent = math.fsum(n * self.bounds.of_block(block, mesh)[1] for block, n in chosen)
        if spent > beneath * SLACK or math.isinf(spent):
            return None
        costs = ((self.pricer.price(block, mesh), n) for block, n in chosen)
        return [(cost, n) for cost, n in costs if cost]

    def _wanted(self, chosen: Sequence[Counted], mesh: Mesh, beneath: float = math.inf) -> list[Wanted]:
        """The blocks without a price, heaviest first, with the period that each may have; none if it is too much."""
        floors = [(n * self.bounds.of_block(block, mesh)[1], block, n) for block, n in chosen]
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
            self.bounds.found += len(left)
            self.told(None)

    def state_nbytes(self, begin: int, end: int, microbatches: int) -> int:
        """Bytes of the weights of some blocks and of their optimizer's state, all of it."""
        return sum(n * self.pricer.state_nbytes(block) for block, n in self.step.counted(begin, end, microbatches))

    def kept_nbytes(self, begin: int, end: int, n_devices: int, microbatches: int) -> int:
        """Bytes of one device that the forward of a microbatch keeps at least; from a sample in no more of them."""
        return sum(n * self.pricer.kept_nbytes(b) for b, n in self.step.counted(begin, end, microbatches)) // n_devices

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        return self.step.boundary_nbytes(cut, microbatches)

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        """Seconds of so many bytes from some devices to others."""
        return boundary_seconds(self.cluster.group(), senders, receivers, nbytes)
