"""Planned steps compared with `jax.jit`, planner by planner: `python -m benchmarks.equality --help`.

A tiny GPT takes a few consecutive steps from one state twice: as planned for 8 virtual CPU devices, and by plain
`jax.jit` on one. Beside the differences stand the collectives that are planned and those that XLA compiled; one beyond
the plan is data that XLA moves on its own, at a cost that the plan does not know.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

import jax
import numpy as np
import optax
from rich.table import Table

import autopar
from autopar.checks import hlo, verify
from benchmarks.console import stdout
from models import gpt

DEVICES = 8
BATCH = 8
STEPS = 5
BOUNDS = {"float64": 1e-10, "float32": 1e-5}

PLANNERS: dict[str, Any] = {
    "auto": autopar.Auto(),
    "dp": autopar.DataParallel(),
    "megatron 2x4": autopar.Megatron(data=2, tensor=4),
    "zero3": autopar.Zero(3),
}

OPTIMIZERS = ("sgd", "adamw+clip")

# The gradient of a key's bias is zero but for rounding, as a softmax ignores what all its inputs share. Adam divides by
# a gradient's own size, so with its usual epsilon, 1e-8, the noise of float32 becomes steps: plain jax.jit in float32
# is then 5e-4 from jax.jit in float64 in that bias (2e-6 with this epsilon), and 1e-5 would test rounding, not plans.
EPSILON = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A train step, before it is planned; `dropout` is the probability of dropping a feature, `epsilon` AdamW's."""

    optimizer: str
    dropout: float
    precision: str
    epsilon: float = EPSILON


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The relative differences of a planned program from `jax.jit` over all its steps, and the collectives of a step.

    `unplanned` counts those that were compiled beyond what was planned, by kind, mesh axes, dtype and bytes; `seconds`
    are those of planning, compiling and running.
    """

    program: Program
    planner: str
    mesh: str
    parameters: float
    loss: float
    planned: int
    compiled: int
    unplanned: int
    seconds: float

    @property
    def bound(self) -> float:
        """The largest difference that is allowed in this precision."""
        return BOUNDS[self.program.precision]

    @property
    def misses(self) -> list[str]:
        """The results out of bounds, in words with both numbers."""
        where = f"{self.planner}, {self.program.optimizer}, dropout {self.program.dropout}, {self.program.precision}"
        misses = [
            f"{where}: {name} differ by {value:.1e}, bound {self.bound:.0e}"
            for name, value in (("parameters", self.parameters), ("losses", self.loss))
            if not value <= self.bound
        ]
        if self.unplanned:
            misses.append(f"{where}: {self.unplanned} unplanned collectives, bound 0")
        return misses


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.equality",
        description=f"Compare {STEPS} steps of a tiny GPT as autopar plans them for {DEVICES} virtual CPU devices with "
        "plain jax.jit, and the planned collectives with the compiled ones. Exits with 1 if a difference is above its "
        f"bound ({BOUNDS['float64']:.0e} in float64, {BOUNDS['float32']:.0e} in float32) or a collective is unplanned.",
        epilog="example: python -m benchmarks.equality --planner auto --precision float64",
    )
    for name, choices, meaning in (
        ("planner", tuple(PLANNERS), "the planner"),
        ("optimizer", OPTIMIZERS, "what updates the parameters"),
        ("dropout", ("off", "on"), "whether features are dropped, with probability 0.1"),
        ("precision", tuple(BOUNDS), "of parameters and of computation"),
    ):
        parser.add_argument(
            f"--{name}", choices=choices, action="append", help=f"{meaning}; give it again for more (default: all)"
        )
    parser.add_argument(
        "--epsilon",
        default=EPSILON,
        type=float,
        metavar="X",
        help="of AdamW; with optax's 1e-8 a key's bias, whose gradient is only rounding error, takes steps of noise, "
        "and float32 misses its bound under jax.jit itself (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only adamw+clip with dropout, in float64 (about 1 minute)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    chosen = parser.parse_args(argv)
    chosen.planner = chosen.planner or list(PLANNERS)
    chosen.optimizer = chosen.optimizer or (["adamw+clip"] if chosen.quick else list(OPTIMIZERS))
    chosen.dropout = chosen.dropout or (["on"] if chosen.quick else ["off", "on"])
    chosen.precision = chosen.precision or (["float64"] if chosen.quick else list(BOUNDS))
    return chosen


def make_config(program: Program) -> gpt.Config:
    """A GPT of 2 layers whose every dimension is a multiple of 8."""
    return gpt.Config(
        vocab_size=64,
        sequence_length=16,
        hidden=32,
        layers=2,
        heads=8,
        dropout=program.dropout,
        dtype=program.precision,
        param_dtype=program.precision,
    )


def make_state(program: Program, config: gpt.Config, key: jax.Array) -> tuple[Any, Any]:
    """The state at step 0."""
    params = gpt.init(config, key)
    return params, make_optimizer(program).init(params)


def make_optimizer(program: Program) -> optax.GradientTransformation:
    """The program's optimizer."""
    match program.optimizer:
        case "sgd":
            return optax.sgd(0.1, momentum=0.9)
        case "adamw+clip":
            return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=program.epsilon))
        case _:
            raise ValueError(f"no optimizer is called {program.optimizer!r}; there are {', '.join(OPTIMIZERS)}")


