"""The numbers that steer planning, each halved and doubled: `python -m benchmarks.settings --help`.

A number that trades quality against time is well chosen where half of it makes plans slower or bounds looser, and twice
of it takes more work for the same plans. Every numeric constant of `passes` and every option that is a number is
varied, except for those of `FIXED`, which says why. Factors and shares near one are varied by their distance from it:
half of 1.1 is 1.05, double of 0.95 is 0.9. Work is calls of Python functions, which a busy machine does not change;
what HiGHS and NumPy do in a call is not in it.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import optax
from rich.table import Table

import autopar
from autopar.rewrite import TracedStep, step_of
from benchmarks.console import json_text, stdout
from benchmarks.networks import drawn
from benchmarks.trainings import make_state, make_step
from models import gpt
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.pipeline import workers
from passes.solver import SolverOptions

ROOT = Path(__file__).parents[1] / "passes"
ROOMS = tuple("layers transforms placement sharding memory solver intra_op inter_op pipeline planners".split())
"""Rooms of `passes` whose numbers steer planning; others describe devices and operators, or lay out text."""

_OF_XLA: Mapping[str, str] = {
    "library_kernels": "ELEMENTS WINDOW", "packing": "ALIGNMENT", "overlap": "HOP", "xla_tpu": "SPLIT_ALIGNMENT",
    "pads_and_joins": "FUSED_JOINS ROW_ELEMENTS", "code_duplication": "MOST_COPIES", "tpu_copies": "MOST_PADDED",
    "gpu_collectives": "COMBINED COMBINED_NBYTES", "tpu_layouts": "ALIGNMENT BATCHED LANES ROWS VECTOR",
    "gpu_costs": "FLOAT32_FLOPS_PER_MICROSECOND FLOAT32_PRODUCT_MICROSECONDS FLOPS_PER_MICROSECOND KERNEL "
    "LIBRARY_MICROSECONDS LONG MOST_FLOPS_PER_MICROSECOND NBYTES_PER_MICROSECOND SENT_MICROSECONDS "
    "SENT_NBYTES_PER_MICROSECOND SHORT SHORT_RATE SIDES WIDENED WIDENED_FLOPS_PER_MICROSECOND",
    "gpu_cycles": "LAUNCH_SECONDS RAGGED_CYCLES STEP TRANSACTION_NBYTES", "gpu_joint_kernels": "OPERANDS SLICED_NBYTES",
    "gpu_times": "APART NARROW_TILE_NBYTES RESIDENT SECTOR_NBYTES SIDE TILE UNROLLED WIDE", "moments": "LOOP_RUNS",
    "gpu_blocks": "COLUMN MOST_ROW_THREADS REREAD REREAD_FAR ROW ROW_ELEMENTS ROW_THREADS THREADS WARP",
    "split_products": "FLOP SPLITS TILE _AMPERE _BLACKWELL _HOPPER", "gpu_joint_products": "FRAGMENT JOINED_NBYTES",
    "on_chip": "FETCHED FETCHED_LATE STAYS", "tpu_chips": "OTHER_KERNELS_NBYTES SLICED_NBYTES SLICE_TABLES",
}  # fmt: skip
"""Numbers with which a module of `passes/memory` imitates XLA."""

FIXED: Mapping[str, str] = dict.fromkeys(
    (
        "layers.even_ranges._ROUNDING", "inter_op.search.CLOSE", "intra_op.extract.EQUAL",
        "intra_op.strategy_filter._ROUNDING", "pipeline.lower_bounds.SLACK", "solver.dominance._ROUNDING",
        "solver.edge_flows._LEG", "solver.elimination._MOST_KEY", "solver.formulation._TOLERANCE",
        "solver.problem.ROUNDING", "solver.problem._EXCESS",
    ),
    "what double precision or a solver loses",
) | dict.fromkeys(
    (f"memory.{module}.{name}" for module, names in _OF_XLA.items() for name in names.split()), "imitates XLA"
) | dict.fromkeys(("inter_op.simulator.MICROSECONDS", "solver.formulation._MICROSECONDS"), "a unit") | dict.fromkeys(
    (
        "intra_op.axis_choices.PARTIAL", "inter_op.schedules.NOTHING", "layers.attention.FUSED",
        "layers.attention.MADE_AGAIN", "layers.sampling.OUTSIDE", "solver.formulation.UNUSED",
        "solver.dual_ascent._FORBIDDEN", "solver.elimination._BEYOND",
    ),
    "stands for a kind, for none, or for infinity",
) | {
    "intra_op.roofline.TILES": "describes a library of GPUs, measured",
    "layers.sampling.SAMPLE_BLOCKS": "two blocks at each end, which the code goes by",
    "memory.holders.HOLDERS": "lines of a report",
    "pipeline.workers._GOODBYE_SECONDS": "no plan waits for it",
    "pipeline.workers.MOST_PROCESSES": "plans do not depend on it; one process works here",
    "planners.infeasible._TIMES": "only what a message proposes",
    "planners.wholes.LARGE": "only where a warning begins",
    "planners.manual.WORTHWHILE": "only of hand-made plans",
    "solver.clock._LEAST_SECONDS": "only where the user gives a time limit",
    "solver.coordinate_descent._MOST_ENTRIES": "bounds what is remembered, which no answer depends on",
    "solver.options.GAP": "varied as `SolverOptions.gap`", "solver.options.RADIUS": "varied as `.tie_radius`",
}  # fmt: skip
"""Numbers that are not varied, and why."""

OPTIONS: tuple[type, ...] = (SolverOptions, autopar.Auto)
"""What a user may set; its numbers are varied where they are defaults."""

HOST, PAIR = "2x2:a100-80g", "2:a100-80g"
LARGE = partial(gpt.Config, vocab_size=4096, sequence_length=256, hidden=1024, heads=16)
SMALL = partial(gpt.Config, vocab_size=512, sequence_length=32, hidden=128, heads=4)

FACTORS = (0.5, 2.0)
NEAR_ONE = (0.75, 2.0)
"""Floating-point numbers in this range are factors or shares of a whole, of which the distance from one is varied."""

Number = int | float
Value = Number | tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A train step with the cluster and planner that it is planned for."""

    step: Callable[..., Any]
    arguments: tuple[Any, Any]
    cluster: str
    planner: Callable[[], autopar.Auto]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A numeric constant of a module of `passes`, named without that prefix, or an option `Class.field`."""

    module: str
    name: str
    value: Value

    def __str__(self) -> str:
        return f"{self.module.removeprefix('passes.')}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One planning: seconds of the planned step and its gap, infinite where no plan was found, and calls."""

    step_seconds: float
    gap: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting multiplied by `factor`: ratios to the plans with the setting as it is, [networks].

    `slower` are of step seconds, `work` of calls; `looser` are differences of the gap."""

    setting: str
    value: Value
    factor: float
    networks: tuple[str, ...]
    slower: tuple[float, ...]
    looser: tuple[float, ...]
    work: tuple[float, ...]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.settings",
        description="Halve and double every number that steers planning and plan a fixed set of networks again: step "
        "seconds of the worst plan by those with the number as it is, the largest change of the gap, and work in calls "
        "of Python functions (least and largest ratio). One process plans.",
        epilog="example: python -m benchmarks.settings --only solver.search --network moe",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="a setting or its module (default: all); again")
    parser.add_argument(
        "--network", action="append", choices=NETWORKS, help="again for more (default: those of the room)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, a line each")
    parser.add_argument("--list", action="store_true", help="print the settings and plan nothing")
    return parser.parse_args(argv)


def _gpt(config: gpt.Config, cluster: str, planner: Callable[[], autopar.Auto]) -> Network:
    """The Adam step of a GPT, from shapes alone."""
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(partial(make_state, gpt, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(gpt.example_batch, config, 32), jax.random.key(0))
    return Network(step=make_step(gpt, config, optimizer), arguments=(state, batch), cluster=cluster, planner=planner)


def _random(number: int, cluster: str, planner: Callable[[], autopar.Auto]) -> Network:
    """A network of `benchmarks.networks`, of seed 1."""
    network = drawn(1, number).network()
    return Network(step=network.step, arguments=(network.state, network.batch), cluster=cluster, planner=planner)


NETWORKS: Mapping[str, Callable[[], Network]] = {
    "attention": lambda: _random(4, HOST, autopar.Auto),
    "shared": lambda: _random(0, HOST, autopar.Auto),
    "skip": lambda: _random(9, HOST, autopar.Auto),
    "siamese": lambda: _random(12, HOST, autopar.Auto),
    "layers": lambda: _gpt(SMALL(layers=4), HOST, autopar.Auto),
    "tied": lambda: _gpt(SMALL(layers=4), HOST, lambda: autopar.Auto(solver=SolverOptions(untied=0))),
    "limit": lambda: _random(13, PAIR, partial(autopar.Auto, memory_limit="420 MB")),
    "stages": lambda: _random(8, "2x1:v100-16g", partial(autopar.Auto, pipeline=True, layers=4)),
    "deep": lambda: _gpt(SMALL(layers=8), "2x1:v100-16g", partial(autopar.Auto, pipeline=True, memory_limit="30 MB")),
    "gpt": lambda: _gpt(LARGE(layers=4), HOST, autopar.Auto),
    "gpt limit": lambda: _gpt(LARGE(layers=2), HOST, partial(autopar.Auto, memory_limit="700 MB")),
    "gpt stages": lambda: _gpt(LARGE(layers=8), "2x1:v100-16g", partial(autopar.Auto, pipeline=True)),
}
"""Networks by what they exercise. The random ones take about a second: a tight relaxation, dense edges, a loose
relaxation whose rest is eliminated, two towers of equal nodes, memory rows and variants, stages. Equal layers, apart
or tied, take two, a deep pipeline that hardly fits takes ten. The others are what people plan, and take minutes."""

FREE = ("attention", "shared", "skip", "siamese", "layers", "tied")
STAGES = ("stages", "deep")
DEFAULT: Mapping[str, tuple[str, ...]] = {
    "solver": (*FREE, "limit"),
    "sharding": FREE,
    "intra_op": ("limit", "skip"),
    "memory": ("limit", "attention"),
    "planners": ("limit", *STAGES),
    **dict.fromkeys(("layers", "transforms", "inter_op", "pipeline"), STAGES),
}
"""The networks that a room's settings are tried on."""


