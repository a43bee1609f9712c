"""Errors about the user's input, each with four parts: what was given, the rule that it breaks, where, and what to
change.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from passes import errors
from passes.errors import ClusterError, InternalError, OverBudgetError, PlanMismatchError, PlanningError

__all__ = [
    "ArgumentError",
    "ClusterError",
    "DeviceError",
    "DisagreementError",
    "InternalError",
    "OverBudgetError",
    "PeerError",
    "PlanMismatchError",
    "PlanningError",
    "UnboundPlanError",
    "UnsupportedError",
    "check_folder",
    "explain",
]


class ArgumentError(PlanningError, TypeError, ValueError):
    """An argument that the function cannot be planned for; `jax.jit` raises TypeError or ValueError for the same."""

    page = "reference/python"


class UnsupportedError(PlanningError, NotImplementedError):
    """An operation in the user's function for which no plan is possible."""


class DeviceError(PlanningError, RuntimeError):
    """A plan for devices that are not present."""

    page = "how-to/devices"


class DisagreementError(PlanningError, RuntimeError):
    """Processes that would run different programs, or that were given different values."""

    page = "processes"


class PeerError(DeviceError):
    """A connection to another process that has ended, mostly because that process has."""


class UnboundPlanError(PlanningError):
    """A question about arguments to a plan without a function, such as one just loaded from a file."""

    page = "how-to/read-a-plan"


def explain(what: str, rule: str, where: str, remedy: str) -> str:
    """The four parts of an error as text; `where` is the user's `file:line (function)` and may be empty."""
    return errors.explain(what, rule, f"at {where}" if where else "", remedy)


def check_folder(argument: str, path: Any, use: str) -> None:
    """Raises ArgumentError, which names the argument, unless it is the path of a folder that exists or can be made.

    `use` says what is in such folders, as in "checkpoints are in a folder".
    """
    remedy = "name a folder, which need not exist"
    if not isinstance(path, str | os.PathLike) or not path or not isinstance(os.fspath(path), str):
        raise ArgumentError(explain(argument, f"{use}, and this is not its path", "", remedy))
    folder = Path(path)
    for each in (folder, *folder.parents):
        if os.path.exists(each) and not os.path.isdir(each):
            rule = f"{'it' if each == folder else each} is a file, and {use}"
            raise ArgumentError(explain(argument, rule, "", remedy))


def not_here(device: Any) -> DeviceError:
    """The error of a call on a device that is only described."""
    rule, remedy = "it is described, and nothing runs there", "write .lower(...).compile(), or run it on jax.devices()"
    return DeviceError(explain(f"device {device}", rule, "", remedy))
