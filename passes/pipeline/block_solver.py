"""The cost of a block as a stage on a mesh without a plan, for searches that compare thousands of them.

A cost is that of the first relaxation of the placement problem, rounded and improved by coordinate descent, and is not
improved until the bound is met: costs are compared with each other, and the stages chosen by them are planned anew.
Problems on one mesh share the seconds of reshardings, and blocks of one kind their operator groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from passes.cluster import Cluster, Mesh
from passes.errors import NoLegalPlanError, OverBudgetError, PlanningError
from passes.inter_op import StageCost
from passes.intra_op import MeshProblems, assemble, cheapest_plan, computing, extract, pins, restrictions
from passes.ir import PHASES
from passes.pipeline.assemble import layout_cost
from passes.pipeline.blocks import Block, KindOfBlock
from passes.pipeline.segments import entering
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


@dataclass(slots=True, kw_only=True)
class BlockSolver:
    """The solver of blocks on meshes: the cost of a block as a stage, and the plan of a stage, each found anew.

    With `restrict`, placements are those of a hand-made plan; a block that it refuses cannot be there. Worker processes
    have copies, which begin with no work done.
    """

    options: SolverOptions
    restrict: restrictions.Restriction | None = None
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    _kinds: dict[str, KindOfBlock] = field(default_factory=dict[str, KindOfBlock])
    _one_device_seconds: dict[tuple[str, Cluster], float] = field(default_factory=dict[tuple[str, Cluster], float])
    _restricted: dict[restrictions.Restriction, BlockSolver] = field(
        default_factory=dict[restrictions.Restriction, "BlockSolver"]
    )

    def __reduce__(self) -> tuple[Callable[[], BlockSolver], tuple[()]]:
        """The recipe for a copy in another process, which begins with nothing known."""
        return partial(type(self), options=self.options, restrict=self.restrict), ()

    def restricted(self, restriction: restrictions.Restriction) -> BlockSolver:
        """The solver for placements that meet a restriction, too, which shares all that does not depend on it.

        Each restriction has one.
        """
        if restriction not in self._restricted:
            self._restricted[restriction] = replace(
                self,
                restrict=pins.Both(self.restrict, restriction) if self.restrict else restriction,
                _restricted={},
            )
        return self._restricted[restriction]

    def under(self, restriction: restrictions.Restriction, method: str, *task: Any) -> Any:
        """The result of a method of the solver that is `restricted` so; calls to a worker's copy go by name."""
        return getattr(self.restricted(restriction), method)(*task)

    def kind(self, block: Block) -> KindOfBlock:
        """The facts about the kind of a block."""
        if block.kind not in self._kinds:
            self._kinds[block.kind] = KindOfBlock.of(block)
        return self._kinds[block.kind]

    def one_device_seconds(self, block: Block, cluster: Cluster) -> float:
        """Seconds of a microbatch of a block on one device, forward and backward; 0 if it cannot be there."""
        key, part = (block.kind, cluster), block.part
        if key not in self._one_device_seconds:
            seconds: Mapping[Any, float] = {}
            if pinned_mesh(part.graph) is None:
                mesh = Mesh(axes=("x",), sizes=(1,), cluster=cluster)
                grouping = self.kind(block).grouping
                seconds = computing.compute_seconds(part.graph, grouping, mesh, whole_layout(part.graph))
            both = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
            self._one_device_seconds[key] = both / part.scan.length
        return self._one_device_seconds[key]

    def cost(self, block: Block, mesh: Mesh, cutoff: float) -> tuple[StageCost | None, float]:
        """(cost of a block on a mesh, lower bound in seconds on a step of it).

        The cost is None where its period is seen to be `cutoff` seconds or more. Where the block cannot be on the mesh,
        it is None, too, and the bound is infinite.
        """
        refused = PlanningError if self.restrict else NoLegalPlanError
        try:
            return self._cost(self.kind(block), mesh, cutoff)
        except refused:
            return None, math.inf

    def plan(
        self, name: str, step: Step, meshes: Sequence[Mesh], options: SolverOptions, most_nbytes: float = math.inf
    ) -> Plan | None:
        """The cheapest plan of a step over the meshes that needs at most `most_nbytes` on a device; None if none is
        found.

        It uses the seconds of reshardings that prices have found.
        """
        try:
            problems = MeshProblems(step=step, restrict=self.restrict, resharders=self.resharders)
            return cheapest_plan(name, problems, meshes, options, most_nbytes=most_nbytes)
        except OverBudgetError:
            return None

    def planned_cost(self, block: Block, mesh: Mesh) -> tuple[StageCost, float]:
        """The cost of a block by its plan, solved to the gap of the options, and the least seconds of a step."""
        graph = block.part.graph
        problems = MeshProblems(step=Step(graph=graph, state_pairs=block.all_pairs), restrict=self.restrict)
        plan = cheapest_plan("block", problems, [mesh], self.options)
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
    """The cost of a layout, with the copies that the loop reads in place of weights with another placement outside of
    it.
    """
    cost = layout_cost(block.part, layout, resharder.mesh, _with_onward_moves(block, reshardings, resharder, seconds))
    copies = entering(block.part, layout, resharder.mesh)
    return replace(cost, persistent_nbytes=cost.persistent_nbytes + copies)


def _with_onward_moves(
    block: Block, reshardings: ReshardingPlan, resharder: Resharder, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by phase, where reshardings of a block's results for the next block count in the phase of the result.

    They stand at the end of the block's program, but run in every microbatch.
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
