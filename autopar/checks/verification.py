"""The collectives that a plan has, compared with those that XLA compiled.

    promised    the plan's collectives, in the types in which a platform sends them        `_promised`
    compiled    the program's collectives, from its optimized HLO                          autopar/checks/hlo.py
    undo        what an accelerator's compiler rewrites, so that bytes can be compared     autopar/checks/rewrites.py
    compare     tensors of equal kind, axes, dtype and bytes; XLA may send fewer           `verify`
    count       flops of products, so that recomputation is seen to be there               autopar/checks/hlo_flops.py

Values that are computed twice are sent once, by plans (`passes.placement.reshardings`) as by XLA. XLA may send less
than that: two reshardings of one value that begin alike share their first steps, and a tensor reduced over one axis and
then another is sometimes reduced over both at once (by its GPU compiler; the CPU's keeps them apart). So fewer tensors
of one kind, axes, dtype and size are no error as long as one is left that the others may repeat. If none is, or one is
beyond the plan, the numbers that the plan was chosen by are wrong.

Python 3.11 with jax 0.10.2 and Python 3.12 with jax 0.11.2 widen alike.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from autopar.checks import hlo
from autopar.checks.hlo import HloCollective
from autopar.checks.hlo_flops import product_flops
from autopar.checks.rewrites import Key, Moved, Undoing, moved
from autopar.lowering import USERS_OWN
from passes.cluster import Collective, Mesh
from passes.errors import InternalError
from passes.ir import item_nbytes
from passes.plan import Plan
from passes.text import Column, Table, quantities

_WIDENED: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "float32",
        "float8_e8m0fnu": "float32",
        "float8": "float16",
        "float4": "float16",
        "int4": "int8",
        "uint4": "uint8",
    }
)
"""The dtypes in which XLA's CPU backend sends those that its transport cannot; the longest prefix of a name decides."""

_MOVE = "/move_"
"""The scope of every collective that `autopar.lowering.lower` makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """The optimized HLO of a program, which runs `runs` times a step."""

    text: str
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tensors of one kind, over the same axes, of one dtype and `nbytes` each (the result on one device).

    Where there are more or fewer than planned, `rewritten` names the compiler's rewrite, if one accounts for it.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    planned: int
    compiled: int
    rewritten: str = ""

    def __str__(self) -> str:
        sort = f"{self.kind}@{'+'.join(self.axes)} {self.dtype} {quantities.nbytes(self.nbytes)}"
        return f"{sort}: {self.planned:,} planned, {self.compiled:,} compiled"

    @property
    def planned_nbytes(self) -> int:
        return self.planned * self.nbytes

    @property
    def compiled_nbytes(self) -> int:
        return self.compiled * self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of one step: `rows`, largest first, the same by kind and axes (`moved`), and `unplanned`
    collectives.

    `count` of an unplanned collective is how often it runs beyond the plan. The flops are those of one device's matrix
    products and convolutions; `planned_flops` is None where the plan's program was not at hand.
    """

    rows: tuple[Row, ...]
    unplanned: tuple[HloCollective, ...]
    moved: tuple[Moved, ...] = ()
    compiled_flops: float = 0.0
    planned_flops: float | None = None

    @property
    def missing(self) -> tuple[Row, ...]:
        """The rows that the plan has and the program never sends, although there is something to send.

        A single integer is mostly the count of a loop's iterations, which XLA knows without communication.
        """
        absent = (row for row in self.rows if row.planned and not row.compiled and not row.rewritten)
        return tuple(row for row in absent if not _is_known(row))

    @property
    def ok(self) -> bool:
        """Whether the program sends nothing beyond the plan, and leaves out at most repeated tensors."""
        return not self.unplanned and not self.missing

    def tables(self) -> tuple[Table, ...]:
        """The tables of planned and compiled tensors and, if there are any, of unplanned ones."""
        rewritten = self.moved if any(row.rewritten for row in self.rows) else ()
        tables = (
            _rows_table(self.rows),
            _moved_table(rewritten),
            _unplanned_table(self.unplanned),
            self._flops_table(),
        )
        return tuple(table for table in tables if table.rows or table is tables[0])

    def _flops_table(self) -> Table:
        """The table of planned and compiled flops, which differ where XLA merged or added recomputation."""
        columns = (Column(heading=""), Column(heading="flops of one device", right=True))
        rows = (("planned", f"{self.planned_flops or 0:.4g}"), ("compiled", f"{self.compiled_flops:.4g}"))
        return Table(title="products of one step", columns=columns, rows=rows if self.planned_flops else ())

    def format(self, width: int = 80) -> str:
        """The comparison as text of `width` columns."""
        return "\n\n".join(table.format(width) for table in self.tables())

    def __str__(self) -> str:
        return self.format()

    def check(self) -> None:
        """Raises InternalError, which names every unplanned and every missing collective, if there is one."""
        if self.missing:
            named = "\n  ".join(map(str, self.missing))
            count = quantities.count(sum(row.planned - row.compiled for row in self.missing), "tensor")
            raise InternalError(
                f"the compiled program lacks {count} that the plan sends:\n  {named}\nIts plan was chosen with their "
                "time and bytes; plan.collectives lists what was planned"
            )
        if self.unplanned:
            named = "\n  ".join(_words(collective) for collective in self.unplanned)
            raise InternalError(
                f"the compiled program sends {quantities.count(_tensors(self.unplanned), 'tensor')} that the plan does "
                f"not:\n  {named}\nIts plan was chosen without their time and bytes; plan.collectives lists what was "
                "planned"
            )


