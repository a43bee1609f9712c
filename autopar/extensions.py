"""Other packages' sharding rules, devices, schedules and planners, which they declare as entry points.

    [project.entry-points."autopar.extensions"]
    my_kernels = "my_package.autopar_rules:register"

    [project.entry-points."autopar.planners"]
    halves = "my_package.planners:HalfTheDevices"

An entry of `autopar.extensions` is called without arguments when autopar is imported, and registers what it has by
`autopar.register_rule`, `register_device` or `register_schedule`. An entry of `autopar.planners` is called with the
text that follows its name in `--planner halves:2`, if there is any, and returns a planner.
"""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

EXTENSIONS, PLANNERS = "autopar.extensions", "autopar.planners"


def load() -> list[str]:
    """The names of the extensions that were loaded; one that fails is left out, with a warning that says why."""
    loaded: list[str] = []
    for entry in entry_points(group=EXTENSIONS):
        try:
            entry.load()()
        except Exception as error:  # another package's: autopar works without it
            package = entry.dist.name if entry.dist else "a package"
            message = f"{package}: its extension {entry.name} = {entry.value} was left out: {error!r}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        else:
            loaded.append(entry.name)
    return loaded


def planners() -> dict[str, EntryPoint]:
    """The planners of other packages by name; they are not loaded yet."""
    return {entry.name: entry for entry in entry_points(group=PLANNERS)}


def planner(name: str, option: str) -> Any:
    """The planner of another package of this name; None where there is none."""
    entry = planners().get(name)
    if entry is None:
        return None
    make = entry.load()
    return make(option) if option else make()
