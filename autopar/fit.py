"""What fits in the memory of a cluster that need not be here: plans by hand beside the searched one, and how far each
of them can be stretched: the largest batch, the largest preset. No device is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import jax

from autopar.api import ParallelFunction, parallelize
from autopar.arguments import abstract
from autopar.forms import TracedForms
from autopar.microbatch import microbatched
from autopar.remat import recomputed
from autopar.trace import Traced, trace
from passes import microbatch
from passes.by_hand import DataParallel, Megatron, Zero
from passes.cluster import Cluster, HostGroup
from passes.errors import OverBudgetError, PlanningError
from passes.mesh_search import best, named
from passes.plan import Plan
from passes.planner import Auto, Planner
from passes.progress import Progress
from passes.variants import VariantSearch

TENSOR = (2, 4, 8)
"""The degrees of tensor parallelism that are tried for Megatron."""

Said = Callable[[str], None]


class _OutOfTime(Exception):
    """The end of a search that was given no more time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A step, plain or parallel, and what it is called with: arrays or their shapes."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """An example from its parts."""
        return cls(step=step, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What plans are made for: a cluster, the bytes that a plan may need on a device, and seconds to search for it."""

    cluster: Cluster
    limit_nbytes: float
    seconds: float = 60.0

    @property
    def auto(self) -> Auto:
        """The search under the limit."""
        return Auto(memory_limit=int(self.limit_nbytes), seconds=self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one planner: the plan, or for a search that found none the leanest; else why there is none."""

    name: str
    limit_nbytes: float
    plan: Plan | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.over_nbytes <= 0

    @property
    def over_nbytes(self) -> float:
        """Bytes of a device above the limit; negative where there is room."""
        return self.plan.peak_nbytes - self.limit_nbytes if self.plan else float("inf")

    def to_json(self) -> dict[str, object]:
        """The row as JSON data; of the plan, what it costs and chose."""
        found: dict[str, object] = {"plan": self.name, "fits": self.fits}
        if self.refusal:
            found["refusal"] = self.refusal
        if (plan := self.plan) is None:
            return found
        return found | {
            "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
            "microbatches": plan.microbatches,
            "remat": list(plan.remat),
            "offloaded": [plan.input_names[i] for i in plan.offloaded],
            "step_seconds": plan.step_seconds,
            "peak_nbytes": plan.peak_nbytes,
            "over_nbytes": max(0, int(self.over_nbytes)),
            "nbytes": dict(plan.nbytes),
            "where": plan.memory.where if plan.memory else "",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch or preset that one planner fits, None if it fits none; not `certain` if time ran out first."""

    name: str
    what: Literal["batch", "preset"]
    size: int | str | None = None
    certain: bool = False
    row: Row | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, object]:
        """The answer as JSON data."""
        row = self.row.to_json() if self.row else {}
        refusal = {"refusal": self.refusal} if self.refusal else {}
        return {"what": self.what, "size": self.size, "certain": self.certain, **row, "plan": self.name, **refusal}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A traced step and what its forms are made of; `structs` are its flat arguments."""

    parallel: ParallelFunction
    traced: Traced
    structs: tuple[jax.ShapeDtypeStruct, ...]
    fixed: bool

    def forms(self) -> TracedForms:
        """The forms that a search chooses among."""
        return TracedForms(
            traced=self.traced,
            structs=self.structs,
            coupling=self.parallel._coupling,
            count=self.parallel._microbatches,
            fixed=self.fixed,
        )

    def by_hand(self) -> Traced:
        """The form that plans by hand are of: as written, in the microbatches that it asks for."""
        count = self.parallel._microbatches or 1
        return microbatched(self.traced, self.structs, count, self.parallel._coupling) if count > 1 else self.traced

    def batch(self) -> tuple[int, ...]:
        """The flat arguments that make up the batch. Raises PlanningError where none does."""
        return microbatch.split(self.traced.graph, 1, tied=self.traced.tied, coupling="independent").batch


def traced_step(example: Example, rows: Mapping[int, int] | None = None) -> Step:
    """An example as planners take it, with the leading dimensions of the flat arguments at `rows` as they say."""
    step = example.step if isinstance(example.step, ParallelFunction) else parallelize(example.step)
    signature = step._signature
    dynamic, _ = signature.split(example.args, dict(example.kwargs))
    leaves, tree = jax.tree.flatten(abstract(dynamic, signature, len(example.args)))
    for position, extent in (rows or {}).items():
        leaf = leaves[position]
        leaves[position] = jax.ShapeDtypeStruct((extent, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)
    args, kwargs = signature.merge(jax.tree.unflatten(tree, leaves), example.args, dict(example.kwargs))
    found = trace(step._fun, args, kwargs, **step._options)
    kept = step._kept(found)
    return Step(
        parallel=step,
        traced=recomputed(found, kept) if kept else found,
        structs=tuple(leaves),
        fixed=bool(kept),
    )


def quiet(what: str) -> None:
    """Says nothing."""


def plans(step: Step, room: Room, said: Said = quiet) -> Iterator[Row]:
    """A row for each planner, from the plainest; `said` is told what is planned now."""
    for name in PLANNERS:
        said(f"planning {name}")
        yield row(name, step, room, said)


def row(name: str, step: Step, room: Room, said: Said = quiet) -> Row:
    """What one planner makes of a step."""
    try:
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=PLANNERS[name](step, room, said))
    except OverBudgetError as error:
        leanest = error.leanest if isinstance(error.leanest, Plan) else None
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=leanest, refusal=str(error))
    except PlanningError as error:
        return Row(name=name, limit_nbytes=room.limit_nbytes, refusal=str(error))


def _jit(step: Step, room: Room, said: Said) -> Plan:
    """The step as it is, on one device."""
    group, found = room.cluster.group(), step.by_hand()
    alone = HostGroup(hosts=1, devices_per_host=1, device=group.device, intra=group.intra, inter=group.inter)
    cluster = Cluster(name=f"one of {room.cluster.name}", groups=(alone,))
    return best("jit", found.graph, [named(cluster)], found.tied, found.donated, room.auto.solver)


def _planned(planner: Planner, step: Step, room: Room) -> Plan:
    found = step.by_hand()
    return cast("Plan", planner.plan(found.graph, room.cluster, tied=found.tied, donated=found.donated))


def _by(planner: Planner) -> Planned:
    return lambda step, room, said: _planned(planner, step, room)


def _megatron(step: Step, room: Room, said: Said) -> Plan:
    """The cheapest that fits of Megatron's shapes within a host, else the leanest."""
    devices, group = room.cluster.n_devices, room.cluster.group()
    sizes = [t for t in TENSOR if group.devices_per_host % t == 0] or [1]
    found, refused = [], None
    for tensor in sizes:
        said(f"planning Megatron, {devices // tensor} x {tensor}")
        try:
            found.append(_planned(Megatron(data=devices // tensor, tensor=tensor), step, room))
        except PlanningError as error:
            refused = error
    if refused is not None and not found:
        raise refused
    fitting = [plan for plan in found if plan.peak_nbytes <= room.limit_nbytes]
    if fitting:
        return min(fitting, key=lambda plan: plan.step_seconds)
    return min(found, key=lambda plan: plan.peak_nbytes)


def _searched(step: Step, room: Room, said: Said) -> Plan:
    """The cheapest that fits of all forms and meshes; an error says what would fit."""
    return room.auto.choose(step.forms(), room.cluster, lambda now: said(f"planning searched: {now.phase}"))


def _tried(step: Step, room: Room, said: Said) -> Plan:
    """As `_searched`, but an error says nothing of other clusters, and there are no seconds beyond the room's.

    Raises _OutOfTime when they are over.
    """
    end = time.monotonic() + room.seconds

    def report(progress: Progress) -> None:
        if time.monotonic() > end:
            raise _OutOfTime

    return VariantSearch(
        forms=step.forms(),
        limit=room.limit_nbytes,
        seconds=room.seconds,
        search=lambda form, offload, told: room.auto._search(form, room.cluster, told, offload),
        report=report,
    ).run()


Planned = Callable[[Step, Room, Said], Plan]

PLANNERS: dict[str, Planned] = {
    "jit": _jit,
    "data parallel": _by(DataParallel()),
    "ZeRO-1/2": _by(Zero(2)),
    "ZeRO-3": _by(Zero(3)),
    "Megatron": _megatron,
    "searched": _searched,
}
"""The rows of the table, by name. ZeRO's stages 1 and 2 are one plan: gradients are scattered as soon as summed."""

STRETCHED: dict[str, Planned] = {
    name: _tried if name == "searched" else PLANNERS[name] for name in ("data parallel", "ZeRO-3", "searched")
}
"""The planners whose largest batch and preset are looked for."""


def largest(
    example: Example,
    step: Step,
    room: Room,
    rows: Sequence[Row],
    presets: Mapping[str, Callable[[], Example]],
    said: Said = quiet,
) -> Iterator[Largest]:
    """The largest batch, and of `presets` (smallest first) the largest, of some planners, for `room.seconds` in all.

    `rows` are those of the example as it is.
    """
    names = tuple(STRETCHED)
    end = time.monotonic() + room.seconds
    shares = len(names) * (1 + bool(presets))

    def until(turn: int) -> float:
        """When the search that comes at `turn` should end: what is left, in equal shares."""
        now = time.monotonic()
        return now + (end - now) / (shares - turn)

    known = {row.name: row for row in rows}
    for turn, name in enumerate(names):
        try:
            yield _largest_batch(name, example, step, room, known.get(name), until(turn), said)
        except PlanningError as error:
            yield Largest(name=name, what="batch", refusal=str(error))
    for turn, name in enumerate(names if presets else (), len(names)):
        try:
            yield _largest_preset(name, presets, room, until(turn), said)
        except PlanningError as error:
            yield Largest(name=name, what="preset", refusal=str(error))


def _largest_batch(
    name: str, example: Example, step: Step, room: Room, known: Row | None, end: float, said: Said
) -> Largest:
    """The largest batch in multiples of the devices; `known` is the row of the batch as it is."""
    devices = room.cluster.n_devices
    batch = step.batch()
    given = step.structs[batch[0]].shape[0]

    def planned(multiple: int) -> Row:
        if known is not None and multiple * devices == given:
            return known
        said(f"planning {name} for a batch of {multiple * devices:,}")
        rows = dict.fromkeys(batch, multiple * devices)
        return _stretched(name, lambda: traced_step(example, rows), room, end, said)

    multiple, found, certain = reach(planned, max(1, given // devices), end)
    return Largest(name=name, what="batch", size=multiple * devices or None, certain=certain, row=found)


def _largest_preset(
    name: str, presets: Mapping[str, Callable[[], Example]], room: Room, end: float, said: Said
) -> Largest:
    """The largest preset, if each needs more than those before it."""
    names = tuple(presets)

    def planned(number: int) -> Row:
        said(f"planning {name} for preset {names[number - 1]}")
        return _stretched(name, lambda: traced_step(presets[names[number - 1]]()), room, end, said)

    number, found, certain = reach(planned, (len(names) + 1) // 2, end, len(names))
    return Largest(name=name, what="preset", size=names[number - 1] if number else None, certain=certain, row=found)


def _stretched(name: str, make: Callable[[], Step], room: Room, end: float, said: Said) -> Row:
    """A row for a step of another size. Raises PlanningError where the user's function takes no such size."""
    left = replace(room, seconds=max(0.0, end - time.monotonic()))
    try:
        step = make()
    except PlanningError:
        raise
    except Exception as error:
        raise PlanningError(f"the step cannot be traced at other sizes: {type(error).__name__}: {error}") from error
    try:
        return Row(name=name, limit_nbytes=room.limit_nbytes, plan=STRETCHED[name](step, left, said))
    except PlanningError as error:
        return Row(name=name, limit_nbytes=room.limit_nbytes, refusal=str(error))


def reach(
    planned: Callable[[int], Row], start: int, end: float, most: int | None = None
) -> tuple[int, Row | None, bool]:
    """(the largest number from 1 to `most` whose row fits, 0 if none does; that row; whether no larger one does).

    From `start` it doubles, then bisects, where two peaks are known at the line through them. At `end` it gives up.
    """
    low, high = 0, most + 1 if most else None
    rows: dict[int, Row] = {}
    at = start
    while high is None or high - low > 1:
        if rows and time.monotonic() > end:
            return low, rows.get(low), False
        try:
            rows[at] = planned(at)
        except _OutOfTime:
            return low, rows.get(low), False
        if rows[at].fits:
            low = at
        else:
            high = at
        at = 2 * low if high is None else _between(rows, low, high, by_line=len(rows) % 2 == 1)
    return low, rows.get(low), True


def _between(rows: Mapping[int, Row], low: int, high: int, *, by_line: bool) -> int:
    """The number to try next: where a line through the peaks at both ends meets the limit, or in the middle."""
    if by_line and all(n in rows and rows[n].plan for n in (low, high)):
        room, over = -rows[low].over_nbytes, rows[high].over_nbytes
        return min(max(low + 1, low + int((high - low) * room / (room + over))), high - 1)
    return (low + high) // 2


def presets_of(found: Mapping[str, Any], read: Callable[[Any], Example]) -> dict[str, Callable[[], Example]]:
    """Examples by name, each made when it is wanted; `read` tells what a value stands for."""

    def later(value: Any) -> Callable[[], Example]:
        return lambda: read(value() if callable(value) else value)

    return {name: later(value) for name, value in found.items()}
