"""Loops and branches bound with bodies that are functions of local arrays.

Reference: the parameters of `scan_p`, `while_p` and `cond_p`, which `jax.lax`'s own functions fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar import jax_compat
from passes.errors import InternalError

Flat = Callable[..., Sequence[Any]]
_Binder = Callable[[Mapping[str, Any], Sequence[Flat], Sequence[Any]], Sequence[Any]]


def bind_control(primitive: str, params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Any:
    """The results of a loop or branch whose bodies are these functions of flat arrays."""
    if primitive not in _BINDERS:
        raise InternalError(f"{primitive} is no control flow that lowering knows")
    return _BINDERS[primitive](params, bodies, operands)


def _scan(params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Sequence[Any]:
    (body,) = bodies
    counts = jax_compat.scan_counts(params)
    constants, fixed = counts["num_consts"], sum(counts.values())
    constant_operands, carries, slices = operands[:constants], operands[constants:fixed], operands[fixed:]

    def step(carry: tuple[Any, ...], sliced: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = tuple(body(*constant_operands, *carry, *sliced))
        return results[: len(carry)], results[len(carry) :]

    after, stacked = lax.scan(
        step,
        tuple(carries),
        tuple(slices),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return (*after, *stacked)


def _while(params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Sequence[Any]:
    test, body = bodies
    for_test, fixed = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    held_by_test, constant_operands, start = operands[:for_test], operands[for_test:fixed], tuple(operands[fixed:])
    if not params["cond_jaxpr"].out_avals[0].shape:
        return lax.while_loop(
            lambda c: test(*held_by_test, *c)[0], lambda c: tuple(body(*constant_operands, *c)), start
        )

    # Under `vmap` the test has one truth value a row: the loop goes on while any row does, the others keep what they
    # have. The test is made in the body, once, for what it sends is planned once.
    def step(state: tuple[tuple[Any, ...], Any]) -> tuple[tuple[Any, ...], Any]:
        before, _ = state
        rows = test(*held_by_test, *before)[0]
        return tuple(map(partial(_where, rows), body(*constant_operands, *before), before)), rows.any()

    return lax.while_loop(lambda state: state[1], step, (start, jnp.asarray(True)))[0]


def _where(rows: Any, after: Any, before: Any) -> Any:
    """`after` in the rows that go on, along the leading dimensions, and `before` in the others."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (after.ndim - rows.ndim)), after, before)


def _cond(params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Sequence[Any]:
    branches = [lambda *arguments, body=body: tuple(body(*arguments)) for body in bodies]
    return lax.switch(operands[0].astype("int32"), branches, *operands[1:])


_BINDERS: Mapping[str, _Binder] = MappingProxyType({"scan": _scan, "while": _while, "cond": _cond})
