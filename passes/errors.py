"""Every error that planning raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanningError(Exception):
    """A program, cluster or option that cannot be planned as it stands; the message says what to change."""


class NoLegalPlanError(PlanningError):
    """No choice of placements on one mesh is legal; another mesh may have one."""


class OverBudgetError(PlanningError):
    """No plan of the kind that was asked for keeps the memory limit; `leanest` needs the least, where one was found."""

    def __init__(self, message: str, *, leanest: object = None) -> None:
        super().__init__(message)
        self.leanest = leanest


class ClusterError(PlanningError):
    """A cluster description that cannot be read, or that does not exist."""


class PlanMismatchError(PlanningError):
    """A saved plan that does not belong to this function, these shapes or these devices."""


class InternalError(Exception):
    """A broken invariant of autopar itself; please report it with the plan and the traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}. This is a bug in autopar; please report it with this traceback.")


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
