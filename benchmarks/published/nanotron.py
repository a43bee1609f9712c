"""nanotron's sweep of a LLaMA of 8.86 billion parameters over 8 to 512 H100: tokens a second and peak memory.

Parameters are in bfloat16 beside a copy in float32, gradients are summed in float32, nothing is recomputed, the
schedule is 1F1B, and under ZeRO-1 optimizer state is cut over data devices. A row without a result ran out of memory or
failed otherwise, which the source does not tell apart. It counts as out of memory unless a configuration that needs no
less memory ran in `CLEAR_GIB`: so 8 stages ran alone and in 2, 4 and 32 copies, and have no result in 8 and 16. Memory
is in binary gigabytes, as nanotron logs it.

Reference: Tazi et al., "The Ultra-Scale Playbook" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.published import nanotron_llama
from benchmarks.published.machines import aws_p5, with_fused_attention, with_matmul_efficiency
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import GIB, Answer, Fields, Row, Source, number, whole
from models import llama

CLEAR_GIB = 72
"""GiB that an H100 of 80 GB has for sure, nine tenths of it: rows ran in up to 77."""

TENSOR_COLLECTIVES = 8
"""Collectives of a layer for a microbatch: a gather and a scatter for attention and MLP, forward and backward."""

START_SECONDS, HOP_SECONDS = 150e-6, 58e-6
"""Of a collective of tensor devices as nanotron runs it in one stage, the start, with the kernels beside it, and a hop
of its ring: **fitted** to the source's configurations of few sequences, whose layers take as long whatever their
microbatches: 4.4, 8.3 and 15.2 ms on 8, 16 and 32 devices."""

STAGED_START_SECONDS, STAGED_HOP_SECONDS, STAGED_FAR_SECONDS = 830e-6, 260e-6, 350e-6
"""The same in several stages, and of a hop beyond a host's devices: **fitted** to 8.7, 13, 21 and 46 ms a layer on 2,
4, 8 and 16 devices, with 1 sequence as with 8, and 83 on 32, whose jobs wait for slow transfers besides. Why these take
longer beside transfers the source does not say."""


SLOW_TRANSFER_SECONDS = 0.285
"""Of an array from stage to stage in large jobs, for which both stages wait: **fitted** to the source. With stages on
512 devices, or on 256 with several sequences a microbatch, 118 of 121 jobs take 0.57 s more for each microbatch in two
stages, where a stage sends once and receives once, and 1.14 s in more, where it does both twice. So do all 12 that fill
more than 66 GiB, 17 of 18 with 32 tensor devices, and, of one sequence a microbatch, all 6 on 256 devices under ZeRO-1
over 32 or more, and 25 of 26 on fewer devices under ZeRO-0 in 4 copies or more, or in 2 on 64 devices or more. Of the
others 2 of 36 under ZeRO-0 do, and 9 of 123 under ZeRO-1. The source does not say why."""


MATMULS = 625e12 / 989e12
"""The share of an H100's peak that large products reach in nanotron's trainings, with FlashAttention 2 for this share
too: **fitted** to the rows `OF_MATMULS`, whose microbatches are long, which say 630, 590 and 650 TFLOP/s. A training
keeps the card at its 700 W; 794 are the best of a benchmark's products, one after the other."""

OF_MATMULS = (
    "8B tp1 pp4 dp8 zero1 micro1 accumulated32",
    "8B tp2 pp1 dp32 zero1 micro2 accumulated4",
    "8B tp4 pp1 dp4 zero1 micro4 accumulated16",
)


KEPT_BY_VIEWS = 6
"""Bytes of each feature of each token that a layer keeps beside what its backward pass reads: **fitted**, as memory was
predicted 13 to 20 % too low without. Three bfloat16 arrays would be queries and keys before their rotation, which are
one array with the values, and the values that FlashAttention takes; nanotron's code was not read for it."""


