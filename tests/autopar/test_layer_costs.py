"""The cost of each layer of a model: all of a plan's seconds and bytes, each once, and alike where layers are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import autopar
from passes.intra_op import layer_costs
from passes.layers import layer_names
from passes.plan import Plan
from tests.sample import slow

WIDTH, ROWS, LAYERS = 64, 32, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(4 * WIDTH, name="up")(x)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(WIDTH, name="head")(x)


def step(params: Any, batch: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(Model().apply(p, batch) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def arguments() -> Any:
    return jax.eval_shape(Model().init, jax.random.key(0), BATCH), BATCH


def step_of(planner: Any) -> Any:
    return autopar.parallelize(step, cluster="4:h100", planner=planner, donate_argnums=0).step(*arguments())


def plan_of(planner: Any) -> Any:
    return autopar.parallelize(step, cluster="4:h100", planner=planner, donate_argnums=0).plan(*arguments())


@pytest.mark.parametrize(
    "planner",
    [
        autopar.Zero(3),
        autopar.Pipeline(stages=2, microbatches=4),
        slow(autopar.Auto()),
        slow(autopar.Megatron(data=1, tensor=2, pipeline=2, microbatches=4)),
    ],
    ids=["zero", "stages", "searched", "megatron"],
)
def test_layers_add_up_to_the_plan(planner: Any, tmp_path: Any) -> None:
    plan = plan_of(planner)
    for program in plan.programs:
        computing = sum(layer.compute_seconds for layer in program.layers)
        assert computing == pytest.approx(program.seconds["compute"])
        assert sum(layer.seconds for layer in program.layers) == pytest.approx(program.step_seconds)
        arrays = zip(program.input_names, program.input_types, program.inputs, strict=True)
        state = sum(s.local_nbytes(t, program.mesh) for name, t, s in arrays if "params" in name)
        assert sum(layer.state_nbytes for layer in program.layers) == state
        live = sum(layer.live_nbytes for layer in program.layers)
        persistent = ("parameters", "optimizer state", "other arguments", "outputs")
        temporary = program.peak_nbytes - sum(program.nbytes.get(cause, 0) for cause in persistent)
        assert 0 < live <= temporary  # the rest lies between buffers
    names = [layer.name for program in plan.programs for layer in program.layers if layer.name.startswith("Block")]
    assert names == [f"Block_{n}" for n in range(LAYERS)]
    plan.save(tmp_path / "plan.json")
    loaded = type(plan).load(tmp_path / "plan.json")
    assert [program.layers for program in loaded.programs] == [program.layers for program in plan.programs]


def test_layers_that_are_alike_cost_alike_and_the_larger_more() -> None:
    plan, graph = plan_of(autopar.DataParallel()), step_of(autopar.DataParallel()).graph
    assert isinstance(plan, Plan)
    assert layer_costs(replace(plan, layers=()), graph) == plan
    by_name = {layer.name: layer for layer in plan.layers}
    assert by_name["Block_1"].compute_seconds == pytest.approx(by_name["Block_2"].compute_seconds)
    assert by_name["Block_1"].state_nbytes == by_name["Block_2"].state_nbytes == 4 * (8 * WIDTH**2 + 5 * WIDTH)
    assert by_name["head"].compute_seconds < by_name["Block_1"].compute_seconds
    assert by_name["head"].state_nbytes == 4 * (WIDTH**2 + WIDTH)


def test_equal_stages_cost_what_each_does_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, renamed, taken = autopar.Pipeline(stages=4, microbatches=4), layer_names.renamed, list[Any]()
    monkeypatch.setattr(layer_names, "renamed", lambda *graphs: taken.append(renamed(*graphs)) or taken[-1])
    plan = plan_of(planner)
    assert any(taken)  # the layers of some stage were those of another
    names = [layer.name for program in plan.programs[1:3] for layer in program.layers]
    assert {"Block_1", "Block_2"} <= set(names)
    monkeypatch.setattr(layer_names, "renamed", lambda *graphs: None)
    assert [program.layers for program in plan_of(planner).programs] == [program.layers for program in plan.programs]


def test_layers_are_renamed_only_where_they_are_the_same() -> None:
    graph = step_of(autopar.DataParallel()).graph
    names = layer_names.renamed(graph, graph)
    assert names
    assert {"Block_0", "head", "update"} <= names.keys()
    assert all(name == other for name, other in names.items())
    one_layer = replace(graph, nodes=tuple(replace(node, scope="jvp(Model)/head") for node in graph.nodes))
    assert layer_names.renamed(graph, one_layer) is None
    assert layer_names.renamed(one_layer, graph) is None
