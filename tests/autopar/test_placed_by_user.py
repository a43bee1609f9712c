"""Arrays that the user has placed, by options of `jit`, by constraints or beforehand, stay where they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.sample import slow

DEVICES = jax.devices()
X = np.arange(256, dtype=np.float32).reshape(16, 16) / 256


def mesh(shape: tuple[int, ...] = (2, 4), devices: Any = None, names: tuple[str, ...] = ("a", "b")) -> Mesh:
    grid = np.array(DEVICES if devices is None else devices).reshape(shape)
    return Mesh(grid, names[: len(shape)])


def pieces(array: jax.Array) -> dict[int, Any]:
    """The part of an array that each device has."""
    return {shard.device.id: shard.index for shard in array.addressable_shards}


def assert_same(mine: Any, theirs: Any) -> None:
    """Arrays of equal values whose parts lie on the same devices."""
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
        assert pieces(x) == pieces(y)


CONSTRAINTS = {
    "rows and columns": lambda x: (x, mesh(), P("a", "b")),
    "axes in the other order": lambda x: (x, mesh(), P(("b", "a"))),
    "devices in reverse": lambda x: (x, mesh(devices=DEVICES[::-1]), P("a", "b")),
    "devices transposed": lambda x: (x, mesh((4, 2), np.array(DEVICES).reshape(2, 4).T), P("b", "a")),
    "a part of the devices": lambda x: (x, mesh((2, 2), DEVICES[2:6]), P("b", "a")),
    "one of several axes": lambda x: (x, mesh((4, 2)), P("a")),
    "three axes": lambda x: (x, mesh((2, 2, 2), names=("a", "b", "c")), P("c", ("b", "a"))),
    "one device": lambda x: (x, mesh((1,), DEVICES[3:4]), P("a")),
    "nothing": lambda x: (x, mesh(), P()),
}
SLOW = {"three axes", "one device", "devices transposed", "nothing"}


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CONSTRAINTS])
def test_a_constraint_says_which_device_has_what(name: str):
    def constrained(x: Any) -> Any:
        array, on, spec = CONSTRAINTS[name](jnp.sin(x))
        return jax.lax.with_sharding_constraint(array, NamedSharding(on, spec))

    assert_same(autopar.parallelize(constrained)(X), jax.jit(constrained)(X))


def test_constraints_on_several_meshes_of_the_same_devices():
    columns, rows = NamedSharding(mesh((4, 2)), P(None, "a")), NamedSharding(mesh((8,)), P("a"))

    def constrained(x: Any) -> Any:
        first = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh(), P("a")))
        second = jax.lax.with_sharding_constraint(first @ first, columns)
        return second, jax.lax.with_sharding_constraint(second.T, rows)

    mine = autopar.parallelize(constrained)(X)
    for x, y, kept in zip(mine, jax.jit(constrained)(X), (columns, rows), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
        assert x.sharding.is_equivalent_to(kept, 2)  # XLA gives up the first one


def test_meshes_of_other_devices_are_refused_as_by_jit():
    def constrained(x: Any) -> Any:
        first = jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P("a")))
        return jax.lax.with_sharding_constraint(first, NamedSharding(mesh(devices=DEVICES[::-1]), P("a")))

    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(constrained)(X)
    with pytest.raises(autopar.ArgumentError, match="same devices in the same order"):
        autopar.parallelize(constrained)(X)


@pytest.fixture
def ambient(request: pytest.FixtureRequest) -> Iterator[None]:
    with jax.set_mesh(Mesh(np.array(DEVICES).reshape(2, 4), ("a", "b"), axis_types=(request.param,) * 2)):
        yield


@pytest.mark.parametrize("ambient", [AxisType.Auto], indirect=True)
def test_bare_specs_are_on_the_ambient_mesh(ambient: None):
    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.sin(x), P("b"))

    assert_same(autopar.parallelize(constrained)(X), jax.jit(constrained)(X))
    options: dict[str, Any] = {"in_shardings": P("a"), "out_shardings": P(None, "b")}
    assert_same(autopar.parallelize(jnp.sin, **options)(X), jax.jit(jnp.sin, **options)(X))


def test_a_shard_map_over_half_of_the_devices_runs_there():
    def mapped(x: Any) -> Any:
        half = mesh((4,), DEVICES[4:])
        return jax.shard_map(lambda t: t * jax.lax.axis_index("a"), mesh=half, in_specs=P("a"), out_specs=P("a"))(x)

    mine, theirs = autopar.parallelize(mapped)(X), jax.jit(mapped)(X)
    np.testing.assert_array_equal(mine, theirs)
    assert mine.sharding.device_set == theirs.sharding.device_set


def test_shardings_of_an_inner_jit_and_device_put_are_kept():
    on = mesh()
    given, called, put = (NamedSharding(on, spec) for spec in (P(None, "a"), P("b"), P(("a", "b"))))
    inner = jax.jit(lambda x: (jnp.sin(x), x), in_shardings=given, out_shardings=(called, None))

    def outer(x: Any) -> Any:
        return *inner(x * 2), jax.device_put(x * 3, put)

    mine = autopar.parallelize(outer)(X)
    for x, y, kept in zip(mine, jax.jit(outer)(X), (called, given, put), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
        assert x.sharding.is_equivalent_to(kept, 2)


# Options of `jit`.


def step(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda s: jnp.mean((jnp.tanh(x @ s["w"]) @ s["v"] + s["b"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), loss


def state() -> Any:
    return {"w": X, "v": X + 1, "b": np.ones(16, np.float32)}


def sharding(*spec: Any, on: Any = None) -> NamedSharding:
    return NamedSharding(on or mesh(), P(*spec))


def each(tree: Any, prefix: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of a tree of at most one level, each with that of its prefix."""
    leaves, given = jax.tree.leaves(tree), jax.tree.leaves(prefix, is_leaf=lambda x: x is None)
    return zip(leaves, given * (len(leaves) // len(given)), strict=True)


OPTIONS = {
    "both, by prefix": lambda: {
        "in_shardings": (sharding("a"), sharding("b")),
        "out_shardings": (sharding("a"), sharding()),
    },
    "some leaves": lambda: {
        "in_shardings": ({"w": sharding(None, "b"), "v": None, "b": None}, None),
        "out_shardings": ({"w": None, "v": sharding("b", "a"), "b": sharding("b")}, None),
    },
    "state that leaves elsewhere": lambda: {
        "in_shardings": (sharding("a"), None),
        "out_shardings": (sharding("b"), None),
    },
    "an explicit mesh": lambda: {
        "in_shardings": (sharding("a", on=jax.make_mesh((2, 4), ("a", "b"))), None),
        "out_shardings": (sharding("a", on=jax.make_mesh((2, 4), ("a", "b"))), None),
    },
}


@pytest.mark.parametrize("name", [n if n == "some leaves" else slow(n) for n in OPTIONS])
@pytest.mark.parametrize("microbatches", [None, slow(2)])
def test_shardings_of_arguments_and_results_bind_the_search(name: str, microbatches: int | None):
    options = OPTIONS[name]()
    parallel = autopar.parallelize(step, microbatches=microbatches, **options)
    mine, theirs = parallel(state(), X), jax.jit(step, **options)(state(), X)
    compiled = parallel.lower(state(), X).compile()
    for number, (ours, expected) in enumerate(zip(compiled.input_shardings[0], options["in_shardings"], strict=True)):
        for there, s in each(ours, expected) if not (number and microbatches) else ():  # whose batch is in pieces
            assert s is None or there.is_equivalent_to(s, max(1, len(s.spec)))
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    for result, expected in zip(mine, options["out_shardings"], strict=True):
        assert all(s is None or leaf.sharding == s for leaf, s in each(result, expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = parallel(mine[0], X) if name != "state that leaves elsewhere" else None
    assert again is None or pieces(again[0]["w"]) == pieces(mine[0]["w"])


@pytest.mark.parametrize("name", ["concatenate", "cumsum", "rev"])
def test_rows_that_come_cut_may_be_read_whole(name: str):
    """An input that one operator alone reads lay as that operator takes it: what it takes whole was refused cut."""
    read = {
        "concatenate": lambda x, y: jnp.concatenate([x, y]),
        "cumsum": lambda x, y: jnp.cumsum(x, 0) + y,
        "rev": lambda x, y: x[::-1] + y,
    }[name]
    rows = NamedSharding(mesh((8,), names=("d",)), P("d"))
    got = autopar.parallelize(read, in_shardings=(rows, rows))(X, X)
    np.testing.assert_allclose(got, read(X, X), rtol=1e-5)


def test_a_planner_that_cannot_take_it_there_says_so():
    whole = autopar.parallelize(step, planner=autopar.DataParallel(), in_shardings=(None, sharding()))
    with pytest.raises(autopar.PlanningError, match="in_shardings"):
        whole.plan(state(), X)
    staged = autopar.parallelize(
        step, planner=autopar.Pipeline(stages=2, microbatches=2), in_shardings=(sharding(), None)
    )
    with pytest.raises(autopar.PlanningError, match="pipeline"):
        staged.plan(state(), X)


def test_unused_arguments_are_kept_where_that_is_wanted():
    def takes(x: Any, unused: Any) -> Any:
        return x + 1

    for keeps, parameters in ((False, 1), (True, 2)):
        parallel = autopar.parallelize(takes, keep_unused=keeps, donate_argnums=1)
        text = parallel.lower(X, X).compile().as_text()
        assert text[text.index("ENTRY") :].count("parameter(") == parameters
        gone = []
        for function in (parallel, jax.jit(takes, keep_unused=keeps, donate_argnums=1)):
            unused = jnp.zeros((16, 16))
            jax.block_until_ready(function(X, unused))
            gone.append(unused.is_deleted())
        assert gone[0] == gone[1]


def test_options_of_the_compiler_reach_it():
    options: dict[str, Any] = {"compiler_options": {"xla_no_such_option": 1}}
    for planner in (None, autopar.Pipeline(stages=2, microbatches=2)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            autopar.parallelize(step, planner=planner, **options)(state(), X)


# Arrays that come placed.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_placed_arrays_move_with_one_warning_or_are_kept(kind: AxisType):
    typed = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    placed = jax.device_put(X, NamedSharding(typed, P("b", "a")))
    moved = autopar.parallelize(lambda x: (x @ x).sum(0), planner=autopar.Auto(max_axes=1))
    with pytest.warns(UserWarning, match=r"1\.00 KiB were placed and have to move"):
        moved(placed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved(placed)
        kept = autopar.parallelize(lambda x: (x @ x).sum(0), placed="keep")
        np.testing.assert_allclose(kept(placed), (X @ X).sum(0), rtol=1e-5)
        np.testing.assert_allclose(kept(X), (X @ X).sum(0), rtol=1e-5)
    assert kept.lower(placed).compile().input_shardings[0][0].is_equivalent_to(placed.sharding, 2)


def on_two_meshes(x: Any, scale: Any = 1.0, *, power: int = 1) -> Any:
    """A function whose two `shard_map`s call one axis by two sizes."""

    def indexed(axis: str, **sizes: int) -> Any:
        mesh = Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))
        body = lambda y: (y + jax.lax.axis_index(axis) + jax.lax.psum(y.sum(), axis)) ** power  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=P(axis))(x)

    return indexed("a", a=2, b=4) * scale, indexed("c", a=4, c=2)


def test_shard_maps_on_two_meshes_are_those_of_jit_and_unplanned():
    x = jnp.arange(32.0).reshape(8, 4)
    options = {"static_argnames": "power", "donate_argnums": 0}
    step = autopar.parallelize(on_two_meshes, **options)
    jitted = jax.jit(on_two_meshes, **options)
    with pytest.warns(UserWarning, match=r"(?s)the meshes \(a=2, b=4\) and \(a=4, c=2\).*nothing is planned"):
        first = step(x.copy(), scale=2.0, power=2)
    for ours in (first, step(x.copy(), scale=2.0, power=2), jax.jit(lambda x: step(x, scale=2.0, power=2))(x)):
        for mine, theirs in zip(ours, jitted(x.copy(), scale=2.0, power=2), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    with pytest.raises(autopar.PlanningError, match="a program is planned on one"):
        autopar.parallelize(on_two_meshes, planner=autopar.DataParallel())(x)
