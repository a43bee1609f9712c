"""Steps in microbatches: the numbers of the whole batch at once, and clear words where that cannot be."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from autopar.errors import ArgumentError
from benchmarks.trainings import MODELS, QUICK
from passes.errors import PlanningError
from passes.ir import Graph, Node
from passes.transforms import microbatch
from tests.closeness import assert_close
from tests.sample import slow, some

KEY = jax.random.key(0)
COUPLED = {"wide-resnet"}
SAMPLE = {("moe", 8)}


def loop_of(graph: Graph) -> Node:
    index = microbatch.loop_of(graph)
    assert index is not None
    return graph.nodes[index]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count) if (name, count) in SAMPLE else slow(name, count)
        for name in MODELS
        for count in (2, 8)
        if name not in COUPLED
    ],
)
def test_models_take_the_step_of_the_whole_batch(name: str, count: int):
    with jax.enable_x64(True):
        training = MODELS[name].training("float64", least=True)
        step = autopar.parallelize(training.step, devices=jax.devices()[:1], microbatches=count)
        compiled = step.lower(training.state, training.batch).compile(QUICK)
        assert compiled.plan.microbatches == count
        wanted = jax.jit(training.step, compiler_options=QUICK)(training.state, training.batch)
        assert_close(compiled(training.state, training.batch), wanted)


@pytest.mark.parametrize("planner", [autopar.Auto(), autopar.Zero(3), autopar.DataParallel()])
@pytest.mark.slow
def test_microbatches_are_planned_like_any_loop(planner: Any):
    with jax.enable_x64(True):
        training = MODELS["gpt"].training("float64", least=True)
        step = autopar.parallelize(training.step, planner=planner, devices=jax.devices()[:4], microbatches=2)
        lowered = step.lower(training.state, training.batch)
        compiled = lowered.compile({**UNCOMBINED, **QUICK})
        verify(compiled.plan, compiled.as_text()).check()
        wanted = jax.jit(training.step, compiler_options=QUICK)(training.state, training.batch)
        assert_close(compiled(training.state, training.batch), wanted)


def mlp_step(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"]) @ params["b"]


LOSSES: dict[str, Callable[[Any, Any], jax.Array]] = {
    "sum": lambda p, b: jnp.sum((predict(p, b["x"]) - b["y"]) ** 2),
    "mean": lambda p, b: jnp.mean((predict(p, b["x"]) - b["y"]) ** 2),
    "masked mean": lambda p, b: (
        jnp.sum(jnp.where(b["mask"][:, None], (predict(p, b["x"]) - b["y"]) ** 2, 0)) / jnp.maximum(b["mask"].sum(), 1)
    ),
    "weighted by the batch": lambda p, b: (
        jnp.sum((predict(p, b["x"] - b["x"].mean(0)) - b["y"]) ** 2)
        / jnp.sum(jnp.where(b["mask"], b["y"][:, 0] ** 2, 0.5))
    ),
    "standardised": lambda p, b: jnp.mean((predict(p, (b["x"] - b["x"].mean(0)) / b["x"].std(0)) - b["y"]) ** 2),
    "with weight decay": lambda p, b: jnp.mean((predict(p, b["x"]) - b["y"]) ** 2) + 0.1 * jnp.sum(p["a"] ** 2),
    "dropout": lambda p, b: jnp.sum(
        jax.random.bernoulli(jax.random.key(1), 0.5, b["x"].shape) * b["x"] @ p["a"] @ p["b"] * b["y"]
    ),
    "checkpoint": lambda p, b: jnp.sum(jax.checkpoint(predict)(p, b["x"]) * b["y"]),
    "looked up by position": lambda p, b: jnp.sum((b["x"] + p["a"].T[jnp.arange(16) % 5].sum(0)) @ p["a"] @ p["b"]),
    "sliced at a place": lambda p, b: jnp.sum(
        b["x"] @ p["a"] * jax.lax.dynamic_slice_in_dim(p["b"], jnp.asarray(2), 1, axis=1).T
    ),
    "vmap": lambda p, b: jnp.mean(jax.vmap(lambda x, y: jnp.dot(predict(p, x[None])[0], y))(b["x"], b["y"])),
}


def mlp() -> tuple[Any, Any]:
    """(params, batch) of 16 rows."""
    a, b, x, y, mask = jax.random.split(KEY, 5)
    params = {"a": jax.random.normal(a, (8, 16)), "b": jax.random.normal(b, (16, 4))}
    rows = {"x": jax.random.normal(x, (16, 8)), "y": jax.random.normal(y, (16, 4))}
    return params, rows | {"mask": jax.random.bernoulli(mask, 0.6, (16,))}


@functools.cache
def whole_step(name: str) -> Any:
    params, batch = mlp()
    return jax.jit(mlp_step(LOSSES[name]))(params, batch)


@pytest.mark.parametrize("name", some(LOSSES, 4))
@pytest.mark.parametrize("count", [slow(1), 2, slow(4), slow(16)])
def test_losses_take_the_step_of_the_whole_batch(name: str, count: int):
    with jax.enable_x64(True):
        params, batch = mlp()
        step = mlp_step(LOSSES[name])
        parallel = autopar.parallelize(step, devices=jax.devices()[:1], microbatches=count)
        assert_close(parallel(params, batch), whole_step(name))


def test_megatron_computes_in_the_microbatches_that_were_asked_for():
    params, batch = mlp()
    step, devices = mlp_step(LOSSES["sum"]), jax.devices()[:4]
    parallel = autopar.parallelize(step, planner=autopar.Megatron(data=2, tensor=2), devices=devices, microbatches=4)
    assert parallel.plan(params, batch).microbatches == 4
    with pytest.raises(ArgumentError, match=r"microbatches=4.*says 2"):
        parallel.replan(planner=autopar.Megatron(data=2, tensor=2, microbatches=2)).plan(params, batch)


def test_gradients_are_reduced_once_a_step():
    params, batch = mlp()
    step = autopar.parallelize(
        mlp_step(LOSSES["sum"]), planner=autopar.DataParallel(), devices=jax.devices()[:4], microbatches=4
    )
    plan = step.plan(params, batch)
    assert [(c.kind, c.count) for c in plan.collectives] == [("all_reduce", 1)]
    assert plan.microbatches == 4
    assert re.search(r"microbatches +4\b", plan.format())


@pytest.mark.parametrize("name", ["masked mean", "weighted by the batch"])
def test_sums_over_the_whole_batch_for_the_loop_move_no_rows(name: str):
    with jax.enable_x64(True):
        params, batch = mlp()
        step = mlp_step(LOSSES[name])
        parallel = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:4], microbatches=2)
        compiled = parallel.lower(params, batch).compile({**UNCOMBINED, **QUICK})
        assert {c.kind for c in compiled.plan.collectives} == {"all_reduce"}
        verify(compiled.plan, compiled.as_text()).check()
        assert_close(compiled(params, batch), jax.jit(step)(params, batch))


def test_nodes_of_weights_alone_are_computed_once_before_the_loop():
    params, batch = mlp()

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.sum(b["x"] @ jnp.sinh(p["a"]) @ p["b"] * b["y"])

    graph = autopar.parallelize(mlp_step(loss), cluster="1:a100-80g", microbatches=4).trace(params, batch).graph
    assert "sinh" in {node.primitive for node in graph.nodes}
    assert "sinh" not in {node.primitive for node in loop_of(graph).subgraphs[0].nodes}


def test_a_barrier_shared_with_the_batch_leaves_the_forward_pass_in_the_loop():
    """A recomputed layer's weights pass a barrier with its activations; what casts them then is not computed once."""
    params, batch = mlp()

    def score(p: Any, x: jax.Array) -> jax.Array:
        half = {name: weight.astype(jnp.bfloat16) for name, weight in p.items()}
        return predict(half, x.astype(jnp.bfloat16))

    step = mlp_step(lambda p, b: jnp.sum(jax.checkpoint(score)(p, b["x"]) * b["y"]))
    planner = autopar.DataParallel()
    graph = autopar.parallelize(step, planner=planner, cluster="1:a100-80g", microbatches=4).trace(params, batch).graph
    assert "dot_general" in {node.primitive for node in loop_of(graph).subgraphs[0].nodes}
    assert "dot_general" not in {node.primitive for node in graph.nodes}


