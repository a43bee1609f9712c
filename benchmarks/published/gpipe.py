"""GPipe's tables: throughput against stages and microbatches on TPU v3, relative to 2 stages and 1 microbatch.

Of its models the zoo has the Transformer, here decoder-only with a tied embedding. The batch is that of the largest
models, 32 sequences; the paper adjusts it to memory without saying how.

Reference: Huang et al., "GPipe" (1811.06965), tables 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.published.machines import machine
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Fields, Row, Source, number, whole
from models import gpt

GIB = 2**30
BATCH, HEADS, VOCAB = 32, 32, 32000
"""Of the Transformers of table 1, which table 2 does not repeat."""


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
    return Job(module=gpt, config=config, batch=batch, precision="single", optimizer="rmsprop")


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
            configuration = Configuration(
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
