"""Loops and branches bound again around bodies that are functions of local arrays.

Reference: the parameters of `scan_p`, `while_p` and `cond_p`, which `jax.lax`'s own functions fill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax import lax

from autopar import jax_compat
from passes.errors import InternalError

Flat = Callable[..., Sequence[Any]]
_Binder = Callable[[Mapping[str, Any], Sequence[Flat], Sequence[Any]], Sequence[Any]]


def bind_control(primitive: str, params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Any:
    """The results of a control node whose bodies are these functions of flat arrays."""
    if primitive not in _BINDERS:
        raise InternalError(f"{primitive} is no control flow that lowering knows")
    return _BINDERS[primitive](params, bodies, operands)


def _scan(params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Sequence[Any]:
    (body,) = bodies
    counts = jax_compat.scan_counts(params)
    constants, fixed = counts["num_consts"], sum(counts.values())
    held, carries, slices = operands[:constants], operands[constants:fixed], operands[fixed:]

    def step(carry: tuple[Any, ...], sliced: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = tuple(body(*held, *carry, *sliced))
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
    return lax.while_loop(
        lambda carry: test(*operands[:for_test], *carry)[0],
        lambda carry: tuple(body(*operands[for_test:fixed], *carry)),
        tuple(operands[fixed:]),
    )


def _cond(params: Mapping[str, Any], bodies: Sequence[Flat], operands: Sequence[Any]) -> Sequence[Any]:
    branches = [lambda *held, body=body: tuple(body(*held)) for body in bodies]
    return lax.switch(operands[0].astype("int32"), branches, *operands[1:])


_BINDERS: Mapping[str, _Binder] = MappingProxyType({"scan": _scan, "while": _while, "cond": _cond})
