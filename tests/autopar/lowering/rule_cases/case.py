"""A use of a primitive, and the arrays that it is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Case:
    """`function(*args)` uses `primitive`; every extent is a multiple of 4, so that two axes can share a dimension."""

    primitive: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    label: str = ""

    def __str__(self) -> str:
        return f"{self.primitive} {self.label}".rstrip()


def floats(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(list(shape)).integers(low, high, shape).astype(dtype)
