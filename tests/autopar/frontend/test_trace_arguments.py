"""Tracing of arguments: parameters as plain data, names and types, and the outputs that are state."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import Partial

import autopar
from autopar.errors import ArgumentError, UnsupportedError
from autopar.frontend import trace
from passes.ir import phase
from tests.autopar.frontend.tracing import F32, ROOT, only, primitives, run, struct, traced
from tests.autopar.jit_cases.values import Checked


def test_while_and_cond_have_two_bodies():
    def f(x, n):
        x = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    program = traced(f, struct(4), struct(dtype=jnp.int32))
    condition, body = only(program.graph, "while").subgraphs
    assert primitives(condition)[-1] == "lt"
    assert set(primitives(body)) == {"mul", "add"}
    assert [primitives(branch) for branch in only(program.graph, "cond").subgraphs] == [["cos"], ["sin"]]


def test_recomputation_in_a_loop_is_backward():
    def loss(w, x):
        layer = jax.checkpoint(lambda x: jnp.tanh(x @ w))
        return jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0].sum()

    graph = traced(jax.grad(loss), struct(4, 4), struct(2, 4)).graph
    assert [phase(node) for node in graph.nodes if node.primitive == "scan"] == ["forward", "backward"]


PLAIN = (bool, int, float, str, type(None))


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return all(map(is_plain, value)) if type(value) is tuple else type(value) in PLAIN


def everything(x, i, key):
    rows = x[i]
    image = x.reshape(1, 8, 8, 1)
    kernel = jnp.ones((3, 3, 1, 2))
    return (
        rows,
        x.at[i].add(1.0),
        x @ x.T,
        jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        jax.random.normal(key, (4,)),
        jax.random.split(key),
        jnp.sort(x, axis=0),
        jnp.cumsum(x, axis=1),
        x.astype(jnp.bfloat16),
        jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"),
        jax.scipy.linalg.cholesky(x),
        jax.lax.scan(lambda c, r: (c + r, c), x[0], x),
    )


EVERYTHING = (struct(8, 8), struct(3, dtype=jnp.int32), jax.eval_shape(lambda: jax.random.key(0)))


def test_params_are_plain_data():
    graph = traced(everything, *EVERYTHING).graph
    assert any(node.params for node in graph.nodes)
    for node in graph.nodes:
        assert is_plain(dict(node.params)), (node.primitive, node.params)
        assert "0x" not in repr(node.params)


def test_params_read_as_rules_want_them():
    graph = traced(everything, *EVERYTHING).graph
    gather = next(node for node in graph.nodes if node.primitive == "gather")
    assert gather.params["dimension_numbers"] == {
        "offset_dims": (1,),
        "collapsed_slice_dims": (0,),
        "start_index_map": (0,),
        "operand_batching_dims": (),
        "start_indices_batching_dims": (),
    }
    assert gather.params["slice_sizes"] == (1, 8)
    scatter = only(graph, "scatter-add")
    assert scatter.params["dimension_numbers"] == {
        "update_window_dims": (1,),
        "inserted_window_dims": (0,),
        "scatter_dims_to_operand_dims": (0,),
        "operand_batching_dims": (),
        "scatter_indices_batching_dims": (),
    }
    assert "update_jaxpr" not in scatter.params
    assert only(graph, "dot_general").params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert any(node.params.get("new_dtype") == "bfloat16" for node in graph.nodes)


def test_nodes_compute_what_the_function_does():
    x = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    x = x @ x.T + 8 * np.eye(8, dtype=np.float32)
    arguments = (x, np.array([1, 2, 3], np.int32), jax.random.key(3))
    program = traced(everything, *arguments)
    for ours, jax_own in zip(run(program, *arguments), jax.tree.leaves(jax.jit(everything)(*arguments)), strict=True):
        if jnp.issubdtype(jax_own.dtype, jax.dtypes.prng_key):
            ours, jax_own = jax.random.key_data(ours), jax.random.key_data(jax_own)
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(jax_own, np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_same_fingerprint_in_another_process():
    graph = traced(everything, *EVERYTHING).graph
    code = f"import {__name__} as t; print(t.traced(t.everything, *t.EVERYTHING).graph.fingerprint)"
    for seed in ("1", "2"):
        env = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert result.stdout.strip() == graph.fingerprint


def test_types_follow_jit():
    graph = traced(lambda *leaves: leaves, 1, 2.0, np.float64(3), True, np.arange(3), jax.random.key(0)).graph
    assert [str(graph.types[v]) for v in graph.inputs] == [
        "int32[]",
        "float32[]",
        "float32[]",
        "bool[]",
        "int32[3]",
        "key<fry>[]",
    ]
    assert graph.input_names == tuple(f"leaves[{i}]" for i in range(6))


def test_python_scalars_are_weak_as_in_jit():
    half = struct(4, dtype=jnp.bfloat16)
    for scalar in (2.0, jax.ShapeDtypeStruct((), F32, weak_type=True), jnp.asarray(2.0), np.float32(2)):
        program = traced(lambda x, y: (x * y, y + 1), half, scalar)
        expected = jax.jit(lambda x, y: (x * y, y + 1)).trace(half, scalar).out_info
        assert [program.graph.types[v].dtype for v in program.graph.outputs] == [e.dtype.name for e in expected]
        assert program.weak == (False, not isinstance(scalar, np.float32))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("ambient", [False, True])
def test_shardings_of_arguments_and_ambient_meshes_do_not_get_in(ambient: bool, axis_type: AxisType):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(axis_type,))
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec("a")))
    placed = jax.ShapeDtypeStruct((8, 8), F32, sharding=x.sharding)

    def f(x, y):
        """The gradients' products had the mesh in a parameter, and so another fingerprint than a saved plan."""
        return jax.grad(lambda x, scale: scale * jnp.tanh(x @ y.T).sum(), argnums=(0, 1))(x, 2.0)

    plain = traced(f, struct(8, 8), struct(8, 8)).graph
    if not ambient:
        assert traced(f, x, placed).graph == plain
        return
    with jax.set_mesh(mesh):
        assert traced(f, x, placed).graph == plain


