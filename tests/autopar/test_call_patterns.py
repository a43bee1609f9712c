"""Options and ways to call, drawn at random: results, errors and donated buffers are those of `jax.jit`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar

SLOW_CASES = 1000
COMPILER_OPTIONS = ({}, {"xla_cpu_enable_fast_min_max": True}, {"xla_embed_ir_in_executable": "true"}, {"no_option": 1})


def mixed(a: Any, b: Any = 2.0, *rest: Any, scale: Any = 1.0, mode: Any = "sum") -> Any:
    """A function of every kind of parameter, whose results repeat its arguments."""
    total = jax.tree.map(lambda x: x * scale, (a, b, rest))
    if mode == "sum":
        return total, sum(jnp.sum(x) for x in jax.tree.leaves(total))
    return {"kept": a, "mode": jnp.asarray(3.0), "none": None, "more": total}


def stated(a: Any, b: Any = 2.0, *, scale: Any = 1.0) -> Any:
    """A step that updates its first argument."""
    return jax.tree.map(lambda x: x - scale * x, a), b


FUNCTIONS = (mixed, stated)


def drawn_leaf(dice: random.Random) -> Any:
    """An array, or anything else that a caller may pass for one."""
    rng = np.random.default_rng(dice.randrange(1 << 16))
    shape = dice.choice([(), (4,), (4, 2), (3,), (0, 4)])
    kind = dice.choice(["jax", "jax", "jax", "numpy", "bool", "int", "float", "half", "scalar", "weak"])
    array = rng.normal(size=shape).astype(np.float32)
    return {
        "jax": lambda: jnp.asarray(array),
        "numpy": lambda: array.astype(dice.choice([np.float32, np.float64])),
        "bool": lambda: True,
        "int": lambda: dice.randrange(5),
        "float": lambda: dice.random(),
        "half": lambda: jnp.asarray(array, jnp.bfloat16),
        "scalar": lambda: np.int8(3),
        "weak": lambda: jnp.asarray(1.5),
    }[kind]()


def drawn_tree(dice: random.Random) -> Any:
    """A pytree of a few leaves, or what is none."""
    kind = dice.choice(["leaf", "leaf", "leaf", "dict", "tuple", "none", "list", "text"])
    return {
        "leaf": lambda: drawn_leaf(dice),
        "dict": lambda: {"w": drawn_leaf(dice), "b": drawn_leaf(dice)},
        "tuple": lambda: (drawn_leaf(dice), drawn_leaf(dice)),
        "none": lambda: None,
        "list": lambda: [drawn_leaf(dice)],
        "text": lambda: dice.choice(["sum", "other"]),
    }[kind]()


def drawn_call(dice: random.Random, function: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = [drawn_tree(dice) for _ in range(dice.choice([1, 1, 2, 2, 3]))]
    kwargs: dict[str, Any] = {"scale": drawn_leaf(dice)} if dice.random() < 0.4 else {}
    if function is mixed and dice.random() < 0.5:
        kwargs["mode"] = dice.choice(["sum", "other", drawn_leaf(dice)])
    if len(args) == 2 and dice.random() < 0.3:
        kwargs["b"] = args.pop()
    return tuple(args), kwargs


def drawn_shardings(dice: random.Random) -> Any:
    """Shardings on the two devices, as a prefix of arguments or results or not."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    leaves = [None, *(NamedSharding(mesh, spec) for spec in (P(), P(), P("a"), P(None, "a")))]
    one, other = dice.choice(leaves), dice.choice(leaves)
    return dice.choice([one, one, (one, other), ({"w": one, "b": None}, other), (one,)])


def drawn_options(dice: random.Random) -> dict[str, Any]:
    return {
        name: value
        for name, chance, value in (
            ("static_argnames", 0.8, dice.choice(["mode", ("mode",), ("mode", "scale"), "b"])),
            ("static_argnums", 0.15, dice.choice([1, (1,), -1, (0, 1)])),
            ("donate_argnums", 0.3, dice.choice([0, (0,), (0, 1), 1])),
            ("donate_argnames", 0.1, dice.choice(["b", ("scale",)])),
            ("in_shardings", 0.15, drawn_shardings(dice)),
            ("out_shardings", 0.15, drawn_shardings(dice)),
            ("keep_unused", 0.15, True),
            ("inline", 0.1, True),
            ("compiler_options", 0.1, dice.choice(COMPILER_OPTIONS)),
        )
        if dice.random() < chance
    }


AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "nothing": lambda function: function,
    "jit": lambda function: jax.jit(lambda *args: function(*args)),
    "partial": functools.partial,
    "eval_shape": lambda function: function.eval_shape,  # pyright: ignore[reportFunctionMemberAccess]
    "compiled": lambda function: lambda *args, **kwargs: function.lower(*args, **kwargs).compile()(*args, **kwargs),  # pyright: ignore[reportFunctionMemberAccess]
    "vmap": lambda function: jax.vmap(function, axis_size=4),
}


