"""The search over stages: blocks are priced, pipelines are drafted by their prices, and the best drafts are planned.

The drafts have the stages of the best partition by the dynamic program, and those of every hand-made pipeline
(`passes.pipeline.drafts`), in numbers of microbatches near the best, under every schedule. Prices leave out working
space: where no plan fits, drafts are searched again for less memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from passes import inter_op
from passes.cluster import Mesh
from passes.errors import PlanningError
from passes.pipeline.block_costs import BlockCosts
from passes.pipeline.block_solver import BlockSolver
from passes.pipeline.draft_space import MOST_PLANNED_NODES, NEAR_BEST, DraftSpace, size
from passes.pipeline.drafting import MOST_UNFIT, SLACK, Drafting
from passes.pipeline.drafts import DraftSearch
from passes.pipeline.part_seconds import weigh_on
from passes.pipeline.search_options import SearchOptions
from passes.pipeline.shapes import Draft, evenly, first_of_each
from passes.pipeline.stage_plans import StagePlans
from passes.pipeline.stage_table import StageCostTable
from passes.pipeline.step_blocks import Sample, StepBlocks
from passes.plan import INTERRUPTED, Alternative, PipelinePlan
from passes.progress import Progress, SearchContext
from passes.step import Step
from passes.text import count

RETRIES, LESS = 3, 0.95
"""The number of times that drafts are searched again where none fits, and the factor for the memory of each search,
applied to what should have done.
"""

_SHOWN = 6
"""The most drafts that a plan lists as alternatives."""


@dataclass(slots=True, kw_only=True)
class StagedSearch:
    """The search over stages of a `step` in `layers` layers, by the `samples` that there are of it so far.

    A sample of one microbatch prices the step without stages. `least_memory_plan` is the plan of least memory of those
    that do not fit, and `least_refused` a lower bound in seconds on all that was left out for its bytes.

    An interruption that the `context` allows ends the search as soon as there are drafts: the best is planned, and
    marked.
    """

    step: Step
    samples: dict[int, Sample]
    layers: int
    options: SearchOptions
    context: SearchContext = field(default_factory=SearchContext)
    least_memory_plan: PipelinePlan | None = None
    least_refused: float = math.inf
    block_costs: BlockCosts = field(init=False)
    table: StageCostTable = field(init=False)
    drafting: Drafting = field(init=False)
    plans: StagePlans = field(init=False)
    met: list[Alternative] = field(default_factory=list[Alternative])
    _seen: set[object] = field(default_factory=set[object])
    _unfit: set[object] = field(default_factory=set[object])

    def __post_init__(self) -> None:
        options = self.options
        self.block_costs = BlockCosts(BlockSolver(options=options.solver, restrict=options.pinned))
        also = sorted({groups * chunks for groups, chunks in evenly(options.cluster.n_devices)})
        self.table = StageCostTable(
            step=StepBlocks(samples=self.samples, n_layers=self.layers, also=also, weigh=weigh_on(options.cluster)),
            cluster=options.cluster,
            meshes=options.meshes,
            block_costs=self.block_costs,
            on_price=self._report_price,
        )
        space = DraftSpace(
            step=self.step,
            stages=options.stages,
            samples=self.samples,
            schedules=options.schedules,
            table=self.table,
        )
        self.drafting = Drafting(space=space, limits=options.limits, counts=options.counts)
        self.plans = StagePlans(step=self.step, options=options, context=self.context)

    @property
    def is_deep(self) -> bool:
        """Whether samples leave blocks out, so that prices cost far less than plans."""
        return any(any(sample.left_out) for sample in self.samples.values())

    def run(self) -> PipelinePlan | None:
        """The cheapest plan in stages; None if none is found that takes less than the cutoff and keeps the limit."""
        with self.block_costs.sharing():
            best = self._run()
        taken = best and _name(len(best.stages), [p[0].n_devices for p in best.submeshes], *_how(best))
        self.met = [alternative for alternative in self.met if alternative.name != taken]
        return best

    def _run(self) -> PipelinePlan | None:
        self._report_price(None)
        cluster = self.options.cluster
        sizes = [choice.n_devices for choice in inter_op.submeshes(cluster, every=False)]
        self.table.survey([n_devices for n_devices in sizes if n_devices < cluster.n_devices])
        self._seen.clear()
        self._unfit.clear()
        is_large, best = self.drafting.is_large, None
        limits = self.options.limits.times(SLACK if is_large else 1.0)  # the fastest of few that are planned may fit
        for _ in range(1 + RETRIES):
            cutoff = best.step_seconds if best else self.context.cutoff
            search = self.drafting.search(limits, cutoff, 1.0 if is_large else SLACK, self._unfit)
            with self.context.ending_early():
                self.drafting.draft(search, self.context)
            if self.context.is_interrupted:
                return self.context.kept(best or self._of_drafts_so_far(search)).ended(INTERRUPTED)
            self.met += [_met(draft) for draft in sorted(search.drafts, key=lambda draft: draft.seconds)[:_SHOWN]]
            better, over = self._best(self.drafting.worth(search), search.limit_seconds)
            best = better or best
            unfit = (draft.seconds for draft in search.drafts if draft.key in self._unfit)
            self.least_refused = min(self.least_refused, search.least_refused, *unfit)
            is_near = is_large and best is not None and best.step_seconds < NEAR_BEST * search.best
            if over is None or is_near or (best is not None and self.context.is_interrupted):
                break
            limits = limits.times(LESS * min(1.0, 1 / over))
        if best is None and (not is_large or math.isinf(self.context.cutoff)):  # prices may say that too much is needed
            best, _ = self._best(self.drafting.of_least_memory(self.context.cutoff), self.context.cutoff)
        return best

    def _of_drafts_so_far(self, search: DraftSearch) -> PipelinePlan | None:
        """The fastest plan within the limit of the first few drafts, those first that fit by their price; None if none
        fits.
        """
        drafts = sorted(search.drafts, key=lambda draft: (draft.excess(self.options.limits) > 1, draft.seconds))
        plans = ((self._limit(draft), self._planned(draft)) for draft in first_of_each(drafts)[:MOST_UNFIT])
        return next((plan for limit, plan in plans if plan is not None and plan.peak_nbytes <= limit), None)

    def _limit(self, draft: Draft) -> float:
        """The bytes of a device that the plan of a draft may need."""
        return draft.shape.limit_nbytes(self.options.limits, draft.table)

    def _planned(self, draft: Draft) -> PipelinePlan | None:
        """The plan of a draft; None where it has none: its blocks may be possible where a whole stage is not."""
        try:
            return self.plans.plan(draft)
        except PlanningError:
            return None

    def _best(self, drafted: Sequence[Draft], cutoff: float) -> tuple[PipelinePlan | None, float | None]:
        """(best plan, least excess): the best plan of these drafts that fits and takes less than the cutoff.

        The excess is the least multiple of its limit that a plan needs which does not fit; None if all that were
        planned do.
        """
        best: PipelinePlan | None = None
        over: float | None = None
        nodes = planned = 0
        with self.context.ending_early():
            for draft in drafted:
                if draft.seconds >= (best.step_seconds if best else cutoff):
                    continue
                if draft.key in self._seen:
                    continue
                is_enough = best is not None or planned >= MOST_UNFIT
                if planned and is_enough and (planned + 1) * nodes > MOST_PLANNED_NODES:  # others have about as many
                    break
                nodes = size(self.plans.written(draft.microbatches).graph)
                planned += 1
                self._seen.add(draft.key)
                if (plan := self._planned(draft)) is None:
                    continue
                if self.least_memory_plan is None or plan.peak_nbytes < self.least_memory_plan.peak_nbytes:
                    self.least_memory_plan = plan
                if (excess := plan.peak_nbytes / self._limit(draft)) > 1:
                    self._unfit.add(draft.key)
                    over = min(excess, over or excess)
                elif plan.step_seconds < (best.step_seconds if best else cutoff):
                    best = plan
        return self.context.kept(best).ended(INTERRUPTED) if self.context.is_interrupted else best, over

    def _report_price(self, mesh: Mesh | None) -> None:
        phase = f"price a layer on {mesh}" if mesh else "partition the layers"
        self.context.report(Progress(phase=phase, done=self.block_costs.solved, total=None))


def _met(draft: Draft) -> Alternative:
    """A draft as an alternative to the plan, with its seconds and bytes by prices."""
    name = _name(len(draft.shape.begins), draft.shape.devices, draft.microbatches, draft.schedule)
    why = "by the prices of its layers"
    return Alternative(name=name, seconds=draft.seconds, why=why, peak_nbytes=draft.peak_nbytes)


def _how(plan: PipelinePlan) -> tuple[int, str]:
    return plan.microbatches, plan.schedule_name


def _name(stages: int, devices: Sequence[int], microbatches: int, schedule: str) -> str:
    """Stages in words: `4 stages on 2+2+2+2 devices, 8 microbatches, 1f1b`."""
    each = "+".join(map(str, devices))
    return f"{stages} stages on {each} devices, {count(microbatches, 'microbatch', 'microbatches')}, {schedule}"
