"""A parallel function inside JAX's other transformations, and under other configurations, is `jax.jit`'s of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import Mesh, PartitionSpec

import autopar
from passes.errors import PlanningError
from tests.sample import slow, some


@jax.custom_jvp
def tenfold(x: jax.Array) -> jax.Array:
    """A sine whose derivative is said to be ten, which no differentiation of the sine would give."""
    return jnp.sin(x)


@tenfold.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return tenfold(primals[0]), 10 * tangents[0]


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    """Rounding with a gradient, itself of a function with a rule of its own."""
    return tenfold(jnp.round(x))


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (7 * g + tenfold(x),))


def forward_only(x: jax.Array) -> jax.Array:
    """A maximum, a kink at zero and a rule that `jvp` may use."""
    return jnp.sum(jax.nn.relu(x) + tenfold(x) ** 2) + jax.nn.softmax(x).max()


def with_vjp(x: jax.Array) -> jax.Array:
    return jnp.sum(straight_through(x) * 3 + jax.nn.relu(x))


X = jnp.linspace(-1, 1, 16).at[8].set(0.0)
XS = jnp.stack([X, X + 0.5, 2 * X])

Function = Callable[[jax.Array], jax.Array]

REVERSE: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: jax.grad(f)(X),
    "grad in jit": lambda f: jax.jit(jax.grad(f))(X),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(X),
    "vjp": lambda f: jax.vjp(f, X)[1](jnp.float32(2)),
    "grad twice": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())(X),
    "jacobian of the gradient": lambda f: jax.jacrev(jax.grad(f))(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(XS),
    "grad of vmap": lambda f: jax.grad(lambda xs: jax.vmap(f)(xs).sum())(XS),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "scan": lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (f(x * c), None), 1.0, None, length=2)[0])(X),
    "cond": lambda f: jax.grad(lambda x: lax.cond(x[0] < 0, f, lambda x: 0.0, x))(X),
    "in another": lambda f: autopar.parallelize(jax.grad(f))(X),
}
FORWARD: dict[str, Callable[[Function], Any]] = {
    "jvp": lambda f: jax.jvp(f, (X,), (X + 1,)),
    "linearize": lambda f: jax.linearize(f, X)[1](X + 1),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "hessian": lambda f: jax.hessian(f)(X),
    "vmap": lambda f: jax.vmap(f)(XS),
    "vmap in jit": lambda f: jax.jit(jax.vmap(f))(XS),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f))(XS),
    "nothing traced in a scan": lambda f: lax.scan(lambda c, _: (c + f(X), None), 0.0, None, length=2)[0],
}


def assert_close(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


LIKE_OTHERS = {"grad twice", "jacobian of the gradient", "grad of vmap"}
"""Taken as others are: by the Hessian, and by the gradient of a row at a time."""


@pytest.mark.parametrize("name", [slow(name) if name in LIKE_OTHERS else name for name in (*REVERSE, *FORWARD)])
def test_transformations_of_a_parallel_function_are_those_of_jit(name: str):
    transform = (REVERSE | FORWARD)[name]
    ours = autopar.parallelize(forward_only, planner=autopar.DataParallel())
    assert_close(transform(ours), transform(jax.jit(forward_only)))


@pytest.mark.parametrize("name", some(REVERSE, 6))
def test_custom_vjp_is_kept_by_whoever_differentiates(name: str):
    assert_close(REVERSE[name](autopar.parallelize(with_vjp)), REVERSE[name](jax.jit(with_vjp)))


def test_every_argument_is_differentiated_as_in_jit():
    def f(w, n, key, x):
        noise = jax.random.normal(key, w.shape)
        return {"loss": jnp.sum(tenfold(w * x + noise)) * n, "next": n + 1, "key": jax.random.split(key)[0]}

    args = (X, 3, jax.random.key(0), 2.0)
    ours, theirs = autopar.parallelize(f, donate_argnums=0), jax.jit(f)
    for argnums in (0, 3, (0, 3)):

        def gradient(f: Any, argnums: Any = argnums) -> Any:
            return jax.grad(lambda *a: f(*a)["loss"], argnums)(*args)

        assert_close(gradient(ours), gradient(theirs))
    ours, theirs = (jax.vjp(f, *args)[1] for f in (ours, theirs))
    zero = np.zeros((), jax.dtypes.float0)
    given = {"loss": jnp.float32(1), "next": zero, "key": zero}
    assert_close(ours(given)[0], theirs(given)[0])


def test_an_unchanged_argument_adds_no_infinity_to_a_derivative():
    """A rule that took the other argument to move by zero would multiply that by an infinite derivative."""

    def f(w, x):
        return jnp.sum(w * jnp.sqrt(x))

    ours = jax.jit(autopar.parallelize(f))
    assert_close(jax.jvp(lambda w: ours(w, 0 * X), (X,), (X,)), jax.jvp(lambda w: f(w, 0 * X), (X,), (X,)))


def test_gradients_lie_where_the_plan_has_the_arguments():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    w, x = jnp.ones((16, 16)) / 9, jnp.arange(1024.0).reshape(64, 16) / 999
    for planner in (autopar.DataParallel(), autopar.Megatron(data=2, tensor=4)):
        step = autopar.parallelize(loss, planner=planner)
        results = jax.grad(step, (0, 1))(w, x)
        assert_close(results, jax.grad(jax.jit(loss), (0, 1))(w, x))
        assert tuple(g.sharding.spec for g in results) == step.plan(w, x).shardings[0][0]


def test_microbatches_are_differentiated_as_one_batch():
    def loss(w, x):
        return jnp.mean(tenfold(x @ w))

    w, x = jnp.ones((16, 16)) / 9, jnp.arange(1024.0).reshape(64, 16) / 999
    step = autopar.parallelize(loss, planner=autopar.DataParallel(), microbatches=4)
    assert_close(jax.jit(jax.grad(step, (0, 1)))(w, x), jax.grad(jax.jit(loss), (0, 1))(w, x))


def test_planned_program_stays_planned_where_it_is_only_staged():
    def f(x):
        return x.sum()

    step = autopar.parallelize(f, planner=autopar.DataParallel())
    text = jax.jit(lambda x: step(x) * 2).lower(jnp.ones((64, 4))).as_text()
    assert "shard_map" in text or "manual_computation" in text


def test_independent_microbatches_have_no_derivative():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    step = autopar.parallelize(loss, planner=autopar.DataParallel(), microbatches=2, microbatch_semantics="independent")
    with pytest.raises(autopar.UnsupportedError, match="own statistics"):
        jax.grad(step)(jnp.ones((3, 3)), jnp.ones((16, 3)))


def test_pipelines_inside_transformations_are_refused():
    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params[0]) @ params[1]) ** 2)

        return jax.value_and_grad(loss)(params)

    params, batch = (jnp.ones((8, 8)), jnp.ones((8, 8))), jnp.ones((16, 8))
    pipeline = autopar.parallelize(step, planner=autopar.Pipeline(stages=2, microbatches=2))
    with pytest.raises(autopar.UnsupportedError, match="pipeline"):
        jax.jit(pipeline)(params, batch)
    # A mesh of the caller's has more devices than a stage, which JAX would not compile under it.
    mesh = jax.make_mesh((8,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(autopar.UnsupportedError, match="pipeline"):
        jax.jit(pipeline)(params, batch)


def test_a_function_that_closes_over_what_is_being_traced_is_refused():
    """It ended in an error of ours; another value in each call would need a plan that takes it."""

    def outer(scale: jax.Array, x: jax.Array) -> jax.Array:
        return autopar.parallelize(lambda x: (x * scale).sum())(x)

    x = jnp.ones((8, 4))
    calls = (jax.jit(outer), 2.0), (jax.grad(outer), 2.0), (jax.vmap(outer, (0, None)), jnp.ones(3))
    for transformed, scale in calls:
        with pytest.raises(autopar.UnsupportedError, match="closes over what is being traced around it"):
            transformed(scale, x)


def test_effects_are_staged_with_their_program():
    seen: list[float] = []

    def f(x):
        io_callback(lambda s: seen.append(float(s)), None, jnp.float32(3))
        return jax.nn.relu(x).sum()

    step = autopar.parallelize(f)
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        assert_close(transform(step)(0 * X), transform(jax.jit(f))(0 * X))
        jax.effects_barrier()


# Programs belong to the configuration that they were traced under.


def under(option: Any, value: Any) -> Callable[[], Any]:
    return lambda: option(value)


CONFIGURED: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "x64": (lambda x: (x.astype(jnp.float64) * 1.0, jnp.arange(3)), under(jax.enable_x64, True)),
    "precision": (lambda x: x @ x, under(jax.default_matmul_precision, "highest")),
    "generator": (lambda x: jax.random.normal(jax.random.key(0), (4,)), under(jax.default_prng_impl, "rbg")),
    "partitionable": (
        lambda x: jax.random.normal(jax.random.key(0), (3,)),
        under(jax.threefry_partitionable, False),
    ),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_program_is_not_found_again_under_another_configuration(name: str):
    fun, changed = CONFIGURED[name]
    ours, theirs, x = autopar.parallelize(fun), jax.jit(fun), np.arange(16, dtype=np.float32).reshape(4, 4)
    before = ours(x)
    assert_same(before, theirs(x))
    with changed():
        assert_same(ours(x), theirs(x))
        lines = [f.lower(x).as_text().count("HIGHEST") for f in (ours, theirs)]
        assert lines[0] == lines[1]
    assert_same(ours(x), before)


def assert_same(ours: Any, theirs: Any) -> None:
    assert [r.dtype for r in jax.tree.leaves(ours)] == [r.dtype for r in jax.tree.leaves(theirs)]
    assert_close(ours, theirs)


def test_configuration_changed_for_good_is_seen():
    step, x = autopar.parallelize(lambda x, n: x + n), np.arange(8, dtype=np.float32)
    assert step(x, np.arange(8)).dtype == np.float32
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    try:
        with pytest.raises(Exception, match="no available implicit dtype promotion"):
            step(x, np.arange(8))
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "standard")
    assert step(x, np.arange(8)).dtype == np.float32


def test_nans_are_found_after_the_first_call():
    step = autopar.parallelize(lambda x: jnp.log(x))
    assert np.isnan(step(-jnp.ones(8))).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) .* a result of log at .*\.py"):
        step(-jnp.ones(8))


def test_nans_of_a_loop_are_those_of_a_line():
    def step(x):
        return jax.lax.scan(lambda rows, _: (jnp.log(rows), None), x, None, length=2)[0]

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"a result of scan at .*\.py"):
        autopar.parallelize(step)(-jnp.ones(8))


def test_nans_of_a_microbatch_are_of_no_operation():
    def step(weights, x):
        return jax.value_and_grad(lambda weights: jnp.log(x @ weights).sum())(weights)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"a result of a microbatch; .*jax.jit"):
        autopar.parallelize(step, microbatches=2)(jnp.ones((4, 4)), -jnp.ones((8, 4)))


def test_nans_of_a_pipeline_are_those_of_a_stage():
    def step(weights, x):
        return jax.value_and_grad(lambda weights: jnp.log(-jnp.tanh(x @ weights[0]) @ weights[1]).sum())(weights)

    pipeline = autopar.Pipeline(stages=2, microbatches=2)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in \w+ 1; .*jax.jit"):
        autopar.parallelize(step, planner=pipeline)(jnp.ones((2, 8, 8)), jnp.ones((8, 8)))


def test_disabled_jit_runs_the_function_itself():
    kinds: list[bool] = []

    def f(x):
        kinds.append(isinstance(x, jax.core.Tracer))
        return x * 2

    step = autopar.parallelize(f)
    step(X)
    with jax.disable_jit():
        assert_close(step(X), 2 * X)
    assert kinds[-1] is False


def test_compiled_programs_refuse_other_static_values():
    def f(x, mode):
        return x * 2 if mode == "up" else -x

    compiled = autopar.parallelize(f, static_argnums=1).lower(X, "up").compile()
    assert_close((compiled(X), compiled(X, "up")), (2 * X, 2 * X))
    with pytest.raises(autopar.ArgumentError, match="'down': the program was compiled for mode = 'up'"):
        compiled(X, "down")


def checked(x: jax.Array) -> jax.Array:
    checkify.check(x.sum() > 1e9, "too small: {total}", total=x.sum())
    return x


CHECKS: dict[str, tuple[Any, Any]] = {
    "a check": (checked, checkify.user_checks),
    "an index": (lambda x: x[jnp.int32(100)], checkify.index_checks),
    "no number": (lambda x: jnp.log(x - 9), checkify.float_checks),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checkify_checks_the_users_operators(name: str):
    function, errors = CHECKS[name]
    parallel = autopar.parallelize(function, devices=jax.devices()[:4])
    wanted = checkify.checkify(jax.jit(function), errors=errors)(X)[0].get()
    assert wanted
    assert checkify.checkify(parallel, errors=errors)(X)[0].get() == wanted
    inside = autopar.parallelize(checkify.checkify(function, errors=errors), devices=jax.devices()[:4])
    assert inside(X)[0].get() == wanted


def over(*sizes: int) -> Function:
    """A sum over the devices along the first of the axes of a mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("a", "b")[: len(sizes)])
    spec = PartitionSpec("a")
    return jax.shard_map(lambda x: x + lax.psum(x, "a"), mesh=mesh, in_specs=spec, out_specs=spec)


def test_one_device_of_a_shard_map_calls_it_as_it_would_jit():
    mesh, spec = Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a")
    parallel = autopar.parallelize(lambda x: 2 * lax.psum(x, "a"))
    mapped = jax.shard_map(lambda x: x + parallel(x), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(mapped(X), X + 2 * jnp.tile(X.reshape(8, 2).sum(0), 8))


def test_two_meshes_have_no_plan_and_are_named():
    both = autopar.parallelize(lambda x: over(2, 4)(x) + over(4, 2)(x))
    with pytest.raises(PlanningError, match=r"\(a=2, b=4\) and \(a=4, b=2\), and a program is planned on one"):
        both.plan(X)