KEPT_WHOLE = 2
"""Bytes of each feature of each token that a layer keeps whole on every tensor device of a host: an input of a product
that was gathered, in bfloat16, as nanotron does unless told to gather it again (`tp_recompute_allgather`). Of the two
that a layer gathers it is one, **fitted** to the source's memory by microbatch in stages on fewer than 256 devices: 1.2
on 2 tensor devices, 1.5 on 4, 1.1 on 8. On 16, four stages keep 0.8 and two none, on 32 none do, nor do jobs whose
transfers are slow: the source does not say why. One stage keeps what its plan gathers.

Reference: huggingface/nanotron, src/nanotron/parallel/tensor_parallel/functional.py (`column_linear`)."""


SUM_NBYTES = 4
"""Bytes of a parameter that the sum of its gradients over microbatches has, in float32: whole on each device under
ZeRO-1, which cuts optimizer state alone.

Reference: huggingface/nanotron, src/nanotron/optim/gradient_accumulator.py (`FP32GradientAccumulator`)."""


PARAMETER_NBYTES, STATE_NBYTES = 2, 12
"""Bytes of a parameter in bfloat16, and of its copy and two moments in float32, which ZeRO-1 cuts over data devices.

Reference: Rajbhandari et al., "ZeRO" (SC 2020), section 3.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNanotron(Configuration):
    """A configuration as nanotron runs it, with its slow collectives and transfers and with what it keeps in memory."""

    def answer(self) -> Answer:
        """The plan's seconds and bytes, corrected for nanotron: at least the seconds of tensor devices' collectives,
        more where transfers are slow, and the bytes that nanotron keeps beside the plan's.

        What does not fit as it is kept ran with less kept and slow transfers, as large jobs do, or did not run: all of
        the source's 12 jobs with stages that fill more than 66 GiB have the time of slow transfers.
        """
        planned = Configuration.answer(self)
        if planned.seconds is None or planned.nbytes is None or planned.limit_nbytes is None:
            return planned
        nbytes = planned.nbytes + self.moved_nbytes(planned.nbytes)
        nbytes += self.views_nbytes + self.whole_nbytes + self.sums_nbytes
        seconds = max(planned.seconds, self.collectives_seconds)
        if self.has_slow_transfers or nbytes > planned.limit_nbytes:
            seconds += self.slow_transfers_seconds
        return replace(planned, seconds=seconds, nbytes=nbytes)

    def moved_nbytes(self, nbytes: float) -> float:
        """Bytes of the layers that nanotron's first stage has more than the plan's, which needs `nbytes`: as much for
        each as its own have, all but the embedding with its copy, moments and gradients.
        """
        if not self.layers:
            return 0.0
        config, cuts = self.job.config, self.data if self.zero else 1
        each = PARAMETER_NBYTES + SUM_NBYTES + STATE_NBYTES / cuts
        embedding = each * config.vocab_size * config.hidden / self.tensor
        return (nbytes - embedding) * (self._first_layers / self.layers[0] - 1)

    @property
    def views_nbytes(self) -> float:
        """Bytes that views keep on a device of the first stage, of every microbatch on its way."""
        return KEPT_BY_VIEWS * self._features_in_flight / self.tensor

    @property
    def whole_nbytes(self) -> float:
        """Bytes of gathered inputs on a device of the first of several stages, of every microbatch on its way."""
        is_kept = 1 < self.tensor <= self.cluster.group().devices_per_host and self.pipeline > 1
        return KEPT_WHOLE * self._features_in_flight if is_kept and not self._is_large else 0.0

    @property
    def sums_nbytes(self) -> float:
        """Bytes of gradients' sums on a device of the first stage that a plan of ZeRO-1 cuts over data.

        Without tensor devices that is the plan of `Zero`, which scatters gradients of every microbatch.
        """
        if self.zero != 1 or self.tensor > 1:
            return 0.0
        config = self.job.config
        ends = 1 if self.layers else 2
        parameters = self._first_layers * _layer_parameters(config) + ends * config.vocab_size * config.hidden
        return SUM_NBYTES * parameters * (1 - 1 / self.data)

    @property
    def collectives_seconds(self) -> float:
        """Seconds of a step that the hops of tensor devices' collectives take, those of the fullest stage."""
        near = min(self.tensor, self.cluster.group().devices_per_host) - 1
        far = self.tensor - 1 - near
        spent = START_SECONDS + (near + far) * HOP_SECONDS
        if self.pipeline > 1:
            spent = STAGED_START_SECONDS + near * STAGED_HOP_SECONDS + far * STAGED_FAR_SECONDS
        each = TENSOR_COLLECTIVES * spent if self.tensor > 1 else 0.0
        return (self.microbatches * max(self.layers, default=0) + self._layers_behind) * each

    @property
    def has_slow_transfers(self) -> bool:
        """Whether a job's stages wait for their transfers, as large jobs' do and some smaller ones'."""
        devices, data = self.cluster.n_devices, self.data
        if self.pipeline == 1 or self._is_large or self.tensor >= 32:
            return self.pipeline > 1
        if devices >= 256:
            return self.zero == 1 and data >= 32
        is_copied = data >= 4 or (data > 1 and devices >= 64)
        return self.zero == 0 and self._sequences == 1 and is_copied

    @property
    def slow_transfers_seconds(self) -> float:
        """Seconds of a step that a stage waits for its transfers where they are slow."""
        period = 2 * min(self.pipeline - 1, 2)  # transfers of a stage between two others, for each microbatch
        there_and_back = 2 * (self.pipeline - 1)
        return ((self.microbatches - 1) * period + there_and_back) * SLOW_TRANSFER_SECONDS

    @property
    def _is_large(self) -> bool:
        """Whether a job with stages is one of those that nearly all wait for their transfers."""
        devices = self.cluster.n_devices
        return self.pipeline > 1 and (devices >= 512 or (devices >= 256 and self._sequences > 1))

    @property
    def _sequences(self) -> int:
        """Sequences of a microbatch on one data device."""
        return self.job.batch // (self.microbatches * self.data)

    @property
    def _features_in_flight(self) -> int:
        """Features of all layers of the first stage, of every token of the microbatches on their way there."""
        config = self.job.config
        tokens = self._sequences * min(self.pipeline, self.microbatches) * config.sequence_length
        return tokens * config.hidden * self._first_layers

    @property
    def _first_layers(self) -> int:
        """Layers of nanotron's first stage."""
        config = self.job.config
        return nanotron_layers(config, self.pipeline)[0] if self.layers else config.layers

    @property
    def _layers_behind(self) -> int:
        """Layers that the first microbatch passes beyond the fullest stage; in one stage, those that all pass."""
        total = self.job.config.layers
        return total - max(self.layers) if self.layers else self.microbatches * total