def test_nodes_that_take_arrays_alone():
    """As under jit, no node is built of anything but tracers; what has to be built of specs says why it is not."""
    planned = autopar.parallelize(lambda checked: (Checked(checked.array * 2), {"twice": checked.array + 1}))
    plan = planned.plan(Checked(jnp.ones(8)))
    assert plan.input_names == ("checked.array",)
    assert plan.output_names == ("out[0]", "out[1]")
    for shardings in (lambda: plan.shardings, lambda: planned.lower(Checked(jnp.ones(8))).compile().input_shardings):
        with pytest.raises(ArgumentError, match=r"takes no \w+: an array"):
            shardings()


def test_donated_leaves_are_those_of_jit():
    def f(a, /, b, *rest, c, d=None, **more):
        return jax.tree.leaves((a, b, rest, c, d, more))

    x = struct(4)
    calls = (((x, (x, x), x), {"c": x, "e": [x]}), ((x,), {"b": x, "c": [x, x], "d": x}))
    options = (
        {"donate_argnums": 0},
        {"donate_argnums": (1, -1)},
        {"donate_argnames": "b"},
        {"donate_argnames": ("c", "e")},
        {"donate_argnums": 0, "donate_argnames": ("d", "c")},
    )
    for (args, kwargs), chosen in itertools.product(calls, options):
        expected = jax.tree.leaves(jax.jit(f, **chosen).trace(*args, **kwargs).args_info)
        assert trace(f, args, kwargs, **chosen).donated == tuple(info.donated for info in expected)


def test_keyword_and_static_arguments():
    def f(x, mode, *, scale, power=2):
        return (x * scale["s"] if mode == "scale" else x) ** power

    program = trace(f, (struct(4), "scale"), {"scale": {"s": 1.5}, "power": 3}, static_argnames=("mode", "power"))
    assert program.graph.input_names == ("x", "scale['s']")
    assert only(program.graph, "integer_pow").params["y"] == 3
    by_position = trace(
        f, (struct(4), "scale"), {"scale": {"s": 1.5}, "power": 3}, static_argnums=1, static_argnames="power"
    )
    assert by_position.graph == program.graph
    last = trace(lambda *xs: xs[0] * xs[-1], (struct(4), 3), {}, static_argnums=-1)
    assert last.graph.input_names == ("xs[0]",)


def test_positions_of_the_batch_count_as_static_ones_do():
    def f(state, batch, rate=0.1):
        return state - rate * batch

    assert trace(f, (struct(4), struct(4)), {}, batch_argnums=-1).named == (False, True)
    assert trace(f, (struct(4), struct(4)), {}, batch_argnums=-2).named == (True, False)
    assert autopar.parallelize(f, batch_argnums=np.int64(1)).trace(struct(4), struct(4)).named == (False, True)
    for outside in (2, -3):
        with pytest.raises(ArgumentError, match=f"batch_argnums={outside}: it names no array of this call"):
            trace(f, (struct(4), struct(4)), {}, batch_argnums=outside)


