"""MaxText's tables of trainings in JAX on TPU v4, v5e and v5p and on one host of H100: TFLOP/s of a device.

The models are decoders with SwiGLU and a head of its own. Parameters are in float32 and read in bfloat16, attention is
fused. v5e and v4 recompute every layer, the other rows all of it but what products with weights make. Parameters are
cut over all devices (ZeRO-3); where `tensor` devices share a layer's products, which no planner has beside ZeRO-3, they
are whole on the others, and their memory is not compared. MaxText counted six flops a parameter and token, and those of
all scores, masked ones too, until its pull request 1988.

Reference: AI-Hypercomputer/maxtext, MaxText/configs (v4, v5e, v5p, a3/llama_2_7b): README.md and the scripts beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.published import maxtext_llama
from benchmarks.published.machines import hosts_of, with_fused_attention
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Fields, Row, Source, whole
from models import llama

OF_DEVICES = ("32B on 256 tpu-v5e", "32B on 64 tpu-v5p", "LLaMA-2-7B on 8 h100")
"""Rows that the device table's shares of large products are fitted to."""


def _job(fields: Fields) -> Job:
    """The decoder of a row's sizes, as MaxText trains it."""
    heads = whole(fields, "heads")
    config = llama.Config(
        vocab_size=whole(fields, "vocab"),
        sequence_length=whole(fields, "seq_len"),
        hidden=whole(fields, "hidden"),
        layers=whole(fields, "layers"),
        heads=heads,
        kv_heads=heads,
        mlp=whole(fields, "ffn"),
        dtype="bfloat16",
        param_dtype="float32",
        scan_layers=True,
        remat=fields["activation_recompute"] == "full",
    )
    batch = whole(fields, "device_seqs") * whole(fields, "devices")
    return Job(module=maxtext_llama, config=config, batch=batch, precision="single")


def flops(config: llama.Config, batch: int) -> float:
    """Flops of a step as MaxText counts them."""
    layer = 4 * config.hidden**2 + 3 * config.hidden * config.mlp
    parameters = config.layers * layer + config.vocab_size * config.hidden
    attention = 12 * config.layers * config.hidden * config.sequence_length
    return (6 * parameters + attention) * batch * config.sequence_length


def _read(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        devices, tensor, device = whole(fields, "devices"), whole(fields, "tensor"), fields["device"]
        job, name = _job(fields), f"{fields['model']} on {devices} {device}"
        cluster = hosts_of(device, devices, each=devices)  # one host of H100, or one slice of TPUs
        yield Row(
            source="maxtext",
            sweep=f"{fields['model']} on {device}",
            name=name,
            question=Configuration(
                job=job,
                cluster=with_fused_attention(cluster),
                data=devices // tensor,
                tensor=tensor,
                zero=3 if tensor == 1 else 0,
            ),
            seconds=flops(job.config, job.batch) / (float(fields["device_tflops"]) * 1e12 * devices),
            work=flops(job.config, job.batch) / devices / 1e12,
            unit="TFLOP/s",
            fitted=name in OF_DEVICES,
        )


MAXTEXT = Source(
    names=("maxtext",),
    columns=frozenset({"device_tflops", "device_seqs", "devices", "tensor"}),
    read=_read,
)
