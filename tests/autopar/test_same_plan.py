"""A plan follows from what is asked, not from the machine: its load, its processors, hashes of strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from models import gpt

ROOT = Path(__file__).parents[2]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def stepped(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any) -> tuple[Callable[..., Any], Any, Any]:
    """A step with Adam, its state and its batch, as shapes."""
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (params, jax.eval_shape(optimizer.init, params)), batch


def layered(layers: int = 4, width: int = 512) -> tuple[Callable[..., Any], Any, Any]:
    """A stack of residual layers."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return (x**2).mean()

    return stepped(loss, [(f32(width, 2 * width), f32(2 * width, width))] * layers, f32(32, width))


def transformer() -> tuple[Callable[..., Any], Any, Any]:
    """A GPT of two layers."""
    config, key = replace(gpt.Config.tiny(), layers=2), jax.random.key(0)
    params = jax.eval_shape(lambda key: gpt.init(config, key), key)
    batch = jax.eval_shape(lambda key: gpt.example_batch(config, 32, key), key)
    return stepped(lambda params, batch: gpt.loss(config, params, batch), params, batch)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "one mesh": (lambda: layered(2, 256), {"cluster": "2x4:a100-80g"}),
}
SLOW_CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "stages": (lambda: layered(2, 256), {"cluster": "2x1:v100-16g", "planner": autopar.Auto(pipeline=True)}),
    "a memory limit": (
        lambda: layered(1, 256),
        {"cluster": "1x2:a100-80g", "memory_limit": "3 MiB", "microbatches": 1},
    ),
    "more layers": (layered, {"cluster": "2x4:a100-80g"}),
    "more layers in little memory": (
        lambda: layered(2, 256),
        {"cluster": "1x2:a100-80g", "memory_limit": "5 MiB", "microbatches": 1},
    ),
    "more layers in stages": (layered, {"cluster": "2x1:v100-16g", "planner": autopar.Auto(pipeline=True)}),
    "a transformer": (transformer, {"cluster": "2x4:a100-80g"}),
    "a transformer in little memory": (transformer, {"cluster": "1x4:a100-80g", "memory_limit": "8 MiB"}),
    "a transformer in stages": (transformer, {"cluster": "2x2:v100-16g", "planner": autopar.Auto(pipeline=True)}),
}


def made(names: Sequence[str]) -> Iterator[str]:
    """A line for each case: its plan as JSON, without the seconds that planning took."""
    for name in names:
        make, options = (CASES | SLOW_CASES)[name]
        step, *given = make()
        plan = autopar.parallelize(step, donate_argnums=0, **options).plan(*given)
        yield json.dumps(_untimed(plan.to_json()))


def _untimed(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _untimed(value) for name, value in data.items() if name != "phase_seconds"}
    return [_untimed(value) for value in data] if isinstance(data, list) else data


def lines(names: Sequence[str], seed: str, processors: int | None = None) -> list[str]:
    """What a fresh process makes of these cases."""
    command = [sys.executable, "-m", "tests.autopar.test_same_plan", str(processors or 0), *names]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing else than keep processors busy."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def assert_the_same(names: Sequence[str], beside: int) -> None:
    idle = lines(names, "0", processors=1)
    with busy(beside):
        loaded = lines(names, "random")
    assert len(idle) == len(names)
    for name, one, other in zip(names, idle, loaded, strict=True):
        assert one == other, name


def test_a_plan_is_the_same_beside_busy_processes():
    assert_the_same(list(CASES), 2)


@pytest.mark.slow
def test_a_large_plan_is_the_same_beside_busy_processes():
    assert_the_same(list(SLOW_CASES), 4)


if __name__ == "__main__":
    if int(sys.argv[1]) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    for line in made(sys.argv[2:]):
        print(line)
