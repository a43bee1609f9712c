"""Programs as source text, one call a line, and the pool of values from which the next line is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZES = (1, 2, 3, 4, 8)
MOST_ELEMENTS = 512
MOST_DIMENSIONS = 3
LARGEST = 1e5

FLOAT, INT = "float64", "int64"

SCOPE = {"jax": jax, "jnp": jnp, "lax": lax}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A line's result; `bound` is above its absolute elements, `exact` says that they are whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool
    bound: float

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Lines of Python over inputs a, b, c (floats) and i, n (integers), and the names of its results.

    `differentiated` are the inputs whose gradients it returns as well.
    """

    inputs: tuple[Value, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    differentiated: tuple[int, ...]

    def __str__(self) -> str:
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return ({', '.join(self.results)},)"))
        source = f"def plain({', '.join(v.name for v in self.inputs)}):\n{body}\n"
        if not self.differentiated:
            return f"{source}\nf = plain\n"
        return f"""{source}
def total(*inputs):
    results = plain(*inputs)
    return sum(jnp.sum(jnp.sin(r)) for r in results if r.dtype == "float64"), results

f = jax.value_and_grad(total, {self.differentiated}, has_aux=True)
"""

    __repr__ = __str__

    @property
    def function(self) -> Callable[..., Any]:
        scope = dict(SCOPE)
        exec(str(self), scope)
        return scope["f"]

    def arguments(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        drawn = (rng.integers(0 if v.dtype == INT else -4, 5, v.shape) for v in self.inputs)
        return tuple(np.asarray(x, v.dtype) for x, v in zip(drawn, self.inputs, strict=True))


class Writer:
    """A program being written; `draw` is hypothesis's, `smooth` keeps out what has no derivative."""

    def __init__(self, draw: Any, *, smooth: bool) -> None:
        self.draw = draw
        self.smooth = smooth
        self.lines: list[str] = []
        self.pool: list[Value] = []
        self.read: set[str] = set()

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def value(self, *, dtype: str = "", rank: int = 0, exact: bool = False) -> Value:
        """A value of the pool, late ones first; Skip where none has the dtype, the rank and whole numbers.

        What has no elements, as a negative padding may leave it, is not read: maxima and elements of it are errors.
        """
        full = [v for v in self.pool if math.prod(v.shape)]
        found = [v for v in full if v.dtype == (dtype or v.dtype) and v.rank >= rank and (v.exact or not exact)]
        if not found:
            raise Skip
        return self.draw(st.sampled_from(found[::-1]))

    def axis(self, value: Value) -> int:
        return self.integer(0, value.rank - 1)

    def write(self, expression: str, *read: Value, bound: float, exact: bool | None = None) -> Value:
        """A line; its result is exact if all that it reads is, unless told otherwise."""
        known = {v.name: jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.pool}
        with jax.enable_x64(True):
            made = jax.eval_shape(lambda scope: eval(expression, {**SCOPE, **scope}), known)
        if math.prod(made.shape) > MOST_ELEMENTS or len(made.shape) > MOST_DIMENSIONS or bound > LARGEST:
            raise Skip
        whole = all(v.exact for v in read) if exact is None else exact
        value = Value(name=f"v{len(self.lines)}", shape=made.shape, dtype=str(made.dtype), exact=whole, bound=bound)
        self.lines.append(f"{value.name} = {expression}")
        self.pool.append(value)
        self.read |= {v.name for v in read}
        return value


class Skip(Exception):
    """Nothing in the pool fits, or the result would be too large."""
