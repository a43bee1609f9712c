"""Whatever `jax.jit` accepts: a table of small functions, each equal to `jax.jit` by a searched and by a random plan.

Equal means the pytree, every dtype, weak types, and values: exact for integers, booleans and keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from tests.autopar.jit_cases import control_flow, derivatives, libraries, values
from tests.autopar.jit_cases.table import Case, mesh_of, x
from tests.autopar.random_plans import Dice
from tests.sample import half

TOLERANCE = {"float64": 1e-10, "complex128": 1e-10, "float32": 2e-5, "complex64": 2e-5, "float16": 4e-3}
"""Relative to an array's largest entry; bfloat16's is the one that is left."""


TABLES = (values.case, derivatives.case, control_flow.case, libraries.case)
CASES: dict[str, Case] = {name: case for table in TABLES for name, case in table.items()}


def words(leaf: Any) -> Any:
    """What is compared of a leaf: a key's own words."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_equal(ours: Any, expected: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        where = f"out{jax.tree_util.keystr(path)}"
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        a, b = words(a), words(b)
        assert a.weak_type == b.weak_type, where
        a, b = np.asarray(a), np.asarray(b)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, where)
            continue
        tolerance = TOLERANCE.get(b.dtype.name, 2e-2)
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        finite = np.abs(b[np.isfinite(b)])
        largest = float(finite.max()) if finite.size else 0.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=where)


@functools.cache
def expected(name: str) -> Any:
    fun, args, options = CASES[name].read()
    return jax.jit(fun, **options)(*args)


def every(plan: str) -> list[Any]:
    """All functions under a plan: in every run, a random one of two in three where the searched one is slow."""
    searched = {name for name, case in CASES.items() if pytest.mark.slow not in case.marks["searched"]}
    return [
        pytest.param(
            name,
            marks=case.marks[plan] or [pytest.mark.slow] * (plan == "random" and (name in searched or number % 3 == 0)),
        )
        for number, (name, case) in enumerate(CASES.items())
    ]


def test_no_function_hides_another():
    assert len(CASES) == sum(map(len, TABLES))


@pytest.mark.parametrize("name", every("searched"))
def test_searched_plan_equals_jit(name: str):
    with jax.enable_x64(True):
        fun, args, options = CASES[name].read()
        step = autopar.parallelize(fun, **options)
        step.lower(*args).verify().check()
        assert_equal(step(*args), expected(name))


@pytest.mark.parametrize("name", every("random"))
def test_random_plan_equals_jit(name: str):
    with jax.enable_x64(True):
        fun, args, options = CASES[name].read()
        step = autopar.parallelize(fun, planner=CASES[name].planner, **options)
        compiled = step.lower(*args).compile(dict(UNCOMBINED))
        verify(compiled.plan, compiled.as_text()).check()
        assert_equal(compiled(*args), expected(name))


# What the user has placed, and what leaves the program.


CONSTRAINTS = ((P("a", "b"), [2, 4]), (P(("a", "b")), [8, 1]), (P(None, "b"), [1, 4]), (P(), [1, 1]))
"""Placements, and in how many parts they cut each dimension."""


@pytest.mark.parametrize(("constraint", "planner"), half(CONSTRAINTS, (None, Dice(seed=1, sizes=(2, 4)))))
def test_sharding_constraint_is_kept(constraint: tuple[P, list[int]], planner: Any):
    mesh, (spec, wanted) = mesh_of(2, 4), constraint

    def f(a, w):
        return lax.with_sharding_constraint(jnp.tanh(a @ w), NamedSharding(mesh, spec)).sum(0)

    args = x(16, 16, dtype=jnp.float32), x(16, 8, dtype=jnp.float32)
    step = autopar.parallelize(f, planner=planner)
    plan = step.plan(*args)
    (operator,) = [o for o in plan.operators if o.primitive == "sharding_constraint"]
    (placed,) = operator.placement.results
    cut = [math.prod(plan.mesh.axis_size(axis) for axis in axes) for axes in placed.dims]
    assert cut == wanted
    assert not placed.partial
    step.lower(*args).verify().check()
    assert_equal(step(*args), jax.jit(f)(*args))


@pytest.mark.parametrize("planner", [None, Dice(seed=1, sizes=(2, 4))])
def test_pure_callback(planner: Any):
    def f(a, w):
        product = a @ w
        sums = jax.pure_callback(lambda a: np.cumsum(a, 0), jax.ShapeDtypeStruct(product.shape, product.dtype), product)
        return jnp.tanh(sums)

    args = x(8, 16, dtype=jnp.float32), x(16, 4, dtype=jnp.float32)
    step = autopar.parallelize(f, planner=planner)
    assert_equal(step(*args), jax.jit(f)(*args))
    step.lower(*args).verify().check()
