"""CPU and wall time of every phase of planning one model for one mesh; `benchmarks.planning --mesh` prints them."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import optax
from rich.table import Table

from autopar.frontend import trace
from benchmarks import trainings
from models import gpt, llama, moe, wide_resnet
from passes.cluster import Cluster
from passes.gc_pause import without_gc
from passes.intra_op import MeshProblems, assemble, cheapest_plan, named
from passes.memory import peak
from passes.placement import group, resharding_plan
from passes.sharding import Resharder
from passes.solver import SolverOptions, solve
from passes.step import Step
from passes.text import quantities

MODELS: dict[str, tuple[Any, Any]] = {
    **{f"gpt-{name.lower()}": (gpt, gpt.Config.preset(name)) for name in gpt.PRESETS},
    **{f"llama-{name.lower()}": (llama, llama.Config.preset(name)) for name in llama.PRESETS},
    **{f"moe-{name.lower()}": (moe, moe.Config.preset(name)) for name in moe.PRESETS},
    **{f"wide-resnet-{name.lower()}": (wide_resnet, wide_resnet.Config.preset(name)) for name in wide_resnet.PRESETS},
    "gpt-1t": (
        gpt,
        replace(gpt.Config.preset("76B"), hidden=25600, heads=160, layers=128, sequence_length=2048),
    ),
}
"""Models by name; GPT 1T is that of Narayanan et al., "Efficient Large-Scale Language Model Training" (SC 2021)."""

LAYERED = tuple(name for name, (module, _) in MODELS.items() if module is not wide_resnet)
"""Models that there are with any number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of CPU and of the clock."""

    cpu: float
    wall: float


@dataclass(slots=True, kw_only=True)
class Phases:
    """The time that each phase of planning a model for a mesh took, in order, and what came of it."""

    model: str
    mesh: str
    spent: dict[str, Spent] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    status: str = ""
    objective: float = 0.0
    gap: float = 0.0
    rss_nbytes: int = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        with without_gc():  # as a parallel function plans
            yield
        self.spent[phase] = Spent(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall)


def make_step(module: Any, config: Any) -> tuple[Callable[..., Any], Any]:
    """An ordinary step (state, batch) -> (state, loss) with the optimizer of the model's paper, and its state's shapes.

    Language models take AdamW, mixtures of experts Adafactor, Wide-ResNet SGD with Nesterov's momentum.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1))
    if module is moe:
        optimizer = optax.adafactor(1e-3)
    if module is wide_resnet:
        optimizer = optax.sgd(1e-2, momentum=0.9, nesterov=True)
    create = partial(trainings.make_state, module, config, optimizer)
    return trainings.make_step(module, config, optimizer), jax.eval_shape(create, jax.random.key(0))


def rss_nbytes() -> int:
    """The most memory that this process has held so far; the operating system counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def depth(config: Any) -> int:
    """The number of a model's layers."""
    return config.depth if isinstance(config, wide_resnet.Config) else config.layers


def plan(
    name: str, sizes: tuple[int, ...], cluster: Cluster, batch_size: int, layers: int | None, options: SolverOptions
) -> Phases:
    """The phases, each run by itself; then the planner as a whole, whose time beyond theirs is the `rest`."""
    module, config = MODELS[name] if name in MODELS else (gpt, gpt.Config.preset(name))
    config = replace(config, layers=layers) if layers else config
    train_step, state = make_step(module, config)
    batch = jax.eval_shape(lambda: module.example_batch(config, batch_size, jax.random.key(0)))
    mesh = named(cluster, *zip("xyz", sizes, strict=False))
    phases = Phases(model=f"{name}, {depth(config)} layers", mesh=str(mesh))
    with phases.timed("trace"):
        traced = trace(train_step, (state, batch), {}, donate_argnums=(0,))
    graph, resharder = traced.graph, Resharder(mesh)
    with phases.timed("grouping"):
        grouping = group(graph)
    with phases.timed("tables"):
        assembly = assemble(graph, mesh, grouping, resharder, traced.state_pairs, regather=False)
    with phases.timed("build and solve"):
        answer = solve(assembly.problem, options)
    with phases.timed("placements and moves"):
        layout = assembly.layout(answer.choice)
        reshardings = resharding_plan(graph, layout, resharder, regather=False)
    with phases.timed("memory"):
        peak(graph, grouping, mesh, layout, reshardings, traced.state_pairs, traced.donated)
    with phases.timed("whole"):
        step = Step(graph=graph, state_pairs=traced.state_pairs, donated=traced.donated)
        full_plan = cheapest_plan("auto", MeshProblems(step=step), [mesh], options)
    parts = [spent for phase, spent in phases.spent.items() if phase not in ("trace", "whole")]
    total = phases.spent.pop("whole")
    phases.spent["rest"] = Spent(
        cpu=max(0.0, total.cpu - sum(p.cpu for p in parts)), wall=max(0.0, total.wall - sum(p.wall for p in parts))
    )
    phases.spent["after tracing"] = total
    phases.spent["in all"] = Spent(
        cpu=total.cpu + phases.spent["trace"].cpu, wall=total.wall + phases.spent["trace"].wall
    )
    phases.sizes = {
        "operators": len(graph.nodes),
        "operator groups": len(grouping.operator_groups),
        "edges": len(assembly.problem.edges),
        "integer programs asked": 1,
        "relaxations solved": answer.relaxations,
    }
    phases.status, phases.objective, phases.gap = full_plan.solution.status, full_plan.solution.objective, full_plan.gap
    phases.rss_nbytes = rss_nbytes()
    return phases


def tables(phases: Phases) -> list[Table]:
    """Phases and their times; then everything else."""
    times = Table("phase", "CPU", "wall", title=f"{phases.model} on {phases.mesh}", title_justify="left")
    for phase, spent in phases.spent.items():
        if phase == "after tracing":
            times.add_section()
        times.add_row(phase, quantities.seconds(spent.cpu), quantities.seconds(spent.wall))
    details = Table(show_header=False)
    for name, number in phases.sizes.items():
        details.add_row(name, f"{number:,}")
    details.add_row("status", f"{phases.status}, gap {100 * phases.gap:.3g} %")
    details.add_row("objective", quantities.seconds(phases.objective))
    details.add_row("process peak", f"{quantities.nbytes(phases.rss_nbytes)} of resident memory so far")
    return [times, details]
