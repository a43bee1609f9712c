"""The choice of drafts: pipelines that are worth planning, by the prices of their blocks.

They are the best partition by prices, and even stages on equal submeshes, as hand-made pipelines have them, in numbers
of microbatches near the best one. For a large step (`passes.pipeline.draft_space.LARGE_NODES`), fewer numbers of
microbatches are looked at, and slower drafts kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from passes.cluster import Cluster
from passes.inter_op import Candidate, Partition, Submesh, is_chunked, partitions, splits_backward, submeshes
from passes.limits import Limits
from passes.pipeline.draft_space import DraftSpace
from passes.pipeline.drafts import DraftSearch
from passes.pipeline.prefetch import price_layers
from passes.pipeline.samples import ANCHORS, anchors, near
from passes.pipeline.shapes import Draft, Shape, drafted, first_of_each, hand_made, shape_of
from passes.pipeline.stage_table import StageCostTable
from passes.pipeline.step_blocks import Sample
from passes.progress import SearchContext

RIVAL = 1.1
"""A step without stages is planned where its price is above that of the stages by no more than this factor: prices are
not plans. This and the limits below were halved and doubled for one deep pipeline, whose plan and work stay the same;
`python -m benchmarks.settings --only pipeline.drafting --network "gpt stages"` would move them."""

SLACK = 1.1
"""The factor of the limit up to which a draft may need by its prices and its plan may still fit. For a deep pipeline
that hardly fits, 1.05 and 1.2 find the same, in 1.00 and 1.14 of the work (`python -m benchmarks.settings`).
"""

MOST_UNFIT = 4
"""The most drafts that are planned where no plan fits, those of least memory; and the most of a large step in one
round. Each takes as long as a plan that fits.
"""


@dataclass(slots=True, kw_only=True)
class Drafting:
    """The choice of the drafts of a `space` that are worth planning.

    The number of stages is one of `counts`, or any if that is empty. No device may need more than the `limits`. Where
    there is a sample of one microbatch, the step without stages is priced as well.
    """

    space: DraftSpace
    limits: Limits
    counts: Sequence[int] = ()

    @property
    def table(self) -> StageCostTable:
        """The prices of stages."""
        return self.space.table

    @property
    def cluster(self) -> Cluster:
        return self.space.table.cluster

    @property
    def samples(self) -> Mapping[int, Sample]:
        """The sample of the step in each number of microbatches that it was written in."""
        return self.space.samples

    @property
    def is_large(self) -> bool:
        """Whether few drafts are planned, as each takes long."""
        return self.space.is_large

    @property
    def layers(self) -> int:
        """The layers of which stages are made."""
        return self.table.step.n_layers

    def search(self, limits: Limits, cutoff: float, slack: float, unfit: Set[object] = frozenset()) -> DraftSearch:
        """A search for drafts that keep the `limits` by their prices; the plans of those with keys in `unfit`
        do not.
        """
        return DraftSearch(space=self.space, limits=limits, slack=slack, limit_seconds=cutoff, unfit=unfit)

    def draft(self, search: DraftSearch, context: SearchContext) -> None:
        """Adds to the search all drafts that are worth planning, and the best partition by prices.

        Hand-made pipelines come first, as their seconds bound the partition; for a large step also those near the best
        of them. Then come the partition's stages in nearby numbers of microbatches; what does not fit is tried with the
        weights of every submesh cut as by Megatron. Raises the interruption that ended the search for a partition.
        """
        is_tight = self.is_large and search.is_tight(self.cluster.n_devices)
        self._draft_hand_made(search, self._anchor, *([max(self._near(self._anchor))] if is_tight else []))
        if self.is_large:
            self._draft_hand_made(search, self._best_count(search))
        partition = self._partition(search, context)
        if partition is not None:
            search.take(drafted(self.table, partition))
            context.raise_if_interrupted()
        base = self._best_count(search)
        if partition is not None:
            shape = shape_of(self.table, partition, partition.microbatches)
            search.add((shape, n) for n in self._near(base))
        self._draft_hand_made(search, base)

    def _best_count(self, search: DraftSearch) -> int:
        """The number of microbatches of the fastest draft that fits, or the largest one with a sample."""
        return fastest.microbatches if (fastest := search.fastest) else max(self.samples)

    def of_least_memory(self, cutoff: float) -> list[Draft]:
        """Hand-made drafts that take less than `cutoff` seconds and are not expected to fit, of least memory first."""
        search = self.search(self.limits, cutoff, math.inf)
        self._draft_hand_made(search, self._anchor, max(self.samples))
        unfit = [draft for draft in search.drafts if draft.excess(self.limits) > SLACK]
        return first_of_each(sorted(unfit, key=lambda draft: draft.peak_nbytes))[:MOST_UNFIT]

    def rivals(self, seconds: float) -> bool:
        """Whether a variant of the step without stages may take at most `RIVAL` times these seconds, by its price."""
        return any(self._whole(count, RIVAL * seconds / count) is not None for count in self.samples)

    def _whole_seconds(self, cutoff: float) -> float:
        """Seconds that a pipeline must stay below to be of use: by the price of the step without stages, or
        the cutoff.
        """
        if 1 not in self.samples or self.counts:
            return cutoff
        stage = self._whole(1, cutoff / RIVAL)
        return cutoff if stage is None else RIVAL * stage.period(1)

    def _whole(self, count: int, cutoff: float) -> Candidate | None:
        """The cost of the step without stages; None where a microbatch takes `cutoff` seconds or more, or it does not
        fit.
        """
        everything = _everything(self.cluster)
        state_nbytes = self.table.bounds.of_layers(0, self.layers, everything, count).nbytes
        end = len(self.table.step.cuts(count).blocks)
        if state_nbytes + self.table.kept_nbytes(0, end, everything.n_devices, count) > self.limits.hand_made:
            return None
        stage = self.table.candidate(0, self.layers, everything, count, cutoff=cutoff)
        return stage if stage is not None and stage.needed_nbytes(1) <= self.limits.hand_made else None

    def _partition(self, search: DraftSearch, context: SearchContext) -> Partition | None:
        """The best partition by prices that keeps the limit; None where none can be better than the drafts so far."""
        device = self.cluster.group().device
        space = partitions.Space(
            n_layers=self.layers,
            whole=_everything(self.cluster),
            choices=submeshes(self.cluster, every=False),
            n_stages=[n for n in range(2, self.layers + 1) if not self.counts or n in self.counts],
            idle=False,
            schedules=_unsplit(self.space.schedules),
            microbatches=self._partition_counts(search),
            memory_limit=search.limits.searched,
            dispatch_seconds=device.dispatch_seconds,
            overlap=device.send_overlap,
        )
        return partitions.partition(
            space,
            self.table,
            lower_bound=self.table.bounds.of_layers,
            prefetch=partial(price_layers, self.table),
            context=replace(context, cutoff=self._whole_seconds(search.cutoff / (1 + search.space.least_gain))),
        )

    def _partition_counts(self, search: DraftSearch) -> tuple[int, ...]:
        """The numbers of microbatches in which partitions are searched: that of the best hand-made pipeline and, unless
        the step is large, those that a search begins with.
        """
        counts = {fastest.microbatches} if (fastest := search.fastest) else set[int]()
        if not counts or not self.is_large:
            counts |= {n for n in anchors(self.space.step.counts) if n in self.samples}
        return tuple(sorted(counts)) or (1,)

    @property
    def _anchor(self) -> int:
        """The number of microbatches near which hand-made pipelines are tried first."""
        return ANCHORS[-1] if self.is_large else ANCHORS[1]

    def _draft_hand_made(self, search: DraftSearch, *bases: int) -> None:
        """Adds even stages in the numbers of microbatches near these, and in those that have samples."""
        shapes: list[tuple[Shape, int]] = []
        for n in dict.fromkeys(n for base in bases for n in self._near(base)):
            known = n if n in self.samples else next(iter(self.samples))
            made = hand_made(self.table, self.cluster.n_devices, known)
            shapes += [(s, n) for s in made if not self.counts or len(s.begins) in self.counts]
        search.add(shapes)

    def _near(self, base: int) -> list[int]:
        """The numbers of microbatches near `base`, and those with samples.

        Samples of the others are made, unless the step is large.
        """
        sampled_counts = [n for n in self.samples if n > 1] or [1]
        counts = dict.fromkeys((*sampled_counts, *near(self.space.step.counts, base)))
        return [n for n in counts if self.is_large or self.space.has(n)]

    def worth(self, search: DraftSearch) -> list[Draft]:
        """The drafts that may have the best plan and may fit: those that fit first, then the fastest.

        For a large step slower ones are among them, for where the plan of the first does not fit after all.
        """
        most = math.inf if self.is_large else search.cutoff
        ours = [
            draft for draft in search.drafts if draft.seconds < most and draft.excess(search.limits) <= search.slack
        ]
        return first_of_each(sorted(ours, key=lambda draft: (draft.excess(search.limits) > 1, draft.seconds)))


def _unsplit(schedules: Sequence[str]) -> Sequence[str]:
    """The schedules in which a partition is searched: those with a whole backward, if there are any.

    Schedules that split it would find the same stages, and have weak bounds; drafts are priced under them.
    """
    single = [name for name in schedules if not is_chunked(name)]
    return [name for name in single if not splits_backward(name)] or single or ("1f1b",)


def _everything(cluster: Cluster) -> Submesh:
    """All devices of a cluster as one submesh."""
    group = cluster.group()
    return Submesh(hosts=group.hosts, devices_per_host=group.devices_per_host)
