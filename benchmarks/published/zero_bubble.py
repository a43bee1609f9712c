"""Zero Bubble's tables: 4, throughput and memory of schedules; 5, simulated bubble rates; 6, times of tasks.

Table 4 is predicted three times: planned from the model, and simulated from the times of table 6, once as the library
simulates (transfers overlap with compute), once with senders that wait. Table 5 is simulated as the authors do.

The vocabulary follows from the numbers of parameters. The embedding and the head count as a layer each, so a group has
(layers + 2) / groups of them; interleaved, every layer is a chunk. Times of tasks are means over the stages.

Reference: Qi et al., "Zero Bubble Pipeline Parallelism" (2401.10241), section 5 and appendix E.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from benchmarks.published.machines import (
    MATMULS_OF_2023,
    MEMORY_OF_2023,
    machine,
    with_matmul_efficiency,
    with_memory_efficiency,
)
from benchmarks.published.megatron import gpt_job
from benchmarks.published.planned import Configuration
from benchmarks.published.rows import Answer, Fields, Row, Source, number, whole
from benchmarks.published.schedules import AsAuthors, Simulated
from passes.cluster import boundary_seconds
from passes.errors import PlanningError
from passes.inter_op import StageCost
from passes.plan import AnyPlan, PipelinePlan

NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zero-bubble-h1", "ZB-1p": "zero-bubble-h1"}
"""The paper's schedules that autopar has, by the paper's name; ZB-1p, which a search finds within the memory of 1F1B,
has the rates of ZB-H1."""

GB = 1e9
RATE_ROUNDING = 0.5e-4
"""The largest error of a bubble rate that is printed with four digits."""

VOCAB = 32000
"""The vocabulary of the paper's SentencePiece tokenizer, by the parameters that the paper prints: 14.6 billion in 46
layers of 5,120 features leave at most 33,500 rows to an embedding, 28.3 in 62 of 6,144 at least 25,000. Megatron-LM's
for GPT-2 has 51,200.

Reference: sail-sg/zero-bubble-pipeline-parallelism, examples/pretrain_zbh1.sh (`--tokenizer-type`)."""

END_SECONDS = 0.101 / 2.03e9
"""Seconds for each parameter of a device at the end of a step: gradients are unscaled and clipped, parameters updated.
It is what Megatron-LM's figure 11 (SC 2021) has for 16.2 billion on 8 A100, by its two rows of 8 and 128 microbatches.

