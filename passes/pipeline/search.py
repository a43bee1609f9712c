"""A step in stages: blocks priced, partitions drafted by their prices, and the best of them planned as they are.

Drafts begin with the partition that the dynamic program finds in few numbers of microbatches: its stages, and those of
every pipeline that is made by hand (`passes.pipeline.drafts`), are priced in the numbers near to that, under every
schedule. The best are planned. Prices leave out what is needed for a moment: where no plan fits, less memory is said to
be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from passes import inter_op
from passes.cluster import Cluster, Mesh
from passes.errors import OverBudgetError, PlanningError
from passes.inter_op import Partition, Submesh, build, is_chunked
from passes.intra_op import Form, named, restrictions, stopped
from passes.ir import Graph, StatePairs
from passes.pipeline.assemble import body_of, joined, restated
from passes.pipeline.block_costs import Pricer
from passes.pipeline.drafts import Draft, DraftSearch, Shape, by_hand, drafted, evenly, first_of_each, found
from passes.pipeline.samples import ANCHORS, Step, anchors, near, sampled
from passes.pipeline.segments import Needs
from passes.pipeline.stage_table import Sample, StageCosts
from passes.pipeline.workers import Crew
from passes.plan import PipelinePlan, Plan
from passes.progress import Progress, Report, silent
from passes.solver import SolverOptions
from passes.transforms import Part, Stages, stages

NEAR = 1e-3
"""The relative gap at which the solve of a stage may end: closing it takes longer than all that comes before."""

RIVAL = 1.1
"""A step without stages is planned where its price is above that of the stages by no more than this factor."""

CLOSE = 1.1
"""Drafts are planned whose price is above the best by less than this factor, as long as plans are no better than it."""

RETRIES, LESS = 3, 0.95
"""How often stages that do not fit are chosen again, and the share that is kept of what should do."""

SLACK = 1.1
"""Drafts may fit that need more than there is by less than this factor: prices are not plans."""

MOST_NODES = 6_000
"""Drafts are planned, after the first that fits, while they have no more operators than this in all."""

MOST_UNFIT = 4
"""So many of the drafts that need least are planned where no other plan fits; so many of a large step in one turn."""


def interrupted(plan: Plan | PipelinePlan) -> Plan | PipelinePlan:
    """A plan, or all of its stages, marked as the best of a search that was interrupted."""
    return _marked(plan) if isinstance(plan, PipelinePlan) else stopped(plan)


def _marked(plan: PipelinePlan) -> PipelinePlan:
    return replace(plan, stages=tuple(map(stopped, plan.stages)))


@dataclass(slots=True, kw_only=True)
class StagedSearch:
    """The search over stages of a `step` in so many `layers`, with the `samples` that there are of it so far.

    `meshes(n)` lays out n devices. A sample of one microbatch prices the step without stages, too. Of what was planned
    and does not keep the limit, `leanest` needs the least.

    If `interruptible`, Ctrl-C ends the search as soon as there are stages: they are planned, and marked.
    """

    step: Step
    cluster: Cluster
    samples: dict[int, Sample]
    layers: int
    schedules: Sequence[str]
    limit: float
    solver: SolverOptions
    meshes: Callable[[int], Sequence[Mesh]]
    report: Report = silent
    interruptible: bool = False
    leanest: PipelinePlan | None = None
    pricer: Pricer = field(init=False)
    table: StageCosts = field(init=False)
    _restricted: dict[tuple[int, int], StageCosts] = field(default_factory=dict[tuple[int, int], StageCosts])
    _seen: set[object] = field(default_factory=set[object])
    _needs: dict[object, Needs] = field(default_factory=dict[object, Needs])
    _plans: dict[object, tuple[Part, Plan]] = field(default_factory=dict[object, "tuple[Part, Plan]"])

    def __post_init__(self) -> None:
        self.pricer = Pricer(options=self.solver)
        self.table = self._table(self.pricer, self.meshes)

    @property
    def is_deep(self) -> bool:
        """Whether blocks are left out of samples, so that prices cost far less than plans."""
        return any(sample.left_out for sample in self.samples.values())

    def run(self, beneath: float = math.inf) -> PipelinePlan | None:
        """The cheapest plan in stages; None if none is found that takes less than `beneath` and keeps the limit."""
        with Crew(self.pricer) as crew:
            self.pricer.crew = crew
            try:
                return self._run(crew, beneath)
            finally:
                self.pricer.crew = None

    def rivals(self, seconds: float) -> bool:
        """Whether the step without stages, in one form or another, may take hardly longer than that by its prices."""
        for count in self.samples:
            most = RIVAL * seconds / count
            one = self.table.candidate(0, self.layers, self._everything(), count, beneath=most)
            if one is not None and one.needed_nbytes(1) <= self.limit:
                return True
        return False

    def _table(self, pricer: Pricer, meshes: Callable[[int], Sequence[Mesh]]) -> StageCosts:
        return StageCosts(
            samples=self.samples,
            cluster=self.cluster,
            n_layers=self.layers,
            meshes=meshes,
            pricer=pricer,
            told=self._tell_price,
            also=sorted({groups * chunks for groups, chunks in evenly(self.cluster.n_devices)}),
        )

    def _run(self, crew: Crew, beneath: float) -> PipelinePlan | None:
        self._tell_price(None)
        self.table.survey([choice.n_devices for choice in inter_op.submeshes(self.cluster, every=False)])
        self._seen.clear()
        limit, best = self.limit, None
        for _ in range(1 + RETRIES):
            search = self._search(limit, best.step_seconds if best else beneath, SLACK * limit)
            try:
                self._draft(search)
            except KeyboardInterrupt:
                fits = [draft for draft in search.found if draft.peak_nbytes <= limit]
                if not self.interruptible or not (best or fits):
                    raise
                return _marked(best or self._plan(min(fits, key=lambda draft: draft.seconds), crew))
            better, over = self._best(self._worth(search), search.most, crew)
            best = better or best
            if over is None or (best is not None and (best.is_interrupted or self._is_large)):
                break
            limit *= LESS * min(1.0, self.limit / over)
        if best is None and math.isinf(beneath):
            best, _ = self._best(self._leanest(), beneath, crew)
        return best

    def _leanest(self) -> list[Draft]:
        """Drafts by hand that are not said to fit, those first that need least."""
        search = self._search(self.limit, math.inf, math.inf)
        self._by_hand(search, ANCHORS[-1 if self._is_large else 1], max(self.samples))
        unfit = [draft for draft in search.found if draft.peak_nbytes > SLACK * self.limit]
        return first_of_each(sorted(unfit, key=lambda draft: draft.peak_nbytes))[:MOST_UNFIT]

    def _search(self, limit: float, most: float, most_nbytes: float) -> DraftSearch:
        return DraftSearch(
            table=self.table,
            schedules=self.schedules,
            limit=limit,
            most_nbytes=most_nbytes,
            most=most,
            reach=1.0 if self._is_large else CLOSE,
            has=self._has,
            leaner=self._leaner,
        )

    @property
    def _is_large(self) -> bool:
        """Whether a step is so large that few drafts are planned, and each number of microbatches takes its time."""
        sample = next(iter(self.samples.values()))
        return sample.left_out > 0 or 2 * _size(sample.graph) > MOST_NODES

    def _whole_seconds(self, beneath: float) -> float:
        """Seconds that stages must stay beneath to be better than none, by its price, if that is less."""
        if 1 not in self.samples:
            return beneath
        one = self.table.candidate(0, self.layers, self._everything(), 1, beneath=beneath / RIVAL)
        return RIVAL * one.period(1) if one is not None and one.needed_nbytes(1) <= self.limit else beneath

    def _partition(self, search: DraftSearch) -> Partition | None:
        """The stages that take least by their prices and keep the limit of a search, if any may be better than its own.

        In the number of microbatches that is best for pipelines by hand and, unless the step is large, the first ones.
        Schedules that split the backward are for drafts: they ask for the same stages, and bounds for them are weak.
        """
        fits = [draft for draft in search.found if draft.peak_nbytes <= search.limit]
        counts = {min(fits, key=lambda draft: draft.seconds).microbatches} if fits else set[int]()
        if not fits or not self._is_large:
            counts |= {n for n in anchors(self.step.counts) if n in self.samples}
        single = [name for name in self.schedules if not is_chunked(name)]
        unsplit = [name for name in single if all(t.kind != "weight_gradient" for t in build(name, 1, 1).groups[0])]
        try:
            return inter_op.partition(
                self.layers,
                self._everything(),
                inter_op.submeshes(self.cluster, every=False),
                self.table,
                schedules=unsplit or single or ("1f1b",),
                microbatches=tuple(sorted(counts)) or (1,),
                memory_limit=search.limit,
                dispatch_seconds=self.cluster.group().device.dispatch_seconds,
                n_stages=range(2, self.layers + 1),
                idle=False,
                cutoff=self._whole_seconds(search.beneath),
                lower_bound=self.table.least,
                prefetch=self.table.expect,
                interruptible=self.interruptible,
            )
        except OverBudgetError:
            return None

    def _draft(self, search: DraftSearch) -> None:
        """Adds all that is worth planning to the search, and the partition that is the best by its prices if it may be.

        Pipelines by hand come first, since what they take bounds the partition; then its stages in numbers of
        microbatches near to its own; what does not fit is tried in a lean form as well.
        """
        first = ANCHORS[-1 if self._is_large else 1]
        is_tight = self._is_large and search.is_tight(self.cluster.n_devices)
        self._by_hand(search, first, *([max(self._near(first))] if is_tight else []))
        partition = self._partition(search)
        if partition is not None:
            search.take(drafted(self.table, partition))
            if partition.interrupted:
                raise KeyboardInterrupt
        fits = [draft for draft in search.found if draft.peak_nbytes <= search.limit]
        base = min(fits, key=lambda draft: draft.seconds).microbatches if fits else max(self.samples)
        if partition is not None:
            shape = found(self.table, partition, partition.microbatches)
            search.add((shape, n) for n in self._near(base))
        self._by_hand(search, base)

    def _by_hand(self, search: DraftSearch, *bases: int) -> None:
        """Adds even stages in numbers of microbatches near to those, and in those that there are."""
        wanted: list[tuple[Shape, int]] = []
        for n in dict.fromkeys(n for base in bases for n in self._near(base)):
            known = n if n in self.samples else next(iter(self.samples))
            wanted += [(shape, n) for shape in by_hand(self.table, self.cluster.n_devices, known)]
        search.add(wanted)

    def _near(self, base: int) -> list[int]:
        """Numbers of microbatches near to that, and those sampled; of a step that is not large, all are."""
        own = [n for n in self.samples if n > 1] or [1]
        return [n for n in dict.fromkeys((*own, *near(self.step.counts, base))) if self._is_large or self._has(n)]

    def _worth(self, search: DraftSearch) -> list[Draft]:
        """The drafts that may be the best and may fit: first what fits, the fastest first.

        Of a large step those that are slower come after the first, for where its plan does not fit after all.
        """
        most = math.inf if self._is_large else search.beneath
        ours = [one for one in search.found if one.seconds < most and one.peak_nbytes <= SLACK * search.limit]
        return first_of_each(sorted(ours, key=lambda draft: (draft.peak_nbytes > search.limit, draft.seconds)))

    def _leaner(self, size: int, tensor: int) -> StageCosts:
        """The prices of blocks on submeshes of this size, their weights cut over so many devices."""
        if (size, tensor) not in self._restricted:
            mesh = named(self.cluster, ("data", size // tensor), ("tensor", tensor))
            pricer = self.pricer.restricted(restrictions.megatron)
            self._restricted[size, tensor] = self.table.restricted(pricer, lambda _: [mesh])
        return self._restricted[size, tensor]

    def _has(self, count: int) -> bool:
        """Whether the step can be had in so many microbatches, and cut as it is in others."""
        if count not in self.samples and (sample := sampled(self.step, count)) is not None:
            known = self.table.cuts(next(iter(self.samples)))
            self.samples[count] = sample
            try:
                alike = len(self.table.cuts(count).blocks) == len(known.blocks)
            except PlanningError:
                alike = False
            if not alike:
                del self.samples[count]
        return count in self.samples

    def _best(self, drafted: Sequence[Draft], beneath: float, crew: Crew) -> tuple[PipelinePlan | None, int | None]:
        """The best plan of these drafts that fits and takes less than that, as far as they are planned.

        With the least that was needed by one that does not fit, None if all that were planned do.
        """
        best: PipelinePlan | None = None
        over: int | None = None
        nodes = planned = 0
        try:
            for draft in drafted:
                if draft.seconds >= (best.step_seconds if best else beneath):
                    continue
                if draft.key in self._seen:
                    continue
                graph = self._graph(draft.microbatches)
                nodes += _size(graph)
                if nodes > MOST_NODES and (best is not None or planned == MOST_UNFIT):
                    break
                planned += 1
                self._seen.add(draft.key)
                try:
                    plan = self._plan(draft, crew)
                except PlanningError:
                    continue  # blocks can be where a whole stage cannot
                if self.leanest is None or plan.peak_nbytes < self.leanest.peak_nbytes:
                    self.leanest = plan
                if plan.peak_nbytes > self.limit:
                    over = min(plan.peak_nbytes, over or plan.peak_nbytes)
                elif plan.step_seconds < (best.step_seconds if best else beneath):
                    best = plan
        except KeyboardInterrupt:
            if not self.interruptible or best is None:
                raise
            return _marked(best), over
        return best, over

    def _everything(self) -> Submesh:
        group = self.cluster.group()
        return Submesh(hosts=group.hosts, devices_per_host=group.devices_per_host)

    def _graph(self, microbatches: int) -> Graph:
        self.report(Progress(phase="write the step in microbatches", done=0, total=None))
        return self.step.graph(microbatches)

    def _plan(self, draft: Draft, crew: Crew) -> PipelinePlan:
        """A draft with its stages planned as they are, under the schedule that is the best then."""
        graph, shape = self._graph(draft.microbatches), draft.shape
        begins = draft.table.firsts(graph, shape.begins, draft.microbatches)
        cut = stages.cut(graph, begins, self.step.state_pairs)
        state_pairs = [stages.state_pairs_of(part, graph, self.step.state_pairs) for part in cut.parts]
        given = [stages.donations(part, graph, self.step.donated) for part in cut.parts]
        plans = self._stages(draft, cut, state_pairs, given, crew)
        made = joined(
            "auto",
            graph,
            self.cluster,
            self.step.state_pairs,
            self.step.donated,
            cut,
            begins,
            plans,
            draft.schedule,
            shape.chunks,
            self._needs,
        )
        under = (replace(made, schedule_name=name) for name in self.schedules if is_chunked(name) == (made.chunks > 1))
        return min(under, default=made, key=lambda one: (one.peak_nbytes > self.limit, one.step_seconds))

    def _stages(
        self,
        draft: Draft,
        cut: Stages,
        state_pairs: Sequence[StatePairs],
        given: Sequence[tuple[bool, ...]],
        crew: Crew,
    ) -> list[Plan]:
        """The plan of every stage; equal ones are planned once, in this draft or another."""
        count, shape, table = draft.microbatches, draft.shape, draft.table
        ends = (*shape.begins[1:], len(table.cuts(count).blocks))
        sizes = [shape.devices[stage % len(shape.devices)] for stage in range(len(ends))]
        laid_out = [table.near(*run, count) for run in zip(shape.begins, ends, sizes, strict=True)]
        self._tell_stage(0, len(ends))
        keys: list[object] = [
            (part.graph.fingerprint, own, gone, tuple(meshes))
            for part, own, gone, meshes in zip(cut.parts, state_pairs, given, laid_out, strict=True)
        ]
        options = replace(self.solver, gap=max(self.solver.gap, NEAR))
        left = {key: stage for stage, key in reversed(list(enumerate(keys))) if key not in self._plans}
        tasks = [
            (
                f"stage {at}",
                Form(graph=cut.parts[at].graph, state_pairs=state_pairs[at], donated=given[at]),
                laid_out[at],
                options,
            )
            for at in left.values()
        ]
        is_shared = table is self.table
        planned = crew.call("plan", tasks) if is_shared else [table.pricer.plan(*task) for task in tasks]
        self._plans |= {key: (cut.parts[at], plan) for (key, at), plan in zip(left.items(), planned, strict=True)}
        plans: list[Plan] = []
        for stage, key in enumerate(keys):
            part, plan = self._plans[key]
            if part is not cut.parts[stage]:
                plan = restated(plan, part.graph, cut.parts[stage].graph, state_pairs[stage], given[stage])
                plan = replace(plan, solution=replace(plan.solution, planner=f"stage {stage}"))
            plans.append(plan)
        return plans

    def _tell_price(self, mesh: Mesh | None) -> None:
        phase = f"price a layer on {mesh}" if mesh else "partition the layers"
        self.report(Progress(phase=phase, done=self.pricer.solved, total=None))

    def _tell_stage(self, done: int, total: int) -> None:
        self.report(Progress(phase="plan the stages chosen", done=done, total=total))


def _size(graph: Graph) -> int:
    """The operators of a step in microbatches: of what is done once, and of its loop."""
    return len(graph.nodes) + len(body_of(graph).nodes)
