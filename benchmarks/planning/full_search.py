"""Time of every phase of a search over stages for one model and cluster; `benchmarks.planning --pipeline` prints them.

The time between two progress reports of the search counts for the phase that the first of them names.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from rich.table import Table

import autopar
from benchmarks.planning import one_mesh
from models import wide_resnet
from passes.cluster import Cluster
from passes.inter_op import submeshes
from passes.intra_op import layouts
from passes.pipeline.samples import ANCHORS
from passes.solver import SolverOptions
from passes.text import quantities

PHASES = {
    "trace": "trace",
    "microbatches": "trace in microbatches",
    "whole": "plan without stages",
    "price": "price layers",
    "partition": "partition into stages",
    "realise": "plan the stages chosen",
}
"""The printed name of each phase, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Seconds of each phase and in all, `cpu` the processor seconds of this process, and figures of the plan.

    `tables` counts the stage costs to know: a layer (of a deep model, a block) on a mesh, for a number of microbatches;
    `priced` are those that took a solve. `gap` is the largest of a stage.
    """

    model: str
    cluster: str
    seconds: dict[str, float]
    total: float
    cpu: float
    tables: int
    priced: int
    stages: int
    microbatches: int
    gap: float
    step_seconds: float
    peak_nbytes: int
    rss_nbytes: int


def search(name: str, cluster: Cluster, batch_size: int, layers: int | None, options: SolverOptions) -> Searched:
    """The search, once, from shapes alone. A microbatch of a Wide-ResNet is normalised by itself."""
    module, config = one_mesh.MODELS.get(name) or one_mesh.MODELS[f"gpt-{name.lower()}"]
    config = replace(config, layers=layers) if layers else config
    train_step, state = one_mesh.make_step(module, config)
    batch = jax.eval_shape(lambda: module.example_batch(config, batch_size, jax.random.key(0)))
    reports: list[tuple[str, float]] = []
    planner = autopar.Auto(pipeline=True, solver=options)
    step = autopar.parallelize(
        train_step,
        cluster=cluster,
        planner=planner,
        donate_argnums=(0,),
        microbatch_semantics="independent" if module is wide_resnet else "exact",
        progress=lambda progress: reports.append((phase_of(progress.phase), time.perf_counter())),
    )
    began, cpu = time.perf_counter(), time.process_time()
    step.trace(state, batch)
    reports.append(("microbatches", time.perf_counter()))
    plan = step.plan(state, batch)
    ended = time.perf_counter()
    meshes = sum(
        len(layouts(cluster, choice.n_devices, planner.max_axes)) for choice in submeshes(cluster, every=False)
    )
    table_entries = one_mesh.depth(config) * meshes * len(ANCHORS)
    return Searched(
        model=f"{name}, {one_mesh.depth(config)} layers",
        cluster=cluster.name,
        seconds=spent([("trace", began), *reports], ended),
        total=ended - began,
        cpu=time.process_time() - cpu,
        tables=table_entries,
        priced=sum(phase == "price" for phase, _ in reports),
        stages=len(plan.programs),
        microbatches=plan.microbatches,
        gap=plan.gap,
        step_seconds=plan.step_seconds,
        peak_nbytes=plan.peak_nbytes,
        rss_nbytes=one_mesh.rss_nbytes(),
    )


def phase_of(report: str) -> str:
    """The phase that a report is of."""
    match report.removeprefix("stages: ").split():
        case ["price", *_]:
            return "price"
        case ["partition", *_]:
            return "partition"
        case ["plan", *_]:
            return "realise"
        case ["write", *_]:
            return "microbatches"
        case _:
            return "whole"


def spent(reports: Sequence[tuple[str, float]], ended: float) -> dict[str, float]:
    """Seconds of every phase, from when each began."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for (phase, began), (_, following) in zip(reports, [*reports[1:], ("", ended)], strict=True):
        seconds[phase] += following - began
    return seconds


def tables(search: Searched) -> list[Table]:
    """Phases and their times; then everything else."""
    title = f"{search.model} on {search.cluster}, stages searched"
    times = Table("phase", "time", "share", title=title, title_justify="left")
    for column in times.columns[1:]:
        column.justify = "right"
    for phase, label in PHASES.items():
        seconds = search.seconds[phase]
        times.add_row(label, quantities.seconds(seconds), quantities.share(seconds, search.total))
    times.add_section()
    after_tracing = search.total - search.seconds["trace"] - search.seconds["microbatches"]
    times.add_row("after tracing", quantities.seconds(after_tracing), quantities.share(after_tracing, search.total))
    times.add_row("total", quantities.seconds(search.total), "")
    times.add_row("CPU of total", quantities.seconds(search.cpu), quantities.share(search.cpu, search.total))
    details = Table(show_header=False)
    details.add_row("layer tables", f"{search.tables:,} asked for, {search.priced:,} solved")
    details.add_row("plan", f"{quantities.count(search.stages, 'stage', 'stages')}, {search.microbatches} microbatches")
    details.add_row("gap of its stages", f"{100 * search.gap:.2g} %")
    details.add_row("predicted step", quantities.seconds(search.step_seconds))
    details.add_row("predicted peak", f"{quantities.nbytes(search.peak_nbytes)} a device")
    details.add_row("process peak", f"{quantities.nbytes(search.rss_nbytes)} of resident memory so far")
    return [times, details]