def settings() -> Iterator[Setting]:
    """The numeric constants of the rooms that steer planning, fixed ones included, and the options."""
    for owner in OPTIONS:
        for option in dataclasses.fields(owner):
            value: Any = option.default
            if is_number(value):
                yield Setting(module=owner.__module__, name=f"{owner.__name__}.{option.name}", value=value)
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            module = ".".join(("passes", *file.relative_to(ROOT).with_suffix("").parts))
            for name in _assigned(ast.parse(file.read_text())):
                value = getattr(importlib.import_module(module), name)
                if is_number(value):
                    yield Setting(module=module, name=name, value=value)


def _assigned(tree: ast.Module) -> Iterator[str]:
    """The names that a module assigns at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def is_number(value: object) -> bool:
    """Whether a value is a number or a tuple of numbers."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def scaled(value: Value, factor: float) -> Value:
    """The value times a factor; whole numbers stay whole and above 0, and factors near one change their distance."""
    if isinstance(value, tuple):
        return tuple(scaled(part, factor) for part in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    low, high = NEAR_ONE
    return 1 + factor * (value - 1) if low < value < high else value * factor


@contextmanager
def changed(setting: Setting, value: Value) -> Iterator[None]:
    """Plans with another value of a setting, wherever it was imported to or is the default of an argument."""
    undo: list[Callable[[], None]] = []
    owner, _, option = setting.name.rpartition(".")
    if owner:
        undo.append(_set_default(getattr(sys.modules[setting.module], owner), option, value))
    for name, module in [] if owner else list(sys.modules.items()):
        if name == setting.module or (name.startswith("passes.") and _imports(module, setting)):
            undo.append(_set(module, setting.name, value))
        if name.startswith("passes."):
            undo.extend(_set_defaults(module, setting.value, value))
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _imports(module: ModuleType, setting: Setting) -> bool:
    """Whether a module has imported a setting: the same object under that name, which it does not assign itself."""
    if module.__dict__.get(setting.name) is not setting.value or module.__file__ is None:
        return False
    return setting.name not in set(_assigned(ast.parse(Path(module.__file__).read_text())))


def _set(module: ModuleType, name: str, value: Value) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)


