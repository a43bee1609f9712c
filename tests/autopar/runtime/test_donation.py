"""Donated arguments of pipelines: gone where `jax.jit` takes them, their buffers reused where they are updated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import Pipeline
from autopar.errors import ArgumentError
from autopar.runtime import pipeline_nbytes
from tests.autopar.runtime import test_scan_pipeline as scanned
from tests.autopar.runtime.pipeline_steps import OPTIMIZERS, mlp, squared, step_of, tied
from tests.closeness import assert_close
from tests.sample import slow

ADAM = OPTIMIZERS["adamw+clip"]
TWO = Pipeline(stages=2, microbatches=4)


def fresh(tree: Any) -> Any:
    """Equal arrays of its own."""
    return jax.tree.map(jnp.array, tree)


def gone(tree: Any) -> list[bool]:
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


def on(step: Callable[..., Any], planner: Any = TWO, devices: int = 4, **options: Any) -> Any:
    return autopar.parallelize(step, planner=planner, devices=jax.devices()[:devices], **options)


def pipeline_of(parallel: Any) -> Any:
    """What runs the only program of a function."""
    (one,) = parallel.compilations.known.values()
    return getattr(one.executable, "pipeline", one.executable)


def small() -> tuple[Any, Any, Any]:
    """(step, state, batch)."""
    params, batch = mlp()
    return step_of(tied, ADAM), (params, ADAM.init(params)), batch


@pytest.mark.parametrize(
    "planner",
    [
        TWO,
        slow(Pipeline(stages=4, microbatches=4, schedule="zero-bubble-h1")),
        slow(Pipeline(stages=2, microbatches=4, interleave=2)),
    ],
    ids=["1f1b", "split backward", "interleaved"],
)
def test_a_donated_state_is_gone_and_the_step_is_jits(planner: Pipeline):
    with jax.enable_x64(True):
        step, state, batch = small()
        parallel, plain = on(step, planner, donate_argnums=0), jax.jit(step, donate_argnums=0)
        ours, theirs = fresh(state), fresh(state)
        for _ in range(3):
            given, same = ours, theirs
            (ours, told), (theirs, wanted) = parallel(given, batch), plain(same, batch)
            assert gone(given) == gone(same)
            assert all(gone(given))
            assert not any(gone(batch))
            assert_close((ours, told), (theirs, wanted))


@pytest.mark.slow
def test_a_state_in_pieces_is_gone_as_a_whole():
    with jax.enable_x64(True):
        params, batch = scanned.mlp()
        step, optimizer = scanned.step_of(scanned.score, "adamw+clip"), scanned.OPTIMIZERS["adamw+clip"]
        parallel, plain = on(step, donate_argnums=0), jax.jit(step, donate_argnums=0)
        ours = theirs = params, optimizer.init(params)
        ours, theirs = fresh(ours), fresh(theirs)
        for _ in range(3):
            given, same = ours, theirs
            (ours, told), (theirs, wanted) = parallel(given, batch), plain(same, batch)
            assert gone(given) == gone(same)
            assert_close((ours, told), (theirs, wanted))


@pytest.mark.parametrize("optimizer", ["sgd", slow("adamw+clip")])
def test_the_stages_that_update_the_state_alias_it(optimizer: str):
    params, batch = mlp()
    step, state = step_of(squared, OPTIMIZERS[optimizer]), (params, OPTIMIZERS[optimizer].init(params))
    parallel = on(step, donate_argnums=0)
    parallel(fresh(state), batch)
    pipeline = pipeline_of(parallel)
    updates = [
        (segment, executable)
        for segment, executable in zip(pipeline.program.segments, pipeline.executables, strict=True)
        if segment.name.startswith("after")
    ]
    for segment, executable in updates:
        for i in segment.donated:  # a buffer goes to an output that lies just as it does
            assert segment.in_structs[i].shape == segment.out_structs[i].shape
            assert segment.in_shardings[i] == segment.out_shardings[i]
        header = executable.as_text().splitlines()[0]
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", header.partition("input_output_alias=")[2])
        assert {int(i) for _, i in pairs} == set(segment.donated)
    aliased = sum(executable.memory_analysis().alias_size_in_bytes for _, executable in updates)
    sizes = [
        np.prod(segment.in_shardings[i].shard_shape(segment.in_structs[i].shape)) * segment.in_structs[i].dtype.itemsize
        for segment, _ in updates
        for i in segment.donated
    ]
    assert aliased == sum(sizes)
    assert sum(len(segment.donated) for segment, _ in updates) == len(jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.xfail(
    jax.__version_info__ < (0, 10, 2),
    reason="stages take 6.3 % more than is predicted with jaxlib 0.10.1",
    strict=True,
    raises=AssertionError,
)
def test_a_donated_state_is_held_once():
    """With momentum the state is twice the parameters, and the batch is small: what else is needed is a gradient."""
    params = [jax.random.normal(key, (128, 128)) / 12 for key in jax.random.split(jax.random.key(0), 4)]
    batch = {"x": jnp.ones((16, 128)), "y": jnp.ones((16, 128))}
    optimizer = optax.sgd(1e-3, momentum=0.9)
    step, state = step_of(squared, optimizer), (params, optimizer.init(params))
    found: dict[bool, tuple[int, int]] = {}
    for donated in (False, True):
        parallel = on(step, devices=2, donate_argnums=0 if donated else ())
        parallel(fresh(state), batch)
        pipeline = pipeline_of(parallel)
        found[donated] = (
            pipeline_nbytes(pipeline.program, pipeline.executables),
            parallel.plan(state, batch).peak_nbytes,
        )
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2
    saved = [twice - once for twice, once in zip(found[False], found[True], strict=True)]
    assert min(saved) > 0.6 * share
    for compiled, predicted in found.values():
        assert -0.05 < predicted / compiled - 1 < 0.15


def test_arrays_that_are_not_donated_survive_and_results_share_nothing_with_them():
    def step(params: Any, kept: jax.Array, batch: Any) -> Any:
        grads = jax.grad(squared)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, kept, kept, jnp.arange(3.0)

    params, batch = mlp()
    kept = jnp.ones((5, 3))
    parallel = on(step)
    found = parallel(params, kept, batch)
    assert_close(found, jax.jit(step)(params, kept, batch), 1e-6)
    for leaf in jax.tree.leaves(found):  # as the next step would, if it were donated
        leaf.delete()
    assert not any(gone((params, kept, batch)))
    assert_close(parallel(params, kept, batch), jax.jit(step)(params, kept, batch), 1e-6)


def test_a_donated_array_that_is_returned_as_it_is_keeps_its_buffer():
    def step(params: Any, kept: jax.Array, batch: Any) -> Any:
        grads = jax.grad(squared)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), kept

    params, batch = mlp()
    kept = jax.device_put(jnp.arange(15.0).reshape(5, 3), jax.devices()[0])
    parallel = on(step, devices=2, donate_argnums=(0, 1))
    _, same = parallel(fresh(params), kept, batch)
    where = same.unsafe_buffer_pointer()
    _, again = parallel(fresh(params), same, batch)
    assert same.is_deleted()
    assert again.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(again, np.arange(15.0).reshape(5, 3))


def test_donated_arrays_that_jit_cannot_reuse_survive():
    """A donated array that no output is like is not deleted by jit, nor one that the step does not read."""

    def step(params: Any, scale: jax.Array, unread: jax.Array, batch: Any) -> Any:
        grads = jax.grad(squared)(params, batch)
        return jax.tree.map(lambda p, g: p - scale.mean() * g, params, grads)

    params, batch = mlp()
    options = {"donate_argnums": (0, 1, 2)}
    given, same = ((fresh(params), jnp.ones(7), jnp.ones((8, 8)), batch) for _ in range(2))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        jax.jit(step, **options)(*same)
    on(step, **options)(*given)
    assert gone(given) == gone(same)
    assert gone(given[1:3]) == [False, False]


@pytest.mark.parametrize("where", [slow("all devices"), slow("another device"), slow("the host")])
def test_a_donated_state_from_elsewhere_is_gone_too(where: str):
    step, state, batch = small()
    parallel = on(step, donate_argnums=0)
    match where:
        case "another device":
            given = jax.device_put(fresh(state), jax.devices()[7])
        case "all devices":
            mesh = jax.make_mesh((8,), ("all",))
            given = jax.device_put(fresh(state), jax.NamedSharding(mesh, jax.P()))
        case _:
            given = jax.tree.map(np.array, state)
    before = jax.tree.map(np.array, given)
    found = parallel(given, batch)
    assert_close(found, jax.jit(step)(before, batch), 1e-5)
    if where == "the host":
        assert_close(given, before, 0.0)
    else:
        assert all(gone(given))


@pytest.mark.slow  # in stages; without them, in every run
def test_an_array_that_is_donated_and_passed_again_is_refused_and_stays():
    def step(params: Any, old: Any, batch: Any) -> Any:
        grads = jax.grad(squared)(params, batch)
        return jax.tree.map(lambda p, q, g: 0.9 * p + 0.1 * q - 0.1 * g, params, old, grads)

    params, batch = mlp()
    same = fresh(params)
    with pytest.raises(Exception, match="donate"):
        jax.jit(step, donate_argnums=0)(same, same, batch)
    given = fresh(params)
    parallel = on(step, donate_argnums=0)
    with pytest.raises(ArgumentError, match=r"params\[0\] and old\[0\] are one array"):
        parallel(given, given, batch)
    assert not any(gone(given))
    assert_close(on(step)(given, given, batch), jax.jit(step)(given, given, batch), 1e-5)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_without_stages_it_is_the_same():
    """The step of a plan on one mesh: as with jit where arguments must move first, too."""

    def step(params: Any, scale: jax.Array, batch: Any) -> Any:
        grads = jax.grad(squared)(params, batch)
        return jax.tree.map(lambda p, g: p - scale.mean() * g, params, grads)

    params, batch = mlp()
    parallel = autopar.parallelize(step, planner=autopar.DataParallel(), donate_argnums=(0, 1))
    given, same = ((fresh(params), jnp.ones(8), batch) for _ in range(2))
    assert_close(parallel(*given), jax.jit(step, donate_argnums=(0, 1))(*same), 1e-5)
    assert gone(given) == gone(same)

    def both(params: Any, old: Any) -> Any:
        return jax.tree.map(jnp.add, params, old)

    given = fresh(params)
    with pytest.raises(Exception, match="donate"):
        jax.jit(both, donate_argnums=0)(given, given)
    with pytest.raises(ArgumentError, match=r"params\[0\] and old\[0\] are one array"):
        autopar.parallelize(both, planner=autopar.DataParallel(), donate_argnums=0)(given, given)
    assert not any(gone(given))


@jax.custom_jvp
def second(a: jax.Array, b: jax.Array) -> jax.Array:
    return b * 2


second.defjvps(None, None)


def branched(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.cond(b.sum() > 1, lambda a, b: b, lambda a, b: b * 2, a, b)


def carried(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: ((c[0], c[1] * 2), None), (a, b), None, length=2)[0][1]


def solved(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.custom_linear_solve(lambda x: a * x, b, solve=lambda _, x: x / 2.0, symmetric=True)


@pytest.mark.parametrize("planner", [autopar.Auto(max_axes=1), autopar.DataParallel()], ids=["auto", "data parallel"])
@pytest.mark.parametrize(
    ("step", "rows"),
    [
        (lambda a, b: (a - a * b.sum(), b), 0),
        (lambda a, b: (a.sum() * jnp.zeros_like(a), b), 0),
        (lambda a, b: (b, a * 2), 4),
        (second, 4),
        (solved, 4),
        (branched, 4),
        (carried, 4),
        (lambda a, b: b * 2, 4),
    ],
    ids=[
        "empty",
        "a sum of nothing",
        "both",
        "not in the primal",
        "a solver's own",
        "no branch",
        "a dead carry",
        "none",
    ],
)
def test_donated_arrays_are_deleted_as_jit_deletes_them(
    step: Callable[..., Any], rows: int, planner: autopar.Auto | autopar.DataParallel
):
    """`jax.jit` keeps a donated array alone that its own dead code would read; simpler graphs read fewer."""
    b = jnp.ones(4)
    deleted = []
    for parallel in (on(step, planner, 2, donate_argnums=0), jax.jit(step, donate_argnums=0)):
        a = jnp.ones(rows)
        jax.block_until_ready(parallel(a, b))
        deleted.append(a.is_deleted())
    assert deleted[0] == deleted[1]
