"""GPipe's tables: throughput against stages and microbatches on TPU v3, relative to 2 stages and 1 microbatch.

Of the paper's models `models/` has the Transformer, here decoder-only. The paper adjusts the batch to memory without
saying how: here it is 32 sequences, as for its largest models, halved until a plan fits. Stages recompute activations
before the gradients of the next stage have arrived.

Reference: Huang et al., "GPipe" (1811.06965), tables 1 to 3; section 2.3: recomputation "can be scheduled earlier,
without waiting for the gradients from earlier layers".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

from benchmarks.published import gpipe_transformer
from benchmarks.published.machines import machine
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import GIB, Answer, Fields, Row, Source, number, whole
from models import gpt
from passes.inter_op import StageCost, Transfer
from passes.plan import PipelinePlan
from passes.planners import Auto

BATCH, HEADS, VOCAB = 32, 32, 32000
"""Of the Transformers of table 1, which table 2 does not repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGPipe(Configuration):
    """A configuration as GPipe runs it; its answer has the seconds of the job's batch, whatever batch fits."""

    def answer(self) -> Answer:
        """The answer for the largest batch that fits, or the least. Raises PlanningError where there is no plan.

        A batch of 1 is no dimension that a step could be cut along: its seconds follow from those of 2 and 4.
        """
        batch, least = self.job.batch, max(self.microbatches, 2)
        while batch > least and not self._sized(batch).fits:
            batch //= 2
        sized = self._sized(batch)
        seconds = sized.seconds / batch
        if self.microbatches == 1 and batch == 2 and not sized.fits:
            seconds = sized.seconds - (self._sized(4).seconds - sized.seconds) / 2
        return replace(Configuration.answer(sized), seconds=seconds * self.job.batch)

    @property
    def fits(self) -> bool:
        """Whether the fullest device has room for its plan."""
        return self.plan().peak_nbytes <= Auto().limit(self.cluster)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        if self.pipeline == 1:
            return self.plan().step_seconds
        plan = cast("PipelinePlan", self.plan())
        return seconds_ahead(plan.costs, plan.transfers, self.microbatches)

    def _sized(self, batch: int) -> Self:
        return replace(self, job=replace(self.job, batch=batch))


def seconds_ahead(costs: Sequence[StageCost], transfers: Sequence[Transfer], microbatches: int) -> float:
    """Seconds of a step whose stages [stages] recompute a microbatch's activations as soon as they are free.

    That takes as long as the forward pass, and is a part of the backward pass; the rest waits for the stage behind.
    """
    arrivals = [0.0] * microbatches
    free: list[float] = []
    for cost, hop in zip(costs, [*(t.forward_seconds for t in transfers), 0.0], strict=True):
        end = 0.0
        for microbatch, arrival in enumerate(arrivals):
            end = max(end, arrival) + cost.forward_seconds
            arrivals[microbatch] = end + hop
        free.append(end)
    step, arrivals = 0.0, [0.0] * microbatches
    hops = [*(t.backward_seconds for t in reversed(transfers)), 0.0]
    for cost, end, hop in zip(reversed(costs), reversed(free), hops, strict=True):
        for microbatch, arrival in enumerate(arrivals):
            again = end + cost.forward_seconds
            end = max(again, arrival) + cost.backward_seconds - cost.forward_seconds
            arrivals[microbatch] = end + hop
        step = max(step, end + cost.finish_seconds)
    return step


def _job(fields: Fields, *, remat: bool) -> Job:
    config = gpt.Config(
        vocab_size=whole(fields, "vocab", VOCAB),
        sequence_length=whole(fields, "seq_len"),
        hidden=whole(fields, "hidden"),
        layers=whole(fields, "layers"),
        heads=whole(fields, "heads", HEADS),
        mlp_factor=whole(fields, "ffn") // whole(fields, "hidden"),
        remat=remat,
        scan_layers=True,
    )
    batch = whole(fields, "global_batch", BATCH)
    return Job(module=gpipe_transformer, config=config, batch=batch, precision="single", optimizer="rmsprop")


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        table, model, stages = fields["table"], fields["model"], whole(fields, "partitions_K")
        times, base = number(fields, "normalized_throughput"), _base(lines, fields)
        gigabytes = [number(fields, f"{part}_memory_GB") for part in ("model_param", "peak_activation")]
        row = Row(
            source="gpipe",
            sweep=f"{table.split(' (')[0]}, {model}",
            name=_name(fields),
            seconds=1 / times if times else None,
            nbytes=sum(x for x in gigabytes if x) * GIB or None,
            unit=f"times {_name(base)}",
            base=_name(base) if times else "",
        )
        naive = "Naive" in model
        cluster = machine(fields["accelerator"], stages)
        if not fields["seq_len"]:
            yield replace(
                row, why=f"the zoo has no {fields['model_family']}" if "Amoeba" in model else "no sizes given"
            )
        elif cluster is None:
            yield replace(row, why=f"no device of the table is called {fields['accelerator']!r}")
        elif not (naive or fields["microbatches_M"]):
            yield replace(row, why="the source does not say how many microbatches")
        else:
            configuration = OnGPipe(
                job=_job(fields, remat=not naive),
                cluster=cluster,
                microbatches=whole(fields, "microbatches_M", 1),
                pipeline=stages,
                schedule="gpipe",
                by_work=True,
                total=True,
            )
            yield replace(row, question=configuration)


def _name(fields: Fields) -> str:
    count = f" M{fields['microbatches_M']}" if fields["microbatches_M"] else ""
    return f"{fields['table'].split(' (')[0]} {fields['model']} K{fields['partitions_K']}{count}"


def _base(lines: Sequence[Fields], fields: Fields) -> Fields:
    """The row whose throughput is 1 in a row's table."""
    alike = [f for f in lines if (f["table"], f["model"]) == (fields["table"], fields["model"])]
    return next((f for f in alike if number(f, "normalized_throughput") == 1), fields)


GPIPE = Source(
    names=("gpipe",),
    columns=frozenset({"partitions_K", "microbatches_M", "accelerator", "normalized_throughput"}),
    read=_read,
)
