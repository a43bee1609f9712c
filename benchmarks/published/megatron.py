"""Megatron-LM's own measurements: SC 2021 on A100, and the first paper and its repository on V100 and A100.

Both run in float16 beside a copy in float32, and recompute every layer unless a row says otherwise. TFLOP/s count the
recomputation (`megatron_flops`); where a source gives no time, it follows from them. For the first paper that is
supported by its own table of epochs, whose iterations take 6 to 7 % longer than so computed.

Reference: Narayanan et al., SC 2021, section 5; Shoeybi et al., "Megatron-LM" (2019), section 5 and appendix D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.published import megatron_gpt
from benchmarks.published.flops import megatron_flops
from benchmarks.published.machines import (
    HOP_OF_2021,
    MATMULS_OF_2019,
    MATMULS_OF_2021,
    machine,
    with_hops,
    with_matmul_efficiency,
    with_summing_groups,
)
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Fields, Row, Source, number, whole
from models import gpt

VOCAB = 51200
"""Megatron-LM's for GPT-2, a multiple of 1,024: of rows that do not say."""

CHOICES = ("fig07", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17")
"""Figures whose rows are one job in several configurations."""

ONE_GPU_TFLOPS = 39.0
"""What the first paper reaches on one V100, of which it prints shares."""


def gpt_job(fields: Fields, batch: int, *, remat: bool) -> Job:
    """The GPT of a row's sizes, as Megatron-LM trains it."""
    config = gpt.Config(
        vocab_size=whole(fields, "vocab", VOCAB),
        sequence_length=whole(fields, "seq_len"),
        hidden=whole(fields, "hidden"),
        layers=whole(fields, "layers"),
        heads=whole(fields, "heads"),
        dtype="float16",
        param_dtype="float16",
        remat=remat,
        scan_layers=True,
    )
    return Job(module=megatron_gpt, config=config, batch=batch, precision="master copy")


def work_of(fields: Fields, batch: int) -> float:
    """Flops of a step as Megatron-LM counts them."""
    length, layers, hidden = (whole(fields, name) for name in ("seq_len", "layers", "hidden"))
    return megatron_flops(batch, length, layers, hidden, whole(fields, "vocab", VOCAB))


def _sc21(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        figure = fields["experiment"]
        # Where the paper does not say (Fig. 7), a step is one microbatch: what a step adds to each sequence halves from
        # one microbatch to the next, and is what the end of a step takes in Fig. 11, parameter by parameter.
        batch = whole(fields, "global_batch_seqs", whole(fields, "microbatch_seqs"))
        tensor, pipeline, data = (whole(fields, name) for name in ("tp", "pp", "dp"))
        micro, chunks = whole(fields, "microbatch_seqs"), whole(fields, "virtual_stages", 1)
        devices = whole(fields, "num_gpus")
        work = work_of(fields, batch) / devices
        tflops, rate = number(fields, "tflops_per_gpu"), number(fields, "seqs_per_s")
        seconds = number(fields, "derived_iter_time_s") or (batch / rate if rate else None)
        seconds = seconds or (work / (tflops * 1e12) if tflops else None)
        row = Row(
            source="megatron-sc21",
            sweep=f"{figure}, {fields['model']}, batch {batch}"
            if figure.startswith(CHOICES)
            else f"{figure}, batch {batch}",
            name=f"{figure} {fields['params_billion']}B tp{tensor} pp{pipeline} dp{data} micro{micro} batch{batch}"
            + (f" chunks{chunks}" if chunks > 1 else "")
            + (" optimized" if fields["scatter_gather"] == "yes" else ""),
            seconds=seconds,
            work=work / 1e12,
            unit="TFLOP/s a device",
            is_choice=figure.startswith(CHOICES),
            fitted=figure.startswith("fig11") and pipeline == 1,
        )
        cluster = machine(fields["gpu"], devices)
        if cluster is None:
            yield replace(row, why=f"no device of the table is called {fields['gpu']!r}")
        elif fields["activation_recompute"] not in ("full", "none"):
            yield replace(row, why=f"no planner recomputes {fields['activation_recompute']!r} activations")
        elif batch % (micro * data):
            yield replace(row, why=f"microbatches of {micro} on {data} devices do not divide the batch of {batch}")
        else:
            job = gpt_job(fields, batch, remat=fields["activation_recompute"] == "full")
            cluster = with_hops(with_matmul_efficiency(cluster, MATMULS_OF_2021), HOP_OF_2021)
            configuration = Configuration(
                job=job,
                cluster=with_summing_groups(cluster, tensor if data > 1 else 0),
                microbatches=batch // (micro * data),
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                interleave=chunks if pipeline > 1 else 1,
            )
            yield replace(row, question=configuration)


def _v100(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        data, tensor, devices = (whole(fields, name) for name in ("dp", "mp", "num_gpus"))
        batch, kind = whole(fields, "global_batch"), fields["experiment"]
        strong = kind.startswith("strong scaling")
        row = Row(
            source="megatron-v100",
            sweep=f"{kind}, {fields['gpu'].split('-')[0]}",
            name=f"{kind}: {fields['model']} {fields['heads']} heads, {devices} {fields['gpu'].split()[0]}",
        )
        cluster = machine(fields["gpu"], devices)
        if not fields["layers"]:
            yield replace(row, why="the source gives no layers and no hidden size")
            continue
        if cluster is None:
            yield replace(row, why=f"no device of the table is called {fields['gpu']!r}")
            continue
        if not kind.startswith("README"):
            cluster = with_matmul_efficiency(cluster, MATMULS_OF_2019)
        elif "A100" in fields["gpu"]:
            cluster = with_hops(with_matmul_efficiency(cluster, MATMULS_OF_2021), HOP_OF_2021)
        work = work_of(fields, batch) / devices / 1e12
        share = number(fields, "scaling_efficiency_pct")
        tflops = number(fields, "tflops_per_gpu") or (ONE_GPU_TFLOPS * share / 100 if share else None)
        spent, times = number(fields, "iter_time_ms"), number(fields, "speedup")
        first = next((other for other in lines if other["experiment"] == kind), fields)
        yield replace(
            row,
            fitted=row.name.startswith("weak scaling, model parallel") and devices == 1,
            question=Configuration(job=gpt_job(fields, batch, remat=True), cluster=cluster, data=data, tensor=tensor),
            seconds=1 / times if times else spent / 1e3 if spent else work / tflops if tflops else None,
            work=1.0 if strong else work,
            unit="times one device" if strong else "TFLOP/s a device",
            base=f"{kind}: {first['model']} {first['heads']} heads, {first['num_gpus']} {first['gpu'].split()[0]}"
            if strong
            else "",
        )


SC21 = Source(
    names=("megatron-sc21",),
    columns=frozenset({"experiment", "tp", "pp", "dp", "virtual_stages", "microbatch_seqs", "activation_recompute"}),
    read=_sc21,
)
V100 = Source(
    names=("megatron-v100",),
    columns=frozenset({"experiment", "mp", "dp", "global_batch", "iter_time_ms", "speedup"}),
    read=_v100,
)
