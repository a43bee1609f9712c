"""The operators that devices ran during steps, from JAX's profiler: name, device, start and end."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.checks import hlo_kinds
from passes.cluster import collectives

COMPUTE, TRANSFERS = "compute", "transfers"
CAUSES = (COMPUTE, *collectives.ALGORITHMS, TRANSFERS)
"""The causes on which a device's time is spent, in the order in which overlaps are counted: a collective or transfer
counts only while nothing before it in this list runs on the device.
"""

_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operator that ran: its name in `module`, on the device of that number in this process, in nanoseconds.

    A copy that no program asked for has an empty module.
    """

    name: str
    module: str
    device: int
    start: float
    end: float


def profiled(run: Callable[[], None]) -> tuple[Event, ...]:
    """The operators that ran during `run()`; empty if the profiler sees none, or cannot start."""
    profile = Profile()
    try:
        run()
    finally:
        seen = profile.end()
    return seen


class Profile:
    """A run of JAX's profiler, which begins at once; it records nothing if the user's own profiler is running."""

    def __init__(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        folder = tempfile.TemporaryDirectory()
        try:
            jax.profiler.start_trace(folder.name, profiler_options=options)
        except RuntimeError:  # one is running already, of the user's: theirs goes on
            folder.cleanup()
            folder = None
        self._folder = folder

    def end(self) -> tuple[Event, ...]:
        """The operators that ran since it began."""
        if self._folder is None:
            return ()
        with self._folder as folder:
            jax.profiler.stop_trace()
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            with warnings.catch_warnings():
                # Reading the first profile makes a type that Python 3.13 warns of, and dies where that is an error.
                warnings.simplefilter("ignore", DeprecationWarning)
                return tuple(event for file in files for event in events(jax.profiler.ProfileData.from_file(str(file))))


def events(profile: Any) -> Iterator[Event]:
    """The operators in a profile (`jax.profiler.ProfileData`).

    Events of operators carry `hlo_op` and `hlo_module`, on CPU `device_ordinal` too; on accelerators the plane is the
    device's. As seen with jaxlib 0.10.2 on CPU; for GPUs and TPUs as the format documents it.
    """
    for plane in profile.planes:
        place = _PLANE.match(plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                device = int(place[1]) if place else stats.get("device_ordinal")
                name = stats.get("hlo_op") or (event.name if place and event.name.startswith("Memcpy") else None)
                if device is None or name is None:
                    continue
                yield Event(
                    name=str(name),
                    module=str(stats.get("hlo_module", "")),
                    device=int(device),
                    start=event.start_ns,
                    end=event.start_ns + event.duration_ns,
                )


def seconds_by_cause(
    seen: Iterable[Event], opcodes: Mapping[tuple[str, str], str], devices: Sequence[int], steps: int
) -> tuple[dict[str, float], ...]:
    """Seconds of a step that each device spends on each cause [devices]; together at most those of the step.

    Programs other than the step's, and copies between devices, count as transfers.
    """
    modules = {module for module, _ in opcodes}
    intervals: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in seen:
        cause = TRANSFERS
        if event.module in modules:
            cause = hlo_kinds.kind_of(opcodes.get((event.module, event.name), event.name))
        intervals.setdefault((event.device, cause), []).append((event.start, event.end))
    by_device: list[dict[str, float]] = []
    for device in devices:
        covered: list[tuple[float, float]] = []
        before, spent = 0.0, dict[str, float]()
        for cause in CAUSES:
            covered = _union([*covered, *intervals.get((device, cause), [])])
            total = sum(end - start for start, end in covered)
            spent[cause] = (total - before) * 1e-9 / steps
            before = total
        by_device.append(spent)
    return tuple(by_device)


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in any of these intervals, which are in nanoseconds."""
    return sum(end - start for start, end in _union(intervals)) * 1e-9


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals without overlaps, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
