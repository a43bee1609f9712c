"""The plain data that is saved beside a state, and read back: the step's number, the position in the data, a key."""

from __future__ import annotations

import base64
import json
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.checkpoint.arrays import is_key, words
from autopar.errors import ArgumentError, explain


def whole_number(step: Any) -> int:
    """The number of a step, which may be an array of one element. Raises ArgumentError unless it is a whole number from
    0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        rule = "should be a whole number from 0"
        raise ArgumentError(explain(f"save(step={step!r:.60})", rule, "", "count the steps that are done"))
    return number


def encoded(position: Any) -> Any:
    """Plain data as JSON. Raises ArgumentError for anything else."""
    if isinstance(position, bytes):
        return {"bytes": base64.b64encode(position).decode()}
    try:
        if keys := _other_keys(position):
            raise TypeError(f"a dict has the key {keys[0]!r}, which is no text")
        return {"json": json.loads(json.dumps(position))}
    except TypeError as error:
        rule = f"it is no plain data: {error}"
        raise ArgumentError(explain("position=", rule, "", "pass numbers, texts, lists and dicts, or bytes")) from error


def _other_keys(data: Any) -> list[Any]:
    """The keys in plain data that are not text: JSON would turn them into text."""
    if isinstance(data, dict):
        return [key for key in data if not isinstance(key, str)] or _other_keys(list(data.values()))
    return [key for each in data for key in _other_keys(each)] if isinstance(data, list | tuple) else []


def decoded(position: Any) -> Any:
    return base64.b64decode(position["bytes"]) if "bytes" in position else position["json"]


def words_of_key(rng: Any) -> Any:
    """A key or array of random numbers as plain data. Raises ArgumentError for anything else."""
    if rng is None:
        return None
    array = np.asarray(words(rng)) if isinstance(rng, jax.Array | np.ndarray | np.generic | int) else None
    if array is None or array.dtype.kind not in "biuf":
        rule = "it is neither a key nor an array of numbers"
        remedy = "pass jax.random.key(...), or what else there is as part of the state"
        raise ArgumentError(explain(f"rng={rng!r:.60}", rule, "", remedy))
    name = jax_compat.key_implementation(rng.dtype) if isinstance(rng, jax.Array) and is_key(rng) else None
    return {"key": name, "dtype": array.dtype.name, "words": array.tolist()}


def fields_of_plan(plan: Any) -> Any:
    """A plan as plain data, None for none. Raises ArgumentError for anything else."""
    if plan is None or hasattr(plan, "to_json"):
        return plan and plan.to_json()
    rule, remedy = "it is no plan", "pass train_step.plan(state, batch), or leave it out"
    raise ArgumentError(explain(f"plan={plan!r:.60}", rule, "", remedy))


def key(fields: Any) -> Any:
    if fields is None:
        return None
    array = np.asarray(fields["words"], fields["dtype"])
    return jax.random.wrap_key_data(jnp.asarray(array), impl=fields["key"]) if fields["key"] else array
