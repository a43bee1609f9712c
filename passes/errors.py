"""The errors that planning raises on purpose, and the text of their messages."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from functools import cache
from importlib import metadata


@cache
def documentation() -> str:
    """The address of the documentation, as the metadata of the installed package have it; empty without any."""
    try:
        urls = metadata.metadata("autopar").get_all("Project-URL") or ()
    except metadata.PackageNotFoundError:
        return ""
    named = dict(str(url).split(", ", 1) for url in urls)
    return named.get("Documentation", "").rstrip("/")


class PlanningError(Exception):
    """A program, cluster or option that cannot be planned as it stands; the message says what to change.

    Below it stands where to read on: the `page` of the documentation, if the installed package says where that is.
    """

    page = "limits"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if site := documentation():
            self.add_note(f"  see {site}/{self.page}")


class NoLegalPlanError(PlanningError):
    """The error of a mesh on which no choice of placements is legal; another mesh may have one."""

    page = "how-to/pin"


class SeveralMeshesError(PlanningError):
    """The error of a program that is written for several meshes at once, where a plan is for one."""


class OverBudgetError(PlanningError):
    """The error where no plan keeps the memory limit; `least_memory_plan` is that of least memory found, if any."""

    page = "how-to/memory"

    def __init__(self, message: str, *, least_memory_plan: object = None) -> None:
        super().__init__(message)
        self.least_memory_plan = least_memory_plan

    @property
    def leanest(self) -> object:
        """The former name of `least_memory_plan`."""
        warnings.warn("OverBudgetError.leanest is called least_memory_plan now", DeprecationWarning, stacklevel=2)
        return self.least_memory_plan


class ClusterError(PlanningError):
    """The error of a cluster description that cannot be read, or of a cluster that does not exist."""

    page = "how-to/clusters"


class PlanMismatchError(PlanningError):
    """The error of a saved plan that does not belong to this function, these shapes or these devices."""

    page = "how-to/pin"


class InternalError(Exception):
    """The error of a broken invariant of autopar itself; please report it with the plan and the traceback."""

    def __str__(self) -> str:
        return f"{super().__str__()}. This is a bug in autopar; please report it with this traceback."


def explain(what: str, rule: str, context: str, remedy: str) -> str:
    """The four parts of an error as text: what was written, the rule it breaks, where or what is known, what to change.

    `context` may be empty.
    """
    return "\n  ".join((f"{what}: {rule}", *([context] if context else []), remedy))


def close(name: str, names: Iterable[str]) -> str:
    """`did you mean ...?` with the names that `name` begins, or else is close to; empty where there are none."""
    names = list(names)
    matches = [n for n in names if n.startswith(name)] or difflib.get_close_matches(name, names, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else ""
