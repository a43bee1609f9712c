"""Factors by which steps took longer than predicted, kept in a file, and clusters made slower by these factors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from passes.cluster import Cluster, what_if
from passes.errors import PlanningError, explain
from passes.plan import AnyPlan
from passes.plan import json as plan_json

NAME = "calibration.json"
"""The file beside the plans in a cache's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Measured over predicted seconds, of computing and of communication."""

    compute: float = 1.0
    communication: float = 1.0


NONE = Factors()
"""The factors of a step that takes as long as predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The factors of each kind of device, as measured with several plans, from the file at `path`."""

    path: str
    factors: Mapping[str, Sequence[Factors]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The calibration in a file. Raises PlanningError for a file that holds none."""
        kinds: dict[str, list[Factors]] = {}
        for entry in _read(Path(path)):
            kinds.setdefault(entry["device"], []).append(_factors(entry))
        return cls(path=os.fspath(path), factors=kinds)

    def of(self, cluster: Cluster) -> Factors:
        """The geometric mean of the factors measured on such devices. Raises PlanningError where there are none."""
        device = cluster.group().device.name
        if not (several := self.factors.get(device)):
            rule = f"steps were measured on {', '.join(sorted(self.factors)) or 'nothing'}, and not on {device}"
            remedy = "leave calibration out, or measure there: print(train_step.report(...))"
            raise PlanningError(explain(f"calibration={self.path!r}", rule, "", remedy))
        compute = math.fsum(math.log(each.compute) for each in several) / len(several)
        communication = math.fsum(math.log(each.communication) for each in several) / len(several)
        return Factors(compute=math.exp(compute), communication=math.exp(communication))

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster made slower by its factors, and named so. Raises PlanningError where there are none."""
        factors = self.of(cluster)
        return what_if.slower(cluster, factors.compute, factors.communication)


def keep(path: str | os.PathLike[str], plan: AnyPlan, factors: Factors, step_seconds: float) -> None:
    """Adds the factors of a plan to a file, in place of earlier ones of the same plan.

    Raises PlanningError if the file has other contents, or cannot be written.
    """
    target = Path(path)
    entries = _read(target) if target.exists() else []
    about = {
        "device": plan.cluster.group().device.name,
        "program": plan.fingerprint,
        "planner": plan.planner,
        "shape": plan.shape,
    }
    entries = [entry for entry in entries if any(entry.get(name) != value for name, value in about.items())]
    entries.append(
        about
        | {
            "predicted_seconds": plan.step_seconds,
            "measured_seconds": step_seconds,
            "compute": factors.compute,
            "communication": factors.communication,
        }
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanningError(f"{target}: the calibration cannot be written: {error.strerror}") from error
    plan_json.write(target, {"calibration": entries})


def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file. Raises PlanningError for a file that is no calibration."""
    remedy = "name the file that a report was kept in, or run print(train_step.report(...)) with cache= first"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"it cannot be read: {error.strerror}"
        raise PlanningError(explain(f"calibration {os.fspath(path)!r}", rule, "", remedy)) from error
    except ValueError as error:
        rule = f"it is not JSON: {error}"
        raise PlanningError(explain(f"calibration {os.fspath(path)!r}", rule, "", remedy)) from error
    entries = data.get("calibration") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise PlanningError(explain(f"calibration {os.fspath(path)!r}", "it is no calibration", "", remedy))
    return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("device"), str):
        return False
    values = [entry.get(name) for name in ("compute", "communication")]
    return all(isinstance(value, int | float) and 0 < value < math.inf for value in values)


def _factors(entry: Mapping[str, Any]) -> Factors:
    return Factors(compute=entry["compute"], communication=entry["communication"])
