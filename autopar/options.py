"""The options of `parallelize`, checked one by one, and the settings made of them."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from types import MappingProxyType
from typing import Any, Literal, Self, SupportsIndex, TypedDict

import jax
import numpy as np

from autopar.cache import PlanCache, checked_cache
from autopar.errors import ArgumentError, explain
from autopar.frontend import Names, Positions
from autopar.jax_compat import Device
from autopar.profiling import Calibration
from passes.cluster import Cluster, parse_cluster
from passes.errors import PlanningError
from passes.planners import Auto, Planned, Planner, PlanOptions, limit_nbytes
from passes.progress import Report, silent
from passes.step import Step
from passes.text import plain_integer
from passes.transforms import KEPT, Coupling, Kept

Arriving = Literal["moved", "keep"]
"""What to do with arrays that arrive in other shardings: move them to where the plan reads them, or plan
around them.
"""


class Options(TypedDict, total=False):
    """The options of `parallelize`, for type checkers: its overloads say the rest."""

    cluster: str | os.PathLike[str] | Cluster | None
    planner: Planner | None
    devices: Sequence[Device] | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: Positions
    static_argnames: Names
    donate_argnums: Positions
    donate_argnames: Names
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | None
    placed: Arriving
    follow: Any
    batch_argnums: Positions
    batch_argnames: Names
    microbatches: int | None
    microbatch_semantics: Coupling
    memory_limit: int | str | None
    remat: Kept | Sequence[Kept] | None
    cache: str | os.PathLike[str] | PlanCache | None
    calibration: str | os.PathLike[str] | Calibration | None
    progress: Report | Literal[False] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `parallelize` that are not `jax.jit`'s, checked."""

    cluster: Cluster | None
    planner: Planner
    devices: tuple[Device, ...] | None
    placed: Arriving
    follow: Any
    batch_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    microbatches: int | None
    microbatch_semantics: Coupling
    memory_limit: int | None
    remat: Kept | Sequence[Kept] | None
    cache: PlanCache | None
    calibration: Calibration | None
    progress: Report | None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """The settings made of a user's options. Raises ArgumentError or ClusterError for invalid ones."""
        return cls(**{name: _CHECKS[name](value) for name, value in options.items()})

    def but(self, options: Mapping[str, object]) -> Self:
        """The settings with these options replaced; those that are None stay."""
        given = {name: value for name, value in options.items() if value is not None}
        return replace(self, **{name: _CHECKS[name](value) for name, value in given.items()})

    def parts(self) -> int:
        """The number of parts in which a loop over rows of the batch is computed: one for each device, in each
        microbatch.
        """
        devices = self.cluster.n_devices if self.cluster else len(self.devices or jax.devices())
        return devices * (self.microbatches or 1)


@dataclass(frozen=True, slots=True)
class _OfGraphs:
    """A planner with the former interface, which takes graphs."""

    planner: Any

    def plan(self, step: Step, cluster: Cluster, options: PlanOptions) -> Planned:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that of the planners which it asks: it has been said
            plan = self.planner.plan(step.graph, cluster, tied=step.state_pairs, donated=step.donated)
        return Planned.of(plan, step)


def checked_cluster(cluster: Any) -> Cluster | None:
    """The cluster that the user's option stands for. Raises ClusterError."""
    return cluster if cluster is None or isinstance(cluster, Cluster) else parse_cluster(cluster)


def check_arguments(call: str, args: object) -> None:
    """Raises ArgumentError where a call passes one argument that is the tuple of all positional arguments of a step."""
    if not isinstance(args, tuple | list):
        remedy = f"write {call}(train_step, (state, batch))"
        raise ArgumentError(explain(f"args={args!r:.60}", "these are all positional arguments", "", remedy))


def checked_planner(planner: Any) -> Planner:
    """The planner, by default the search. Raises ArgumentError for anything else, a planner's class included."""
    if planner is None:
        return Auto()
    is_class = isinstance(planner, type)
    plan = None if is_class else getattr(planner, "plan", None)
    if callable(plan) and _takes(plan, "step", "cluster", "options"):
        return planner
    if callable(plan) and _takes(plan, "graph", "cluster", tied=(), donated=()):
        kind = type(planner).__name__
        warnings.warn(
            f"{kind}.plan(graph, cluster, tied=, donated=) is deprecated: write {kind}.plan(step, cluster, options), "
            "which returns autopar.Planned",
            DeprecationWarning,
            stacklevel=2,
        )
        return _OfGraphs(planner)
    rule = "a planner is a value, and this is its class"
    rule = rule if is_class else "a planner has a method plan(step, cluster, options)"
    remedy = "pass autopar.Auto(), DataParallel(), Zero(), Megatron(data=, tensor=) or Manual(path)"
    raise ArgumentError(explain(f"planner={planner!r:.60}", rule, "", remedy))


def _takes(plan: Callable[..., Any], *args: object, **kwargs: object) -> bool:
    """Whether a method can be called with these arguments."""
    try:
        inspect.signature(plan).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def checked_microbatches(microbatches: Any) -> int | None:
    """The number of microbatches, None where none is given. Raises ArgumentError."""
    if microbatches is None:
        return None
    if isinstance(microbatches, SupportsIndex) and not isinstance(microbatches, bool) and index(microbatches) >= 1:
        return index(microbatches)
    rule = "the batch is computed in a whole number of microbatches, 1 or more"
    raise ArgumentError(explain(f"microbatches={microbatches!r:.60}", rule, "", "leave it out for 1"))


