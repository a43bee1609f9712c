"""Values of which every element is one number that is known at tracing, such as the 1/n of a mean's gradient.

XLA computes them before the program runs, and sends nothing of them between devices. As numbers they cost a plan
nothing either, wherever they are read. Only results that are exact are computed here: arithmetic that IEEE 754 rounds
correctly, comparisons, selections, and views of an array of equal elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.frontend.by_row import Values

BROADCAST = "broadcast_in_dim"

_VIEWS = frozenset(
    {BROADCAST, "copy", "dynamic_slice", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"}
)
"""Primitives whose result has only elements of the first operand."""

_EXACT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": np.abs,
        "add": np.add,
        "add_any": np.add,
        "and": np.bitwise_and,
        "clamp": lambda least, number, most: np.minimum(np.maximum(number, least), most),
        "div": np.divide,
        "eq": np.equal,
        "ge": np.greater_equal,
        "gt": np.greater,
        "is_finite": np.isfinite,
        "le": np.less_equal,
        "lt": np.less,
        "mul": np.multiply,
        "ne": np.not_equal,
        "neg": np.negative,
        "not": np.bitwise_not,
        "or": np.bitwise_or,
        "select_n": lambda which, *cases: cases[min(max(int(which), 0), len(cases) - 1)],
        "sqrt": np.sqrt,
        "sub": np.subtract,
        "xor": np.bitwise_xor,
    }
)
"""Primitives with an exact result, with the function that computes it."""

_INTEGERS = frozenset(f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)) | {"bool"}
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})


def as_number(value: Any, aval: Any) -> float | int | bool | None:
    """A scalar as a Python number; None for an array, and for anything but a bool, integer or real number."""
    if aval.shape:
        return None
    match aval.dtype.name:
        case "bool":
            return bool(value)
        case name if name.startswith(("int", "uint")):
            return int(value)
        case name if name.startswith(("float", "bfloat")):
            return float(value)
    return None


def number_of(value: int, values: Values) -> float | int | bool | None:
    """The number that a value is, or that all its elements are; None if it is not known."""
    maker = values.makers.get(value)
    if maker is not None and maker.primitive == BROADCAST:
        value = maker.inputs[0]
    number = values.literals.get(value)
    return number if isinstance(number, float | int) else None


def branch_taken(equation: Any, inputs: Sequence[int], values: Values) -> Any:
    """The jaxpr of the branch that a choice takes, where its number is known; None of any other equation."""
    branches = equation.params.get("branches")
    index = number_of(inputs[0], values) if branches else None
    return None if index is None else branches[min(max(int(index), 0), len(branches) - 1)]


def slice_taken(equation: Any, inputs: Sequence[int], values: Values) -> dict[str, Any] | None:
    """The parameters of the slice that a dynamic one is, where its place is known; None of any other equation."""
    if equation.primitive.name != "dynamic_slice":
        return None
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    given = [number_of(value, values) for value in inputs[1:]]
    known = [int(number) for number in given if number is not None]
    if not known or len(known) < len(given):
        return None
    starts = tuple(min(max(at, 0), n - size) for at, n, size in zip(known, shape, sizes, strict=True))
    ends = tuple(at + size for at, size in zip(starts, sizes, strict=True))
    return {"start_indices": starts, "limit_indices": ends, "strides": None}


def computed(equation: Any, inputs: Sequence[int], values: Values) -> float | int | bool | None:
    """The number that all elements of an equation's result are; None if it is not known, or not computed here."""
    numbers: list[float | int | bool] = []
    for value in inputs:
        if (number := number_of(value, values)) is None:
            return None
        numbers.append(number)
    if not numbers or len(equation.outvars) != 1 or equation.effects:
        return None
    name = equation.primitive.name
    if name in _VIEWS:
        return numbers[0]
    dtypes = [var.aval.dtype for var in (*equation.invars, *equation.outvars)]
    if not {dtype.name for dtype in dtypes} <= _INTEGERS | _FLOATS:
        return None
    *given, dtype = dtypes
    operands = [np.asarray(number, dtype=each) for number, each in zip(numbers, given, strict=True)]
    with np.errstate(all="ignore"):
        if name == "convert_element_type":
            if given[0].name in _FLOATS and dtype.name not in _FLOATS:
                return None  # what does not fit has no one result
            result = operands[0].astype(dtype)
        elif name not in _EXACT or (name == "div" and dtype.name not in _FLOATS):
            return None
        else:
            result = np.asarray(_EXACT[name](*operands)).astype(dtype)
    return result.item() if dtype.name in _INTEGERS else _representable(result, dtype)


def _representable(result: Any, dtype: Any) -> float | None:
    """A result as a number; None for one that devices may have differently: not a number, infinite, or
    flushed to zero.
    """
    number = float(result)
    return number if number == 0 or float(jnp.finfo(dtype).tiny) <= abs(number) < np.inf else None
