"""Predictions for accelerators beside what their compilers make of the plans: `python -m benchmarks.compilers --help`.

Every model is planned for eight devices of an accelerator under each planner and compiled by XLA's compiler for it,
which runs on a CPU. For one device stand side by side, predicted and compiled: peak bytes, by autopar's model of that
compiler and as the plan was chosen by, bytes sent by kind and axes, flops, and on TPUs the compiler's own estimate of
cycles. What was compiled is kept in compilers.json with the compilers' versions and a digest of the plan. Where the
plan is still the same, predictions are compared with that and no compiler is needed; `--compile` compiles what is new.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.runtime import needed_nbytes
from autopar.tools.estimates import CLOCK_HZ, cycles
from benchmarks import gpt, heaps
from benchmarks.console import stdout
from benchmarks.large import LARGE
from benchmarks.lists import names, some_of
from benchmarks.trainings import MODELS, make_state, make_step
from passes.cluster import parse_cluster
from passes.errors import InternalError, PlanningError
from passes.memory import margin_of, model_of, peak
from passes.placement import group, resharding_plan
from passes.sharding import Resharder
from passes.text import quantities

RESULTS = Path(__file__).with_name("compilers.json")

TARGETS: Mapping[str, str] = {
    "h100": "8:h100",
    "a100": "8:a100-80g",
    "v5e:2x4": "8:tpu-v5e",
    "v5p:2x2x2": "2x4:tpu-v5p",
    "v6e:2x4": "8:tpu-v6e",
}
"""Accelerators as their compilers name eight of them -> clusters."""

PLANNERS: Mapping[str, Any] = {
    "dp": autopar.DataParallel(),
    "zero3": autopar.Zero(3),
    "megatron": autopar.Megatron(data=2, tensor=4),
    "auto": autopar.Auto(),
}

GPT_350M = "gpt-350m"
"""The model of `benchmarks.gpt`, beside those of the zoo: blocks recomputed, AdamW."""

NAMES = (*MODELS, *LARGE, GPT_350M)
LARGE_NBYTES = 100e6
"""The peak from which a step counts for the margin: no smaller one comes near a device's memory."""

QUANTILE = 0.95
"""The share of large steps whose compiled peak is above the predicted one by at most the margin that is printed."""

OVER, OVER_TPU, UNDER = 0.10, 0.15, 0.05
"""The bounds of a predicted peak: at most so much too high, on GPUs and on TPUs, never so much too low."""

ANY_NBYTES = 10**15
"""A limit that no step exceeds: what does not fit is compiled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A step as an accelerator's compiler made it: bytes of one device, tensors sent, flops and seconds.

    `temporaries_nbytes` are as the compiler reports them, and `peak_nbytes` what a device needs: `needed_nbytes`, on
    TPUs with the temporaries of the compiler's account of buffers (benchmarks/heaps.py).
    `unplanned` are tensors beyond the plan; `cycle_seconds` follow from the compiler's own cycles, 0 where it has none.
    """

    target: str
    model: str
    planner: str
    digest: str
    versions: dict[str, str]
    arguments_nbytes: int
    temporaries_nbytes: int
    peak_nbytes: int
    moved: list[dict[str, Any]]
    unplanned: int
    missing: int
    flops: float
    cycle_seconds: float
    compile_seconds: float

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of what was compiled: nothing of it is compiled again."""
        return self.target, self.model, self.planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan's predictions for one device beside what was compiled; `compiled` is None where this plan never was.

    `predicted_nbytes` is the peak by autopar's model of the device's compiler, `planned_nbytes` the one that the search
    went by.
    """

    target: str
    model: str
    planner: str
    planned_nbytes: int
    predicted_nbytes: int
    predicted_compute_seconds: float
    compiled: Compiled | None

    @property
    def error(self) -> float:
        """The relative error of the predicted peak, of the compiled one; negative where it is too low."""
        return self.predicted_nbytes / self.compiled.peak_nbytes - 1 if self.compiled else 0.0

    @property
    def misses(self) -> bool:
        """Whether the predicted peak is out of bounds, or other bytes move than were planned."""
        if self.compiled is None:
            return False
        over = OVER_TPU if self.target.startswith("v") else OVER
        return not -UNDER <= self.error <= over or self.compiled.unplanned + self.compiled.missing > 0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compilers",
        description="Hold predicted memory, bytes sent and compute seconds against the accelerators' own compilers.",
        epilog="example: python -m benchmarks.compilers --targets h100 --models gpt,moe --compile",
    )
    parser.add_argument(
        "--targets", default=tuple(TARGETS), type=names("target", TARGETS), metavar="A,B", help=some_of(TARGETS)
    )
    parser.add_argument("--models", default=NAMES, type=names("model", NAMES), metavar="A,B", help=some_of(NAMES))
    planners = names("planner", PLANNERS)
    parser.add_argument("--planners", default=tuple(PLANNERS), type=planners, metavar="A,B", help=some_of(PLANNERS))
    parser.add_argument("--compile", action="store_true", help="compile new plans, and keep the results")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="where results are kept (default: beside this script)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser.parse_args(argv)