def make_step(program: Program) -> Callable[..., Any]:
    """An ordinary train step (state, batch, key) -> (state, loss); state is (parameters, optimizer's state)."""
    config, optimizer = make_config(program), make_optimizer(program)

    def train_step(state: Any, batch: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(lambda params: gpt.loss(config, params, batch, key))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return train_step


def walk(step: Callable[..., Any], state: Any, batch: Any) -> Iterator[tuple[Any, float]]:
    """(parameters, loss) after each step, as NumPy arrays and a float."""
    for i in range(STEPS):
        state, loss = step(state, batch, jax.random.key(i))
        yield jax.tree.map(np.asarray, state[0]), float(loss)


def difference(ours: Any, plain: Any) -> float:
    """The largest difference of any two arrays, relative to the plain one's largest magnitude; NaN where one has it."""

    def relative(ours: Any, plain: Any) -> float:
        ours, plain = np.asarray(ours, np.float64), np.asarray(plain, np.float64)
        worst = float(np.max(np.abs(ours - plain)))
        return worst / scale if (scale := float(np.max(np.abs(plain)))) else worst

    return float(np.max([relative(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)]))


def compare(program: Program, planners: list[str]) -> Iterator[Result]:
    """A result for each planner of one program, which `jax.jit` runs once for all of them."""
    config, step = make_config(program), make_step(program)
    state = jax.jit(lambda key: make_state(program, config, key))(jax.random.key(0))
    batch = gpt.example_batch(config, BATCH, jax.random.key(9))
    plain = list(walk(jax.jit(step), state, batch))
    for planner in planners:
        start = time.perf_counter()
        lowered = autopar.parallelize(step, planner=PLANNERS[planner]).lower(state, batch, jax.random.key(0))
        compiled = lowered.compile(dict(hlo.UNCOMBINED))
        ours = list(walk(compiled, state, batch))
        verification = verify(lowered.plan, compiled.as_text())
        yield Result(
            program=program,
            planner=planner,
            mesh=mesh_text(lowered.plan),
            parameters=difference([params for params, _ in ours], [params for params, _ in plain]),
            loss=difference([loss for _, loss in ours], [loss for _, loss in plain]),
            planned=sum(row.planned for row in verification.rows),
            compiled=sum(row.compiled for row in verification.rows),
            unplanned=sum(collective.count for collective in verification.unplanned),
            seconds=time.perf_counter() - start,
        )


def mesh_text(plan: Any) -> str:
    """The mesh as `2x4`."""
    return "x".join(map(str, plan.mesh.sizes))


def table(results: list[Result]) -> Table:
    """All results, one a row; what is out of bounds in red."""
    table = Table(
        title=f"{STEPS} steps of a tiny GPT: largest relative difference from jax.jit, and collectives a step",
        title_justify="left",
        padding=(0, 0),
    )
    for name in ("planner", "mesh", "optimizer", "dropout", "precision"):
        table.add_column(name, no_wrap=True)
    for name in ("params", "loss", "planned", "compiled", "unplanned", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.planner,
            r.mesh,
            r.program.optimizer,
            "on" if r.program.dropout else "off",
            r.program.precision,
            f"{r.parameters:.0e}",
            f"{r.loss:.0e}",
            str(r.planned),
            str(r.compiled),
            str(r.unplanned),
            f"{r.seconds:.0f} s",
            style="red" if r.misses else None,
        )
    return table


def main(argv: list[str] | None = None) -> int:
    """Prints the table that the command line asks for; 1 if anything is out of bounds."""
    args = arguments(argv)
    console = stdout()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    start = time.perf_counter()
    results: list[Result] = []
    programs = list(product(args.precision, args.optimizer, args.dropout))
    for done, (precision, optimizer, dropout) in enumerate(programs):
        program = Program(
            optimizer=optimizer,
            dropout=0.1 if dropout == "on" else 0.0,
            precision=precision,
            epsilon=args.epsilon,
        )
        with console.status(f"program {done + 1} of {len(programs)}"), jax.enable_x64(precision == "float64"):
            results.extend(compare(program, args.planner))
    misses = [miss for r in results for miss in r.misses]
    if args.json:
        rows = [{f.name: getattr(r, f.name) for f in fields(r)} | {"program": asdict(r.program)} for r in results]
        print(
            json.dumps(
                {"steps": STEPS, "epsilon": args.epsilon, "bounds": BOUNDS, "results": rows, "misses": misses}, indent=1
            )
        )
        return bool(misses)
    console.print(table(results))
    console.print("planned, compiled: collectives of a step; unplanned: compiled beyond the plan, which must be none")
    if "adamw+clip" in args.optimizer:
        console.print(f"AdamW has epsilon {args.epsilon:g}, not optax's 1e-08: see --help")
    for precision in args.precision:
        worst = np.max([(r.parameters, r.loss) for r in results if r.program.precision == precision])
        console.print(f"{precision}: largest relative difference {worst:.1e}, bound {BOUNDS[precision]:.0e}")
    console.print(f"in all {time.perf_counter() - start:.0f} s")
    for miss in misses:
        console.print(f"MISSED {miss}", style="red", soft_wrap=True)
    return bool(misses)


if __name__ == "__main__":
    raise SystemExit(main())
