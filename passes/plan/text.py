"""The tables of a plan, each from the part of the plan that it shows."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from passes.cluster import Cluster, Collective, Kind, Mesh
from passes.ir import TensorType
from passes.placement import Placement
from passes.plan.parts import LayerCost, MemoryReport, Operator, Solution
from passes.sharding import ShardingSpec
from passes.text import Column, Table, quantities

_KEEPS = {
    "everything": "keeping everything",
    "matmuls": "keeping products with weights",
    "inputs": "keeping inputs alone",
}

STALE = (
    "The placements were edited: seconds, bytes and collectives are those from before the edit. To count them again: "
    "autopar plan TARGET --planner manual:FILE, or parallelize(step, planner=Manual(FILE)).plan(...)"
)
"""The note on a plan whose numbers were counted for other placements."""

_UNSAID = 1e-3
"""The share of a step below which hidden collectives are not mentioned."""

_BARS = " ▁▂▃▄▅▆▇█"

_PLAIN = (Column(heading=""), Column(heading="", flexible=True))


def header(
    fingerprint: str,
    cluster: Cluster,
    mesh: Mesh,
    solution: Solution,
    microbatches: int,
    remat: Sequence[str] = (),
    offloaded: Sequence[int] = (),
) -> Table:
    """The table of facts: what was planned, for which devices, by which planner, and the bound."""
    planning = sum(solution.phase_seconds.values())
    phases = ", ".join(f"{name} {quantities.seconds(value)}" for name, value in solution.phase_seconds.items())
    rows = [
        ("program", fingerprint),
        ("cluster", f"{cluster.name}, {quantities.count(cluster.n_devices, 'device')}"),
        ("mesh", f"{mesh}, {quantities.count(mesh.size, 'device')}" if mesh.axes else str(mesh)),
        ("planner", solution.planner),
        ("solver", f"{solution.status}, gap {gap(solution)}"),
        ("planning", quantities.seconds(planning) + (f" ({phases})" if phases else "")),
    ]
    if microbatches > 1:
        rows.append(("microbatches", f"{microbatches:,}"))
    if remat:
        rows.append(("recomputation", kept(remat)))
    if offloaded:
        rows.append(("offloaded", f"{quantities.count(len(offloaded), 'input')} in the host's memory between steps"))
    return Table(title="plan", columns=_PLAIN, rows=tuple(rows))


def kept(remat: Sequence[str]) -> str:
    """The text of what layers keep for the backward pass."""
    counted = Counter(remat)
    several = ", ".join(f"{quantities.count(number, 'layer')} {_KEEPS[choice]}" for choice, number in counted.items())
    return several or "none"


def gap(solution: Solution) -> str:
    """The gap in percent; `unknown` for a planner that gives no bound."""
    bounded = 0 < solution.bound < float("inf") or solution.objective == solution.bound
    return f"{100 * solution.gap:.2f} %" if bounded else "unknown"


def seconds_table(seconds: Mapping[str, float], sent_seconds: float) -> Table:
    """The predicted step time by cause, largest first; `sent_seconds` is what its collectives take one by one."""
    total, exposed = sum(seconds.values()), sum(seconds.get(kind, 0.0) for kind in get_args(Kind))
    hidden = sent_seconds - exposed
    note = (
        f"Of collectives, what is exposed: one by one they take {quantities.seconds(sent_seconds)}, of which "
        f"{quantities.seconds(hidden)} are hidden behind computing or saved where they are combined."
    )
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    rows = [(cause, quantities.seconds(s), quantities.share(s, total)) for cause, s in ordered]
    return Table(
        title=f"predicted step time: {quantities.seconds(total)}",
        columns=(Column(heading="cause"), Column(heading="time", right=True), Column(heading="share", right=True)),
        rows=tuple(rows),
        note=note if hidden > _UNSAID * total else "",
    )


def nbytes_table(nbytes: Mapping[str, int]) -> Table:
    """The predicted peak memory of one device by cause."""
    total = sum(nbytes.values())
    rows = [(cause, quantities.nbytes(n), quantities.share(n, total)) for cause, n in nbytes.items()]
    return Table(
        title=f"predicted peak memory of one device: {quantities.nbytes(total)}",
        columns=(Column(heading="cause"), Column(heading="memory", right=True), Column(heading="share", right=True)),
        rows=tuple(rows),
    )


def memory_tables(memory: MemoryReport) -> tuple[Table, ...]:
    """Bytes of one device over the step, and what holds most at the peak."""
    sizes = memory.over_time
    if not sizes:
        return ()
    over_time = Table(
        title=f"over the step: {quantities.nbytes(min(sizes))} to {quantities.nbytes(max(sizes))}",
        columns=(Column(heading=""),),
        rows=((sparkline(sizes),),),
        note=f"peak at {short(memory.where)}" if memory.where else "",
    )
    holders = Table(
        title="largest at the peak",
        columns=(
            Column(heading="array", flexible=True),
            Column(heading="cause"),
            Column(heading="memory", right=True),
        ),
        rows=tuple((_short_entry(h.name), h.cause, quantities.nbytes(h.nbytes)) for h in memory.holders if h.nbytes),
    )
    return over_time, holders


def sparkline(values: Sequence[float], full: float = 0.0) -> str:
    """Values as bars of one character each; a full bar is the largest value, or `full` and more. Only 0 is blank."""
    full = full or max(values) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, math.ceil((len(_BARS) - 1) * value / full))] for value in values)


def collectives_table(collectives: Sequence[Collective], *, every: bool = False) -> Table:
    """The collectives of one step, most bytes first: one row for each kind and axes, or for `every` source line."""
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in collectives:
        key = (c.kind, "+".join(c.axes), c.where) if every else (c.kind, "+".join(c.axes))
        groups.setdefault(key, []).append(c)
    ordered = sorted(groups.items(), key=lambda item: (-_sent(item[1]), item[0]))
    rows = [
        (kind, axes, f"{sum(c.count for c in group):,}", quantities.nbytes(_sent(group)), _where(group))
        for (kind, axes, *_), group in ordered
    ]
    return Table(
        title=f"collectives of one step: {sum(c.count for c in collectives):,}",
        columns=(
            Column(heading="kind"),
            Column(heading="axes"),
            Column(heading="tensors", right=True),
            Column(heading="bytes", right=True),
            Column(heading="where", flexible=True),
        ),
        rows=tuple(rows),
    )


def _sent(collectives: Iterable[Collective]) -> int:
    return sum(c.nbytes * c.count for c in collectives)


def _where(group: Sequence[Collective]) -> str:
    """The line with the most bytes, and how many others there are."""
    sent: dict[str, int] = {}
    for c in group:
        sent[c.where] = sent.get(c.where, 0) + c.nbytes * c.count
    first = max(sent, key=lambda where: sent[where])
    return short(first) + (f" and {quantities.count(len(sent) - 1, 'more line')}" if len(sent) > 1 else "")


def layers_table(programs: Sequence[Sequence[LayerCost]], name: str | None = None) -> Table:
    """The cost of each layer in one step, or of the one named `name`; equal layers in a row share one line.

    Of several programs each line has the number of its own.
    """
    total = sum(layer.seconds for layers in programs for layer in layers)
    rows: list[tuple[str, ...]] = []
    for number, layers in enumerate(programs):
        shown = [(layer.name, _layer_cells(layer, total)) for layer in layers if name in (layer.name, None)]
        for cells, alike in itertools.groupby(shown, key=lambda row: row[1]):
            names = [name for name, _ in alike]
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each"
            rows.append((label, *([str(number)] if len(programs) > 1 else []), *cells))
    headings = (*(["stage"] if len(programs) > 1 else []), "compute", "communication", "share", "arrays", "temporaries")
    return Table(
        title="cost by layer",
        columns=(Column(heading="layer", flexible=True), *(Column(heading=h, right=True) for h in headings)),
        rows=tuple(rows),
        note="Of one device in one step: seconds, and bytes at the peak. What belongs to no layer is the update's.",
    )


def _layer_cells(layer: LayerCost, total: float) -> tuple[str, ...]:
    return (
        *map(quantities.seconds, (layer.compute_seconds, layer.moving_seconds)),
        quantities.share(layer.seconds, total),
        *map(quantities.nbytes, (layer.state_nbytes, layer.live_nbytes)),
    )


def inputs_table(names: Sequence[str], types: Sequence[TensorType], specs: Sequence[ShardingSpec], mesh: Mesh) -> Table:
    """The sharded inputs, equal ones of numbered names in one row, and how much the replicated ones hold."""
    shown = types or (None,) * len(specs)
    groups: dict[tuple[tuple[str, ...], TensorType | None, ShardingSpec], list[str]] = {}
    for name, type, spec in zip(names, shown, specs, strict=True):
        if not spec.is_replicated:
            groups.setdefault((around_numbers(name), type, spec), []).append(name)
    columns = (
        Column(heading="input", flexible=True),
        Column(heading="count", right=True),
        Column(heading="placement", flexible=True),
    )
    rows: list[tuple[str, ...]] = [(common(m), f"{len(m):,}", str(spec)) for (_, _, spec), m in groups.items()]
    if types:
        columns = (*columns, Column(heading="type"), Column(heading="each device", right=True))
        sizes = [(str(t), quantities.nbytes(spec.local_nbytes(t, mesh)) if t else "") for _, t, spec in groups]
        rows = [(*row, *size) for row, size in zip(rows, sizes, strict=True)]
    copies = [type for type, spec in zip(shown, specs, strict=True) if spec.is_replicated]
    total = f", {quantities.nbytes(sum(type.nbytes for type in copies if type))}" if types else ""
    return Table(
        title=f"sharded inputs: {len(specs) - len(copies):,} of {len(specs):,}",
        columns=columns,
        rows=tuple(rows),
        note=f"{quantities.count(len(copies), 'input')} whole on every device{total}" if copies else "",
    )


def around_numbers(name: str) -> tuple[str, ...]:
    """The text before, between and after the numbers of a name, equal for names that `common` takes together."""
    return tuple(re.split(r"\d+", name))


def common(names: Sequence[str]) -> str:
    """One name for names that differ in numbers alone, with `*` where they differ: `h_*.kernel`."""
    split = [re.split(r"(\d+)", name) for name in names]
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def short(source: str) -> str:
    """A source with the last two parts of its path, without `<locals>`: `models/gpt.py:120 (MLP.__call__)`."""
    path, line, remainder = source.partition(".py:")
    return "/".join(path.split("/")[-2:]) + line + remainder.replace(".<locals>", "")


def replicated_table(replicated: Sequence[str], operators: Sequence[Operator]) -> Table:
    """Operators that no rule cuts, which every device computes whole, and how many of each there are."""
    counted = Counter(f"{op.primitive} at {op.source}" for op in everything(operators))
    rows = [(max(1, counted[entry]), entry) for entry in dict.fromkeys(replicated)]
    return Table(
        title=f"operators computed whole on every device: {sum(count for count, _ in rows):,}",
        columns=(Column(heading="count", right=True), Column(heading="operator", flexible=True)),
        rows=tuple((f"{count:,}", _short_entry(entry)) for count, entry in rows),
        note="No rule cuts them: autopar.register_rule adds one, shard_map cuts a kernel.",
    )


def _short_entry(entry: str) -> str:
    primitive, at, source = entry.partition(" at ")
    return primitive + at + short(source)


def operators_table(operators: Sequence[Operator]) -> Table:
    """Every operator in order, under the source line and scope that it comes from, bodies under their loop."""
    return Table(
        title=f"operators: {sum(1 for _ in everything(operators)):,}",
        columns=(
            Column(heading="node", right=True),
            Column(heading="operator", flexible=True),
            Column(heading="placement", flexible=True),
        ),
        rows=tuple(_operator_rows(operators, "")),
    )


def _operator_rows(operators: Sequence[Operator], within: str) -> Iterator[tuple[str, str, str]]:
    numbered = enumerate(operators)
    for (source, scope), run in itertools.groupby(numbered, key=lambda item: (item[1].source, item[1].scope)):
        yield "", short(source) or "(no source)", scope
        for i, op in run:
            yield f"{within}{i}", op.primitive, placement_text(op.placement)
            for number, body in enumerate(op.bodies):
                yield from _operator_rows(body, f"{within}{i}.{f'{number}.' if len(op.bodies) > 1 else ''}")


def everything(operators: Sequence[Operator]) -> Iterator[Operator]:
    """The operators and those inside them."""
    for operator in operators:
        yield operator
        for body in operator.bodies:
            yield from everything(body)


def placement_text(placement: Placement) -> str:
    """`[x, -] [-, y] -> [x, y]`: operands, then results."""
    operands, results = (" ".join(map(str, specs)) for specs in (placement.operands, placement.results))
    return f"{operands} -> {results}".strip()


def digest(operators: Sequence[Operator], values: Sequence[Sequence[ShardingSpec]], how: object) -> str:
    """A fingerprint of placements, of all operators and of lists of values, and of how the step is run."""
    placements = [placement_text(operator.placement) for operator in everything(operators)]
    inside = [
        (layout.inputs, layout.outputs) for operator in everything(operators) for layout in operator.placement.bodies
    ]
    specs = [[str(spec) for spec in several] for pair in (values, *inside) for several in pair]
    return hashlib.sha256(repr((how, specs, placements)).encode()).hexdigest()[:16]