def llama_job(fields: Fields, batch: int) -> Job:
    """The LLaMA of a row's sizes, as nanotron trains it."""
    config = llama.Config(
        vocab_size=whole(fields, "vocab"),
        sequence_length=whole(fields, "seq_len"),
        hidden=whole(fields, "hidden"),
        layers=whole(fields, "layers"),
        heads=whole(fields, "heads"),
        kv_heads=whole(fields, "kv_heads"),
        mlp=whole(fields, "ffn"),
        dtype="bfloat16",
        param_dtype="bfloat16",
        scan_layers=True,
    )
    return Job(module=nanotron_llama, config=config, batch=batch, precision="float32 gradients")


def stage_layers(config: llama.Config, stages: int) -> tuple[int, ...]:
    """The layers of each stage as a planner has them: nanotron's, but for stages of a head alone, which no planner has
    and which get a layer of the fullest stage.
    """
    counts = list(nanotron_layers(config, stages))
    for empty in [stage for stage, count in enumerate(counts) if not count]:
        counts[max(stage for stage, count in enumerate(counts) if count > 1)] -= 1
        counts[empty] = 1
    return tuple(counts)


def nanotron_layers(config: llama.Config, stages: int) -> tuple[int, ...]:
    """The layers of each stage: as many as it takes to go past its share of the work, the head's product among it.

    So the first stage has a layer more than an equal share, and keeps that of every microbatch on its way.

    Reference: nanotron, src/nanotron/models/base.py (`build_model`) and `get_block_compute_costs` of its LLaMA.
    """
    layer = _layer_parameters(config)
    total = config.layers * layer + config.vocab_size * config.hidden
    counts, stage = [0] * stages, 0
    for done in range(config.layers):
        if done * layer * stages > total * (stage + 1):
            stage += 1
        counts[stage] += 1
    return tuple(counts)