Reference: Narayanan et al., SC 2021, figure 11."""

SUMMING_NBYTES = 6
"""Bytes of a parameter that pass memory where a gradient in half precision is added to a sum: two are read, one is
written."""

Task = Literal["T_F", "T_B + T_W", "T_comm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnZeroBubble(Configuration):
    """A configuration whose products of weights' gradients add to what earlier microbatches have summed.

    Reference: sail-sg/zero-bubble-pipeline-parallelism, megatron/core/weight_grad_store.py (`WeightGradStore.pop`).
    """

    def plan(self) -> AnyPlan:
        """The plan without the passes over memory that sum the gradients of the stages' products, microbatch by
        microbatch.
        """
        if self.pipeline == 1:
            return Configuration.plan(self)
        plan = cast("PipelinePlan", Configuration.plan(self))
        config, rate = self.job.config, self.cluster.group().device.achieved_bytes_per_second
        stages = len(plan.costs)
        layers = [(config.layers + 2) // stages] * stages
        layers[0], layers[-1] = layers[0] - 1, layers[-1] - 1
        parameters = [12 * config.hidden**2 * count for count in layers]
        parameters[-1] += config.vocab_size * config.hidden
        spent = [SUMMING_NBYTES * count / rate for count in parameters]
        return replace(plan, costs=tuple(map(with_shorter_gradients, plan.costs, spent)))


def with_shorter_gradients(cost: StageCost, seconds: float) -> StageCost:
    """The cost of a stage with so many seconds less for the gradients of weights."""
    weights = cost.weight_gradient_seconds
    return replace(
        cost,
        backward_seconds=cost.backward_seconds - seconds,
        weight_gradient_seconds=None if weights is None else weights - seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """The mean over the stages of one kind of task, or over the boundaries of a transfer, as planned."""

    configuration: Configuration
    task: Task

    def answer(self) -> Answer:
        """Seconds of the task. Raises PlanningError where there is no such plan."""
        if self.configuration.pipeline == 1:
            raise PlanningError("a plan without stages has no tasks")
        plan = cast("PipelinePlan", self.configuration.plan())
        match self.task:
            case "T_F":
                seconds = [cost.forward_seconds for cost in plan.costs]
            case "T_B + T_W":
                seconds = [cost.backward_seconds for cost in plan.costs]
            case "T_comm":
                seconds = [transfer.forward_seconds for transfer in plan.transfers]
        return Answer(seconds=statistics.fmean(seconds))


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
    times = {_key(fields): fields for fields in lines if fields["table"].startswith("Table 6")}
    for fields in lines:
        if fields["table"].startswith("Table 4"):
            yield from _table_4(fields, times.get(_key(fields)))
        elif fields["table"].startswith("Table 5"):
            yield _table_5(fields, times.get(_key(fields)))
        elif fields["table"].startswith("Table 6"):
            yield from _table_6(fields)


def _key(fields: Fields) -> tuple[str, str, str]:
    return fields["model"], fields["p"], fields["num_microbatches"]


def _chunks(fields: Fields) -> int:
    """Stages on each group."""
    return (whole(fields, "layers") + 2) // whole(fields, "p") if fields["schedule"] == "1F1B-I" else 1


def _name(fields: Fields) -> str:
    return f"{fields['model']} p{fields['p']} m{fields['num_microbatches']} {fields['schedule']}".strip()


def _configuration(fields: Fields) -> Configuration | None:
    """The pipeline of a row; None for a device that is not known."""
    cluster = machine(fields["gpu"], whole(fields, "num_gpus"))
    if cluster is None:
        return None
    count = whole(fields, "num_microbatches")
    return OnZeroBubble(
        job=gpt_job({**fields, "vocab": str(VOCAB)}, count * whole(fields, "microbatch_seqs"), remat=False),
        cluster=with_memory_efficiency(with_matmul_efficiency(cluster, MATMULS_OF_2023), MEMORY_OF_2023),
        microbatches=count,
        pipeline=whole(fields, "p"),
        interleave=_chunks(fields),
        ends_count=True,
        schedule=NAMES.get(fields["schedule"], "1f1b"),
    )


def _table_4(fields: Fields, times: Fields | None) -> Iterator[Row]:
    rate, gigabytes = number(fields, "samples_per_gpu_per_s"), number(fields, "peak_memory_GB")
    work = whole(fields, "microbatch_seqs") * whole(fields, "num_microbatches") / whole(fields, "num_gpus")
    row = Row(
        source="zero-bubble",
        sweep=f"{fields['model']} p{fields['p']} m{fields['num_microbatches']}",
        name=_name(fields),
        seconds=work / rate if rate else None,
        nbytes=gigabytes * GB if gigabytes else None,
        work=work,
        unit="sequences/s a device",
        is_choice=True,
    )
    known, configuration = fields["schedule"] in NAMES, _configuration(fields)
    missing = f"autopar has no schedule {fields['schedule']}"
    if configuration is None:
        yield replace(row, why=f"no device of the table is called {fields['gpu']!r}")
    else:
        yield replace(row, question=configuration) if known else replace(row, why=missing)
    for source, overlap in (("zero-bubble-times", 1.0), ("zero-bubble-times-blocking", 0.0)):
        given = replace(row, source=source, nbytes=None)
        if not known:
            yield replace(given, why=missing)
        elif times is None:
            yield replace(given, why="no times are given for it")
        else:
            yield replace(given, question=_as_laid_out(fields, _simulated(fields, times), overlap))


def _as_laid_out(fields: Fields, equal: Simulated, overlap: float) -> Simulated:
    """The schedule with stages and boundaries as they differ, given their means.

    The first stage has an embedding for a layer, which computes nothing, and the last one the head, which counts as
    its flops: 2 V h a token, where a layer's are 24 h^2 + 4 s h. A transfer takes longer to another host, as predicted
    for a neighbour there and on the same one. Times of tasks leave out the end of a step.
    """
    groups, stages = equal.pipeline, equal.pipeline * equal.chunks
    layers = [(whole(fields, "layers") + 2) / stages] * stages
    layers[0] -= 1
    layers[-1] += VOCAB / (12 * whole(fields, "hidden") + 2 * whole(fields, "seq_len")) - 1
    parameters = 1e9 * (number(fields, "params_billion") or 0.0)
    equal = replace(equal, finish_seconds=END_SECONDS * parameters / groups)
    work = tuple(count / statistics.fmean(layers) for count in layers)
    cluster = machine(fields["gpu"], whole(fields, "num_gpus"))
    if cluster is None:
        return replace(equal, overlap=overlap, work=work)
    nbytes = 2 * whole(fields, "microbatch_seqs") * whole(fields, "seq_len") * whole(fields, "hidden")

    def sent(stage: int) -> float:
        sender, receiver = stage % groups, (stage + 1) % groups
        return boundary_seconds(cluster.group(), range(sender, sender + 1), range(receiver, receiver + 1), nbytes)

    mean = statistics.fmean(sent(stage) for stage in range(groups - 1))
    ways = tuple(sent(stage) / mean for stage in range(stages - 1))
    return replace(equal, overlap=overlap, work=work, ways=ways)


def _simulated(fields: Fields, times: Fields) -> Simulated:
    """The schedule of a row of equal stages, with the profiled times of its model."""
    milliseconds = [number(times, f"T_{kind}_ms") or 0.0 for kind in ("F", "B", "W", "comm")]
    forward, inputs, weights, transfer = (spent / 1e3 for spent in milliseconds)
    return Simulated(
        schedule=NAMES[fields["schedule"]],
        pipeline=whole(fields, "p"),
        microbatches=whole(fields, "num_microbatches"),
        forward_seconds=forward,
        input_seconds=inputs,
        weight_seconds=weights,
        transfer_seconds=transfer,
        chunks=_chunks(fields),
    )


def _table_5(fields: Fields, times: Fields | None) -> Row:
    rate = number(fields, "bubble_rate") or 0.0
    row = Row(source="zero-bubble-rates", sweep=fields["schedule"], name=_name(fields))
    if fields["schedule"] not in NAMES:
        return replace(row, why=f"autopar has no schedule {fields['schedule']}")
    if times is None:
        return replace(row, why="no times are given for it")
    ideal = _ideal_seconds(fields, times)
    return replace(
        row,
        question=AsAuthors(simulated=_simulated(fields, times)),
        seconds=ideal / (1 - rate),
        rounding=RATE_ROUNDING / (1 - rate - RATE_ROUNDING),
    )


def _ideal_seconds(fields: Fields, times: Mapping[str, str]) -> float:
    """Seconds of a step that no group waits in."""
    busy = sum(number(times, f"T_{kind}_ms") or 0.0 for kind in "FBW")
    return whole(fields, "num_microbatches") * busy / 1e3


def _table_6(fields: Fields) -> Iterator[Row]:
    configuration = _configuration(fields)
    forward, inputs, weights, transfer = (number(fields, f"T_{kind}_ms") for kind in ("F", "B", "W", "comm"))
    backward = inputs + weights if inputs and weights else None
    tasks: tuple[tuple[Task, float | None], ...] = (("T_F", forward), ("T_B + T_W", backward), ("T_comm", transfer))
    for task, spent in tasks:
        yield Row(
            source="zero-bubble-tasks",
            fitted=True,
            sweep=task,
            name=f"{_name(fields)} {task}",
            seconds=spent / 1e3 if spent else None,
            question=configuration and TaskTimes(configuration=configuration, task=task),
            why="" if configuration else f"no device of the table is called {fields['gpu']!r}",
        )


ZERO_BUBBLE = Source(
    names=(
        "zero-bubble",
        "zero-bubble-tasks",
        "zero-bubble-times",
        "zero-bubble-times-blocking",
        "zero-bubble-rates",
    ),
    columns=frozenset({"table", "p", "schedule", "samples_per_gpu_per_s", "bubble_rate", "T_F_ms", "T_comm_ms"}),
    read=_read,
)
