"""The drafts of a step: pipelines that are worth planning, by the prices of their blocks.

They are the best partition by prices, and even stages on equal submeshes, as they are made by hand, in the numbers of
microbatches near to the best. Of a large step, which is priced on a sample or has more than `LARGE_NODES` operators,
fewer numbers of microbatches are looked at, and slower drafts kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from passes.cluster import Cluster, Mesh
from passes.errors import OverBudgetError, PlanningError
from passes.inter_op import Candidate, Partition, Submesh, is_chunked, partitions, splits_backward, submeshes
from passes.intra_op import pins, restrictions
from passes.ir import Graph
from passes.pipeline.assemble import body_of
from passes.pipeline.drafts import DraftSearch
from passes.pipeline.prefetch import price_layers
from passes.pipeline.samples import ANCHORS, anchors, near, sampled
from passes.pipeline.shapes import Draft, Limits, Shape, by_hand, drafted, first_of_each, shape_of
from passes.pipeline.stage_table import LEAST_GAIN, StageCostTable
from passes.pipeline.step_blocks import Sample
from passes.progress import SearchContext
from passes.step import Step

RIVAL = 1.1
"""A step without stages is planned where its price is above that of the stages by no more than this factor: prices are
not plans. This and the limits below were halved and doubled for one deep pipeline, whose plan and work stay the same;
`python -m benchmarks.settings --only pipeline.drafting --network "gpt stages"` would move them."""

NEAR_BEST = 1.1
"""Drafts are planned whose price is above the best by less than this factor, as long as plans are no better than it. A
large step is drafted again for less memory where its best plan takes more than this factor of the fastest draft. What
was measured is at `RIVAL`."""

SLACK = 1.1
"""Drafts may fit that need more than there is by less than this factor: prices are not plans. For a deep pipeline that
hardly fits, 1.05 and 1.2 find the same, in 1.00 and 1.14 of the work (`python -m benchmarks.settings`)."""

MOST_PLANNED_NODES = 6_000
"""Drafts are planned, after the first that fits, while they have no more operators than this in all: a bound on
the time of planning (`python -m benchmarks.planning cases`). What was measured is at `RIVAL`."""

LARGE_NODES = MOST_PLANNED_NODES // 2
"""The operators of a step above which it is large: one draft of it is planned, as two would have more than
`MOST_PLANNED_NODES`."""

MOST_UNFIT = 4
"""The drafts that are planned where no other plan fits, those that need least; and those of a large step in one turn.
Each takes as long as a plan that fits."""


@dataclass(slots=True, kw_only=True)
class Drafting:
    """The drafts of a `step`: pipelines by the prices of a `table`, in the numbers of microbatches of its `samples`.

    Samples are of its variants for so many `stages`, whose loops over layers are chunked; `samples` grows as others are
    asked for. Pipelines have a number of stages that is in `counts`, any if that is empty. No device may need more than
    the `limits`. A sample of one microbatch prices the step without stages, too.
    """

    step: Step
    stages: int
    cluster: Cluster
    samples: dict[int, Sample]
    schedules: Sequence[str]
    limits: Limits
    table: StageCostTable
    counts: Sequence[int] = ()
    _megatron_tables: dict[tuple[int, int], StageCostTable] = field(
        default_factory=dict[tuple[int, int], StageCostTable]
    )
    _refused_counts: set[int] = field(default_factory=set[int])

    @property
    def layers(self) -> int:
        """The layers of which stages are made."""
        return self.table.step.n_layers

    def search(self, limits: Limits, cutoff: float, slack: float, unfit: Set[object] = frozenset()) -> DraftSearch:
        """A search for drafts that keep the `limits` by their prices; plans of the keys in `unfit` need more."""
        return DraftSearch(
            table=self.table,
            schedules=self.schedules,
            limits=limits,
            slack=slack,
            limit_seconds=cutoff,
            reach=1.0 if self.is_large else NEAR_BEST,
            least_gain=LEAST_GAIN if self.is_large else 0.0,
            has=self._has,
            megatron_table=self._megatron_table,
            unfit=unfit,
        )

    def draft(self, search: DraftSearch, context: SearchContext) -> None:
        """Adds all that is worth planning to the search, and the partition that is the best by its prices if it may be.

        Pipelines by hand come first, of a large step also near the best of them, since what they take bounds the
        partition; then its stages in numbers of microbatches near to its own; what does not fit is tried with the
        weights of every submesh cut as Megatron does. Raises the interruption that ended the search for a partition.
        """
        is_tight = self.is_large and search.is_tight(self.cluster.n_devices)
        self._by_hand(search, self._anchor, *([max(self._near(self._anchor))] if is_tight else []))
        if self.is_large:
            self._by_hand(search, self._best_count(search))
        partition = self._partition(search, context)
        if partition is not None:
            search.take(drafted(self.table, partition))
            context.raise_if_interrupted()
        base = self._best_count(search)
        if partition is not None:
            shape = shape_of(self.table, partition, partition.microbatches)
            search.add((shape, n) for n in self._near(base))
        self._by_hand(search, base)

    def _best_count(self, search: DraftSearch) -> int:
        """The microbatches of the fastest draft that fits, or the most that are sampled."""
        return fastest.microbatches if (fastest := search.fastest) else max(self.samples)

    def of_least_memory(self, cutoff: float) -> list[Draft]:
        """Drafts by hand that take less than `cutoff` seconds and are not said to fit, those first that need least."""
        search = self.search(self.limits, cutoff, math.inf)
        self._by_hand(search, self._anchor, max(self.samples))
        unfit = [draft for draft in search.drafts if draft.excess(self.limits) > SLACK]
        return first_of_each(sorted(unfit, key=lambda draft: draft.peak_nbytes))[:MOST_UNFIT]

    def rivals(self, seconds: float) -> bool:
        """Whether the step without stages, in one form or another, may take hardly longer than that by its prices."""
        return any(self._whole(count, RIVAL * seconds / count) is not None for count in self.samples)

    def _whole_seconds(self, cutoff: float) -> float:
        """Seconds that stages must stay below to be better than none, by the price of the whole step, or the cutoff."""
        if 1 not in self.samples or self.counts:
            return cutoff
        stage = self._whole(1, cutoff / RIVAL)
        return cutoff if stage is None else RIVAL * stage.period(1)

    def _whole(self, count: int, cutoff: float) -> Candidate | None:
        """The step without stages by its price; None where a microbatch takes `cutoff` seconds or it does not fit."""
        everything = _everything(self.cluster)
        state_nbytes = self.table.bounds.of_layers(0, self.layers, everything, count).nbytes
        end = len(self.table.step.cuts(count).blocks)
        if state_nbytes + self.table.kept_nbytes(0, end, everything.n_devices, count) > self.limits.by_hand:
            return None
        stage = self.table.candidate(0, self.layers, everything, count, cutoff=cutoff)
        return stage if stage is not None and stage.needed_nbytes(1) <= self.limits.by_hand else None

    def _partition(self, search: DraftSearch, context: SearchContext) -> Partition | None:
        """The stages that take least by their prices and keep the limit, if any may be better than drafts so far."""
        device = self.cluster.group().device
        space = partitions.Space(
            n_layers=self.layers,
            whole=_everything(self.cluster),
            choices=submeshes(self.cluster, every=False),
            n_stages=[n for n in range(2, self.layers + 1) if not self.counts or n in self.counts],
            idle=False,
            schedules=_unsplit(self.schedules),
            microbatches=self._partition_counts(search),
            memory_limit=search.limits.searched,
            dispatch_seconds=device.dispatch_seconds,
            overlap=device.send_overlap,
        )
        try:
            return partitions.partition(
                space,
                self.table,
                lower_bound=self.table.bounds.of_layers,
                prefetch=partial(price_layers, self.table),
                context=replace(context, cutoff=self._whole_seconds(search.cutoff / (1 + search.least_gain))),
            )
        except OverBudgetError:
            return None

    def _partition_counts(self, search: DraftSearch) -> tuple[int, ...]:
        """The numbers of microbatches in which stages are searched: the one that is best for pipelines by hand and,
        unless the step is large, the first ones.
        """
        counts = {fastest.microbatches} if (fastest := search.fastest) else set[int]()
        if not counts or not self.is_large:
            counts |= {n for n in anchors(self.step.counts) if n in self.samples}
        return tuple(sorted(counts)) or (1,)

    @property
    def _anchor(self) -> int:
        """The number of microbatches near to which pipelines by hand are tried first."""
        return ANCHORS[-1] if self.is_large else ANCHORS[1]

    def _by_hand(self, search: DraftSearch, *bases: int) -> None:
        """Adds even stages in numbers of microbatches near to those, and in those that there are."""
        shapes: list[tuple[Shape, int]] = []
        for n in dict.fromkeys(n for base in bases for n in self._near(base)):
            known = n if n in self.samples else next(iter(self.samples))
            by_hand_shapes = by_hand(self.table, self.cluster.n_devices, known)
            shapes += [(s, n) for s in by_hand_shapes if not self.counts or len(s.begins) in self.counts]
        search.add(shapes)

    def _near(self, base: int) -> list[int]:
        """Numbers of microbatches near to that, and those sampled; of a step that is not large, all are."""
        sampled_counts = [n for n in self.samples if n > 1] or [1]
        return [
            n for n in dict.fromkeys((*sampled_counts, *near(self.step.counts, base))) if self.is_large or self._has(n)
        ]

    def worth(self, search: DraftSearch) -> list[Draft]:
        """The drafts that may be the best and may fit: first what fits, the fastest first.

        Of a large step those that are slower come after the first, for where its plan does not fit after all.
        """
        most = math.inf if self.is_large else search.cutoff
        ours = [
            draft for draft in search.drafts if draft.seconds < most and draft.excess(search.limits) <= search.slack
        ]
        return first_of_each(sorted(ours, key=lambda draft: (draft.excess(search.limits) > 1, draft.seconds)))

    def _megatron_table(self, size: int, tensor: int) -> StageCostTable:
        """The prices of blocks on submeshes of this size, their weights cut over so many devices."""
        if (size, tensor) not in self._megatron_tables:
            meshes, data = self.table.bounds.meshes_of(size), size // tensor
            sizes = tuple(n for n in (data, tensor) if n > 1)
            mine = Mesh(axes=("x", "y")[: len(sizes)], sizes=sizes, cluster=self.cluster)
            mesh = next((mesh for mesh in meshes if mesh.sizes == sizes), pins.without(mine, meshes[0].forbidden))
            along = restrictions.Along(mesh.axes[0] if data > 1 else "", mesh.axes[-1] if tensor > 1 else "")
            block_costs = self.table.block_costs.restricted(along)
            self._megatron_tables[size, tensor] = self.table.restricted(block_costs, lambda _: [mesh])
        return self._megatron_tables[size, tensor]

    def _has(self, count: int) -> bool:
        """Whether the step can be had in so many microbatches, and cut as it is in others."""
        if count in self.samples or count in self._refused_counts:
            return count in self.samples
        sample = sampled(self.step, self.stages, count)
        if sample is None or not self._is_cut_alike(count, sample):
            self._refused_counts.add(count)
        return count in self.samples

    def _is_cut_alike(self, count: int, sample: Sample) -> bool:
        """Whether a sample in so many microbatches has as many blocks as others, which it is added to then."""
        n_blocks = len(self.table.step.cuts(next(iter(self.samples))).blocks)
        self.samples[count] = sample
        with suppress(PlanningError):
            if len(self.table.step.cuts(count).blocks) == n_blocks:
                return True
        del self.samples[count]
        return False

    @property
    def is_large(self) -> bool:
        """Whether a step is so large that few drafts are planned, and each number of microbatches takes its time."""
        sample = next(iter(self.samples.values()))
        return sample.left_out > 0 or size(sample.graph) > LARGE_NODES


def _unsplit(schedules: Sequence[str]) -> Sequence[str]:
    """The schedules in which a partition is searched, those with a whole backward if there are any.

    Those that split it are for drafts: they ask for the same stages, and bounds for them are weak.
    """
    single = [name for name in schedules if not is_chunked(name)]
    return [name for name in single if not splits_backward(name)] or single or ("1f1b",)


def _everything(cluster: Cluster) -> Submesh:
    """All devices of a cluster as one submesh."""
    group = cluster.group()
    return Submesh(hosts=group.hosts, devices_per_host=group.devices_per_host)


def size(graph: Graph) -> int:
    """The operators of a step in microbatches: of what is done once, and of its loop."""
    return len(graph.nodes) + len(body_of(graph).nodes)
