"""Loops over the rows of the batch, such as `jax.lax.map`, rewritten with rows side by side: each device then runs its
own.

A scan whose iterations are independent becomes several scans at once, each over its part of the rows. Sums over
iterations (gradients of shared values) are summed by each for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from autopar import jax_compat
from autopar.frontend.primitives import ALONE, THREEFRY, dtype_name, traced_for


@dataclass(frozen=True, slots=True)
class RowLoops:
    """The equations that are loops over rows of the batch, by their parameters, with which of their carries stay
    unchanged; and how many parts run at once.
    """

    loops: tuple[tuple[Mapping[str, Any], tuple[bool, ...]], ...] = ()
    parts: int = 1

    def of(self, equation: Any) -> Any:
        """The jaxpr of such a loop with its rows side by side; None for any other equation."""
        unchanged = next((flags for params, flags in self.loops if params is equation.params), None)
        return None if unchanged is None else side_by_side(equation, self.parts, unchanged)


def side_by_side(equation: Any, parts: int, unchanged: Sequence[bool]) -> Any:
    """The jaxpr of a scan over rows as several scans at once, of a number that divides its length; None where that
    changes its meaning, or the number is 1.

    Of its carries some are `unchanged`, and the others are sums.
    """
    params = equation.params
    length, counts = params["length"], jax_compat.scan_counts(params)
    parts = gcd(length, parts)
    if parts < 2 or equation.effects or not all(map(_is_of_a_row, _equations(params["jaxpr"]))):
        return None
    first, begin = counts["num_consts"], counts["num_consts"] + counts["num_carry"]
    body = jaxpr_as_fun(params["jaxpr"])

    def rewritten(*xs: Any) -> list[Any]:
        carries = xs[first:begin]
        begins = tuple(jnp.zeros(x.shape, x.dtype) for x, stays in zip(carries, unchanged, strict=True) if not stays)

        def step(sums: Any, row: Any) -> tuple[Any, Any]:
            summed = iter(sums)
            carried = [x if stays else next(summed) for x, stays in zip(carries, unchanged, strict=True)]
            results = body(*xs[:first], *carried, *row)
            sums = tuple(x for x, stays in zip(results, unchanged, strict=False) if not stays)
            return sums, tuple(results[len(carries) :])

        def scanned(rows: Any) -> tuple[Any, Any]:
            return jax.lax.scan(step, begins, rows, length // parts, params["reverse"], params["unroll"])

        sums, made = jax.vmap(scanned)(tuple(x.reshape(parts, length // parts, *x.shape[1:]) for x in xs[begin:]))
        summed = iter(sums)
        totals = [
            x if stays else x + next(summed).sum(0, dtype=x.dtype) for x, stays in zip(carries, unchanged, strict=True)
        ]
        return [*totals, *(x.reshape(length, *x.shape[2:]) for x in made)]

    return traced_for(rewritten, equation)


def _is_of_a_row(equation: Any) -> bool:
    """Whether an equation means the same for one row and for several side by side."""
    dtypes = (dtype_name(atom.aval.dtype) for atom in equation.invars if hasattr(atom.aval, "dtype"))
    return equation.primitive.name not in ALONE and all(d == THREEFRY or not d.startswith("key<") for d in dtypes)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, those of jaxprs in them included."""
    for equation in jax_compat.open_jaxpr(jaxpr)[0].eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if jax_compat.is_jaxpr(inner):
                    yield from _equations(inner)
