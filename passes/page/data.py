"""The data of a plan's page: plain values, texts and lists that repeat kept once."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from passes.inter_op import StageCost, Timeline
from passes.ir import PHASES
from passes.page.blocks import Block, Row, blocks_of
from passes.page.measured import Measured, kinds_of, measured_rows
from passes.plan import AnyPlan, Plan
from passes.plan import text as plan_text

DEAREST = 10
"""The number of collectives that the page lists, those that take longest."""


@dataclass(slots=True)
class Pool:
    """A list in which each entry is once."""

    entries: list[Any] = field(default_factory=list[Any])
    _places: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def at(self, entry: Hashable) -> int:
        """The place of an entry, which is added if it is new."""
        if entry not in self._places:
            self._places[entry] = len(self.entries)
            self.entries.append(entry)
        return self._places[entry]


def page_data(plan: AnyPlan, measured: Measured | None = None) -> dict[str, object]:
    """The plan as the page reads it, with steps as they were `measured`."""
    texts, lists = Pool(), Pool()
    blocks = blocks_of(plan.programs)
    return {
        "title": f"{plan.planner} on {plan.cluster.name}",
        "facts": {name: value for name, value in plan.facts.items() if name != "planner"} | {"planner": plan.planner},
        "seconds": _finite(plan.step_seconds),
        "peak": plan.peak_nbytes,
        "gap": _finite(plan.gap),
        "solver": sorted({program.solution.status for program in plan.programs}),
        "devices": plan.n_devices,
        "limit": plan.cluster.group().device.memory_nbytes,
        "microbatches": plan.microbatches,
        "programs": _programs(plan),
        "blocks": [_block(block, texts, lists, plan.programs[block.stage]) for block in blocks],
        "layers": _layers(plan),
        "alternatives": [
            {"name": a.name, "seconds": _finite(a.seconds), "peak": a.peak_nbytes, "why": a.why} for a in plan.met
        ],
        "dearest": _dearest(plan),
        "arrays": _arrays(plan, texts),
        "holders": _holders(plan),
        "timeline": _timeline(plan.timeline, measured) if plan.timeline else None,
        "memory": _memory(plan),
        "measured": _measured(measured) if measured else None,
        "texts": texts.entries,
        "lists": lists.entries,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _programs(plan: AnyPlan) -> list[dict[str, object]]:
    """Each program's mesh, the first of its devices, and its costs by cause."""
    sizes = [programs[0].n_devices for programs in plan.submeshes]
    firsts = [sum(sizes[:group]) for group in range(len(sizes))]
    return [
        {
            "axes": list(program.mesh.axes),
            "sizes": list(program.mesh.sizes),
            "group": stage % len(firsts),
            "first": firsts[stage % len(firsts)],
            "seconds": {cause: _finite(spent) for cause, spent in program.seconds.items()},
            "phases": {phase: _finite(spent) for phase, spent in program.phases.items()},
            "nbytes": dict(program.nbytes),
            "where": plan_text.short(program.memory.where) if program.memory else "",
        }
        for stage, program in enumerate(plan.programs)
    ]


def _block(block: Block, texts: Pool, lists: Pool, program: Plan) -> list[object]:
    """`[name, stage, operators, lists of rows by phase, bytes of weights on a device]`."""
    phases = [lists.at(_rows(block.rows.get(phase, ()), texts)) for phase in PHASES]
    return [block.name, block.stage, block.operators, phases, _weights_nbytes(block.name, program)]


def _rows(rows: Sequence[Row], texts: Pool) -> tuple[tuple[int, ...], ...]:
    """`[primitive, placement, source, scope, depth, count]` of each row, texts by their places."""
    return tuple(
        (
            *(texts.at(text) for text in (row.primitive, row.placement, plan_text.short(row.source), row.scope)),
            row.depth,
            row.count,
        )
        for row in rows
    )


def _layers(plan: AnyPlan) -> list[list[object]]:
    """`[name, stage, seconds of computing, of moving, bytes of arrays, of temporaries]` of each layer."""
    return [
        [
            layer.name,
            stage,
            _six(layer.compute_seconds),
            _six(layer.moving_seconds),
            layer.state_nbytes,
            layer.live_nbytes,
        ]
        for stage, program in enumerate(plan.programs)
        for layer in program.layers
        if layer.seconds or layer.nbytes
    ]


def _weights_nbytes(name: str, program: Plan) -> int:
    """Bytes on one device of the inputs that are named after a module."""
    if not program.input_types:
        return 0
    named = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    entries = zip(program.input_names, program.input_types, program.inputs, strict=True)
    return sum(spec.local_nbytes(type, program.mesh) for path, type, spec in entries if named.search(path))


