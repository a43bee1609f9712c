"""The differences between two plans: facts, seconds, bytes, collectives, inputs and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from passes.cluster import Collective
from passes.errors import PlanningError, explain
from passes.plan.parts import Operator
from passes.plan.text import around_numbers, common, everything, placement_text, short
from passes.sharding import ShardingSpec
from passes.text import Column, Table, quantities

SomePlan = TypeVar("SomePlan")


GROUPS = 20
"""The most groups of operators that the text form lists, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that differs, as text in both plans; `where` is its source line, if it has one."""

    name: str
    before: str
    after: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A number in both plans, whether equal or not; 0 in a plan that lacks it."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All differences between two plans; empty where there are none.

    `seconds` and `nbytes` list every cause if any differs; `tensors` and `sent_nbytes`, in parallel, only the
    collectives (kind and axes) that differ. `operators` is empty where the programs differ, as `aligned` says.
    """

    words: tuple[Change, ...]
    seconds: tuple[Amount, ...]
    nbytes: tuple[Amount, ...]
    tensors: tuple[Amount, ...]
    sent_nbytes: tuple[Amount, ...]
    inputs: tuple[Change, ...]
    operators: tuple[Change, ...]
    aligned: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether the plans have equal placements and predictions."""
        return self.aligned and not any(
            (self.words, self.seconds, self.nbytes, self.tensors, self.sent_nbytes, self.inputs, self.operators)
        )

    def tables(self) -> tuple[Table, ...]:
        """One table for each kind of difference that there is."""
        all_tables = (
            _words_table(self.words),
            _amounts_table("predicted step time", self.seconds, quantities.seconds),
            _amounts_table("predicted peak memory of one device", self.nbytes, quantities.nbytes),
            _collectives_table(self.tensors, self.sent_nbytes),
            _inputs_table(self.inputs),
            _operators_table(self.operators, self.aligned),
        )
        return tuple(table for table in all_tables if table.rows or table.note)

    def format(self, *, width: int = 80) -> str:
        """The differences as text."""
        return "\n\n".join(table.format(width) for table in self.tables()) or "no difference"

    def to_json(self) -> dict[str, object]:
        """The differences as plain data; seconds and bytes are numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return self.format()


def checked(other: object, kind: type[SomePlan]) -> SomePlan:
    """The plan that another is compared with. Raises PlanningError for anything but one of this kind."""
    if isinstance(other, kind):
        return other
    remedy = "pass a plan, such as autopar.Plan.load(path) of a saved one"
    raise PlanningError(explain(f"plan.diff({other!r:.60})", "plans are compared with plans", "", remedy))


def changes(pairs: Mapping[str, tuple[str, str]]) -> tuple[Change, ...]:
    """The pairs that differ."""
    return tuple(Change(name=name, before=a, after=b) for name, (a, b) in pairs.items() if a != b)


def amounts(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Amount, ...]:
    """The numbers of every cause in either plan; empty where all are equal."""
    if before == after:
        return ()
    names = dict.fromkeys((*before, *after))
    return tuple(Amount(name=name, before=before.get(name, 0), after=after.get(name, 0)) for name in names)


def collective_amounts(
    before: Sequence[Collective], after: Sequence[Collective]
) -> tuple[tuple[Amount, ...], tuple[Amount, ...]]:
    """Tensors and bytes of each kind and axes where either differs."""
    old, new = _totals(before), _totals(after)
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    none = (0, 0)
    return (
        tuple(Amount(name=n, before=old.get(n, none)[0], after=new.get(n, none)[0]) for n in names),
        tuple(Amount(name=n, before=old.get(n, none)[1], after=new.get(n, none)[1]) for n in names),
    )


