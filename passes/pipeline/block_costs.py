"""The costs of blocks of a step as stages on meshes, without plans, for searches that compare very many.

A cost is that of the first relaxation of the placement problem, rounded and improved by coordinate descent, and is not
improved until the bound is met: costs are compared with each other, and the stages that are chosen by them are planned
anew. Parts that are equal but for names share their operator groups and their cost; problems on one mesh share the
seconds of reshardings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from passes.cluster import Cluster, Mesh
from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.inter_op import StageCost
from passes.intra_op import assemble, best, computing, extract, pins, restrictions
from passes.ir import PHASES
from passes.pipeline.assemble import layout_cost
from passes.pipeline.blocks import Block, KindOfBlock
from passes.pipeline.segments import entering
from passes.pipeline.workers import Task, WorkerPool
from passes.placement import Layout, ReshardingPlan, resharding_plan
from passes.plan import Plan
from passes.rules import pinned_mesh
from passes.sharding import Resharder
from passes.solver import SolverOptions, solve
from passes.step import Step
from passes.transforms import whole_layout

ROUGH = 3e-2
"""The relative gap at which the solve of a price ends: prices choose stages, and the stages that are chosen are solved
to the gap that is asked for. `python -m benchmarks.planning --pipeline` shows what prices and plans differ by."""


class PriceRequest(NamedTuple):
    """A block to be priced on a mesh; from the period `cutoff` in seconds on, its price is of no use."""

    block: Block
    mesh: Mesh
    cutoff: float


@dataclass(slots=True, kw_only=True)
class BlockCosts:
    """The costs ("prices") of blocks on meshes, each computed once, and bounds on those that are not known.

    With `restrict`, they are those of placements that a planner by hand makes; a block that it refuses cannot be there.
    Costs that are restricted further know those that they came from as their `whole`, by their own `restriction`: what
    is shared with copies of the whole (`sharing`) is the work of all that is restricted, too.
    """

    options: SolverOptions
    restrict: restrictions.Restriction | None = None
    whole: BlockCosts | None = None
    restriction: restrictions.Restriction | None = None
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    n_prices: int = 0
    _pool: WorkerPool | None = None
    _kinds: dict[str, KindOfBlock] = field(default_factory=dict[str, KindOfBlock])
    _prices: dict[tuple[str, Mesh], StageCost | None] = field(default_factory=dict[tuple[str, Mesh], StageCost | None])
    _bounds: dict[tuple[str, Mesh], float] = field(default_factory=dict[tuple[str, Mesh], float])
    _one_device_seconds: dict[tuple[str, Cluster], float] = field(default_factory=dict[tuple[str, Cluster], float])
    _restricted: dict[restrictions.Restriction, BlockCosts] = field(
        default_factory=dict[restrictions.Restriction, "BlockCosts"]
    )

    def __reduce__(self) -> tuple[Callable[[], BlockCosts], tuple[()]]:
        """The recipe for a copy in another process, which begins with nothing known."""
        return partial(BlockCosts, options=self.options, restrict=self.restrict), ()

    def restricted(self, restriction: restrictions.Restriction) -> BlockCosts:
        """The costs of blocks under placements made by hand; they share work, and what all placements share."""
        if restriction not in self._restricted:
            self._restricted[restriction] = BlockCosts(
                options=self.options,
                restrict=pins.Both(self.restrict, restriction) if self.restrict else restriction,
                whole=self,
                restriction=restriction,
                resharders=self.resharders,
                _kinds=self._kinds,
                _one_device_seconds=self._one_device_seconds,
            )
        return self._restricted[restriction]

    @contextmanager
    def sharing(self) -> Generator[None]:
        """A block in which copies of these costs, in processes of their own, do part of the work."""
        with WorkerPool(self) as self._pool:
            try:
                yield
            finally:
                self._pool = None

    def under(self, restriction: restrictions.Restriction, method: str, *task: Any) -> Any:
        """The result of a method of the costs that are `restricted` so: what those ask a pool of these for."""
        return getattr(self.restricted(restriction), method)(*task)

    def _shared(self, method: str, tasks: Sequence[Task]) -> list[Any]:
        """The result of a method for each task, in order; with a pool, copies do some of them."""
        if self.whole is not None:
            return self.whole._shared("under", [(self.restriction, method, *task) for task in tasks])
        return (self._pool or WorkerPool(self, 1)).call(method, tasks)

    @property
    def solved(self) -> int:
        """The number of prices, those included of which only a bound is known since they are too high."""
        return len(self._prices.keys() | self._bounds.keys())

    def is_known(self, block: Block, mesh: Mesh) -> bool:
        return (block.kind, mesh) in self._prices

    def price(self, block: Block, mesh: Mesh, cutoff: float = math.inf) -> StageCost | None:
        """The cost of a block on a mesh as a stage of its own; None if it cannot be there.

        None as well as soon as it is seen that its period is no less than `cutoff` seconds.
        """
        self.price_all([PriceRequest(block, mesh, cutoff)])
        return self._prices.get((block.kind, mesh))

    def price_all(self, requests: Sequence[PriceRequest]) -> None:
        """Finds the prices that are not known yet, each as `price` does, sharing the work."""
        missing = self.missing(requests)
        self.n_prices += len(missing)
        # Whoever does it, the first block of a kind is priced: others may have their operators in another order.
        tasks = [(self._kind(block).block, mesh, cutoff) for block, mesh, cutoff in missing]
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
        """The least seconds of a microbatch, forward and backward, and the least period; exact for a known price.

        Halving microbatches saves nothing: a step takes no less time than in fewer of them.
        """
        if self.is_known(block, mesh):
            if (cost := self._prices[block.kind, mesh]) is None:
                return math.inf, math.inf
            return cost.forward_seconds + cost.backward_seconds, block.period(cost)
        least, _ = self.least(block, mesh.cluster, mesh.size)
        step = max(self._bounds.get((kind, mesh), 0.0) for kind in (block.kind, *block.fewer))
        return least, max(least, step / block.part.scan.length)

    def least(self, block: Block, cluster: Cluster, n_devices: int) -> tuple[float, float]:
        """Seconds of a microbatch and bytes of one device that prices on so many devices do not go below.

        The seconds are those of one device, shared: moves come on top, and cutting saves no work but for one product in
        twenty, which fills the multiprocessors of a GPU better once it is cut, and takes 2 to 16 % less.
        """
        key = (block.kind, cluster)
        if key not in self._one_device_seconds:
            mesh = Mesh(axes=("x",), sizes=(1,), cluster=cluster)
            self._one_device_seconds[key] = self._seconds_on_one_device(block, mesh)
        return self._one_device_seconds[key] / n_devices, self._kind(block).nbytes / n_devices

    def state_nbytes(self, block: Block, parts: int) -> int:
        """The least bytes of one device of a block's weights and their optimizer's state, cut over so many devices."""
        return self._kind(block).state_nbytes(parts)

    def kept_nbytes(self, block: Block) -> int:
        """Bytes that the forward of a microbatch keeps for its backward, all devices together and no copies."""
        return self._kind(block).kept_nbytes

    def _seconds_on_one_device(self, block: Block, mesh: Mesh) -> float:
        """Seconds of a block's operators on one device; 0 if it cannot be there."""
        part = block.part
        if pinned_mesh(part.graph) is not None:
            return 0.0
        spent = computing.compute_seconds(part.graph, self._kind(block).grouping, mesh, whole_layout(part.graph))
        return (spent.get("forward", 0.0) + spent.get("backward", 0.0)) / part.scan.length

    def _kind(self, block: Block) -> KindOfBlock:
        if block.kind not in self._kinds:
            self._kinds[block.kind] = KindOfBlock.of(block)
        return self._kinds[block.kind]

    def cost(self, block: Block, mesh: Mesh, cutoff: float) -> tuple[StageCost | None, float]:
        """The price, None once it is seen that its period is `cutoff` or more; the least seconds of a step.

        Those are infinite if it cannot be there.
        """
        refused = PlanningError if self.restrict else NoLegalPlanError
        try:
            return self._cost(self._kind(block), mesh, cutoff)
        except refused:
            return None, math.inf

    def plans(self, tasks: Sequence[Task]) -> list[Plan | None]:
        """The plan of each of these tasks of `plan`, sharing the work."""
        return self._shared("plan", tasks)

    def plan(
        self, name: str, step: Step, meshes: Sequence[Mesh], options: SolverOptions, most_nbytes: float = math.inf
    ) -> Plan | None:
        """The cheapest plan of a program over the meshes that needs at most so many bytes, None if none is found.

        It takes what prices have found out about the meshes.
        """
        try:
            return best(name, step, meshes, options, self.restrict, resharders=self.resharders, most_nbytes=most_nbytes)
        except OverBudgetError:
            return None

    def planned_cost(self, block: Block, mesh: Mesh) -> tuple[StageCost, float]:
        """The cost of a block by its plan, solved to the gap that is asked for, and the least seconds of a step."""
        graph = block.part.graph
        plan = best("block", Step(graph=graph, state_pairs=block.all_pairs), [mesh], self.options, self.restrict)
        resharder = Resharder(plan.mesh)
        reshardings = resharding_plan(graph, plan.layout, resharder, regather=plan.regather)
        return _price(block, plan.layout, resharder, reshardings, plan.phases), plan.solution.bound

    def _cost(self, kind: KindOfBlock, mesh: Mesh, cutoff: float) -> tuple[StageCost | None, float]:
        block, part, graph = kind.block, kind.block.part, kind.block.part.graph
        if pinned_mesh(graph) is not None:
            return self.planned_cost(block, mesh)
        resharder = self.resharders.setdefault(mesh, Resharder(mesh))
        assembly = assemble(graph, mesh, kind.grouping, resharder, block.all_pairs, regather=False)
        assembly = self.restrict(assembly) if self.restrict else assembly
        most, least = cutoff * part.scan.length, math.fsum(float(s.min()) for s in assembly.problem.seconds)
        if least >= most:  # without any resharding
            return None, least
        answer = solve(assembly.problem, replace(self.options, gap=max(self.options.gap, ROUGH)), most, close=False)
        if answer.bound >= most:
            return None, answer.bound
        layout = assembly.layout(answer.choice)
        reshardings = resharding_plan(graph, layout, resharder, regather=False)
        _, moved = extract.move_seconds(graph, reshardings, resharder)
        compute = assembly.root.compute_seconds(answer.choice)
        seconds: dict[str, float] = {name: compute.get(name, 0.0) + moved.get(name, 0.0) for name in PHASES}
        return _price(block, layout, resharder, reshardings, seconds), answer.bound