def test_random_bits_are_drawn_a_microbatch_at_a_time():
    params, batch = mlp()
    step = autopar.parallelize(mlp_step(LOSSES["dropout"]), cluster="1:a100-80g", microbatches=4)
    (body,) = loop_of(step.trace(params, batch).graph).subgraphs
    assert max(body.types[v].size for node in body.nodes for v in node.outputs) <= 16 * 8 // 4 + 8 * 16


def test_outputs_for_each_row_come_back_in_order():
    params, batch = mlp()

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            out = predict(p, batch["x"])
            return jnp.sum((out - batch["y"]) ** 2), out

        grads, out = jax.grad(loss, has_aux=True)(params)
        return grads, out, jnp.argmax(out, -1), jnp.max(out)

    parallel = autopar.parallelize(step, devices=jax.devices()[:1], microbatches=4)
    assert_close(parallel(params, batch), jax.jit(step)(params, batch), 1e-5)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, param_dtype=jnp.float64)(x)
        x = nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)(x)
        return nn.Dense(4, param_dtype=jnp.float64)(nn.relu(x))


def normed_step(variables: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        out, changed = Normed().apply({**variables, "params": params}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), changed["batch_stats"]

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
    return {"params": params, "batch_stats": stats}, value


def test_stages_refuse_batch_statistics_with_name_and_line():
    with jax.enable_x64(True):
        _, batch = mlp()
        variables = Normed().init(KEY, batch["x"])
        stages = autopar.Pipeline(stages=2, microbatches=4)
        step = autopar.parallelize(normed_step, planner=stages, cluster="4:a100-80g")
        with pytest.raises(PlanningError, match="BatchNorm_0") as caught:
            step.plan(variables, batch)
        assert "test_microbatch.py" in str(caught.value)


def test_independent_microbatches_take_their_own_statistics():
    with jax.enable_x64(True):
        _, batch = mlp()
        variables = Normed().init(KEY, batch["x"])
        step = autopar.parallelize(
            normed_step, microbatches=4, microbatch_semantics="independent", devices=jax.devices()[:2]
        )
        rows = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(4)]
        each = [jax.jit(normed_step)(variables, part) for part in rows]
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *each)
        assert_close(step(variables, batch), mean)


