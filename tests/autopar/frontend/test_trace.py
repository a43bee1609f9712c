"""Tracing a function to a graph: names, types, wiring and phases; nodes that nothing reads are dropped."""

from __future__ import annotations

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.frontend import Traced
from passes.ir import TensorType, phase
from tests.autopar.frontend.tracing import only, primitives, run, struct, traced

# A model, its training step, and the same step without flax.


class Layer(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        return nn.gelu(nn.Dense(self.features, name="dense")(x))


class Perceptron(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        return layer(4, name="down")(layer(16, name="up")(x))


def train_step(state, batch):
    def loss(params):
        predicted = state.apply_fn({"params": params}, batch["inputs"])
        return jnp.mean((predicted - batch["targets"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value


def example(remat: bool = False):
    model = Perceptron(remat)

    def init(key):
        params = model.init(key, jnp.zeros((1, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    batch = {"inputs": struct(32, 8), "targets": struct(32, 4)}
    return jax.eval_shape(init, jax.random.key(0)), batch


@pytest.fixture(scope="module")
def step() -> Traced:
    return traced(train_step, *example(), donate_argnums=0)


def test_step_has_one_flat_graph(step: Traced):
    step.graph.verify()
    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"} & set(primitives(step.graph))
    assert len(step.equations) == len(step.graph.nodes)
    assert all(e.primitive.name == n.primitive for e, n in zip(step.equations, step.graph.nodes, strict=True))


def test_names_are_paths_in_the_users_words(step: Traced):
    assert "state.params['up']['dense']['kernel']" in step.graph.input_names
    assert "batch['inputs']" in step.graph.input_names
    assert "out[0].params['up']['dense']['kernel']" in step.graph.output_names
    assert step.graph.output_names[-1] == "out[1]"
    assert len(step.graph.input_names) == len(step.graph.inputs) == len(step.donated)
    assert len(step.graph.output_names) == len(step.graph.outputs) == len(step.weak)


def test_state_is_paired_leaf_by_leaf_and_donated(step: Traced):
    names = [
        (step.graph.output_names[output].removeprefix("out[0]"), step.graph.input_names[input].removeprefix("state"))
        for output, input in step.state_pairs
    ]
    assert len(names) == len(step.graph.outputs) - 1
    assert all(output == input for output, input in names)
    assert [name.startswith("state") for name in step.graph.input_names] == list(step.donated)


def test_phases_come_from_scopes(step: Traced):
    phases = Counter(map(phase, step.graph.nodes))
    assert set(phases) == {"forward", "backward", "apply"}
    products = [node for node in step.graph.nodes if node.primitive == "dot_general"]
    assert [(phase(node), node.scope.split("/")[1]) for node in products] == [
        ("forward", "up"),
        ("forward", "down"),
        ("backward", "down"),
        ("backward", "down"),
        ("backward", "up"),
    ]


def test_phases_of_a_plain_function_with_nested_calls():
    @jax.jit
    def layer(w, x):
        return jax.nn.relu(x @ w)

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: layer(w, x).sum())(w)

    graph = traced(step, struct(8, 8), struct(4, 8)).graph
    products = [phase(node) for node in graph.nodes if node.primitive == "dot_general"]
    assert products == ["forward", "backward"]
    assert phase(only(graph, "sub")) == "apply"


def test_sources_are_lines_of_the_user(step: Traced):
    products = [node.source for node in step.graph.nodes if node.primitive == "dot_general"]
    assert products
    assert all(source.startswith(f"{__file__}:") and source.endswith("(Layer.__call__)") for source in products)
    assert all("site-packages" not in node.source for node in step.graph.nodes)
    assert all(node.source for node in step.graph.nodes)


# What a graph keeps and what it drops.


def test_scalars_are_numbers_and_arrays_are_constants():
    table = np.arange(8, dtype=np.float32)

    def f(x):
        return x * 2 + table, x * 2.0 - jnp.asarray(table)

    program = traced(f, struct(8))
    assert sorted(program.graph.literals.values()) == [2.0]
    types = {program.graph.types[v] for v in program.graph.constants}
    assert types == {TensorType(shape=(8,), dtype="float32")}
    assert len(program.graph.constants) == len(program.constants)
    assert all(np.array_equal(constant, table) for constant in program.constants)


def test_literals_of_different_types_stay_apart():
    graph = traced(lambda x, i: (x + 1, i + 1, i > 0), struct(), struct(dtype=jnp.int32)).graph
    assert {(repr(n), graph.types[v].dtype) for v, n in graph.literals.items()} == {
        ("1.0", "float32"),
        ("1", "int32"),
        ("0", "int32"),
    }


def test_operators_constants_and_literals_that_nothing_reads_are_dropped():
    table = np.arange(8, dtype=np.float32)

    def f(x):
        jnp.sin(x) + table
        largest, _ = jax.lax.top_k(x, 2)
        return largest

    program = traced(f, struct(8))
    assert primitives(program.graph) == ["top_k"]
    assert not program.constants
    assert not program.graph.literals
    assert len(only(program.graph, "top_k").outputs) == 2


def test_prints_are_kept():
    def f(x):
        jax.debug.print("{}", x)
        return x

    assert len(traced(f, struct()).graph.nodes) == 1


def test_inputs_and_constants_may_be_outputs():
    program = traced(lambda x, y: (y, 3.0, x, jnp.arange(3), y), struct(2), struct(3))
    graph = program.graph
    assert graph.outputs[0] == graph.outputs[4] == graph.inputs[1]
    assert graph.outputs[2] == graph.inputs[0]
    assert graph.literals[graph.outputs[1]] == 3.0


def test_function_of_nothing():
    program = traced(lambda: jnp.ones(3) + 1)
    assert not program.graph.inputs
    np.testing.assert_array_equal(run(program)[0], np.full(3, 2.0))


def test_recomputation_stands_behind_a_barrier():
    state, batch = example(remat=True)
    graph = traced(train_step, state, batch).graph
    assert not {"remat2", "checkpoint"} & set(primitives(graph))
    barriers = [node for node in graph.nodes if node.primitive == "optimization_barrier"]
    assert len(barriers) == 2
    recomputed = [i for i, n in enumerate(graph.nodes) if "rematted_computation" in n.scope]
    behind = {v for node in barriers for v in node.outputs}
    assert recomputed
    assert behind & {v for i in recomputed for v in graph.nodes[i].inputs}
    assert all([graph.types[v] for v in n.inputs] == [graph.types[v] for v in n.outputs] for n in barriers)


@pytest.mark.parametrize("differentiate", [False, True])
def test_no_barrier_where_jax_has_none(differentiate: bool):
    prevent = not differentiate
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent)
    graph = traced(jax.grad(f) if differentiate else f, struct()).graph
    assert "optimization_barrier" not in primitives(graph)


def test_a_user_s_constraint_is_the_devices_of_each_piece():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def f(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, PartitionSpec("a")))

    graph = traced(f, struct(8)).graph
    assert only(graph, "sharding_constraint").params == {"dims": (((8, 1),),), "devices": 8}


# Control flow.


def loop(x, w):
    def body(carry, row):
        return jax.nn.relu(carry @ w), row.sum()

    return jax.lax.scan(body, x, jnp.ones((5, 3)))


def test_scan_is_a_node_with_its_body():
    program = traced(loop, struct(4, 4), struct(4, 4))
    node = only(program.graph, "scan")
    (body,) = node.subgraphs
    assert {"dot_general", "max", "reduce_sum"} <= set(primitives(body))
    assert node.params["length"] == 5
    assert "jaxpr" not in node.params
    equation = program.equations[program.graph.nodes.index(node)]
    assert equation.bodies[0].graph is body
    assert len(equation.bodies[0].equations) == len(body.nodes)
    x, w = np.eye(4, dtype=np.float32), np.full((4, 4), 0.5, np.float32)
    for ours, jax_own in zip(run(program, x, w), loop(x, w), strict=True):
        np.testing.assert_allclose(ours, jax_own)


# Parameters.


# Fingerprints.


def test_same_program_same_fingerprint(step: Traced):
    again = traced(train_step, *example(), donate_argnums=0)
    assert again.graph.fingerprint == step.graph.fingerprint
    assert traced(train_step, *example(remat=True)).graph.fingerprint != step.graph.fingerprint
    wider = {"inputs": struct(64, 8), "targets": struct(64, 4)}
    assert traced(train_step, example()[0], wider).graph.fingerprint != step.graph.fingerprint


# Arguments.


# Tied state.


def test_a_sum_over_an_axis_of_vmap_is_a_sum_over_a_dimension() -> None:
    """What `pmap` code becomes: batch normalisation over devices is one over the batch, reduced and not gathered."""

    def normed(weight: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ weight
        mean = jax.lax.pmean(y, "batch")
        return jnp.mean((y - mean) ** 2 / jax.lax.pmean((y - mean) ** 2 + 1, "batch"))

    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        losses = jax.vmap(normed, in_axes=(None, 0), axis_name="batch")
        return weight - jax.grad(lambda weight: losses(weight, x).mean())(weight)

    weight, x = jnp.eye(8), jax.random.normal(jax.random.key(0), (16, 8))
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:4])
    np.testing.assert_allclose(parallel(weight, x), jax.jit(step)(weight, x), rtol=1e-5, atol=1e-6)
    largest = autopar.parallelize(jax.vmap(lambda x: x - jax.lax.pmax(x, "batch"), axis_name="batch"))
    assert "reduce_max" in {node.primitive for node in largest.step(x).graph.nodes}
    types = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((65536, 64), "float32")
    plan = parallel.replan(cluster="8:a100-80g").plan(*types)
    assert max(collective.nbytes for collective in plan.collectives) <= 64 * 64 * 4


def test_linear_systems_are_solved_where_their_batch_is() -> None:
    """`custom_linear_solve` is what it runs: all systems were brought to every device."""

    def step(bias: jax.Array, x: jax.Array) -> jax.Array:
        def loss(bias: jax.Array) -> jax.Array:
            spd = jnp.einsum("nij,nkj->nik", x, x) + jnp.eye(4) + bias @ bias.T
            return jnp.sum(jnp.linalg.solve(spd, bias) ** 2) + jnp.linalg.slogdet(spd)[1].sum()

        return bias - 0.01 * jax.grad(loss)(bias)

    bias, x = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate(((4, 4), (8, 4, 4))))
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), devices=jax.devices()[:4])
    assert {collective.kind for collective in parallel.plan(bias, x).collectives} == {"all_reduce"}
    np.testing.assert_allclose(parallel(bias, x), jax.jit(step)(bias, x), rtol=1e-4, atol=1e-5)


def test_a_branch_for_kernels_is_not_planned() -> None:
    """`jnp.diagonal` has one, whose sum over devices was planned and never ran."""
    x = jax.ShapeDtypeStruct((8, 4, 4), "float32")
    graph = autopar.parallelize(jax.vmap(jax.grad(lambda x: jnp.sum(jnp.diagonal(x) ** 2)))).step(x).graph
    assert {"cond", "platform_index"}.isdisjoint(node.primitive for node in graph.nodes)


def test_rows_that_stop_one_by_one_stay_where_they_are() -> None:
    """A loop with a test for each row brought all rows to every device."""

    def root(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def improved(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return (state[0] + x / state[0]) / 2, state[1] + 1

        return jax.lax.while_loop(lambda s: jnp.abs(s[0] ** 2 - x).max() > 1e-3, improved, (x, jnp.asarray(0)))

    x = 1 + jnp.arange(32.0).reshape(8, 4) ** 2
    parallel = autopar.parallelize(jax.vmap(root), planner=autopar.DataParallel(), devices=jax.devices()[:4])
    assert {c.nbytes for c in parallel.plan(x).collectives} <= {1, 8}  # the truth of each row
    for mine, theirs in zip(parallel(x), jax.jit(jax.vmap(root))(x), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_an_unread_carry_is_dropped_from_its_loop() -> None:
    """All rows of an unread carry were brought to every device, in each iteration."""

    def step(weight: jax.Array, unused: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            return (jnp.tanh(carry[0] @ weight), carry[1][::-1] * 2), carry[1].sum()

        return jax.lax.scan(layer, (x, unused), None, length=3)[0][0]

    step_of = autopar.parallelize(step).step(*(jnp.ones((8, 8)),) * 3)
    (loop,) = (node for node in step_of.graph.nodes if node.primitive == "scan")
    assert [node.primitive for node in loop.subgraphs[0].nodes] == ["dot_general", "tanh"]
    assert (len(loop.inputs), len(loop.outputs)) == (2, 1)
    assert len(step_of.graph.inputs) == 3