def _price(
    block: Block, layout: Layout, resharder: Resharder, reshardings: ReshardingPlan, seconds: Mapping[str, float]
) -> StageCost:
    """The cost of a layout, with the copies that the loop reads in place of weights that lie elsewhere."""
    cost = layout_cost(block.part, layout, resharder.mesh, _with_onward_moves(block, reshardings, resharder, seconds))
    copies = entering(block.part, layout, resharder.mesh)
    return replace(cost, persistent_nbytes=cost.persistent_nbytes + copies)


def _with_onward_moves(
    block: Block, reshardings: ReshardingPlan, resharder: Resharder, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by phase, with the reshardings of a block's results for the next block in the phase that they belong to.

    They stand at the end of the block's program, for all microbatches at once, and are due in each of them.
    """
    part, by_phase = block.part, dict(seconds)
    chained = {part.graph.outputs[output] for output, _ in block.chain}
    made = {value for index in part.forward for value in part.body.nodes[index].outputs}
    for move in reshardings.before[-1]:
        if move.value in chained:
            spent = resharder.cost(part.graph.types[move.value], move.before, move.after)
            phase = "forward" if part.boundary_values[move.value] in made else "backward"
            by_phase["apply"] = by_phase.get("apply", 0.0) - spent
            by_phase[phase] = by_phase.get(phase, 0.0) + spent
    return by_phase
