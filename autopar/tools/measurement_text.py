"""A measurement as tables and a plot: the cluster, and each sample beside what the cluster predicts of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from autopar.tools.compiler_measurement import Bytes, CompilerMeasurement
from autopar.tools.device_sweep import Sample, half_of
from autopar.tools.measurement import NBYTES, Measurement
from autopar.tools.plot import blank, save
from passes.cluster import Cluster, collectives
from passes.text import Column, Table, quantities


def tables(measurement: Measurement) -> tuple[Table, ...]:
    """The cluster, the samples of one device, and those of collectives."""
    return (
        cluster_table(measurement.cluster, measurement.overlap),
        samples_table([s for s in measurement.samples if s.kind not in collectives.ALGORITHMS]),
        *([collectives_table(sent)] if (sent := _sent(measurement.samples)) else []),
    )


def compiler_tables(measurement: CompilerMeasurement) -> tuple[Table, ...]:
    """The rates by the compiler beside the preset's, the samples, and bytes."""
    return (
        rates_table(measurement),
        samples_table(measurement.samples, "compiler"),
        nbytes_table(measurement.nbytes),
    )


def rates_table(measurement: CompilerMeasurement) -> Table:
    """The table of a device's rates by its compiler and by the preset: of its data sheet, what is reached."""
    cluster = measurement.cluster
    ours, theirs = cluster.group().device, measurement.preset.group().device
    rates = [
        (f"{dtype} products", rate * ours.matmul_efficiency, theirs.flops_per_second[dtype] * theirs.matmul_efficiency)
        for dtype, rate in ours.flops_per_second.items()
        if dtype in theirs.flops_per_second
    ]
    rows = [(name, f"{a / 1e12:,.3g} Tflop/s", f"{b / 1e12:,.3g} Tflop/s", f"{a / b:.2f}") for name, a, b in rates]
    a, b = (d.memory_bytes_per_second * d.memory_efficiency for d in (ours, theirs))
    rows.append(("memory", f"{a / 1e9:,.4g} GB/s", f"{b / 1e9:,.4g} GB/s", f"{a / b:.2f}"))
    a, b = ours.launch_seconds, theirs.launch_seconds
    rows.append(("one operator at least", quantities.seconds(a), quantities.seconds(b), f"{a / b:.2f}"))
    half = half_of(ours)
    curve = f"{getattr(ours, half):g}" if measurement.has_curve else "the preset's"
    rows.append((half.replace("_", " "), curve, f"{getattr(theirs, half):g}", ""))
    rows.append(("links and collectives", "the preset's", "", ""))
    return Table(
        title=f"{cluster.name}: estimates, nothing was run",
        columns=(Column(heading=""), *_right("compiler", "preset", "ratio")),
        rows=tuple(rows),
    )


def nbytes_table(several: Sequence[Bytes]) -> Table:
    """The table of bytes of each operation, predicted beside the compiler's."""
    return Table(
        title="bytes of a device: predicted, by memory_analysis(), and predicted by compiler",
        columns=(Column(heading=""), Column(heading="size"), *_right("predicted", "compiler", "ratio")),
        rows=tuple(
            (
                each.kind,
                each.size,
                quantities.nbytes(each.predicted),
                quantities.nbytes(each.compiled),
                f"{each.predicted / each.compiled:.2f}" if each.compiled else "-",
            )
            for each in several
        ),
    )


def _sent(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.kind in collectives.ALGORITHMS]


def cluster_table(cluster: Cluster, overlap: float | None = None) -> Table:
    """The table of what was measured, one row a number."""
    group = cluster.group()
    rates = (
        (f"{dtype} products", f"{rate / 1e9:,.3g} Gflop/s") for dtype, rate in group.device.flops_per_second.items()
    )
    rows = [*rates, ("memory", f"{group.device.memory_bytes_per_second / 1e9:,.3g} GB/s")]
    rows.append(("one operator at least", quantities.seconds(group.device.launch_seconds)))
    slower = 1 / group.device.matmul_efficiency
    rows.append(("operators in a training step", f"{slower:.2f} times as long as alone"))
    rows.append(("to start a task on the host", quantities.seconds(group.device.dispatch_seconds)))
    lines: dict[str, list[str]] = {}
    for m in group.measured:
        line = f"{quantities.seconds(m.alpha_seconds)} + {m.bytes_per_second / 1e9:,.3g} GB/s"
        lines.setdefault(f"{m.kind} among {m.ranks}", []).append(line)
    rows += [(name, ", at least ".join(several)) for name, several in lines.items()]
    if overlap is not None:
        rows.append(("an all-reduce behind products", f"{100 * overlap:.0f} % hidden"))
    return Table(
        title=f"{cluster.name}: each of {quantities.count(cluster.n_devices, 'device')}, all at work",
        columns=(Column(heading=""), Column(heading="", right=True)),
        rows=tuple(rows),
    )


def samples_table(samples: Sequence[Sample], source: str = "measured") -> Table:
    """The table with a row for each sample, whose seconds were `measured` or are a compiler's."""
    return Table(
        title=f"predicted by these numbers, {source}, and predicted by {source}",
        columns=(Column(heading=""), Column(heading="size"), *_right("predicted", source, "ratio")),
        rows=tuple(
            (
                sample.kind,
                sample.size if sample.is_fitted else f"{sample.size} (not fitted)",
                quantities.seconds(sample.predicted),
                quantities.seconds(sample.measured),
                _ratio(sample),
            )
            for sample in samples
        ),
    )


def collectives_table(samples: Sequence[Sample]) -> Table:
    """The table of predicted by measured seconds of each kind of collective and number of ranks, by bytes."""
    rows: dict[str, list[str]] = {}
    for sample in samples:
        ranks = sample.size.rpartition(" ")[2]
        rows.setdefault(f"{sample.kind} among {ranks}", []).append(_ratio(sample))
    return Table(
        title="predicted by measured seconds of collectives",
        columns=(Column(heading=""), *_right(*map(quantities.nbytes, NBYTES))),
        rows=tuple((name, *ratios) for name, ratios in rows.items()),
    )


def _right(*headings: str) -> tuple[Column, ...]:
    return tuple(Column(heading=heading, right=True) for heading in headings)


def _ratio(sample: Sample) -> str:
    return f"{sample.predicted / sample.measured:.2f}" if sample.measured > 0 else "-"


def plot_measurement(samples: Sequence[Sample], path: str | os.PathLike[str], source: str = "measured") -> None:
    """Draws predicted over measured seconds (or another `source`'s) into a file, both on logarithmic scales, with the
    line on which they agree.

    Raises PlanningError without matplotlib and for another kind of file.
    """
    figure = blank(path)
    figure.set_size_inches(7, 6)
    axes = figure.subplots()
    for kind in dict.fromkeys(sample.kind for sample in samples):
        points = [(s.measured, s.predicted) for s in samples if s.kind == kind and s.measured > 0 and s.predicted > 0]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, label=kind)
    every = [value for sample in samples for value in (sample.measured, sample.predicted) if value > 0]
    ends = [min(every, default=1e-6), max(every, default=1.0)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=f"{source} seconds", ylabel="predicted seconds")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