def program(model: str) -> tuple[Any, tuple[Any, ...]]:
    """The training step of a model in bfloat16, free to need any memory, and its arguments, as shapes."""
    if model == GPT_350M:
        step, args = gpt.example()
        return step.replan(memory_limit=ANY_NBYTES), tuple(args)
    chosen, optimizer = {**MODELS, **LARGE}[model], optax.sgd(0.05, momentum=0.9)
    config = replace(chosen.config, dtype="bfloat16")
    state = jax.eval_shape(partial(make_state, chosen.module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(chosen.module.example_batch, config, chosen.batch), jax.random.key(1))
    step = make_step(chosen.module, config, optimizer)
    return autopar.parallelize(step, donate_argnums=0, memory_limit=ANY_NBYTES), (state, batch)


def digest_of(plan: autopar.Plan) -> str:
    """A digest of what a program is made of: the placements of a plan, and nothing that is predicted."""
    operators = [[str(s) for s in (*o.placement.operands, *o.placement.results)] for o in plan.operators]
    sent = sorted([c.kind, list(c.axes), c.nbytes, c.count] for c in plan.collectives)
    facts = [plan.fingerprint, str(plan.mesh), [*map(str, plan.inputs)], [*map(str, plan.outputs)], operators, sent]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """The versions of the compilers here."""
    present: dict[str, str] = {}
    for package in ("jax", "jaxlib", "jax-cuda12-pjrt", "libtpu"):
        with suppress(PackageNotFoundError):
            present[package] = version(package)
    return present


def rows(args: argparse.Namespace, console: Console) -> Iterator[Row]:
    """A row for every case that the command line asks for."""
    known = load(args.results)
    for target in args.targets:
        for model in args.models:
            step, given = program(model)
            for planner in args.planners:
                made = step.replan(cluster=TARGETS[target], planner=PLANNERS[planner])
                try:
                    plan = made.plan(*given)
                except PlanningError as error:
                    console.print(f"left out: {target} {model} {planner}: {error}", soft_wrap=True)
                    continue
                kept = known.get((target, model, planner))
                if kept is not None and kept.digest != digest_of(plan):
                    kept = None
                if kept is None and args.compile:
                    kept = compile_(made, given, (target, model, planner))
                    known[kept.key] = kept
                    save(args.results, known)
                yield row(plan, made.trace(*given), kept, (target, model, planner))


def row(plan: autopar.Plan, traced: Any, kept: Compiled | None, key: tuple[str, str, str]) -> Row:
    """The row of a plan and of what was compiled of it, if anything."""
    target, model, planner = key
    return Row(
        target=target,
        model=model,
        planner=planner,
        planned_nbytes=plan.peak_nbytes,
        predicted_nbytes=modelled_nbytes(plan, traced),
        predicted_compute_seconds=plan.seconds.get("compute", 0.0),
        compiled=kept,
    )


def modelled_nbytes(plan: autopar.Plan, traced: Any) -> int:
    """The peak of one device by the model of its own compiler.

    The plan does not say whether its peak counts weights that are gathered again for the backward pass, so that follows
    from the peak: it is one of the two.
    """
    graph, mesh = traced.graph, plan.mesh
    grouping, resharder = group(graph), Resharder(mesh)
    donated = traced.donated or (False,) * len(graph.inputs)
    for regather in (False, True):
        reshardings = resharding_plan(graph, plan.layout, resharder, regather=regather)
        step = (graph, grouping, mesh, plan.layout, reshardings, traced.state_pairs, donated)
        if peak(*step).peak_nbytes == plan.peak_nbytes:
            return peak(*step, model=model_of(mesh.cluster.group().device)).peak_nbytes
    raise InternalError(f"the bytes of {plan.fingerprint} follow from its placements neither way")


def clock_of(target: str) -> float:
    """The cycles a second of a target's cores, 0 for a GPU, whose compiler counts none."""
    return CLOCK_HZ.get(parse_cluster(TARGETS[target]).group().device.name, 0.0)


def compile_(made: Any, given: tuple[Any, ...], key: tuple[str, str, str]) -> Compiled:
    """A step compiled for its target, and what its compiler says of it."""
    target, model, planner = key
    devices = autopar.topology(parse_cluster(TARGETS[target]))
    began = time.perf_counter()
    lowered = made.replan(devices=devices).lower(*given).unlimited()
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(heaps.options(folder) if clock_of(target) else None)
        seconds = time.perf_counter() - began
        analysis, verification = compiled.memory_analysis(), compiled.verify()
        on_tpu = clock_of(target) > 0
        needed = heaps.needed_nbytes(Path(folder), analysis) if on_tpu else needed_nbytes(compiled.plan, analysis)
    return Compiled(
        target=target,
        model=model,
        planner=planner,
        digest=digest_of(compiled.plan),
        versions=versions(),
        arguments_nbytes=analysis.argument_size_in_bytes,
        temporaries_nbytes=analysis.temp_size_in_bytes,
        peak_nbytes=needed,
        moved=[moved.to_json() for moved in verification.moved],
        unplanned=sum(c.count for c in verification.unplanned),
        missing=len(verification.missing),
        flops=verification.compiled_flops,
        cycle_seconds=cycles(compiled.as_text()) / clock if (clock := clock_of(target)) else 0.0,
        compile_seconds=seconds,
    )


def load(path: Path) -> dict[tuple[str, str, str], Compiled]:
    """The cases compiled before, by target, model and planner."""
    if not path.exists():
        return {}
    kept = (Compiled(**entry) for entry in json.loads(path.read_text())["compiled"])
    return {entry.key: entry for entry in kept}


def save(path: Path, known: Mapping[tuple[str, str, str], Compiled]) -> None:
    """Keeps what was compiled, a case a line."""
    lines = ",\n".join(json.dumps(asdict(known[key])) for key in sorted(known))
    path.write_text(f'{{"compiled": [\n{lines}\n]}}\n')


def table(cases: Sequence[Row]) -> Table:
    """The predictions beside what was compiled, one case a row; what is out of bounds in red."""
    shown = Table(title="predicted and compiled, for one device", title_justify="left", padding=(0, 0))
    for name in ("target", "model", "planner"):
        shown.add_column(name, no_wrap=True)
    for name in ("planned peak", "predicted", "compiled", "error", "bytes sent", "compiled", "compute", "by cycles"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("XLA's rewrites")
    for case in cases:
        kept = case.compiled
        if kept is None:
            planned = map(quantities.nbytes, (case.planned_nbytes, case.predicted_nbytes))
            shown.add_row(case.target, case.model, case.planner, *planned, "-")
            continue
        sent = [sum(moved[side] for moved in kept.moved) for side in ("planned_nbytes", "compiled_nbytes")]
        rewrites = sorted({rewrite for moved in kept.moved for rewrite in moved["rewrites"]})
        shown.add_row(
            case.target,
            case.model,
            case.planner,
            quantities.nbytes(case.planned_nbytes),
            quantities.nbytes(case.predicted_nbytes),
            quantities.nbytes(kept.peak_nbytes),
            f"{100 * case.error:+.1f} %",
            *map(quantities.nbytes, sent),
            quantities.seconds(case.predicted_compute_seconds),
            quantities.seconds(kept.cycle_seconds) if kept.cycle_seconds else "-",
            ", ".join(rewrites),
            style="red" if case.misses else None,
        )
    return shown


def summary(cases: Sequence[Row]) -> Table:
    """Errors of predicted peaks by target and planner: how many are out of bounds, the worst either way."""
    shown = Table(title="errors of peaks", title_justify="left", padding=(0, 0))
    shown.add_column("", no_wrap=True)
    for name in ("cases", "out of bounds", "mean absolute", "most too high", "most too low", "other collectives"):
        shown.add_column(name, justify="right", no_wrap=True)
    judged = [case for case in cases if case.compiled]
    groups = {name: [c for c in judged if name in (c.target, c.planner)] for name in (*TARGETS, *PLANNERS)}
    for name, members in {**groups, "all": judged}.items():
        if members:
            errors = [case.error for case in members]
            others = sum(1 for c in members if c.compiled and c.compiled.unplanned + c.compiled.missing)
            shown.add_row(
                name,
                f"{len(members)}",
                f"{sum(case.misses for case in members)}",
                f"{100 * (sum(map(abs, errors)) / len(errors)):.1f} %",
                f"{100 * max(errors):+.1f} %",
                f"{100 * min(errors):+.1f} %",
                f"{others}",
            )
    return shown


def margin(cases: Sequence[Row], target: str) -> float | None:
    """The share by which compiled peaks of an accelerator exceed predicted ones, in `QUANTILE` of the large, if any."""
    kept = [(c.compiled.peak_nbytes, c.predicted_nbytes) for c in cases if c.target == target and c.compiled]
    above = sorted(compiled / predicted - 1 for compiled, predicted in kept if compiled >= LARGE_NBYTES)
    return max(0.0, above[math.ceil(QUANTILE * len(above)) - 1]) if above else None


def account(cases: Sequence[Row], target: str) -> str:
    """A line on an accelerator: how far compiled peaks exceed predictions, and the share that its plans leave free."""
    free = f"plans leave {100 * left_free(target):.1f} % of their limit free"
    if (share := margin(cases, target)) is None:
        return f"{target}: no compiled peak has 100 MB or more; {free}"
    large = f"{100 * QUANTILE:.0f} % of compiled peaks of 100 MB and more"
    return f"{target}: {large} are at most {100 * share:.1f} % above the predicted ones; {free}"


def left_free(target: str) -> float:
    """The share of a prediction that plans for an accelerator leave free of their limit."""
    return margin_of(parse_cluster(TARGETS[target]).group().device)


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; 1 if a peak is out of bounds, the margin of plans too small, or other bytes move, else 0."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    console = stdout()
    cases = list(rows(args, Console(stderr=True)))
    if args.json:
        print(json.dumps([asdict(case) | {"error": case.error} for case in cases], indent=1))
    else:
        console.print(table(cases), summary(cases))
        console.print(*(account(cases, target) for target in args.targets), sep="\n")
        console.print(
            f"targets: at most {100 * OVER:.0f} % too high (TPU {100 * OVER_TPU:.0f} %), "
            f"never {100 * UNDER:.0f} % too low"
        )
        if new := sum(case.compiled is None for case in cases):
            console.print(
                f"{new} of {len(cases)} plans were never compiled and are not judged: --compile compiles them"
            )
    is_short = any((margin(cases, target) or 0.0) > left_free(target) for target in args.targets)
    return is_short or any(case.misses for case in cases)


if __name__ == "__main__":
    raise SystemExit(main())
