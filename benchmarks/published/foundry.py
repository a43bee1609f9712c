"""MosaicML's table of MPT trainings, 125 million to 70 billion parameters, on 8 to 128 A100 and H100: tokens a second.

Layers run under PyTorch's FullyShardedDataParallel, as ZeRO-3: parameters in float32, cut over all devices, are
gathered for each microbatch in bfloat16 where layers compute; attention is fused. Where `activation_recompute` says so,
each layer's backward pass recomputes it. Every row ran, so none is out of memory. No row is fitted.

Reference: mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.published import mpt
from benchmarks.published.machines import hosts_of, with_fused_attention
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Fields, Row, Source, whole
from models import gpt

DEVICES = {"H100-SXM5-80GB": "h100", "A100-SXM4-80GB": "a100-80g", "A100-SXM4-40GB": "a100-40g"}
"""The table's names of devices, by the source's."""


def _job(fields: Fields, batch: int) -> Job:
    """The GPT of a row's sizes, as MPT is trained."""
    config = gpt.Config(
        vocab_size=whole(fields, "vocab"),
        sequence_length=whole(fields, "seq_len"),
        hidden=whole(fields, "hidden"),
        layers=whole(fields, "layers"),
        heads=whole(fields, "heads"),
        dtype="bfloat16",
        param_dtype="float32",
        remat=fields["activation_recompute"] == "full",
        scan_layers=True,
    )
    return Job(module=mpt, config=config, batch=batch, precision="single")


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        devices, count, length = (whole(fields, name) for name in ("num_gpus", "grad_accum", "seq_len"))
        micro, gpu = whole(fields, "microbatch_seqs"), fields["gpu"]
        batch = micro * count * devices
        again = ", recomputed" if fields["activation_recompute"] == "full" else ""
        configuration = Configuration(
            job=_job(fields, batch),
            cluster=with_fused_attention(hosts_of(DEVICES[gpu], devices)),
            microbatches=count,
            data=devices,
            zero=3,
        )
        yield Row(
            source="llm-foundry",
            sweep=f"{fields['model']}, {gpu}",
            name=f"{fields['model']} on {devices} {gpu}, {count} x {micro} of {length}{again}",
            question=configuration,
            seconds=batch * length / whole(fields, "fsdp_tokens_per_s"),
            out_of_memory=False,
            work=batch * length,
            unit="tokens/s",
        )


FOUNDRY = Source(
    names=("llm-foundry",),
    columns=frozenset({"fsdp_tokens_per_s", "activation_recompute", "microbatch_seqs", "grad_accum"}),
    read=_read,
)