def verify(
    plan: Plan,
    emitted: str | Sequence[Emitted],
    *,
    platform: str = "cpu",
    planned_flops: float | None = None,
) -> Verification:
    """The comparison of a plan with the optimized HLO of its program, or of the programs that a step runs.

    They are compiled for `platform`, for CPU with `hlo.UNCOMBINED`; what other compilers rewrite is undone first.
    `planned_flops` are those of the program's products on one device (`passes.intra_op.flops`), to be told beside
    XLA's. What the user's own `shard_map`s send is left out. Raises InternalError for a collective that cannot be
    read.
    """
    programs = (Emitted(text=emitted),) if isinstance(emitted, str) else emitted
    sent = [
        replace(collective, count=collective.count * program.runs)
        for program in programs
        for collective in hlo.collectives(program.text, plan.mesh.axes, plan.mesh.sizes)
        if USERS_OWN not in collective.op_name
    ]
    compiled: Counter[Key] = Counter()
    for collective in sent:
        compiled[_key(collective)] += collective.count
    planned = _merged(_promised(plan.collectives, platform), compiled)
    undoing = Undoing(planned, compiled, {_key(c) for c in sent if c.is_padded}, partial(_ranks, plan.mesh))
    if platform != "cpu":
        undoing.undo()
    return Verification(
        rows=_rows(planned, compiled, undoing.rewritten),
        unplanned=tuple(_beyond(undoing.compiled, sent)),
        moved=moved(planned, compiled, undoing),
        compiled_flops=sum(program.runs * product_flops(program.text) for program in programs),
        planned_flops=planned_flops,
    )


def _rows(planned: Counter[Key], compiled: Counter[Key], rewritten: Mapping[Key, str]) -> tuple[Row, ...]:
    """The tensors of both sides, by falling bytes."""
    rows = [
        Row(
            kind=kind,
            axes=axes,
            dtype=dtype,
            nbytes=nbytes,
            planned=planned[key],
            compiled=compiled[key],
            rewritten=rewritten.get(key, ""),
        )
        for key in planned | compiled
        for kind, axes, dtype, nbytes in (key,)
    ]
    rows.sort(key=lambda row: (-max(row.planned_nbytes, row.compiled_nbytes), row.kind, row.axes, row.dtype))
    return tuple(rows)


