"""The collectives that a textbook allows and what of a plan goes beyond them: tensors, bytes on a device, seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.causes import Program, Sent
from passes.cluster import collectives

ROUNDING = 1 + 1e-6
"""The factor within which seconds that are summed in different orders count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A textbook plan: ZeRO's `stage` (0: data parallel) over the axes `data`, Megatron over the axes `tensor`.

    With `sequence`, norms and the like work on a part of the sequence on each device of `tensor`.
    """

    stage: int = 0
    data: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    sequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The tensors that the textbook sends for one cause: their number, bytes and seconds; `wire` is as of `on_wire`.

    Bytes are those of the larger of operand and result on one device.
    """

    role: str
    phase: str
    axes: tuple[str, ...]
    layer: str
    count: int
    nbytes: int
    wire: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Collectives that the textbook does not need, or `surplus_seconds` more of them than it needs, and `why`."""

    sent: Sent
    surplus_seconds: float
    why: str

    @property
    def waited_seconds(self) -> float:
        """The part of the surplus by which the step is longer: what compute does not overlap."""
        return self.surplus_seconds * self.sent.waited_share


@dataclass(kw_only=True)
class Verdict:
    """The textbook's collectives, and the findings of what is unexplained in the plan.

    `charges` are the plan's collectives over the axes `tensor`, with the seconds that count against Megatron's.
    """

    allowed: list[Allowed] = field(default_factory=list[Allowed])
    findings: list[Finding] = field(default_factory=list[Finding])
    charges: list[tuple[Sent, float]] = field(default_factory=list[tuple[Sent, float]])

    @property
    def waited_seconds(self) -> float:
        """The seconds that a step takes beyond the textbook."""
        return sum(finding.waited_seconds for finding in self.findings)


def payload(sent: Sent, ranks: int) -> int:
    """Bytes of the larger of operand and result on one device, of all tensors, over a group of so many `ranks`."""
    return sent.count * (sent.nbytes * ranks if sent.kind == "reduce_scatter" else sent.nbytes)


def on_wire(kind: collectives.Kind, nbytes: int) -> int:
    """Bytes that a device of n in a ring sends, times n / (n - 1): the payload, and twice that of an all-reduce."""
    return 2 * nbytes if kind == "all_reduce" else nbytes


def sent_on_wire(program: Program, sends: Sequence[Sent]) -> int:
    """The same for all of these collectives of a plan."""
    return sum(on_wire(s.kind, payload(s, program.mesh.group(s.axes).ranks)) for s in sends)


def seconds_of(program: Program, kind: collectives.Kind, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one collective whose larger side has `nbytes` on a device, its launch included."""
    mesh = program.mesh
    launch = mesh.cluster.group().device.launch_seconds
    return collectives.seconds(kind, nbytes, mesh.group(tuple(axes))) + launch


def by_phase(allowed: Sequence[Allowed]) -> dict[tuple[str, str, tuple[str, ...]], Allowed]:
    """The allowed collectives by role, phase and axes, those of one key added up."""
    totals: dict[tuple[str, str, tuple[str, ...]], Allowed] = {}
    for entry in allowed:
        key = entry.role, entry.phase, entry.axes
        known = totals.get(key)
        totals[key] = (
            entry
            if known is None
            else replace(
                known,
                count=known.count + entry.count,
                nbytes=known.nbytes + entry.nbytes,
                wire=known.wire + entry.wire,
                seconds=known.seconds + entry.seconds,
            )
        )
    return totals


def by_cause(sends: Iterable[Sent]) -> dict[tuple[str, str, tuple[str, ...]], list[Sent]]:
    """The planned collectives by role, phase and axes; recomputed parameters belong to the backward pass."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Sent]] = defaultdict(list)
    for sent in sends:
        phase = "backward" if sent.role == "parameter" and sent.phase == "recomputed" else sent.phase
        groups[sent.role, phase, sent.axes].append(sent)
    return dict(groups)
