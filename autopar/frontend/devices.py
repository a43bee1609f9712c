"""The devices that a program names, in their order: it runs on these, with all its shardings, as under `jit`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.errors import ArgumentError, explain
from autopar.frontend.placements import Devices, devices_of
from autopar.frontend.primitives import meshes_of


def named_devices(jaxpr: Any, around: Sequence[tuple[Sharding, str]], mesh: Any, source: str) -> Devices | None:
    """The devices of a program's own shardings; None where it has none.

    `around` are the shardings of its arguments and results, with their names; a sharding without devices is on the
    ambient `mesh`. Raises ArgumentError where devices differ, as `jax.jit` does.
    """
    known: dict[Devices, str] = {}
    for sharding, name in (*around, *_shardings(jaxpr)):
        if devices := devices_of(sharding) or devices_of(mesh):
            known.setdefault(devices, name)
    if len(known) > 1:
        (first, one_name), (second, other_name) = list(known.items())[:2]
        rule = f"it is on devices {_numbers(second)}, and {one_name} is on {_numbers(first)}"
        remedy = "place all of a function on meshes of the same devices in the same order"
        raise ArgumentError(explain(other_name, rule, source, remedy))
    return next(iter(known), None)


def _numbers(devices: Devices) -> list[int]:
    return [device.id for device in devices]


def _shardings(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """(sharding or mesh, the name of what has it) for every one in a program."""
    opened, _ = jax_compat.open_jaxpr(jaxpr)
    for equation in opened.eqns:
        for sharding in meshes_of(equation):
            yield sharding, f"{equation.primitive.name} at {jax_compat.source_of(equation)}"
        for inner in jaxprs_in_params(equation.params):
            yield from _shardings(inner)
