"""The costs of a step's blocks as stages on meshes, each found once.

Blocks that are equal but for names are of one kind, and have one cost. Of a cost that was seen to be too high, only a
lower bound is known, which is kept.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from passes.cluster import Cluster, Mesh
from passes.inter_op import StageCost
from passes.intra_op import restrictions
from passes.pipeline.block_solver import BlockSolver
from passes.pipeline.blocks import Block
from passes.pipeline.workers import Task, WorkerPool
from passes.plan import Plan


class PriceRequest(NamedTuple):
    """A block to be priced on a mesh; a price with a period of `cutoff` seconds or more is of no use."""

    block: Block
    mesh: Mesh
    cutoff: float


@dataclass(slots=True)
class BlockCosts:
    """The costs ("prices") of blocks on meshes that the `solver` finds, and lower bounds on those that are not known.

    The costs under a further `restriction` have those without it as their `whole`, whose worker processes do their
    work.
    """

    solver: BlockSolver
    whole: BlockCosts | None = None
    restriction: restrictions.Restriction | None = None
    n_prices: int = 0
    _pool: WorkerPool | None = None
    _prices: dict[tuple[str, Mesh], StageCost | None] = field(default_factory=dict[tuple[str, Mesh], StageCost | None])
    _bounds: dict[tuple[str, Mesh], float] = field(default_factory=dict[tuple[str, Mesh], float])
    _restricted: dict[restrictions.Restriction, BlockCosts] = field(
        default_factory=dict[restrictions.Restriction, "BlockCosts"]
    )

    def restricted(self, restriction: restrictions.Restriction) -> BlockCosts:
        """The costs of blocks whose placements must meet a restriction, too; each restriction has one such object."""
        if restriction not in self._restricted:
            self._restricted[restriction] = BlockCosts(self.solver.restricted(restriction), self, restriction)
        return self._restricted[restriction]

    @contextmanager
    def sharing(self) -> Generator[None]:
        """A context in which copies of the solver, in processes of their own, do part of the work."""
        with WorkerPool(self.solver) as self._pool:
            try:
                yield
            finally:
                self._pool = None

    def _shared(self, method: str, tasks: Sequence[Task]) -> list[Any]:
        """The result of a method of the solver for each task, in order; worker processes do some of them."""
        if self.whole is not None:
            return self.whole._shared("under", [(self.restriction, method, *task) for task in tasks])
        return (self._pool or WorkerPool(self.solver, 1)).call(method, tasks)

    @property
    def solved(self) -> int:
        """The number of prices, including those of which only a lower bound is known."""
        return len(self._prices.keys() | self._bounds.keys())

    def is_known(self, block: Block, mesh: Mesh) -> bool:
        return (block.kind, mesh) in self._prices

    def price(self, block: Block, mesh: Mesh, cutoff: float = math.inf) -> StageCost | None:
        """The cost of a block on a mesh as a stage of its own; None if the block cannot be there.

        None as well where its period is seen to be `cutoff` seconds or more.
        """
        self.price_all([PriceRequest(block, mesh, cutoff)])
        return self._prices.get((block.kind, mesh))

    def price_all(self, requests: Sequence[PriceRequest]) -> None:
        """Finds the requested prices that are not known yet, each as `price` does, sharing the work."""
        missing = self.missing(requests)
        self.n_prices += len(missing)
        # Whoever does it, the first block of a kind is priced: others may have their operators in another order.
        tasks = [(self.solver.kind(block).block, mesh, cutoff) for block, mesh, cutoff in missing]
        for (block, mesh, _), (cost, bound) in zip(missing, self._shared("cost", tasks), strict=True):
            self._bounds[block.kind, mesh] = bound
            if cost or math.isinf(bound):
                self._prices[block.kind, mesh] = cost

    def missing(self, requests: Sequence[PriceRequest]) -> list[PriceRequest]:
        """The requests whose price is not known yet, each once."""
        missing: dict[tuple[str, Mesh], PriceRequest] = {}
        for request in requests:
            block, mesh, cutoff = request
            if not self.is_known(block, mesh) and self.lower_bound(block, mesh)[1] < cutoff:
                known = missing.setdefault((block.kind, mesh), request)
                missing[block.kind, mesh] = max(known, request, key=lambda each: each.cutoff)
        return list(missing.values())

    def lower_bound(self, block: Block, mesh: Mesh) -> tuple[float, float]:
        """(least seconds of a microbatch, forward and backward; least period); exact for a known price.

        Smaller microbatches save nothing: a step takes no less time than in fewer of them.
        """
        if self.is_known(block, mesh):
            if (cost := self._prices[block.kind, mesh]) is None:
                return math.inf, math.inf
            return cost.forward_seconds + cost.backward_seconds, block.period(cost)
        least, _ = self.least(block, mesh.cluster, mesh.size)
        step = max(self._bounds.get((kind, mesh), 0.0) for kind in (block.kind, *block.fewer))
        return least, max(least, step / block.part.scan.length)

    def least(self, block: Block, cluster: Cluster, n_devices: int) -> tuple[float, float]:
        """Lower bounds on the price of a block on `n_devices`: seconds of a microbatch, and bytes of one device.

        The seconds are those of one device, divided: collectives come on top, and cutting saves no work but for one
        product in twenty, which fills the multiprocessors of a GPU better once it is cut, and takes 2 to 16 % less.
        """
        seconds = self.solver.one_device_seconds(block, cluster)
        return seconds / n_devices, self.solver.kind(block).nbytes / n_devices

    def state_nbytes(self, block: Block, parts: int) -> int:
        """The least bytes on one device of a block's weights and their optimizer's state, cut into `parts`."""
        return self.solver.kind(block).state_nbytes(parts)

    def kept_nbytes(self, block: Block) -> int:
        """Bytes that the forward of a microbatch keeps for its backward, on all devices together and without copies."""
        return self.solver.kind(block).kept_nbytes

    def plans(self, tasks: Sequence[Task]) -> list[Plan | None]:
        """The plan of each task, which are the arguments of `BlockSolver.plan`; worker processes make some of them."""
        return self._shared("plan", tasks)
