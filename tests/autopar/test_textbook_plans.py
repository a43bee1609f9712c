"""Plans by hand send what their textbook says and nothing else: no activation where the batch alone is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
import pytest

import autopar
from benchmarks.trainings import MODELS, Model, make_state, make_step

METRICS_NBYTES = 64
"""What a loss, its parts and a count of tokens take."""

RECOMPUTING = ("plain", "jax.checkpoint", "remat=inputs", "remat=matmuls")


def planned(model: Model, planner: Any, *, recomputing: str = "plain", dtype: str = "float32", **options: Any) -> Any:
    """(the plan of a model's least training for 8 GPUs, the shapes of its parameters)."""
    config = replace(model.least, dtype=dtype, **({"remat": True} if recomputing == "jax.checkpoint" else {}))
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(partial(make_state, model.module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, config, model.least_batch), jax.random.key(1))
    if recomputing.startswith("remat="):
        options["remat"] = recomputing.removeprefix("remat=")
    step = make_step(model.module, config, optimizer)
    function = autopar.parallelize(step, cluster="8:a100-80g", planner=planner, donate_argnums=(0,), **options)
    return function.plan(state, batch), state[0]


def nbytes(arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def sent(plan: Any, *kinds: str, over: str = "data") -> int:
    """Bytes that come out of the collectives of some kinds along an axis."""
    return sum(c.nbytes * c.count for c in plan.collectives if c.kind in kinds and over in c.axes)


def kinds(plan: Any, over: str = "data") -> set[str]:
    return {c.kind for c in plan.collectives if over in c.axes}


def with_recomputation(names: Any) -> list[Any]:
    """Models as they are and recomputed in each way that they have."""
    return [
        pytest.param(name, recomputing, id=f"{name}-{recomputing}")
        for name in names
        for recomputing in RECOMPUTING
        if recomputing != "jax.checkpoint" or hasattr(MODELS[name].least, "remat")
    ]


NORMALISED_BY_BATCH = "wide-resnet"


@pytest.mark.parametrize(("name", "recomputing"), with_recomputation(n for n in MODELS if n != NORMALISED_BY_BATCH))
def test_data_parallelism_reduces_each_gradient_once_and_sends_nothing_else(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.DataParallel(), recomputing=recomputing, dtype="bfloat16")
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES
    repeats = MODELS[name].least.layers if name.endswith("-scan") else 1
    assert sum(c.count for c in plan.collectives if c.nbytes > 4) <= len(jax.tree.leaves(params)) * repeats


@pytest.mark.parametrize("name", ["gpt"])
def test_data_parallelism_reduces_after_the_last_microbatch(name: str):
    model = replace(MODELS[name], least_batch=16)
    plan, params = planned(model, autopar.DataParallel(), recomputing="jax.checkpoint", microbatches=2)
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES


@pytest.mark.parametrize("recomputing", RECOMPUTING)
@pytest.mark.parametrize("name", ["gpt", "llama-scan", "moe"])
def test_zero_fetches_weights_and_no_activation(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.Zero(3), recomputing=recomputing)
    assert kinds(plan) <= {"all_gather", "all_reduce", "reduce_scatter"}
    assert sent(plan, "all_gather") <= 2 * nbytes(params)
    assert sent(plan, "all_reduce") + 8 * sent(plan, "reduce_scatter") <= nbytes(params) + METRICS_NBYTES


@pytest.mark.parametrize("recomputing", RECOMPUTING)
@pytest.mark.parametrize("name", ["gpt", "llama-scan", "moe"])
def test_megatron_sends_gradients_alone_along_data(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.Megatron(data=2, tensor=4), recomputing=recomputing)
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES
