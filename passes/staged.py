"""A step in stages: blocks priced, a partition chosen by their prices, and its stages planned as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes import inter_op, stages
from passes.abridge import KEPT
from passes.cluster import Cluster
from passes.crew import Crew
from passes.errors import OverBudgetError
from passes.inter_op import Partition, Submesh
from passes.intra_op import SolverOptions
from passes.ir import Graph
from passes.mesh import Mesh
from passes.mesh_search import stopped
from passes.pipeline import DISPATCH_SECONDS, PipelinePlan
from passes.pipelines import joined, restated
from passes.plan import Plan
from passes.pricing import Pricer
from passes.progress import Progress, Report, silent
from passes.stage_table import Sample, StageCosts
from passes.variants import Form

NEAR = 1e-3
"""The relative gap at which the solve of a stage may end: closing it takes longer than all that comes before."""

RIVAL = 1.1
"""A step without stages is planned where its price is above that of the stages by no more than this factor."""

RETRIES, LESS = 3, 0.95
"""How often stages that do not fit are chosen again, and the share that is kept of what should do."""

FINEST = 32
"""The most layers that a deep model is cut into: prices are of blocks, so more layers cost no more of them."""


def finest(samples: Iterable[Sample], layers: int) -> int:
    """As many layers of equally many blocks as are worth it where blocks were left out of samples; else `layers`."""
    sample = next(iter(samples))
    if not sample.left_out:
        return layers
    n_blocks = sample.left_out + KEPT
    return max(layers, math.ceil(n_blocks / math.ceil(n_blocks / FINEST)))


def interrupted(plan: Plan | PipelinePlan) -> Plan | PipelinePlan:
    """A plan, or all of its stages, marked as the best of a search that was interrupted."""
    if isinstance(plan, PipelinePlan):
        return replace(plan, stages=tuple(map(stopped, plan.stages)))
    return stopped(plan)


@dataclass(slots=True, kw_only=True)
class StagedSearch:
    """The search over stages of `form` in the microbatches that there are `samples` of; `graph(m)` is all of it.

    `meshes(n)` lays out n devices. A sample of one microbatch stands for the step without stages, which competes then.

    If `interruptible`, Ctrl-C ends the search as soon as there are stages: they are planned, and marked.
    """

    form: Form
    cluster: Cluster
    samples: Mapping[int, Sample]
    graph: Callable[[int], Graph]
    layers: int
    schedules: Sequence[str]
    limit: float
    solver: SolverOptions
    meshes: Callable[[int], Sequence[Mesh]]
    report: Report = silent
    interruptible: bool = False
    pricer: Pricer = field(init=False)
    table: StageCosts = field(init=False)

    def __post_init__(self) -> None:
        self.pricer = Pricer(options=self.solver)
        self.table = StageCosts(
            samples=self.samples,
            cluster=self.cluster,
            n_layers=self.layers,
            meshes=self.meshes,
            pricer=self.pricer,
            told=self._tell_price,
        )

    @property
    def prices_whole(self) -> bool:
        """Whether the step without stages is priced too."""
        return 1 in self.samples

    def run(self) -> Plan | PipelinePlan:
        """The cheapest plan by its prices. Raises OverBudgetError if none keeps the limit by them.

        Prices leave out what is needed for a moment. Where the stages that were chosen need more than there is, they
        are chosen again with as much less, a few times.
        """
        with Crew(self.pricer) as crew:
            self.pricer.crew = crew
            try:
                return self._run(crew)
            finally:
                self.pricer.crew = None

    def _run(self, crew: Crew) -> Plan | PipelinePlan:
        self._tell_price(None)
        whole = self._everything()
        self.table.survey([choice.n_devices for choice in inter_op.submeshes(self.cluster, every=False)])
        partition = self._partition(whole, self.limit, interruptible=self.interruptible)
        plan = self._realised(partition, crew)
        if partition.interrupted:
            return interrupted(plan)
        try:
            partition, plan = self._fitting(partition, plan, whole, crew)
            return self._or_whole(plan, whole, RIVAL * partition.seconds)
        except KeyboardInterrupt:
            if not self.interruptible or plan.peak_nbytes > self.limit:
                raise
            return interrupted(plan)

    def _fitting(
        self, partition: Partition, plan: Plan | PipelinePlan, whole: Submesh, crew: Crew
    ) -> tuple[Partition, Plan | PipelinePlan]:
        """Stages whose plans fit, if some are found soon."""
        limit = self.limit
        for _ in range(RETRIES):
            if plan.peak_nbytes <= self.limit:
                break
            again = partition
            try:
                while again.stages == partition.stages:
                    limit *= LESS * min(1.0, self.limit / plan.peak_nbytes)
                    again = self._partition(whole, limit)
            except OverBudgetError:
                break
            partition, plan = again, self._realised(again, crew)
        return partition, plan

    def _or_whole(self, plan: Plan | PipelinePlan, whole: Submesh, at_most: float) -> Plan | PipelinePlan:
        """The plan, or that of the step without stages if it is better; none is made if it takes `at_most` seconds."""
        if not self.prices_whole or not self._rivals(whole, at_most):
            return plan
        self._tell_stage(0, 1)
        form, meshes = self.form, self.table.near(0, self.layers, whole, 1)
        rival = self.pricer.plan("auto", form, meshes, self.solver)
        return min(plan, rival, key=lambda plan: (plan.peak_nbytes > self.limit, plan.step_seconds))

    def _partition(self, whole: Submesh, limit: float, *, interruptible: bool = False) -> Partition:
        """The stages that take least by their prices and need at most `limit` bytes of a device."""
        return inter_op.partition(
            self.layers,
            whole,
            inter_op.submeshes(self.cluster, every=False),
            self.table,
            schedules=self.schedules,
            microbatches=tuple(count for count in self.samples if count > 1) or (1,),
            memory_limit=limit,
            dispatch_seconds=DISPATCH_SECONDS,
            idle=False,
            least=self.table.least,
            expect=self.table.expect,
            interruptible=interruptible,
        )

    def _everything(self) -> Submesh:
        group = self.cluster.group()
        return Submesh(hosts=group.hosts, devices_per_host=group.devices_per_host)

    def _rivals(self, whole: Submesh, seconds: float) -> bool:
        """Whether the step without stages may take no longer than that, by its prices."""
        found = self.table.candidate(0, self.layers, whole, 1, beneath=seconds)
        if found is None or found.needed_nbytes(1) > self.limit:
            return False
        return found.pace(1) <= seconds

    def _realised(self, partition: Partition, crew: Crew) -> Plan | PipelinePlan:
        """The stages that were chosen, planned as they are, equal ones once."""
        count, chosen, form = partition.microbatches, partition.stages, self.form
        self.report(Progress(phase="write the step in microbatches", done=0, total=None))
        graph = self.graph(count)
        meshes = [self.table.near(stage.first, stage.last, stage.submesh, count) for stage in chosen]
        self._tell_stage(0, len(chosen))
        if len(chosen) == 1:
            plan = self.pricer.plan("auto", replace(form, graph=graph), meshes[0], self.solver)
            return replace(plan, microbatches=count)
        firsts = self.table.firsts(graph, count)
        begins = tuple(firsts[stage.first] for stage in chosen)
        cut = stages.cut(graph, begins, form.tied)
        ties = [stages.ties(part, graph, form.tied) for part in cut.parts]
        keys = [
            (part.graph.fingerprint, own, laid_out) for part, own, laid_out in zip(cut.parts, ties, meshes, strict=True)
        ]
        planned = {key: stage for stage, key in reversed(list(enumerate(keys)))}
        options = replace(self.solver, gap=max(self.solver.gap, NEAR))
        tasks = [
            (f"stage {stage}", Form(graph=cut.parts[stage].graph, tied=ties[stage], donated=()), meshes[stage], options)
            for stage in planned.values()
        ]
        found = dict(zip(planned.values(), crew.call("plan", tasks), strict=True))
        plans: list[Plan] = []
        for stage, key in enumerate(keys):
            plan, own = found[planned[key]], cut.parts[stage].graph
            if planned[key] != stage:
                plan = restated(plan, cut.parts[planned[key]].graph, own, ties[stage])
                plan = replace(plan, solution=replace(plan.solution, planner=f"stage {stage}"))
            plans.append(plan)
        return joined("auto", graph, self.cluster, cut, begins, plans, partition.schedule, chunks=1)

    def _tell_price(self, mesh: Mesh | None) -> None:
        phase = f"price a layer on {mesh}" if mesh else "partition the layers"
        self.report(Progress(phase=phase, done=self.pricer.solved, total=None))

    def _tell_stage(self, done: int, total: int) -> None:
        self.report(Progress(phase="plan the stages chosen", done=done, total=total))
