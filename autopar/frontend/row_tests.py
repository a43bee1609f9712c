"""Loops under `vmap` whose rows end one by one, rewritten so that each device runs until its own rows have ended.

JAX gives such a loop a test for each row, and runs it while any row goes on; rows that have ended stay as they are. So
a device need not wait for the rows of others, unless they share what the loop computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from autopar.frontend.primitives import traced_for


def _any_row() -> Primitive:
    """The primitive (tests of rows) -> whether any of them is true, along `axes`."""

    def any_row(rows: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
        return rows.any(axes)

    primitive = Primitive("any_row")
    primitive.def_impl(any_row)
    primitive.def_abstract_eval(
        lambda rows, *, axes: rows.update(shape=tuple(n for d, n in enumerate(rows.shape) if d not in axes))
    )
    mlir.register_lowering(primitive, mlir.lower_fun(any_row, multiple_results=False))

    def batched(operands: Any, dims: Any, *, axes: tuple[int, ...]) -> tuple[Any, int]:
        rows = jnp.moveaxis(operands[0], dims[0], 0)
        return primitive.bind(rows, axes=tuple(axis + 1 for axis in axes)), 0

    batching.primitive_batchers[primitive] = batched
    return primitive


_any_row_p = _any_row()


def tested_by_row(equation: Any) -> Any:
    """The jaxpr of a loop that `vmap` has given a test for each row, which runs while any row goes on; None for any
    other.

    The tests are carried from one iteration to the next, so rows can be anywhere, and only one bit of them is needed. A
    loop whose test reads the rows needs all of them.
    """
    params = equation.params
    if equation.primitive.name != "while" or equation.effects or not params["cond_jaxpr"].out_avals[0].shape:
        return None
    first, begin = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test, body = (jaxpr_as_fun(params[key]) for key in ("cond_jaxpr", "body_jaxpr"))

    def rewritten(*xs: Any) -> Any:
        def tested(carry: Sequence[Any]) -> tuple[Any, ...]:
            (goes_on,) = test(*xs[:first], *carry)
            return _any_row_p.bind(goes_on, axes=tuple(range(goes_on.ndim))), goes_on, tuple(carry)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            _, goes_on, carry = state
            moved = body(*xs[first:begin], *carry)
            rows = [goes_on.reshape(goes_on.shape + (1,) * (x.ndim - goes_on.ndim)) for x in carry]
            return tested(list(map(jnp.where, rows, moved, carry)))

        return jax.lax.while_loop(lambda state: state[0], step, tested(xs[begin:]))[2]

    return traced_for(rewritten, equation)
