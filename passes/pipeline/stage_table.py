"""The table of stage costs for the search over stages: a stage is a sum of blocks, and equal blocks are priced once.

Layers, of which stages are made, are runs of the blocks in which a model repeats itself; where it does not, a layer is
one block. A block is priced as a stage of its own on every mesh that a submesh can be; where its neighbours are of its
kind, it hands on what it takes in with the same placement. A stage is the sum of its blocks on the one mesh that suits
all of them best. Reshardings between unlike blocks of one stage are left out: the stages that are chosen are planned
again as they are.

A mesh is left out as soon as the blocks priced on it, with lower bounds on the others, gain nothing over the best mesh
so far; blocks that are already priced count first, and then those with most work (bounds:
`passes.pipeline.lower_bounds`). A survey of the block with most work finds the bounds that matter before the search
begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from passes.cluster import Cluster, Mesh, boundary_seconds
from passes.inter_op import Candidate, StageCost, Submesh
from passes.pipeline.block_costs import BlockCosts, PriceRequest
from passes.pipeline.lower_bounds import SLACK, BlockBounds
from passes.pipeline.step_blocks import Counted, Kinds, StepBlocks

LEAST_GAIN = 0.03
"""The gain for which no other mesh is tried, over a price or from a price to its lower bound: as much as the gap to
which prices are solved. `python -m benchmarks.planning --pipeline` counts the programs that are left.
"""

WASTE = 4.0
"""The survey ends where the devices together spend this many times what the best number of them spends: four times as
many would then gain nothing. `python -m benchmarks.planning --pipeline` counts the programs that are left.
"""

TOGETHER = 4
"""Numbers of devices that the survey prices a block on at once, so that as many processors have work; it may end before
the last of them is of use (`python -m benchmarks.planning cases` has its seconds)."""

PRICE_TOLERANCE = 0.03
"""The share by which prices of two meshes may differ, so that both are tried for a stage that was chosen: prices are
sums over its blocks.
"""


Run = tuple[Kinds, int]
"""A run of blocks by their kinds, and the number of devices that it is on."""


@dataclass(slots=True, kw_only=True)
class StageCostTable:
    """The costs of a step's stages, computed when they are asked for; `meshes(n)` lays out n devices.

    `on_price` is called with every mesh on which a block is about to be priced, and with None afterwards. `least_bytes`
    and `partly_priced` cache the results of `passes.pipeline.stage_bytes`, the latter with the number of prices known
    then.
    """

    step: StepBlocks
    cluster: Cluster
    meshes: Callable[[int], Sequence[Mesh]]
    block_costs: BlockCosts
    on_price: Callable[[Mesh | None], None]
    bounds: BlockBounds = field(init=False)
    least_bytes: dict[Run, StageCost] = field(init=False, default_factory=dict[Run, StageCost])
    partly_priced: dict[Run, tuple[int, list[StageCost]]] = field(
        init=False, default_factory=dict[Run, "tuple[int, list[StageCost]]"]
    )
    _winners: dict[int, Mesh] = field(default_factory=dict[int, Mesh])

    def __post_init__(self) -> None:
        self.bounds = BlockBounds(
            step=self.step, cluster=self.cluster, meshes=self.meshes, block_costs=self.block_costs
        )

    def restricted(self, block_costs: BlockCosts, meshes: Callable[[int], Sequence[Mesh]]) -> StageCostTable:
        """The table of the same blocks with other prices, on other meshes."""
        return replace(self, block_costs=block_costs, meshes=meshes, _winners={})

    def survey(self, n_devices: Sequence[int]) -> None:
        """Prices the block with most work, in the fewest microbatches, on more and more devices while they are of use.

        The prices bound what more devices can save, and what more microbatches cost, everywhere else.
        """
        count = min((count for count in self.step.samples if count > 1), default=1)
        every = self.step.in_layers(0, self.step.n_layers, count)
        heaviest, _ = max(every, key=lambda entry: entry[1] * self.block_costs.least(entry[0], self.cluster, 1)[0])
        heaviest_block, least = ((heaviest, 1),), math.inf
        for place, n in enumerate(sizes := sorted(n_devices)):
            if place % TOGETHER == 0:
                firsts = [self.order(heaviest_block, size)[0][1] for size in sizes[place : place + TOGETHER]]
                self.price_all([entry for mesh in firsts for entry in self.requests(heaviest_block, mesh)])
            stage = self._best(heaviest_block, n, count, math.inf)
            seconds = n * stage.period(count) if stage else math.inf
            least = min(least, seconds)
            if math.isfinite(least) and seconds > WASTE * least:
                return

    def candidate(
        self, first: int, last: int, submesh: Submesh, microbatches: int, cutoff: float = math.inf
    ) -> Candidate | None:
        """The stage of some layers on the mesh where its period is least; None if that is `cutoff` or more everywhere.

        The period is in seconds of a microbatch, with its share of the end of a step.
        """
        return self._best(self.step.in_layers(first, last, microbatches), submesh.n_devices, microbatches, cutoff)

    def stage(self, begin: int, end: int, n_devices: int, microbatches: int, cutoff: float) -> Candidate | None:
        """The stage of some blocks on its best mesh; None as in `candidate`."""
        return self._best(self.step.counted(begin, end, microbatches), n_devices, microbatches, cutoff)

    def order(self, chosen: Sequence[Counted], n_devices: int) -> list[tuple[int, Mesh]]:
        """The meshes with their numbers, in the order in which they are tried: those first on which all is priced."""

        def order(numbered: tuple[int, Mesh]) -> tuple[bool, bool, float, int, int]:
            number, mesh = numbered
            period = math.fsum(n * self.bounds.of_block(block, mesh)[1] for block, n in chosen)
            is_winner = mesh == self._winners.get(n_devices)
            return not self.bounds.is_priced(chosen, mesh), not is_winner, period, max(mesh.sizes, default=1), number

        return sorted(enumerate(self.bounds.meshes_of(n_devices)), key=order)

    def good_enough(self, chosen: Sequence[Counted], n_devices: int) -> float:
        """The period, in seconds of a microbatch, from which no other mesh is tried."""
        least = math.fsum(n * self.block_costs.least(block, self.cluster, n_devices)[0] for block, n in chosen)
        return least * (1 + LEAST_GAIN)

    def _best(self, chosen: Sequence[Counted], n_devices: int, microbatches: int, cutoff: float) -> Candidate | None:
        """The stage of n blocks of each kind, given as (block, n), on its best mesh; None as in `candidate`."""
        meshes = self.order(chosen, n_devices)
        n_first = max(1, sum(self.bounds.is_priced(chosen, mesh) for _, mesh in meshes))
        best: tuple[float, int, Candidate] | None = None
        for place, (number, mesh) in enumerate(meshes):
            bound = best[0] / (1 + LEAST_GAIN) if best else cutoff  # what another mesh must stay below to be worth it
            if place == n_first:
                self.price_all(self.ahead(chosen, [mesh for _, mesh in meshes[n_first:]], bound))
            costs = self.costs(chosen, mesh, bound)
            if costs is None:
                continue
            stage = Candidate.together(costs, mesh)
            period = stage.period(microbatches)
            if period >= cutoff:
                continue
            if best is None or (period, number) < best[:2]:
                best = period, number, stage
                self._winners[n_devices] = mesh
            if period <= self.good_enough(chosen, n_devices):
                break
        return best[2] if best else None

    def near(self, begin: int, end: int, n_devices: int, microbatches: int) -> tuple[Mesh, ...]:
        """The meshes whose period for these blocks is within `PRICE_TOLERANCE` of the best; prices them where
        needed.
        """
        chosen, meshes = self.step.counted(begin, end, microbatches), self.by_wins(n_devices)
        best, periods = math.inf, list[tuple[float, Mesh]]()
        for place, mesh in enumerate(meshes):
            if place == 1:
                self.price_all(self.ahead(chosen, meshes[1:], (1 + PRICE_TOLERANCE) * best))
            costs = self.costs(chosen, mesh, (1 + PRICE_TOLERANCE) * best)
            if costs is not None:
                periods.append((Candidate.together(costs, mesh).period(microbatches), mesh))
                best = min(best, periods[-1][0])
        return tuple(mesh for period, mesh in periods if period <= (1 + PRICE_TOLERANCE) * best)

    def by_wins(self, n_devices: int) -> list[Mesh]:
        """The meshes of that many devices, the last winner first."""
        return sorted(self.bounds.meshes_of(n_devices), key=lambda mesh: mesh != self._winners.get(n_devices))

    def ahead(self, chosen: Sequence[Counted], meshes: Sequence[Mesh], cutoff: float) -> list[PriceRequest]:
        """The first blocks without a price on each mesh, to be priced all at once."""
        return [request for mesh in meshes for request in self.requests(chosen, mesh, cutoff)[:1]]

    def costs(self, chosen: Sequence[Counted], mesh: Mesh, cutoff: float) -> list[tuple[StageCost, int]] | None:
        """The price of each kind of block; None if one cannot be on the mesh, or if their period exceeds `cutoff`."""
        while requests := self.requests(chosen, mesh, cutoff):
            heaviest_first = math.isfinite(cutoff) and len(requests) == len(chosen)
            now = requests[:1] if heaviest_first else requests
            self.price_all(now)
            if not all(self.block_costs.is_known(block, mesh) for block, _, _ in now):
                return None
        spent = math.fsum(n * self.bounds.of_block(block, mesh)[1] for block, n in chosen)
        if spent > cutoff * SLACK or math.isinf(spent):
            return None
        costs = ((self.block_costs.price(block, mesh), n) for block, n in chosen)
        return [(cost, n) for cost, n in costs if cost]

    def requests(self, chosen: Sequence[Counted], mesh: Mesh, cutoff: float = math.inf) -> list[PriceRequest]:
        """The blocks without a price, heaviest first, each with the period that it may have; empty if the known ones
        take too long.
        """
        floors = [(n * self.bounds.of_block(block, mesh)[1], block, n) for block, n in chosen]
        spent = math.fsum(period for period, _, _ in floors)
        if spent > cutoff * SLACK or math.isinf(spent):
            return []
        unpriced = sorted(
            (bound for bound in floors if not self.block_costs.is_known(bound[1], mesh)), key=lambda bound: -bound[0]
        )
        return [PriceRequest(block, mesh, (cutoff * SLACK - spent + period) / n) for period, block, n in unpriced]

    def price_all(self, requests: Sequence[PriceRequest]) -> None:
        missing = self.block_costs.missing(requests)
        for _, mesh, _ in missing:
            self.on_price(mesh)
        if missing:
            self.block_costs.price_all(missing)
            self.on_price(None)

    def state_nbytes(self, begin: int, end: int, microbatches: int, parts: int) -> int:
        """The least bytes on one device of the weights of some blocks and their optimizer's state, cut into `parts`."""
        chosen = self.step.counted(begin, end, microbatches)
        return sum(n * self.block_costs.state_nbytes(block, parts) for block, n in chosen)

    def kept_nbytes(self, begin: int, end: int, n_devices: int, microbatches: int) -> int:
        """Bytes of one device that the forward of a microbatch keeps at least, from the sample in that many
        microbatches or fewer.
        """
        return (
            sum(n * self.block_costs.kept_nbytes(b) for b, n in self.step.counted(begin, end, microbatches))
            // n_devices
        )

    def boundary_nbytes(self, cut: int, microbatches: int) -> int:
        """Bytes of one microbatch from layer cut - 1 to layer cut."""
        return self.step.boundary_nbytes(cut, microbatches)

    def transfer_seconds(self, senders: range, receivers: range, nbytes: int) -> float:
        """Seconds to send that many bytes from some devices to others."""
        return boundary_seconds(self.cluster.group(), senders, receivers, nbytes)