def checked_names(option: str, kind: type, names: Any) -> tuple[Any, ...]:
    """The positions or names of arguments; the user may give one alone, or none. Raises ArgumentError."""
    single = plain_integer(names)
    listed = () if names is None else (single,) if isinstance(single, kind) else names
    if isinstance(listed, Iterable) and not isinstance(listed, str):
        listed = tuple(map(plain_integer, listed))
        if all(isinstance(name, kind) and not isinstance(name, bool) for name in listed):
            return listed
    written = "0 or (0, 1)" if kind is int else "'batch' or ('images', 'labels')"
    rule = "it names arguments by position" if kind is int else "it names arguments, or paths into them"
    raise ArgumentError(explain(f"{option}={names!r:.60}", rule, "", f"write, say, {option}={written}"))


def checked_progress(progress: Any) -> Any:
    """The callback for `Progress`: one that does nothing for False, None for progress bars. Raises ArgumentError."""
    if progress is None or progress is True:
        return None
    if progress is False:
        return silent
    if callable(progress):
        return progress
    rule = "progress is a function of one autopar.Progress, or False for none"
    raise ArgumentError(explain(f"progress={progress!r:.60}", rule, "", "write, say, progress=print"))


def checked_limit(limit: Any) -> int | None:
    """The bytes that a device may need. Raises ArgumentError."""
    try:
        return limit_nbytes(limit)
    except PlanningError as error:
        raise ArgumentError(str(error)) from None


def checked_coupling(coupling: Any) -> Coupling:
    """The semantics of microbatches: `"exact"` or `"independent"`. Raises ArgumentError."""
    if coupling not in ("exact", "independent"):
        rule = 'it is "exact" or "independent"'
        raise ArgumentError(explain(f"microbatch_semantics={coupling!r:.60}", rule, "", 'leave it out for "exact"'))
    return coupling


def checked_remat(remat: Any) -> Kept | tuple[Kept, ...] | None:
    """The policy of all layers, or of each: what they keep for the backward pass. Raises ArgumentError."""
    if remat is None or (isinstance(remat, str) and remat in KEPT):
        return remat
    names: tuple[Any, ...] = tuple(remat) if isinstance(remat, Sequence) and not isinstance(remat, str) else (remat,)
    if not all(isinstance(name, str) and name in KEPT for name in names):
        rule = f"a layer keeps one of {', '.join(KEPT)} for its backward pass"
        remedy = "write, say, remat='inputs' for what jax.checkpoint does, a name for each layer, or leave it out"
        raise ArgumentError(explain(f"remat={remat!r:.60}", rule, "", remedy))
    return names


def checked_placed(placed: Any) -> Arriving:
    """The treatment of arrays that arrive in other shardings: `"moved"` or `"keep"`. Raises ArgumentError."""
    if placed not in ("moved", "keep"):
        rule = 'arrays that come placed are "moved" to where the plan reads them, or it is to "keep" them'
        raise ArgumentError(explain(f"placed={placed!r:.60}", rule, "", 'leave it out for "moved"'))
    return placed


def checked_follow(follow: Any) -> Any:
    """The compilations of the function to be followed; None for none. Raises ArgumentError."""
    if follow is None or hasattr(follow, "compilations"):
        return getattr(follow, "compilations", None)
    rule = "a function follows what parallelize(...) returned"
    raise ArgumentError(explain(f"follow={follow!r:.60}", rule, "", "write, say, follow=train_step"))


def checked_devices(devices: Any) -> tuple[Device, ...] | None:
    """The devices; None for those that are present.

    Raises ArgumentError for anything but a sequence of devices, and for a device that is named twice.
    """
    if devices is None:
        return None
    listed = tuple(devices) if isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str) else ()
    shown, remedy = f"devices={devices!r:.60}", "write, say, devices=jax.devices()[:8]"
    if not listed or not all(hasattr(device, "device_kind") for device in listed):
        raise ArgumentError(explain(shown, "devices are a sequence of one jax.Device or more", "", remedy))
    if twice := sorted({str(device) for device in listed if listed.count(device) > 1}):
        rule = f"a device is named once, and {', '.join(twice)} more often"
        raise ArgumentError(explain(shown, rule, "", remedy))
    return listed


def checked_calibration(calibration: Any) -> Calibration | None:
    """The calibration in a file. Raises ArgumentError for a file that has none."""
    if calibration is None or calibration is False:
        return None
    if isinstance(calibration, Calibration):
        return calibration
    if not isinstance(calibration, str | os.PathLike):
        rule = "a calibration is the file that a report was kept in, or an autopar.Calibration"
        remedy = "write, say, calibration='plans/calibration.json', or leave it out for none"
        raise ArgumentError(explain(f"calibration={calibration!r:.60}", rule, "", remedy))
    try:
        return Calibration.load(calibration)
    except PlanningError as error:
        raise ArgumentError(str(error)) from None


_CHECKS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "cluster": checked_cluster,
        "planner": checked_planner,
        "devices": checked_devices,
        "placed": checked_placed,
        "follow": checked_follow,
        "batch_argnums": partial(checked_names, "batch_argnums", int),
        "batch_argnames": partial(checked_names, "batch_argnames", str),
        "microbatches": checked_microbatches,
        "microbatch_semantics": checked_coupling,
        "memory_limit": checked_limit,
        "remat": checked_remat,
        "cache": checked_cache,
        "calibration": checked_calibration,
        "progress": checked_progress,
    }
)