def _totals(collectives: Sequence[Collective]) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of each kind and axes."""
    totals: dict[str, tuple[int, int]] = {}
    for c in collectives:
        name = f"{c.kind} {'+'.join(c.axes)}"
        tensors, sent = totals.get(name, (0, 0))
        totals[name] = (tensors + c.count, sent + c.count * c.nbytes)
    return totals


def value_changes(
    names: tuple[Sequence[str], Sequence[str]], specs: tuple[Sequence[ShardingSpec], Sequence[ShardingSpec]]
) -> tuple[Change, ...]:
    """Inputs by name whose placement differs, in the order of the first plan; `absent` where a plan lacks one."""
    before, after = (dict(zip(n, map(str, s), strict=True)) for n, s in zip(names, specs, strict=True))
    return changes({name: (before.get(name, "absent"), after.get(name, "absent")) for name in {**before, **after}})


def operator_changes(before: Sequence[Operator], after: Sequence[Operator]) -> tuple[Change, ...]:
    """Operators, one by one, whose placement differs; the plans must be of one program."""
    return tuple(
        Change(name=a.primitive, before=old, after=new, where=a.source)
        for a, b in zip(everything(before), everything(after), strict=True)
        if (old := placement_text(a.placement)) != (new := placement_text(b.placement))
    )


def _words_table(changed: Sequence[Change]) -> Table:
    columns = (Column(heading=""), Column(heading="before", flexible=True), Column(heading="after", flexible=True))
    return Table(title="plan", columns=columns, rows=tuple((c.name, c.before, c.after) for c in changed))


def _amounts_table(title: str, amounts: Sequence[Amount], text: quantities.Text) -> Table:
    total = Amount(name="total", before=sum(a.before for a in amounts), after=sum(a.after for a in amounts))
    shown = (*amounts, total) if amounts else ()
    return Table(
        title=title,
        columns=(
            Column(heading="cause"),
            Column(heading="before", right=True),
            Column(heading="after", right=True),
            Column(heading="change", right=True),
        ),
        rows=tuple((a.name, text(a.before), text(a.after), quantities.change(a.before, a.after)) for a in shown),
    )


def _collectives_table(tensors: Sequence[Amount], sent: Sequence[Amount]) -> Table:
    rows = [
        (
            t.name,
            f"{t.before:,} -> {t.after:,}",
            f"{quantities.nbytes(n.before)} -> {quantities.nbytes(n.after)}",
            quantities.change(n.before, n.after),
        )
        for t, n in zip(tensors, sent, strict=True)
    ]
    return Table(
        title="collectives of one step",
        columns=(
            Column(heading="collective", flexible=True),
            Column(heading="tensors", right=True),
            Column(heading="bytes", right=True),
            Column(heading="change", right=True),
        ),
        rows=tuple(rows),
    )


def _inputs_table(changes: Sequence[Change]) -> Table:
    groups: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    for c in changes:
        groups.setdefault((around_numbers(c.name), c.before, c.after), []).append(c.name)
    return Table(
        title=f"inputs placed otherwise: {len(changes):,}",
        columns=(
            Column(heading="input", flexible=True),
            Column(heading="count", right=True),
            Column(heading="before", flexible=True),
            Column(heading="after", flexible=True),
        ),
        rows=tuple((common(names), f"{len(names):,}", a, b) for (_, a, b), names in groups.items()),
    )


def _operators_table(changes: Sequence[Change], aligned: bool) -> Table:
    """The table with two rows a group: the operator with its placement before, and its line with the one after."""
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for c in changes:
        groups.setdefault((c.name, c.before, c.after), []).append(c)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows: list[tuple[str, str, str]] = []
    for (name, before, after), members in ordered[:GROUPS]:
        lines = list(dict.fromkeys(c.where for c in members))
        more = f" and {quantities.count(len(lines) - 1, 'more line')}" if len(lines) > 1 else ""
        rows.append((f"{len(members):,}", name, f"was {before}"))
        rows.append(("", short(lines[0]) + more, f"now {after}"))
    note = "" if aligned else "The plans are of different programs, so their operators are not compared."
    if further := ordered[GROUPS:]:
        operators = quantities.count(sum(len(members) for _, members in further), "more operator")
        note = f"{operators} in {quantities.count(len(further), 'more group')}; the JSON form lists every one."
    return Table(
        title=f"operators placed otherwise: {len(changes):,}" if aligned else "operators",
        columns=(
            Column(heading="count", right=True),
            Column(heading="operator", flexible=True),
            Column(heading="placement", flexible=True),
        ),
        rows=tuple(rows),
        note=note,
    )