@pytest.mark.parametrize(
    ("count", "step", "words"),
    [
        (3, mlp_step(LOSSES["sum"]), "must divide the batch, which is 16"),
        (2, lambda x, y: x * 2, "this function has none"),
        (2, lambda x, y: jnp.zeros(3), "this function has none"),
    ],
    ids=["divisor", "scalars", "nothing read"],
)
def test_a_step_that_microbatches_cannot_cut_says_why(count: int, step: Callable[..., Any], words: str):
    arguments = mlp() if words.startswith("must") else (jnp.ones(()), jnp.ones(()))
    with pytest.raises(PlanningError, match=words):
        autopar.parallelize(step, cluster="2:a100-80g", microbatches=count).plan(*arguments)


@pytest.mark.parametrize("count", [0, -1, 1.5, "four", True])
def test_counts_are_whole_and_positive(count: Any):
    with pytest.raises(ArgumentError, match="whole number of microbatches"):
        autopar.parallelize(lambda x: x, microbatches=count)


def test_semantics_are_named():
    with pytest.raises(ArgumentError, match="exact"):
        autopar.parallelize(lambda x: x, microbatch_semantics="sloppy")  # pyright: ignore[reportArgumentType]


def test_a_saved_plan_brings_its_microbatches(tmp_path: Any):
    params, batch = mlp()
    step = mlp_step(LOSSES["mean"])
    planned = autopar.parallelize(step, devices=jax.devices()[:2], microbatches=4)
    path = tmp_path / "plan.json"
    planned.plan(params, batch).save(path)
    replayed = autopar.parallelize(step, planner=autopar.Manual(path), devices=jax.devices()[:2])
    assert replayed.plan(params, batch).microbatches == 4
    assert_close(replayed(params, batch), jax.jit(step)(params, batch), 1e-5)
    other = autopar.parallelize(step, planner=autopar.Manual(path), microbatches=2)
    with pytest.raises(ArgumentError, match="says 4"):
        other.plan(params, batch)


@pytest.mark.parametrize("planner", [None, slow(autopar.DataParallel()), slow(autopar.Megatron(data=2, tensor=2))])
def test_keys_and_rates_beside_the_batch_are_not_cut_with_it(planner: Any):
    params, batch = mlp()
    beside = {"key": jax.random.PRNGKey(1), "rates": jnp.linspace(0.1, 0.3, 3)}

    def step(data: Any) -> Any:
        noise = jax.random.normal(data["key"], data["x"].shape)
        loss = mlp_step(LOSSES["mean"])
        return data | {"params": loss(data["params"], {"x": data["x"] + data["rates"][2] * noise, "y": data["y"]})[0]}

    data = {"params": params, "x": batch["x"], "y": batch["y"], **beside}
    parallel = autopar.parallelize(step, planner=planner, microbatches=4, devices=jax.devices()[:4])
    assert_close(parallel(data), jax.jit(step)(data), 1e-5)


