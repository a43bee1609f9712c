"""Pipelines of models whose layers are one loop: every stage runs its own shorter loop over its own weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import Pipeline
from autopar.frontend import trace
from autopar.rewrite import in_pieces
from autopar.rewrite.chunked_scans import n_pieces
from benchmarks.trainings import MODELS, QUICK, training
from passes.ir import Graph, Node
from passes.transforms import loop_of, stages
from tests.closeness import assert_close
from tests.sample import half, slow, some

KEY = jax.random.key(0)
WIDTH = 8


def mlp(layers: int = 4, rows: int = 8) -> tuple[Any, Any]:
    """(params, batch): a first layer, a stack and a last layer."""
    keys = jax.random.split(KEY, 6)
    params = {
        "first": jax.random.normal(keys[0], (4, WIDTH)),
        "stack": {
            "w": jax.random.normal(keys[1], (layers, WIDTH, WIDTH)) / 3,
            "b": jax.random.normal(keys[2], (layers, WIDTH)) / 3,
        },
        "last": jax.random.normal(keys[3], (WIDTH, 4)),
    }
    return params, {"x": jax.random.normal(keys[4], (rows, 4)), "y": jax.random.normal(keys[5], (rows, 4))}


def layer(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
    x = x + jnp.tanh(x @ p["w"] + p["b"])
    return x, jnp.mean(x**2)


def score(params: Any, batch: Any, step: Callable[..., Any] = layer, **options: Any) -> jax.Array:
    x, _ = jax.lax.scan(step, batch["x"] @ params["first"], params["stack"], **options)
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def reversed_order(params: Any, batch: Any) -> jax.Array:
    return score(params, batch, reverse=True)


def unrolled(params: Any, batch: Any) -> jax.Array:
    return score(params, batch, unroll=3)


def checkpointed(params: Any, batch: Any) -> jax.Array:
    return score(params, batch, jax.checkpoint(layer))


def with_auxiliary(params: Any, batch: Any) -> jax.Array:
    """What every layer adds to the loss, and what the weights do."""
    x, extra = jax.lax.scan(layer, batch["x"] @ params["first"], params["stack"])
    decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params["stack"]))
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2) + 0.1 * jnp.sum(extra) + 0.01 * decay


def twice(params: Any, batch: Any) -> jax.Array:
    """The same weights in two loops, cast on the way."""
    x = batch["x"] @ params["first"]
    for _ in range(2):
        x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda w: w * 0.5, params["stack"]))
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def held(params: Any, batch: Any) -> jax.Array:
    """All layers read one mask, and one matrix that is no stack."""

    def step(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x, _ = layer(x * mask, p)
        return x @ params["first"].T @ params["first"] / 8, None

    mask = (batch["x"] > 0).astype(batch["x"].dtype).sum(-1, keepdims=True)
    x, _ = jax.lax.scan(step, batch["x"] @ params["first"], params["stack"])
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def shrinking(params: Any, batch: Any) -> jax.Array:
    """What the layers return is read whole, and its gradient comes back whole."""
    x, seen = jax.lax.scan(lambda x, p: (layer(x, p)[0],) * 2, batch["x"] @ params["first"], params["stack"])
    mixed = jnp.einsum("lbw,lw->bw", seen, params["stack"]["b"])
    return jnp.mean(((x + mixed) @ params["last"] - batch["y"]) ** 2)


def recomputed(params: Any, batch: Any) -> jax.Array:
    """The whole loop is computed again in the backward pass."""
    return jax.checkpoint(score)(params, batch)


def dropped(params: Any, batch: Any) -> jax.Array:
    """A key for every layer."""

    def step(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        weights, key = p
        return layer(x, weights)[0] * jax.random.bernoulli(key, 0.8, x.shape), None

    keys = jax.random.split(KEY, params["stack"]["w"].shape[0])
    x, _ = jax.lax.scan(step, batch["x"] @ params["first"], (params["stack"], keys))
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


# Kernels of their own, as mixed precision has them: of a stack, what is behind a barrier comes in pieces, too.
WRITTEN = optax.stateless(lambda updates, _: jax.tree.map(jax.lax.optimization_barrier, updates))
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw+clip": optax.chain(optax.clip_by_global_norm(0.5), WRITTEN, optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def step_of(loss: Callable[[Any, Any], jax.Array], optimizer: str = "sgd") -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = OPTIMIZERS[optimizer].update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "gradient": grads["stack"]["w"]}

    return step


def assert_equals_jit(
    loss: Callable[[Any, Any], jax.Array],
    planner: Any,
    *,
    optimizer: str = "sgd",
    layers: int = 4,
    steps: int = 2,
    n_devices: int = 4,
) -> Any:
    with jax.enable_x64(True):
        params, batch = mlp(layers)
        step = step_of(loss, optimizer)
        parallel = autopar.parallelize(step, planner=planner, devices=jax.devices()[:n_devices])
        ours = theirs = (params, OPTIMIZERS[optimizer].init(params))
        plain = jax.jit(step, compiler_options=QUICK)
        for _ in range(steps):
            (ours, told), (theirs, wanted) = parallel(ours, batch), plain(theirs, batch)
            assert_close((ours, told), (theirs, wanted))
        return ours


TWO = Pipeline(stages=2, microbatches=2, submeshes=(1, 1))


LOSSES = [with_auxiliary, twice, shrinking, score, reversed_order, unrolled, checkpointed, held, recomputed, dropped]


@pytest.mark.parametrize("loss", some(LOSSES, 1), ids=lambda f: f.__name__)
def test_losses(loss: Callable[..., jax.Array]):
    assert_equals_jit(loss, TWO)


@pytest.mark.parametrize("optimizer", some(["adafactor", "adamw+clip"], 1))
def test_optimizers(optimizer: str):
    assert_equals_jit(checkpointed, TWO, optimizer=optimizer)


PLANNERS = [
    Pipeline(stages=4, microbatches=4, schedule="zero-bubble-h1"),
    Pipeline(stages=3, microbatches=2, submeshes=(1, 1, 2)),
    Pipeline(stages=2, microbatches=1),
    Pipeline(stages=2, microbatches=4, schedule="zero-bubble-h1", submeshes=(1, 1)),
    Pipeline(stages=4, microbatches=2, schedule="gpipe"),
    Pipeline(stages=3, microbatches=2, submeshes=(1, 1, 1)),
    Pipeline(stages=2, microbatches=4, interleave=2),
]


@pytest.mark.parametrize(
    "planner", some(PLANNERS, 0), ids=lambda p: f"{p.stages}-{p.microbatches}-{p.schedule}-{p.submeshes}"
)
def test_planners(planner: Any):
    assert_equals_jit(score, planner)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 6, 7, 11])
def test_depths(layers: int):
    assert_equals_jit(score, Pipeline(stages=4, microbatches=2), layers=layers)


MODEL_CASES = [
    ("gpt-scan", 4, Pipeline(stages=2, microbatches=2)),
    ("gpt-scan", 4, Pipeline(stages=2, microbatches=1, schedule="zero-bubble-h1")),
    ("gpt-scan", 4, Pipeline(stages=4, microbatches=4)),
    ("gpt-scan", 6, Pipeline(stages=3, microbatches=2, submeshes=(4, 2, 2))),
    ("llama-scan", 4, Pipeline(stages=2, microbatches=4)),
    ("llama-scan", 4, Pipeline(stages=4, microbatches=2, schedule="zero-bubble-h1")),
    ("llama-scan", 3, Pipeline(stages=3, microbatches=4, submeshes=(4, 2, 2), schedule="zero-bubble-h1")),
]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize(("name", "layers", "planner"), MODEL_CASES)
def test_models(name: str, layers: int, planner: Any, remat: bool):
    with jax.enable_x64(True):
        model = MODELS[name]
        config = dataclasses.replace(model.least, layers=layers, remat=remat, dtype="float64", param_dtype="float64")
        ready = training(model.module, config, 8)
        ours = theirs = ready.state
        parallel = autopar.parallelize(ready.step, planner=planner)
        plain = jax.jit(ready.step, compiler_options=QUICK)
        for _ in range(2):
            got, wanted = parallel(ours, ready.batch), plain(theirs, ready.batch)
            assert_close(got, wanted)
            ours, theirs = got[0], wanted[0]


def arguments(layers: int = 4, optimizer: str = "adamw+clip") -> tuple[Any, Any]:
    params, batch = mlp(layers)
    return (params, OPTIMIZERS[optimizer].init(params)), batch


def cut_of(planner: Pipeline, loss: Callable[..., jax.Array] = score, layers: int = 4) -> tuple[Any, Any, Any]:
    """(traced, plan, stages) of a step with AdamW and clipping, for four devices."""
    parallel = autopar.parallelize(step_of(loss, "adamw+clip"), planner=planner, cluster="4:a100-80g")
    given = arguments(layers)
    plan, traced = parallel.plan(*given), parallel.trace(*given)
    return traced, plan, stages.cut(traced.graph, plan.firsts, traced.state_pairs)


def scans(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.primitive == "scan"]


@pytest.mark.parametrize(("loss", "interleave"), half([score, checkpointed], [1, 2]))
def test_every_stage_runs_its_layers(loss: Callable[..., jax.Array], interleave: int):
    planner = Pipeline(stages=4 // interleave, microbatches=2, interleave=interleave)
    _, plan, cut = cut_of(planner, loss, layers=8)
    assert plan.groups == 4 // interleave
    for k, part in enumerate(cut.parts):
        forward, backward = scans(part.body)
        assert (forward.params["length"], backward.params["length"]) == (2, 2)
        assert (forward.params["reverse"], backward.params["reverse"]) == (False, True)
        assert forward.scope.endswith(f"piece {k}")
        assert backward.scope.endswith(f"piece {k}")


def test_of_stacks_nothing_crosses_stages():
    traced, _, cut = cut_of(Pipeline(stages=4, microbatches=2), layers=8)
    graph = traced.graph
    own = {v: cut.input_stages[i] for i, v in enumerate(graph.inputs)}
    for k, part in enumerate(cut.parts):
        assert {str(part.body.types[v]) for v in part.boundary_values.values()} <= {f"float32[4,{WIDTH}]"}
        foreign = [v for v in part.graph.inputs if v not in part.boundary_values and own.get(v) != k]
        assert all(part.graph.types[v].size <= 1 for v in foreign)  # the step's number, parts of the norm
        stacked = [part.graph.types[v].shape for v in part.graph.inputs if len(part.graph.types[v].shape) == 3]
        assert stacked.count((2, WIDTH, WIDTH)) == 3  # a piece of the weights and of two moments
    primitives = {node.primitive for node in graph.nodes}
    assert not primitives & {"concatenate", "slice"}
    held = [part.graph.types[v].nbytes for part in cut.parts for v in part.graph.inputs if v in own]
    whole = sum(graph.types[v].nbytes for v in graph.inputs)
    assert whole <= sum(held) <= whole + 3 * 8  # the step's number is on all stages


def test_the_state_lies_where_its_layers_are():
    with jax.enable_x64(True):
        params, batch = mlp()
        step = step_of(score)
        parallel = autopar.parallelize(step, planner=TWO, devices=jax.devices()[:2])
        state = (params, OPTIMIZERS["sgd"].init(params))
        wanted = jax.jit(step)(state, batch)
        got = parallel(state, batch)
        assert_close(got, wanted)
        for tree in got[0]:
            for stack in jax.tree.leaves(tree["stack"] if isinstance(tree, dict) else tree[0].trace["stack"]):
                assert [s.index[0] for s in stack.addressable_shards] == [slice(0, 2), slice(2, 4)]
                assert [s.device for s in stack.addressable_shards] == jax.devices()[:2]
        # However the state comes, the step is the same.
        again = jax.jit(step)(wanted[0], batch)
        mesh = jax.make_mesh((2,), ("m",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
        assert_close(parallel(got[0], batch), again)
        assert_close(parallel(jax.tree.map(np.asarray, got[0]), batch), again)
        assert_close(parallel(jax.device_put(got[0], jax.devices()[3]), batch), again)
        with jax.set_mesh(mesh):
            assert_close(parallel(got[0], batch), again)


def test_a_saved_pipeline_is_a_planner(tmp_path: Any):
    given = arguments()
    step = step_of(score, "adamw+clip")
    plan = autopar.parallelize(step, planner=TWO, cluster="4:a100-80g").plan(*given)
    plan.save(tmp_path / "plan.json")
    for source in (plan, tmp_path / "plan.json"):
        replayed = autopar.parallelize(step, planner=autopar.Manual(source), cluster="4:a100-80g")
        assert replayed.plan(*given) == plan


def test_without_a_pipeline_loops_stay_whole():
    parallel = autopar.parallelize(step_of(score), microbatches=2, cluster="1:a100-80g")
    graph = parallel.trace(*arguments(optimizer="sgd")).graph
    index = loop_of(graph)
    assert index is not None
    assert [node.params["length"] for node in scans(graph.nodes[index].subgraphs[0])] == [4, 4]


def over_time(params: Any, batch: Any) -> jax.Array:
    """A recurrent network: the loop runs over time, and every step of it needs all weights."""
    inputs = jnp.stack([batch["x"]] * 4)
    x, _ = jax.lax.scan(
        lambda x, t: (jnp.tanh(x @ params["stack"]["w"][0] + t @ params["first"]), None),
        batch["x"] @ params["first"],
        inputs,
    )
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


@pytest.mark.parametrize("loss", [over_time, lambda p, b: jnp.sum(b["x"] @ p["first"] @ p["stack"]["w"][0])])
def test_other_loops_stay_whole(loss: Callable[..., jax.Array]):
    traced = trace(step_of(loss), arguments(optimizer="sgd"), {})
    assert in_pieces(traced, 2) == (traced, None)


@pytest.mark.parametrize(
    ("trips", "n_stages", "wanted"),
    [
        (4, 2, 2),
        (4, 4, 4),
        (6, 4, 6),
        (7, 4, 7),
        (3, 4, 3),
        (1, 2, 1),
        (37, 4, 37),
        (67, 4, 1),
        (48, 8, 8),
        (22, 8, 22),
        (30, 8, 15),
    ],
)
def test_numbers_of_pieces(trips: int, n_stages: int, wanted: int):
    assert n_pieces(trips, n_stages) == wanted


@pytest.mark.parametrize("n_stages", [2, 3, 4, 8])
def test_no_stage_has_more_layers_than_it_must(n_stages: int):
    """With at most 64 pieces: 22 layers on 8 stages are 3 a stage, which 11 pieces of 2 made 4."""
    for trips in range(n_stages, 65):
        pieces = n_pieces(trips, n_stages)
        assert trips % pieces == 0
        assert -(-pieces // n_stages) * (trips // pieces) == -(-trips // n_stages)


@pytest.mark.parametrize("data", [slow(1), 2])
def test_a_pipeline_tells_the_shardings_of_its_results(data: int) -> None:
    """Of arrays on one stage, and of weights whose rows lie on both."""
    params, batch = mlp()

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(score)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    parallel = autopar.parallelize(step, planner=Pipeline(stages=2, microbatches=2), devices=jax.devices()[: 2 * data])
    plan, results = parallel.plan(params, batch), parallel(params, batch)
    ((args, kwargs), outputs) = plan.shardings
    assert jax.tree.structure(args) == jax.tree.structure((params, batch))
    assert kwargs == {}
    assert args[0] == outputs[0]
    assert outputs[0]["stack"]["w"][0] in ("stage", ("stage", "data"))
    told, leaves = jax.tree.leaves(outputs), jax.tree.leaves(results)
    assert len(told) == len(leaves)
    for spec, leaf in zip(told, leaves, strict=True):
        assert spec == getattr(leaf.sharding, "spec", jax.sharding.PartitionSpec())