def fresh(tree: Any) -> Any:
    """The same arguments in buffers of their own, which may be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, tree)


def outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """(the tree, values and types of the results, which arguments are gone), or what kind of error there is."""
    args, kwargs = fresh(args), fresh(kwargs)
    try:
        results = function(*args, **kwargs)
    except Exception as error:
        return error
    leaves, tree = jax.tree.flatten(results)
    types = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]
    gone = [isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves((args, kwargs))]
    values = [np.asarray(x, np.float64) for x in leaves if isinstance(x, jax.Array)]
    return tree, types, values, gone


def drawn_follow(dice: random.Random, args: tuple[Any, ...]) -> dict[str, Any]:
    """The option `follow` with a step that is planned for the first of these arguments, or for what else there is."""
    if dice.random() > 0.15:
        return {}
    planner = dice.choice([autopar.Auto(max_axes=1), autopar.Zero(3), autopar.DataParallel()])
    step = autopar.parallelize(stated, devices=jax.devices()[:2], planner=planner)
    try:
        step.plan(dice.choice([args[0], args[-1], {"w": jnp.ones((4, 2)), "b": jnp.ones(4)}]), jnp.ones((4, 2)))
    except (TypeError, ValueError, autopar.PlanningError):
        return {}  # text, or what no hand-made plan takes
    return {"follow": step}


def assert_equals_jit(seed: int) -> None:
    dice = random.Random(seed)
    function, options = dice.choice(FUNCTIONS), drawn_options(dice)
    name = dice.choice(["nothing", "nothing", "nothing", *AROUND])
    calls = [drawn_call(dice, function) for _ in range(2)]
    try:
        jitted: Any = jax.jit(function, **options)
    except Exception as error:
        with pytest.raises(type(error)):
            autopar.parallelize(function, **options)
        return
    placed = dice.choice(["moved", "keep"])
    planner = autopar.Auto(max_axes=1)
    given = {"devices": jax.devices()[:2], "planner": planner, "placed": placed} | drawn_follow(dice, calls[0][0])
    parallel = autopar.parallelize(function, **given, **options)
    for args, kwargs in (*calls, calls[0]):
        wanted, got = (outcome(AROUND[name](f), args, kwargs) for f in (jitted, parallel))
        where = f"seed {seed}: {function.__name__} {options} {given} {name} {args} {kwargs}: {wanted!r} and {got!r}"
        if name == "compiled" and isinstance(wanted, TypeError):
            continue  # static arguments may be given to what is compiled, too, which jit's takes no more
        if name == "vmap" and "INVALID_ARGUMENT" in str(wanted) and options["compiler_options"]:
            continue  # of a batch the user's own function is compiled, without the options of the planned one
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            kinds = (ValueError, TypeError)
            both = isinstance(wanted, kinds) and isinstance(got, kinds)
            assert both or type(wanted) is type(got), where
            continue
        assert got[:2] == wanted[:2], where
        # Where a batch is taken of it, a function keeps what is donated, which jit's gives away.
        is_placed = "in_shardings" in options or "out_shardings" in options  # XLA's choice of the rest may not match
        assert got[3] == wanted[3] or is_placed or (name == "vmap" and not any(got[3])), where
        for mine, theirs in zip(got[2], wanted[2], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-4, err_msg=where)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(6), 9303392])
def test_a_call_is_that_of_jit(seed: int):
    assert_equals_jit(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_calls_are_those_of_jit(fresh_seed: int):
    for case in range(SLOW_CASES):
        assert_equals_jit(fresh_seed + case)


def test_a_cleared_cache_is_filled_anew():
    traces: list[int] = []

    @autopar.parallelize(devices=jax.devices()[:2])
    def traced(x: jax.Array) -> jax.Array:
        traces.append(len(x))
        return x + 1

    for _ in range(2):
        traced(np.ones(4))
    traced.clear_cache()
    traced(np.ones(4))
    assert traces == [4, 4]


@pytest.mark.parametrize(
    "around",
    [
        lambda call: jax.vmap(lambda y: call() + y)(jnp.arange(3.0)).sum() / 3 - 1,
        lambda call: jax.grad(lambda y: call() * y)(3.0),
        lambda call: jax.vmap(jax.grad(lambda y: call() * y))(jnp.arange(3.0)).mean(),
    ],
    ids=["vmap", "grad", "both"],
)
def test_a_call_beside_a_transformation_is_one_from_outside(around: Callable[[Callable[[], Any]], Any]):
    """It was part of the transformation, where JAX takes no options of XLA's."""
    options = {"xla_cpu_enable_fast_min_max": True}
    step = autopar.parallelize(lambda x: jnp.sum(x), devices=jax.devices()[:2], compiler_options=options)
    x = jnp.ones((4, 4))
    assert around(lambda: step(x)) == 16.0
