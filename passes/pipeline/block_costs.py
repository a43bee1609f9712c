"""What a block of a step costs as a stage on a mesh, without its plan, for searches that ask for very many.

Answers come from the first relaxations, rounded and polished, and are not improved until the bound is met: prices are
compared with each other, and what is chosen by them is planned anew. Parts that are equal but for names share their
bundles and their price, problems on one mesh what reshardings cost there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np

from passes.cluster import Cluster, Mesh
from passes.errors import NoLegalPlanError, PlanningError
from passes.inter_op import StageCost
from passes.intra_op import Assembly, assemble, best, move_seconds
from passes.ir import PHASES, StatePairs
from passes.pipeline.assemble import kept, priced
from passes.pipeline.segments import entering
from passes.pipeline.structural_hash import structural_hash
from passes.pipeline.workers import WorkerPool
from passes.placement import Grouping, Layout, ReshardingPlan, group, resharding_plan
from passes.plan import Plan
from passes.rules import pinned_mesh
from passes.sharding import Resharder
from passes.solver import SolverOptions, solve
from passes.step import Step
from passes.transforms import Part, microbatch_stacks

ROUGH = 3e-2
"""The relative gap at which the solve of a price ends: prices choose stages, and the stages that are chosen are solved
to the gap that is asked for. `python -m benchmarks.planning --pipeline` shows what prices and plans differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a step with its state; parts of one `kind` are the same but for names.

    `chain` pairs (output, input) positions of what a block hands on with what it takes in, if those next to it are like
    it: laid out alike, blocks follow each other without more ado. `fewer` are the kinds that it is of in fewer
    microbatches.
    """

    part: Part
    state_pairs: StatePairs
    chain: StatePairs
    kind: str
    fewer: tuple[str, ...] = ()

    @classmethod
    def of(cls, part: Part, state_pairs: StatePairs, chain: StatePairs = ()) -> Self:
        return cls(part=part, state_pairs=state_pairs, chain=chain, kind=structural_hash(part, (*state_pairs, *chain)))

    def period(self, cost: StageCost) -> float:
        """Seconds of a microbatch with its share of what comes after all of them."""
        return cost.period(self.part.scan.length)


def alike(parts: Sequence[Part], state_pairs: Sequence[StatePairs]) -> tuple[Block, ...]:
    """The consecutive parts of a step as blocks, chained to what comes before and after them where that is alike."""
    kinds = [structural_hash(part, own) for part, own in zip(parts, state_pairs, strict=True)]
    found: list[Block] = []
    for at, (part, own) in enumerate(zip(parts, state_pairs, strict=True)):
        inner = 0 < at < len(parts) - 1 and kinds[at] in (kinds[at - 1], kinds[at + 1])
        found.append(Block.of(part, own, _chain(parts[at - 1], part, parts[at + 1]) if inner else ()))
    return tuple(found)


def _chain(before: Part, part: Part, after: Part) -> StatePairs:
    """What a part hands on, forward and backward, with what it takes in from the other side."""
    return (*_handed(before, part, after), *_handed(after, part, before))


def _handed(source: Part, part: Part, target: Part) -> StatePairs:
    """(output, input) positions of what a part gets from one neighbour and gives to the other; none unless they fit."""
    inputs, outputs = ({v: i for i, v in enumerate(values)} for values in (part.graph.inputs, part.graph.outputs))
    taken = [v for v in part.streams if v in inputs and v in source.graph.outputs]
    given = [v for v in part.streams if v in outputs and v in target.graph.inputs]
    if [part.graph.types[v] for v in taken] != [part.graph.types[v] for v in given]:
        return ()
    return tuple((outputs[theirs], inputs[ours]) for theirs, ours in zip(given, taken, strict=True))


Wanted = tuple[Block, Mesh, float]
"""A block, a mesh, and the period from which its price is no longer asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """The first block of a kind; `nbytes` are of what stays between microbatches, `state_nbytes` without the batch.

    `kept_nbytes` are what the forward of a microbatch keeps for its backward.
    """

    block: Block
    grouping: Grouping
    nbytes: int
    state_nbytes: int
    kept_nbytes: int


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices of blocks on meshes; those of plans as `passes.intra_op.mesh_search` makes them unless `rough`.

    With `restrict`, of plans that a planner by hand makes; a block that it refuses cannot be there. Work that can be
    shared is, with a `pool` of Pricers.
    """

    options: SolverOptions
    rough: bool = True
    restrict: Callable[[Assembly], Assembly] | None = None
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    pool: WorkerPool | None = None
    _firsts: dict[str, _First] = field(default_factory=dict[str, _First])
    _prices: dict[tuple[str, Mesh], StageCost | None] = field(default_factory=dict[tuple[str, Mesh], StageCost | None])
    _bounds: dict[tuple[str, Mesh], float] = field(default_factory=dict[tuple[str, Mesh], float])
    _alone: dict[tuple[str, Cluster], float] = field(default_factory=dict[tuple[str, Cluster], float])

    def __reduce__(self) -> tuple[Callable[[], Pricer], tuple[()]]:
        """A copy in another process begins with nothing known."""
        return partial(Pricer, options=self.options, rough=self.rough, restrict=self.restrict), ()

    def restricted(self, restrict: Callable[[Assembly], Assembly]) -> Pricer:
        """A pricer of plans made by hand that shares what it can know of blocks and meshes."""
        return Pricer(
            options=self.options,
            rough=self.rough,
            restrict=restrict,
            resharders=self.resharders,
            _firsts=self._firsts,
            _alone=self._alone,
        )

    @property
    def solved(self) -> int:
        """How many prices there are, and bounds of prices that were too high to be found."""
        return len(self._prices.keys() | self._bounds.keys())

    def is_known(self, block: Block, mesh: Mesh) -> bool:
        return (block.kind, mesh) in self._prices

    def price(self, block: Block, mesh: Mesh, at_most: float = math.inf) -> StageCost | None:
        """What a block costs on a mesh as a stage of its own; None if it cannot be there.

        None as well as soon as it is seen that its period is no less than `at_most`.
        """
        self.find([(block, mesh, at_most)])
        return self._prices.get((block.kind, mesh))

    def find(self, asked: Sequence[Wanted]) -> None:
        """Finds the prices that are not known, each as `price` does, sharing the work."""
        left = self.left(asked)
        pool = self.pool or WorkerPool(self, 1)
        # Whoever does it, the first block of a kind is priced: others may have their operators in another order.
        tasks = [(self._first(block).block, mesh, at_most) for block, mesh, at_most in left]
        for (block, mesh, _), (found, bound) in zip(left, pool.call("cost", tasks), strict=True):
            self._bounds[block.kind, mesh] = bound
            if found or math.isinf(bound):
                self._prices[block.kind, mesh] = found

    def left(self, asked: Sequence[Wanted]) -> list[Wanted]:
        """What of that is not known, each once."""
        left: dict[tuple[str, Mesh], Wanted] = {}
        for block, mesh, at_most in asked:
            key = block.kind, mesh
            if not self.is_known(block, mesh) and self.floor(block, mesh)[1] < at_most:
                left[key] = max(left.get(key, (block, mesh, at_most)), (block, mesh, at_most), key=lambda one: one[2])
        return list(left.values())

    def floor(self, block: Block, mesh: Mesh) -> tuple[float, float]:
        """The least seconds of a microbatch, forward and backward, and the least period; exact for a known price.

        Halving microbatches saves nothing: a step takes no less time than in fewer of them.
        """
        if self.is_known(block, mesh):
            if (found := self._prices[block.kind, mesh]) is None:
                return math.inf, math.inf
            return found.forward_seconds + found.backward_seconds, block.period(found)
        least, _ = self.least(block, mesh.cluster, mesh.size)
        step = max(self._bounds.get((kind, mesh), 0.0) for kind in (block.kind, *block.fewer))
        return least, max(least, step / block.part.scan.length)

    def least(self, block: Block, cluster: Cluster, n_devices: int) -> tuple[float, float]:
        """Seconds of a microbatch and bytes of one device that no price on so many devices goes below.

        The seconds are those of one device, shared by all: cutting an operator saves no work, and moves come on top.
        """
        key = (block.kind, cluster)
        if key not in self._alone:
            self._alone[key] = self._seconds_alone(block, Mesh(axes=("x",), sizes=(1,), cluster=cluster))
        return self._alone[key] / n_devices, self._first(block).nbytes / n_devices

    def state_nbytes(self, block: Block) -> int:
        """Bytes of what a block reads that is no batch, all of it: weights and their optimizer's state."""
        return self._first(block).state_nbytes

    def kept_nbytes(self, block: Block) -> int:
        """Bytes that the forward of a microbatch keeps for its backward, all devices together and no copies."""
        return self._first(block).kept_nbytes

    def _seconds_alone(self, block: Block, mesh: Mesh) -> float:
        """What a block's operators take on one device; 0 if it cannot be there."""
        part, resharder = block.part, self.resharders.setdefault(mesh, Resharder(mesh))
        try:
            assembly = assemble(part.graph, mesh, self._first(block).grouping, resharder, (), refetch=False)
        except NoLegalPlanError:
            return 0.0
        spent = assembly.root.compute_seconds([int(np.argmin(seconds)) for seconds in assembly.problem.seconds])
        return (spent.get("forward", 0.0) + spent.get("backward", 0.0)) / part.scan.length

    def _first(self, block: Block) -> _First:
        if block.kind not in self._firsts:
            part, graph = block.part, block.part.graph
            own, rows = [value for value in graph.inputs if value not in part.streams], microbatch_stacks(graph)
            summed = [value for value in graph.nodes[part.loop].outputs if value not in part.streams]
            self._firsts[block.kind] = _First(
                block=block,
                grouping=group(graph),
                nbytes=sum(graph.types[value].nbytes for value in (*own, *summed)),
                state_nbytes=sum(graph.types[value].nbytes for value in own if value not in rows),
                kept_nbytes=sum(part.body.types[value].nbytes for value in kept(part)),
            )
        return self._firsts[block.kind]

    def cost(self, block: Block, mesh: Mesh, at_most: float) -> tuple[StageCost | None, float]:
        """The price, None once it is seen that its period is `at_most` or more; the least seconds of a step.

        Those are infinite if it cannot be there.
        """
        refused = PlanningError if self.restrict else NoLegalPlanError
        try:
            return self._cost(self._first(block), mesh, at_most)
        except refused:
            return None, math.inf

    def plan(self, name: str, step: Step, meshes: Sequence[Mesh], options: SolverOptions) -> Plan:
        """The cheapest plan of a program over the meshes, with what prices have found out about them."""
        return best(
            name, step.graph, meshes, step.state_pairs, step.donated, options, self.restrict, resharders=self.resharders
        )

    def _cost(self, one: _First, mesh: Mesh, at_most: float) -> tuple[StageCost | None, float]:
        block, part, graph = one.block, one.block.part, one.block.part.graph
        state_pairs = (*block.state_pairs, *block.chain)
        if not self.rough or pinned_mesh(graph) is not None:
            plan = best("block", graph, [mesh], state_pairs, (), self.options, self.restrict)
            resharder = Resharder(plan.mesh)
            schedule = resharding_plan(graph, plan.layout, resharder, refetch=plan.refetch)
            return _price(block, plan.layout, resharder, schedule, plan.phases), plan.solution.bound
        resharder = self.resharders.setdefault(mesh, Resharder(mesh))
        assembly = assemble(graph, mesh, one.grouping, resharder, state_pairs, refetch=False)
        assembly = self.restrict(assembly) if self.restrict else assembly
        options = replace(self.options, gap=max(self.options.gap, ROUGH))
        most = at_most * part.scan.length
        answer = solve(assembly.problem, options, most, close=False)
        if answer.bound >= most:
            return None, answer.bound
        layout = assembly.layout(answer.choice)
        schedule = resharding_plan(graph, layout, resharder, refetch=False)
        _, moved = move_seconds(graph, schedule, resharder)
        compute = assembly.root.compute_seconds(answer.choice)
        seconds: dict[str, float] = {name: compute.get(name, 0.0) + moved.get(name, 0.0) for name in PHASES}
        return _price(block, layout, resharder, schedule, seconds), answer.bound


def _price(
    block: Block, layout: Layout, resharder: Resharder, schedule: ReshardingPlan, seconds: Mapping[str, float]
) -> StageCost:
    """What a layout costs, with the copies that the loop reads in place of weights that lie elsewhere."""
    found = priced(block.part, layout, resharder.mesh, _onward(block, schedule, resharder, seconds))
    copies = entering(block.part, layout, resharder.mesh)
    return replace(found, persistent_nbytes=found.persistent_nbytes + copies)


def _onward(
    block: Block, schedule: ReshardingPlan, resharder: Resharder, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by phase, with what brings a block's results to where the next one wants them in the phase they are of.

    They stand at the end of the block's program, for all microbatches at once, and are due in each of them.
    """
    part, found = block.part, dict(seconds)
    chained = {part.graph.outputs[output] for output, _ in block.chain}
    made = {value for index in part.forward for value in part.body.nodes[index].outputs}
    for move in schedule.before[-1]:
        if move.value in chained:
            spent = resharder.cost(part.graph.types[move.value], move.before, move.after)
            when = "forward" if part.streams[move.value] in made else "backward"
            found["apply"] = found.get("apply", 0.0) - spent
            found[when] = found.get(when, 0.0) + spent
    return found
