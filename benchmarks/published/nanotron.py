"""nanotron's sweep of an 8.86-billion LLaMA over 8 to 512 H100: tokens a second and peak memory, or nothing.

bfloat16 beside a copy in float32, gradients added up in float32, no recomputation, 1F1B, optimizer state cut over data
devices where ZeRO-1 is said. A row without a result ran out of memory or failed otherwise, which the source does not
tell apart: both count as out of memory, so some that count as missed could not have been found. Memory is in binary
gigabytes, as nanotron logs it.

Reference: Tazi et al., "The Ultra-Scale Playbook" (2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.published import nanotron_llama
from benchmarks.published.machines import aws_p5, fusing
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Fields, Row, Source, number, whole
from models import llama

GIB = 2**30


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


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
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
            out_of_memory=fields["status"] == "no_result",
            work=tokens,
            unit="tokens/s",
            is_choice=True,
        )
        if micro * count * data != batch:
            product = micro * count * data
            yield replace(row, why=f"microbatches, accumulation and data make {product} sequences, not {batch}")
        elif fields["tied_embeddings"] != "no":
            yield replace(row, why="LLaMA's embedding is not tied here")
        elif whole(fields, "kv_heads") % tensor:
            yield replace(row, why=f"{tensor} devices do not divide the {fields['kv_heads']} key-value heads")
        else:
            configuration = Configuration(
                job=llama_job(fields, batch),
                cluster=fusing(aws_p5(devices)),
                microbatches=count,
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                zero=zero if data > 1 else 0,
            )
            yield replace(row, question=configuration)


NANOTRON = Source(
    names=("nanotron",),
    columns=frozenset({"kv_heads", "ffn", "zero_stage", "grad_accum", "status", "tokens_per_s", "peak_mem_GB"}),
    read=_read,
)
