"""Sums of arrays that are zero but for a part each, written as those parts joined along their leading dimension.

The derivative of an array that is read in slices, as of weights [layers, ...] that are indexed layer by layer or of one
vector with all weights, is a sum of as many arrays as there are slices, each of them all zeros but for its slice. XLA
computes the sum in one kernel that reads each slice once, which is what joining them is; taken one by one, the sums of
n slices would count as n arrays of the whole. Parts are `pad`s and updates of zeros alike.

Along another dimension, as of queries, keys and values made by one product, the sum is one of activations, which XLA
computes where it is read; such programs stay as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from autopar.frontend.by_row import Values
from autopar.frontend.known_numbers import number_of

_SUM = "add_any"

Part = tuple[int, int]
"""(where it begins along the leading dimension, its value)"""


def joined_sum(equation: Any, inputs: Sequence[int], values: Values) -> list[int | tuple[int, ...]] | None:
    """The parts, in order, of a sum of derivatives that have no element in common; None of any other equation.

    A part is a value, or the shape of zeros between others.
    """
    if equation.primitive.name != _SUM or not equation.outvars[0].aval.shape:
        return None
    first, second = (_parts(value, values) for value in inputs)
    if first is None or second is None:
        return None
    size, *rest = equation.outvars[0].aval.shape
    joined, end = list[int | tuple[int, ...]](), 0
    for begin, value in sorted((*first, *second)):
        if begin < end:
            return None
        joined += [(begin - end, *rest), value] if begin > end else [value]
        end = begin + values.types[value].shape[0]
    return joined + ([(size - end, *rest)] if end < size else [])


def _parts(value: int, values: Values) -> list[Part] | None:
    """The parts of an array that is zero elsewhere; None if it may be anything."""
    maker = values.makers.get(value)
    match maker.primitive if maker else None:
        case "pad":
            return _padded(value, values)
        case "dynamic_update_slice":
            return _updated(value, values)
        case "concatenate":
            return _concatenated(value, values)
        case _:
            return None


def _padded(value: int, values: Values) -> list[Part] | None:
    node = values.makers[value]
    array, zero = node.inputs
    config: Any = node.params["padding_config"]
    (low, high, between), *others = config
    if min(low, high) < 0 or between or any(map(any, others)) or number_of(zero, values) != 0:
        return None
    return _from(int(low), array, values)


def _updated(value: int, values: Values) -> list[Part] | None:
    whole, array, first, *_ = values.makers[value].inputs
    shape, part = values.types[whole].shape, values.types[array].shape
    start = number_of(first, values)
    if start is None or shape[1:] != part[1:] or number_of(whole, values) != 0:
        return None
    return _from(min(max(int(start), 0), shape[0] - part[0]), array, values)


def _from(begin: int, array: int, values: Values) -> list[Part]:
    """An array from an element on: the parts of which it was joined."""
    maker = values.makers.get(array)
    inside = _concatenated(array, values) if maker and maker.primitive == "concatenate" else None
    return [(begin, array)] if inside is None else [(begin + at, part) for at, part in inside]


def _concatenated(value: int, values: Values) -> list[Part] | None:
    node = values.makers[value]
    if node.params["dimension"] != 0:
        return None
    sizes = [values.types[operand].shape[0] for operand in node.inputs]
    begins = zip(accumulate(sizes, initial=0), node.inputs, strict=False)
    return [(begin, operand) for begin, operand in begins if number_of(operand, values) != 0]