def _set_default(owner: Any, option: str, value: Value) -> Callable[[], None]:
    """Sets the default of an option and returns what puts it back."""
    defaults = owner.__init__.__kwdefaults__
    before = defaults[option]
    defaults[option] = value
    return lambda: defaults.update({option: before})


def _set_defaults(module: ModuleType, before: Value, value: Value) -> Iterator[Callable[[], None]]:
    """Sets the defaults of keyword arguments that are the very object `before`; small integers are shared objects."""
    if isinstance(before, int) and -5 <= before <= 256:
        return
    for member in list(module.__dict__.values()):
        function = member.__init__ if isinstance(member, type) else member
        if not isinstance(function, FunctionType) or member.__module__ != module.__name__:
            continue
        defaults = function.__kwdefaults__ or {}
        for name in [name for name, default in defaults.items() if default is before]:
            defaults[name] = value
            yield lambda defaults=defaults, name=name: defaults.update({name: before})


def _of(name: str, known: dict[str, tuple[TracedStep, Network, Run]]) -> tuple[TracedStep, Network, Run]:
    """A network, traced, with the planning of it as it is: the second one, as the first fills caches."""
    if name not in known:
        network = NETWORKS[name]()
        function = autopar.parallelize(network.step, cluster=network.cluster, donate_argnums=(0,))
        step = function.step(*network.arguments)
        planned(step, network)
        known[name] = step, network, planned(step, network)
    return known[name]


