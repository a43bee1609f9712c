"""Times of steps whose layers are a loop, by what is kept for the backward pass: `python -m benchmarks.scanned_layers`.

A loop over layers writes what its iterations keep for the backward pass into stacked arrays, which the backward pass
reads. This script compares that with recomputation: in measured seconds of one CPU device, and with `--targets` in the
estimates of accelerators' compilers, each beside what the plan predicts.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import autopar
from autopar.tools.estimates import GPU_OPTIONS, seconds_of
from autopar.tools.topologies import topology
from benchmarks.console import stdout
from benchmarks.lists import names, words
from benchmarks.one_device import Runner
from benchmarks.timing import interleaved, ratio
from benchmarks.trainings import MODELS, Training
from passes.text import quantities
from passes.transforms import KEPT, Kept

LSTM = "lstm"
SCANNED = ("gpt-scan", "llama-scan", LSTM)
"""Models whose layers are a loop: of the zoo, and a recurrent network of this script's own."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scanned_layers",
        description="Steps of models whose layers are a loop, with everything kept for the backward pass, products "
        "with weights, or inputs of layers alone: predicted, and measured on one CPU device or estimated by the "
        "compilers of accelerators.",
        epilog="example: python -m benchmarks.scanned_layers --targets h100,tpu-v5e",
    )
    parser.add_argument(
        "--models",
        default=SCANNED,
        type=names("model", (*MODELS, LSTM)),
        metavar="A,B",
        help=f"of {', '.join((*MODELS, LSTM))} (default: {','.join(SCANNED)})",
    )
    parser.add_argument(
        "--targets",
        default=(),
        type=words,
        metavar="A,B",
        help="accelerators whose compilers estimate the step, such as h100 or tpu-v5e (default: none)",
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="steps of each, in turn (default: 20)")
    return parser.parse_args(argv)


def lstm(width: int = 256, tokens: int = 64, batch: int = 32) -> Training:
    """Two layers of an LSTM and a projection, trained by gradient descent."""

    def cell(weights: Any, carry: Any, x: jax.Array) -> Any:
        hidden, memory = carry
        gates = x @ weights["x"] + hidden @ weights["hidden"] + weights["bias"]
        enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (hidden, memory), hidden

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        carry = (jnp.zeros((batch, width)),) * 2
        for layer in weights["layers"]:
            _, x = jax.lax.scan(lambda carry, x, layer=layer: cell(layer, carry, x), carry, x)
        return jnp.mean((x @ weights["out"]) ** 2)

    def step(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    draw = np.random.default_rng(0).normal

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(0.1 * draw(size=shape), "float32")

    layer = {"x": weight(width, 4 * width), "hidden": weight(width, 4 * width), "bias": weight(4 * width)}
    return Training(
        step=step, state={"layers": [layer, layer], "out": weight(width, width)}, batch=weight(tokens, batch, width)
    )


def measured(training: Training, rounds: int) -> list[tuple[str, ...]]:
    """A row for each choice of what is kept: predicted and measured seconds, and the latter's ratio to keeping all."""
    forms = {kept: _lowered(training, kept, devices=jax.devices()[:1]) for kept in KEPT}
    compiled = {kept: form.compile() for kept, form in forms.items()}
    runners = {kept: Runner(step, training.state, training.batch) for kept, step in compiled.items()}
    seconds = interleaved(runners, rounds)
    rows = list[tuple[str, ...]]()
    for kept, step in compiled.items():
        middle, (low, high) = ratio(seconds, kept, KEPT[0])
        spent = quantities.seconds(statistics.median(seconds[kept]))
        rows.append((kept, quantities.seconds(step.plan.step_seconds), spent, f"{middle:.2f} ({low:.2f}-{high:.2f})"))
    return rows


def estimated(training: Training, target: str) -> list[tuple[str, ...]]:
    """A row for each choice of what is kept: predicted seconds, the compiler's, and their ratio to keeping all."""
    options = None if target.startswith("tpu-") else dict(GPU_OPTIONS)
    devices, cluster = topology(f"8:{target}")[:1], f"1:{target}"
    rows, first = list[tuple[str, ...]](), 0.0
    for kept in KEPT:
        lowered = _lowered(training, kept, devices=devices, cluster=cluster)
        compiled = lowered.compile(options)
        seconds = seconds_of(compiled.as_text(), target)
        first = first or seconds
        predicted = quantities.seconds(compiled.plan.step_seconds)
        rows.append((kept, predicted, quantities.seconds(seconds), f"{seconds / first:.2f}"))
    return rows


def _lowered(training: Training, kept: Kept, **where: Any) -> Any:
    """The step with layers that keep that, on one device."""
    step = autopar.parallelize(training.step, planner=autopar.DataParallel(), remat=kept, **where)
    return step.lower(training.state, training.batch)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each model and device."""
    args = arguments(list(argv) if argv is not None else None)
    for name in args.models:
        training = lstm() if name == LSTM else MODELS[name].training()
        for target in ("", *args.targets):
            source = "measured" if not target else f"by the compiler of {target}"
            shown = Table(title=f"{name}, {source}", title_justify="left")
            for heading in ("kept", "predicted", source, "/ everything kept"):
                shown.add_column(heading, justify="left" if heading == "kept" else "right")
            for row in estimated(training, target) if target else measured(training, args.rounds):
                shown.add_row(*row)
            stdout().print(shown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
