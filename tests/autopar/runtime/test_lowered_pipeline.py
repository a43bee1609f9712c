"""Pipelines lowered and compiled before they run: they give what calls give, and say what each submesh needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.runtime import Limit
from tests.sample import slow


def train_step(params: Any, batch: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden = batch
        for layer in params:
            hidden = jnp.tanh(hidden @ layer["up"]) @ layer["down"]
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0).normal
    layer = {"up": (64, 128), "down": (128, 64)}
    params = [{name: 0.1 * jnp.asarray(draw(size=shape), "float32") for name, shape in layer.items()} for _ in range(4)]
    return params, jnp.asarray(draw(size=(64, 64)), "float32")


@pytest.fixture(scope="module")
def compiled() -> Any:
    planner = autopar.Pipeline(stages=4, microbatches=4, schedule="gpipe")
    return autopar.parallelize(train_step, planner=planner).lower(*arguments()).compile()


def test_a_compiled_pipeline_gives_what_jit_gives(compiled: Any):
    pairs = zip(
        *(jax.tree.leaves(run(*arguments())) for run in (compiled, jax.jit(train_step))),
        strict=True,
    )
    for ours, jits in pairs:
        np.testing.assert_allclose(ours, jits, rtol=1e-5, atol=1e-6)


def test_a_compiled_pipeline_refuses_arguments_of_other_shapes_types_and_structures(compiled: Any):
    params, batch = arguments()
    for rows in (32, 128):
        with pytest.raises(autopar.ArgumentError, match=rf"float32\[{rows},64\]: the program was compiled for float32"):
            compiled(params, jnp.resize(batch, (rows, 64)))
    with pytest.raises(autopar.ArgumentError, match="bfloat16"):
        compiled(params, batch.astype("bfloat16"))
    with pytest.raises(autopar.ArgumentError, match="with the structure"):
        compiled([tuple(layer.values()) for layer in params], batch)


def test_a_compiled_pipeline_is_made_ready_to_run_once(compiled: Any):
    compiled(*arguments())
    assert compiled.executable() is compiled.executable()


def test_every_submesh_has_a_peak_and_every_segment_an_account(compiled: Any):
    assert list(compiled.peaks) == [0, 1, 2, 3]
    assert all(nbytes > 0 for nbytes in compiled.peaks.values())
    assert compiled.memory_report().count("\n") >= 4
    assert [name for name, _ in compiled.memory_analysis()]
    assert compiled.as_text().count("HloModule") == len(compiled.executables)


def test_every_stage_sends_what_it_planned(compiled: Any):
    verifications = compiled.verify()
    assert len(verifications) == 4
    for verification in verifications:
        verification.check()
        assert verification.rows


@pytest.mark.parametrize("schedule", ["1f1b", slow("zero-bubble-h1")])
def test_a_sum_that_both_passes_read_is_reduced_once(schedule: str):
    planner = autopar.Pipeline(stages=2, microbatches=4, schedule=schedule)
    verifications = autopar.parallelize(train_step, planner=planner).lower(*arguments()).verify()
    for verification in verifications:
        assert verification.rows
        assert all(row.planned for row in verification.rows)
        verification.check()


@pytest.mark.slow
def test_a_limit_is_kept_by_the_compiled_program(compiled: Any):
    needed = max(compiled.peaks.values())
    limit = Limit(nbytes=needed - 1, words="memory_limit", source="", searched=False)
    limited = replace(compiled.lowered, limit=limit)
    with pytest.raises(autopar.OverBudgetError, match=f"{needed:,} bytes"):
        limited.compile()
    assert max(limited.unlimited().compile().peaks.values()) == needed
    assert replace(limited, limit=replace(limit, nbytes=needed)).compile()


def test_a_lowered_pipelines_text_names_its_segments():
    planner = autopar.Pipeline(stages=2, microbatches=4)
    text = autopar.parallelize(train_step, planner=planner).lower(*arguments()).as_text()
    assert "// " in text
    assert "stablehlo" in text