def planned(step: TracedStep, network: Network) -> Run:
    """One planning of a step that knows none of its variants yet."""
    fresh = step_of(step.written, step.structs)
    profile = cProfile.Profile(builtins=False)
    try:
        planned = profile.runcall(network.planner().plan, fresh, parse_cluster(network.cluster))
        seconds, gap = planned.plan.step_seconds, planned.plan.gap
    except PlanningError:
        seconds, gap = math.inf, math.inf
    return Run(step_seconds=seconds, gap=gap, calls=sum(entry.callcount for entry in profile.getstats()))


def rows(chosen: Sequence[Setting], names: Sequence[str]) -> Iterator[Row]:
    """The rows of settings on the networks of those names, by default on those of their room."""
    known: dict[str, tuple[TracedStep, Network, Run]] = {}
    for setting in chosen:
        networks = {name: _of(name, known) for name in names or DEFAULT[str(setting).split(".")[0]]}
        for factor in FACTORS:
            if (value := scaled(setting.value, factor)) == setting.value:
                continue
            with changed(setting, value):
                pairs = [(before, planned(step, network)) for step, network, before in networks.values()]
            yield Row(
                setting=str(setting),
                value=setting.value,
                factor=factor,
                networks=tuple(networks),
                slower=tuple(new.step_seconds / old.step_seconds for old, new in pairs),
                looser=tuple(new.gap - old.gap for old, new in pairs),
                work=tuple(new.calls / old.calls for old, new in pairs),
            )


def table(settings_rows: Sequence[Row]) -> Table:
    """The rows as a table: steps, gap and work are relative to those with the setting as it is."""
    columns = ("setting", "value", "factor", "plans", "slowest step", "fastest step", "gap", "least work", "most work")
    printed = Table(*columns, title="planning with settings halved and doubled", title_justify="left")
    for row in settings_rows:
        printed.add_row(
            row.setting,
            " ".join(f"{number:g}" for number in (row.value if isinstance(row.value, tuple) else (row.value,))),
            f"{row.factor:g}",
            f"{sum(ratio != 1 for ratio in row.slower)} of {len(row.slower)} differ",
            f"{100 * (max(row.slower) - 1):+.2f} %",
            f"{100 * (min(row.slower) - 1):+.2f} %",
            f"{100 * max(row.looser, key=abs):+.2f} %",
            f"{min(row.work):.2f}",
            f"{max(row.work):.2f}",
        )
    return printed


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    workers.MOST_PROCESSES = 1  # the calls of other processes would not be counted
    chosen = [setting for setting in settings() if str(setting) not in FIXED]
    if args.only:
        chosen = [setting for setting in chosen if any(str(setting).startswith(name) for name in args.only)]
    console = stdout()
    if args.list:
        for setting in chosen:
            console.print(f"{setting} = {setting.value}")
        return 0
    settings_rows: list[Row] = []
    for row in rows(chosen, args.network or ()):
        settings_rows.append(row)
        if args.json:
            print(json_text(asdict(row)), flush=True)
    if not args.json:
        console.print(table(settings_rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