def test_unhashable_static_argument_is_explained():
    def f(x, sizes):
        return x.reshape(sizes)

    with pytest.raises(ArgumentError, match=r"static argument sizes = \[2, 2\] of type list") as caught:
        traced(f, struct(4), [2, 2], static_argnames="sizes")
    assert isinstance(caught.value, ValueError)
    assert f"at {__file__}:" in str(caught.value)
    assert "tuple" in str(caught.value)


def test_argument_that_is_no_array_is_explained():
    with pytest.raises(ArgumentError, match=r"argument options\['mode'\] = 'fast' of type str") as caught:
        traced(lambda x, options: x, struct(4), {"mode": "fast"})
    assert isinstance(caught.value, TypeError)
    assert "static_argnames" in str(caught.value)


def test_references_are_refused_with_their_line():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    with pytest.raises(UnsupportedError, match="mutable reference") as caught:
        traced(f, struct())
    assert f"at {__file__}:" in str(caught.value)


def test_errors_of_the_function_are_its_own():
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        traced(f, struct())
    with pytest.raises(TypeError, match="missing"):
        traced(lambda x, y: x, struct())


def test_any_callable_can_be_traced():
    partial = Partial(lambda scale, x: x * scale, 2.0)
    assert traced(partial, struct(3)).graph.input_names == ("x",)


class Carry(NamedTuple):
    a: Any
    b: Any


def paired(fun: Any, *args: Any, **options: Any) -> list[tuple[str, str]]:
    program = traced(fun, *args, **options)
    return [(program.graph.output_names[o], program.graph.input_names[i]) for o, i in program.state_pairs]


def test_a_whole_output_is_paired():
    assert paired(lambda s, x: Carry(s.a + x, s.b), Carry(struct(4), struct(2)), 1.0) == [
        ("out.a", "s.a"),
        ("out.b", "s.b"),
    ]


def test_parts_are_paired_in_order_each_once():
    def f(params, moments):
        return {"new": (params, moments), "loss": params["w"].sum()}

    params = {"w": struct(4), "b": struct(2)}
    assert paired(f, params, params) == [
        ("out['new'][0]['b']", "params['b']"),
        ("out['new'][0]['w']", "params['w']"),
        ("out['new'][1]['b']", "moments['b']"),
        ("out['new'][1]['w']", "moments['w']"),
    ]


def test_donated_arguments_choose_first():
    def f(old, params):
        return params

    params = {"w": struct(4), "b": struct(2)}
    assert [i for _, i in paired(f, params, params)] == ["old['b']", "old['w']"]
    assert [i for _, i in paired(f, params, params, donate_argnums=1)] == ["params['b']", "params['w']"]


def test_a_lone_array_is_state_only_if_donated():
    def f(w, x):
        return w - x, (w * x).sum()

    assert paired(f, struct(4), struct(4)) == []
    assert paired(f, struct(4), struct(4), donate_argnums=0) == [("out[0]", "w")]


def test_a_lone_array_that_gradients_update_is_state():
    def loss(w, x):
        return ((w * x) ** 2).sum()

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    def momentum_step(w, moment, x):
        moment = 0.9 * moment + jax.grad(loss)(w, x)
        return w - 0.1 * moment, moment

    assert paired(step, struct(4), struct(4)) == [("out[0]", "w")]
    assert paired(step, struct(), struct()) == [("out[0]", "w")]
    assert paired(momentum_step, struct(4), struct(4), struct(4)) == [("out[0]", "w"), ("out[1]", "moment")]


def test_a_batch_is_no_state_though_its_gradient_is_added_to_it():
    """An attack moves its examples: parameters before them are not returned, so what comes after is no state."""

    def attacked(params, x):
        return x + 0.1 * jnp.sign(jax.grad(lambda x: (jnp.tanh(params["w"] * x + params["b"]) ** 2).sum())(x))

    def gradient_of(w, x):
        return jax.grad(lambda w: ((w * x) ** 2).sum())(w)

    assert paired(attacked, {"w": struct(4), "b": struct(4)}, struct(4)) == []
    assert paired(gradient_of, struct(4), struct(4)) == []


def test_other_shapes_are_not_paired():
    def f(s):
        return Carry(s.a[:2], s.b), Carry(s.a.astype(jnp.bfloat16), s.b)

    assert paired(f, Carry(struct(4), struct(2))) == []