def _layer_parameters(config: llama.Config) -> int:
    """The weights of a layer's products; every head has keys and values of its own."""
    return 4 * config.hidden**2 + 3 * config.hidden * config.mlp


def _needs_no_less(other: Fields, fields: Fields) -> bool:
    """Whether a device of another configuration needs no less memory than one of this, of as many stages and of the
    same ZeRO: each has no less of the layers, of microbatches on their way, and of their sequences.
    """
    if any(other[name] != fields[name] for name in ("model", "seq_len", "pp", "zero_stage")):
        return False
    cuts = ("tp", "dp") if whole(fields, "zero_stage") else ("tp",)
    is_filled = whole(other, "grad_accum") >= min(whole(fields, "grad_accum"), whole(fields, "pp"))
    is_no_finer = all(whole(other, name) <= whole(fields, name) for name in cuts)
    return is_filled and is_no_finer and whole(other, "microbatch_seqs") >= whole(fields, "microbatch_seqs")


def _ran_out(fields: Fields, ran: Sequence[Fields]) -> bool | None:
    """Whether a configuration ran out of memory; None where not: one of those that `ran` needs no less."""
    if fields["status"] != "no_result":
        return False
    return None if any(_needs_no_less(other, fields) for other in ran) else True


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
    ran = [fields for fields in lines if (peak := number(fields, "peak_mem_GB")) and peak <= CLEAR_GIB]
    for fields in lines:
        tensor, pipeline, data, zero = (whole(fields, name) for name in ("tp", "pp", "dp", "zero_stage"))
        micro, count, batch = (whole(fields, n) for n in ("microbatch_seqs", "grad_accum", "global_batch_seqs"))
        rate, peak, devices = (
            number(fields, "tokens_per_s"),
            number(fields, "peak_mem_GB"),
            whole(fields, "num_gpus"),
        )
        tokens = batch * whole(fields, "seq_len")
        row = Row(
            source="nanotron",
            sweep=f"{fields['model']} on {devices} devices",
            name=f"{fields['model']} tp{tensor} pp{pipeline} dp{data} zero{zero} micro{micro} accumulated{count}",
            seconds=tokens / rate if rate else None,
            nbytes=peak * GIB if peak else None,
            out_of_memory=_ran_out(fields, ran),
            work=tokens,
            unit="tokens/s",
            is_choice=True,
        )
        row = replace(row, fitted=row.name in OF_MATMULS)
        if micro * count * data != batch:
            product = micro * count * data
            yield replace(row, why=f"microbatches, accumulation and data make {product} sequences, not {batch}")
        elif fields["tied_embeddings"] != "no":
            yield replace(row, why="LLaMA's embedding is not tied here")
        elif whole(fields, "kv_heads") % tensor:
            yield replace(row, why=f"{tensor} devices do not divide the {fields['kv_heads']} key-value heads")
        else:
            job = llama_job(fields, batch)
            configuration = OnNanotron(
                job=job,
                cluster=with_matmul_efficiency(with_fused_attention(aws_p5(devices)), MATMULS),
                microbatches=count,
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                layers=stage_layers(job.config, pipeline) if 1 < pipeline <= job.config.layers else (),
                sequence=tensor > 1,
                zero=zero if data > 1 else 0,
            )
            yield replace(row, question=configuration)


NANOTRON = Source(
    names=("nanotron",),
    columns=frozenset({"kv_heads", "ffn", "zero_stage", "grad_accum", "status", "tokens_per_s", "peak_mem_GB"}),
    read=_read,
)