def _dearest(plan: AnyPlan) -> list[dict[str, object]]:
    """The collectives that take longest in a step, by kind, axes and source line."""
    sums: dict[tuple[int, str, str, str], list[float]] = {}
    for stage, program in enumerate(plan.programs):
        for c in program.collectives:
            key = (stage, c.kind, "+".join(c.axes), plan_text.short(c.where))
            entry = sums.setdefault(key, [0.0, 0.0, 0.0])
            entry[0] += c.seconds(program.mesh)
            entry[1] += c.count
            entry[2] += c.count * c.nbytes
    dearest = sorted(sums.items(), key=lambda item: -item[1][0])[:DEAREST]
    names = ("stage", "kind", "axes", "where", "seconds", "count", "nbytes")
    return [dict(zip(names, (*key, *entry), strict=True)) for key, entry in dearest]


def _arrays(plan: AnyPlan, texts: Pool) -> list[list[int]]:
    """`[name, type, placement, stage, bytes of one device]` of every input of every program, texts by their places."""
    rows: list[list[int]] = []
    for stage, program in enumerate(plan.programs):
        types = program.input_types or (None,) * len(program.inputs)
        for name, type, spec in zip(program.input_names, types, program.inputs, strict=True):
            local = spec.local_nbytes(type, program.mesh) if type else 0
            rows.append([texts.at(name), texts.at(str(type or "")), texts.at(str(spec)), stage, local])
    return rows


def _holders(plan: AnyPlan) -> list[list[object]]:
    """`[stage, name, cause, bytes]` of the largest arrays at the peak of each program."""
    return [
        [stage, _short_name(holder.name), holder.cause, holder.nbytes]
        for stage, program in enumerate(plan.programs)
        for holder in (program.memory.holders if program.memory else ())
        if holder.nbytes
    ]


def _short_name(name: str) -> str:
    primitive, at, source = name.partition(" at ")
    return primitive + at + plan_text.short(source)


def _measured(measured: Measured) -> dict[str, object]:
    """Seconds of the median step, and of each submesh by cause."""
    return {"seconds": measured.step_seconds, "shares": [dict(share) for share in measured.shares]}


def _timeline(timeline: Timeline, measured: Measured | None) -> dict[str, object]:
    """The spans `[group, stage, microbatch, kind, start, end]` of a pipeline, and the end of each group's step."""
    schedule = timeline.schedule
    kinds = kinds_of(timeline)
    return {
        "name": str(schedule),
        "bubble": timeline.bubble,
        "bubbles": list(timeline.bubbles),
        "kinds": kinds,
        "spans": [
            [
                *(schedule.group_of(span.task.stage), span.task.stage, span.task.microbatch),
                *(kinds.index(span.task.kind), _six(span.start_seconds), _six(span.end_seconds)),
            ]
            for span in timeline.spans
        ],
        "measured": measured_rows(measured.spans, kinds) if measured else [],
        "ends": [[_six(e - f), _six(e)] for e, f in zip(timeline.end_seconds, timeline.finish_seconds, strict=True)],
    }


def _six(value: float) -> float:
    """The number rounded to six digits, which is more than a screen shows."""
    return float(f"{value:.6g}")


def _memory(plan: AnyPlan) -> list[dict[str, object]]:
    """Bytes of one device over the step, by submesh: `[[second or share of the step, bytes], ...]`."""
    if plan.timeline is not None:
        return [
            {"unit": "s", "points": points, "persistent": persistent}
            for points, persistent in _pipeline_memory(plan.timeline, plan.stage_costs)
        ]
    return [
        {
            "unit": "share",
            "points": [[k / len(sizes), size] for k, size in enumerate(sizes)] + [[1.0, sizes[-1]]] if sizes else [],
            "persistent": sum(program.nbytes.get(cause, 0) for cause in ("parameters", "optimizer state")),
        }
        for program in plan.programs
        for sizes in [program.memory.over_time if program.memory else ()]
    ]


def _pipeline_memory(timeline: Timeline, costs: Sequence[StageCost]) -> list[tuple[list[list[float]], int]]:
    """The bytes of one device of each submesh, from task to task, and those that stay for the whole step.

    While a task runs, it needs working memory; what its microbatch saves is there from a forward to its backward.
    """
    schedule = timeline.schedule
    groups = len(schedule.groups)
    result: list[tuple[list[list[float]], int]] = []
    for group in range(groups):
        stages = range(group, schedule.n_stages, groups)
        persistent = sum(costs[stage].persistent_nbytes for stage in stages)
        points: list[list[float]] = [[0.0, persistent]]
        saved = 0
        for span in (span for span in timeline.spans if schedule.group_of(span.task.stage) == group):
            cost = costs[span.task.stage]
            if span.task.kind == "forward":
                saved += cost.in_flight_nbytes
            points.append([_six(span.start_seconds), persistent + saved + cost.working_nbytes])
            if span.task.kind not in ("forward", "input_gradient"):
                saved -= cost.in_flight_nbytes
            points.append([_six(span.end_seconds), persistent + saved])
        end, finish = timeline.end_seconds[group], timeline.finish_seconds[group]
        if finish:
            points.append([_six(end - finish), persistent + sum(costs[stage].finish_nbytes for stage in stages)])
        points.append([_six(end), persistent])
        result.append((points, persistent))
    return result
