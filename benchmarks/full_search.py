"""Time of every phase of a search over stages for one model and cluster; `benchmarks.planning --pipeline` prints them.

What happens between two reports of the search belongs to the phase that the first of them tells of.
"""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from rich.table import Table

import autopar
from benchmarks import one_mesh
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
"""What is printed of each phase, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Seconds of each phase and of all of it, `cpu` of them computed here; tables and the plan, `gap` its largest.

    `tables` are as many as there are layers (of a deep model, blocks), meshes and numbers of microbatches, `priced`
    those that took a solve.
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
    told: list[tuple[str, float]] = []
    planner = autopar.Auto(pipeline=True, solver=options)
    step = autopar.parallelize(
        train_step,
        cluster=cluster,
        planner=planner,
        donate_argnums=(0,),
        microbatch_semantics="independent" if module is wide_resnet else "exact",
        progress=lambda progress: told.append((phase_of(progress.phase), time.perf_counter())),
    )
    began, cpu = time.perf_counter(), time.process_time()
    step.trace(state, batch)
    told.append(("microbatches", time.perf_counter()))
    plan = step.plan(state, batch)
    ended = time.perf_counter()
    meshes = sum(
        len(layouts(cluster, choice.n_devices, planner.max_axes)) for choice in submeshes(cluster, every=False)
    )
    asked = one_mesh.depth(config) * meshes * len(ANCHORS)
    return Searched(
        model=f"{name}, {one_mesh.depth(config)} layers",
        cluster=cluster.name,
        seconds=spent([("trace", began), *told], ended),
        total=ended - began,
        cpu=time.process_time() - cpu,
        tables=asked,
        priced=sum(phase == "price" for phase, _ in told),
        stages=len(plan.stages) if isinstance(plan, autopar.PipelinePlan) else 1,
        microbatches=plan.microbatches,
        gap=max(stage.gap for stage in plan.stages) if isinstance(plan, autopar.PipelinePlan) else plan.gap,
        step_seconds=plan.step_seconds,
        peak_nbytes=plan.peak_nbytes,
        rss_nbytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def phase_of(told: str) -> str:
    """The phase that a report is of."""
    match told.removeprefix("stages: ").split():
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


def spent(told: Sequence[tuple[str, float]], ended: float) -> dict[str, float]:
    """Seconds of every phase, from when each began."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for (phase, began), (_, after) in zip(told, [*told[1:], ("", ended)], strict=True):
        seconds[phase] += after - began
    return seconds


def tables(found: Searched) -> list[Table]:
    """Phases and their times; then everything else."""
    title = f"{found.model} on {found.cluster}, stages searched"
    times = Table("phase", "time", "share", title=title, title_justify="left")
    for column in times.columns[1:]:
        column.justify = "right"
    for phase, words in PHASES.items():
        seconds = found.seconds[phase]
        times.add_row(words, quantities.seconds(seconds), quantities.share(seconds, found.total))
    times.add_section()
    after = found.total - found.seconds["trace"] - found.seconds["microbatches"]
    times.add_row("after tracing", quantities.seconds(after), quantities.share(after, found.total))
    times.add_row("total", quantities.seconds(found.total), "")
    times.add_row("of it CPU", quantities.seconds(found.cpu), quantities.share(found.cpu, found.total))
    rest = Table(show_header=False)
    rest.add_row("layer tables", f"{found.tables:,} asked, {found.priced:,} solved")
    rest.add_row("plan", f"{quantities.count(found.stages, 'stage', 'stages')}, {found.microbatches} microbatches")
    rest.add_row("gap of its stages", f"{100 * found.gap:.2g} %")
    rest.add_row("predicted step", quantities.seconds(found.step_seconds))
    rest.add_row("predicted peak", f"{quantities.nbytes(found.peak_nbytes)} a device")
    rest.add_row("process peak", f"{quantities.nbytes(found.rss_nbytes)} of resident memory so far")
    return [times, rest]