def _ranks(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of devices along axes; 1 for those that no mesh has."""
    sizes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    return math.prod(sizes[axis] for axis in axes) if all(axis in sizes for axis in axes) else 1


def _promised(collectives: Iterable[Collective], platform: str) -> Counter[Key]:
    """The number of tensors of each type that a plan sends."""
    promised: Counter[Key] = Counter()
    for collective in collectives:
        dtype = _sent(collective.kind, collective.dtype, platform)
        nbytes = collective.nbytes // item_nbytes(collective.dtype) * item_nbytes(dtype)
        if collective.dtype.startswith("key<"):
            nbytes = collective.nbytes
        promised[collective.kind, collective.axes, dtype, nbytes] += collective.count
    return promised


def _sent(kind: str, dtype: str, platform: str) -> str:
    """The dtype in which an array crosses devices: booleans are reduced as integers, and keys sent as words."""
    if dtype.startswith("key<"):
        return "uint32"
    if dtype == "bool" and kind in ("all_reduce", "reduce_scatter"):
        return "int32"
    widened = [name for name in _WIDENED if dtype.startswith(name)]
    return _WIDENED[max(widened, key=len)] if widened and platform == "cpu" else dtype


def _is_known(row: Row) -> bool:
    """Whether a tensor is empty or a single integer, which XLA knows without asking other devices."""
    return not row.nbytes or (row.dtype.startswith(("int", "uint")) and row.nbytes == item_nbytes(row.dtype))


def _merged(planned: Counter[Key], compiled: Counter[Key]) -> Counter[Key]:
    """The promised collectives, with all-reduces over single axes replaced by one over all of them where XLA merged
    them.
    """
    planned = Counter(planned)
    for key in compiled - planned:
        kind, axes, dtype, nbytes = key
        if kind != "all_reduce" or len(axes) < 2:
            continue
        for parts in _partitions(axes):
            keys = [(kind, part, dtype, nbytes) for part in parts]
            spare = min(planned[part] - compiled[part] for part in keys)
            merged = max(0, min(spare, compiled[key] - planned[key]))
            planned[key] += merged
            planned.subtract(dict.fromkeys(keys, merged))
    return +planned


def _partitions(axes: tuple[str, ...]) -> list[tuple[tuple[str, ...], ...]]:
    """The ways to part axes into several groups that each keep their order."""
    subsets = [s for n in range(1, len(axes)) for s in itertools.combinations(axes, n)]
    tuples = (c for n in range(2, len(axes) + 1) for c in itertools.combinations(subsets, n))
    return [parts for parts in tuples if sorted(itertools.chain(*parts)) == sorted(axes)]


def _beyond(unaccounted: Mapping[Key, int], compiled: Iterable[HloCollective]) -> list[HloCollective]:
    """The collectives that the plan does not account for; those that lowering made come last."""
    alike: defaultdict[Key, list[HloCollective]] = defaultdict(list)
    for collective in compiled:
        alike[_key(collective)].append(collective)
    beyond: list[HloCollective] = []
    for key, collectives in alike.items():
        planned_count = sum(c.count for c in collectives) - unaccounted.get(key, 0)
        for collective in sorted(collectives, key=lambda c: _MOVE not in c.op_name):
            extra = max(0, collective.count - planned_count)
            planned_count = max(0, planned_count - collective.count)
            if extra:
                beyond.append(replace(collective, count=extra))
    return beyond


def _key(collective: HloCollective) -> Key:
    return collective.kind, collective.axes, collective.dtype, collective.nbytes


def _tensors(collectives: Iterable[HloCollective]) -> int:
    return sum(collective.count for collective in collectives)


def _words(collective: HloCollective) -> str:
    where = f" at {collective.source}" if collective.source else ""
    return f"{collective}{where}"


def _rows_table(rows: tuple[Row, ...]) -> Table:
    planned, compiled = sum(row.planned for row in rows), sum(row.compiled for row in rows)
    sent = sum(row.planned_nbytes for row in rows), sum(row.compiled_nbytes for row in rows)
    return Table(
        title=(
            f"collectives of one step: {planned:,} planned ({quantities.nbytes(sent[0])}), "
            f"{compiled:,} compiled ({quantities.nbytes(sent[1])})"
        ),
        columns=(
            Column(heading="kind"),
            Column(heading="axes"),
            Column(heading="dtype"),
            Column(heading="bytes each", right=True),
            Column(heading="planned", right=True),
            Column(heading="compiled", right=True),
            Column(heading="", flexible=True),
        ),
        rows=tuple(
            (
                row.kind,
                "+".join(row.axes),
                row.dtype,
                quantities.nbytes(row.nbytes),
                f"{row.planned:,}",
                f"{row.compiled:,}",
                row.rewritten
                or ("unplanned" if row.compiled > row.planned else "fewer" if row.compiled < row.planned else ""),
            )
            for row in rows
        ),
    )


def _moved_table(rows: tuple[Moved, ...]) -> Table:
    """The table of bytes by kind and axes, rewrites undone."""
    return Table(
        title="what moves, with the compiler's rewrites undone",
        columns=(
            Column(heading="kind"),
            Column(heading="axes"),
            Column(heading="planned", right=True),
            Column(heading="compiled", right=True),
            Column(heading="", flexible=True),
        ),
        rows=tuple(
            (
                row.kind,
                "+".join(row.axes),
                quantities.nbytes(row.planned_nbytes),
                quantities.nbytes(row.compiled_nbytes),
                ", ".join(row.rewrites),
            )
            for row in rows
        ),
    )


def _unplanned_table(unplanned: tuple[HloCollective, ...]) -> Table:
    return Table(
        title=f"unplanned: {_tensors(unplanned):,}",
        columns=(
            Column(heading="collective", flexible=True),
            Column(heading="tensors", right=True),
            Column(heading="operation", flexible=True),
            Column(heading="where", flexible=True),
        ),
        rows=tuple(
            (f"{c.kind}@{'+'.join(c.axes)} {c.dtype}{list(c.shape)}", f"{c.count:,}", c.op_name, c.source)
            for c in unplanned
        ),
    )