def test_a_forward_pass_is_computed_in_microbatches():
    _, batch = mlp()
    step = autopar.parallelize(lambda p, x: jnp.tanh(x @ p["w"]), microbatches=4, devices=jax.devices()[:2])
    weight = {"w": jnp.ones((batch["x"].shape[1], batch["x"].shape[0]))}
    assert_close(step(weight, batch["x"]), jax.jit(lambda p, x: jnp.tanh(x @ p["w"]))(weight, batch["x"]), 1e-6)


def test_stages_refuse_statistics_of_what_is_normalized():
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ p)
        return p - jax.grad(lambda q: jnp.mean((x @ q - (y - y.mean(0)) ** 2) ** 2))(p)

    staged = autopar.parallelize(step, cluster="2:a100-80g", planner=autopar.Pipeline(stages=2, microbatches=2))
    with pytest.raises(PlanningError, match=r"(?s)before all of it is there.*taken for the batch: x float32\[8,4\]"):
        staged.plan(jnp.ones((4, 4)), jnp.ones((8, 4)))


def test_complex_weights_of_two_real_arrays_add_up():
    """The gradient of each is the real part of a complex sum over microbatches."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        weight = params["real"] + 1j * params["imaginary"]
        return jnp.sum(jnp.abs(jnp.fft.fft(x) @ weight) ** 2)

    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"real": jax.random.normal(keys[0], (8, 4)), "imaginary": jax.random.normal(keys[1], (8, 4))}
    arguments = params, jax.random.normal(keys[2], (32, 8))
    for planner in (autopar.Auto(), autopar.DataParallel()):
        got = autopar.parallelize(step, planner=planner, microbatches=2)(*arguments)
        assert_close(got, jax.jit(step)(*arguments), 1e-5)


def merged(factors: Any, w: jax.Array, x: jax.Array, mask: jax.Array) -> Any:
    """LoRA with its two factors merged into the weight: their gradients are made of that of the whole weight."""

    def loss(factors: Any) -> jax.Array:
        return (jnp.tanh(x @ (w + factors["a"] @ factors["b"])).sum(-1) * mask).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, factors, jax.grad(loss)(factors))


def over_a_count_and_state(state: Any, x: jax.Array, mask: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return ((jnp.tanh(x @ w) ** 2).sum(-1) * mask).sum() / (state["count"] + mask.sum() + 1e-6)

    return {"w": state["w"] - 0.1 * jax.grad(loss)(state["w"]), "count": state["count"] + mask.sum()}


def by_running_statistics(state: Any, x: jax.Array, mask: jax.Array) -> Any:
    count = state["count"] + mask.sum()
    mean = state["mean"] + ((x - state["mean"]) * mask[:, None]).sum(0) / count
    grad = jax.grad(lambda w: (jnp.tanh((x - mean) @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": count, "mean": mean}


def test_values_of_sums_are_computed_after_the_loop_or_before_it() -> None:
    draws = np.random.default_rng(0)
    w, x, mask = draws.normal(size=(8, 8)), draws.normal(size=(16, 8)), draws.integers(0, 2, 16).astype(float)
    factors = {"a": draws.normal(size=(8, 2)), "b": draws.normal(size=(2, 8))}
    counted = {"w": w, "count": np.float64(3)}
    cases = (
        (merged, (factors, w, x, mask)),
        (over_a_count_and_state, (counted, x, mask)),
        (by_running_statistics, ({**counted, "mean": x.mean(0)}, x, mask)),
    )
    with jax.enable_x64(True):
        for step, arguments in cases:
            assert_close(autopar.parallelize(step, microbatches=4)(*arguments), jax.jit(step)(*arguments))


@pytest.mark.parametrize("coupling", ["exact", "independent"])
def test_rows_that_are_picked_from_all_of_the_batch_are_refused_with_a_way_out(coupling: Any) -> None:
    def mixed(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        order = jax.random.permutation(key, len(x))
        return w - 0.1 * jax.grad(lambda w: jnp.tanh(0.7 * x @ w + 0.3 * (x @ w)[order]).mean())(w)

    step = autopar.parallelize(mixed, microbatches=4, microbatch_semantics=coupling)
    with pytest.raises(PlanningError, match="rows are picked by an index that may be of any row") as caught:
        step.plan(jnp.ones((8, 8)), jnp.ones((16, 8)), jax.random.key(0))
    assert "pick the rows before the step and pass them beside the others" in str(caught.value)
    assert "independent" not in str(caught.value)
