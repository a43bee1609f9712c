"""Tables of small functions with arguments, and what their arrays are made with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.autopar.random_plans import Dice

PLANS = "searched", "random"


@dataclass(frozen=True)
class Case:
    """A function with arguments and options; `make` builds them where 64-bit types are on.

    `sizes` and `seed` make the random plan; `marks` are pytest's, by plan.
    """

    make: Callable[[], tuple[Any, ...]]
    sizes: tuple[int, ...]
    seed: int
    marks: dict[str, list[pytest.MarkDecorator]]

    @property
    def planner(self) -> Dice:
        return Dice(seed=self.seed, sizes=self.sizes)

    def read(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        fun, args, *options = self.make()
        return fun, args, options[0] if options else {}


class Table(dict[str, Case]):
    """Cases by the names of their functions, with spaces: the table decorates them.

    `slow` are the plans of a slow run; the reasons `searched` and `random` say why that plan fails.
    """

    def __call__(
        self,
        make: Any = None,
        *,
        slow: tuple[str, ...] = (),
        sizes: tuple[int, ...] = (2, 4),
        seed: int = 0,
        **fails: str,
    ) -> Any:
        if make is None:
            return functools.partial(self, slow=slow, sizes=sizes, seed=seed, **fails)
        marks = {
            plan: [
                *([pytest.mark.xfail(strict=True, reason=fails[plan])] if plan in fails else []),
                *([pytest.mark.slow] if plan in slow else []),
            ]
            for plan in PLANS
        }
        name = make.__name__.replace("_", " ")
        assert name not in self
        assert {*slow, *fails} <= {*PLANS}
        self[name] = Case(make, sizes, seed, marks)
        return make


def x(*shape: int, dtype: Any = None, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype or jnp.float64)


def ints(*shape: int, below: int = 8, dtype: Any = jnp.int32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), dtype)


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
