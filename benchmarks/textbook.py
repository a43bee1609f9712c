"""What the textbook's parallelisms send, derived from the program alone, and what of a plan goes beyond that.

Over the axis `data`, of n devices, for a parameter of B bytes (or B/t where t devices of `tensor` cut it):

    data parallel   one all-reduce of B for its gradient
    ZeRO-1, ZeRO-2  one reduce-scatter of B for its gradient, one all-gather of B for its update
    ZeRO-3          one all-gather of B in the forward pass, one in the backward pass (what is recomputed uses the
                    same), one reduce-scatter of B for its gradient

and, whatever the planner, one all-reduce for everything else that is summed over the batch (the loss; a mean that
normalises): one for every operator that sums it, of what that operator makes. Activations have the batch on one of
their dimensions: each device has its own rows of it, and nothing brings them elsewhere.

Over the axis `tensor`, of t devices, a product with a weight follows Megatron. One that reads a whole activation X [b,
..] and makes Y cuts the weight's columns: Y comes out cut, and the backward pass all-reduces the gradient of X, once
however many such products read X. One that reads a cut activation cuts the weight's rows: the forward pass all-reduces
Y. So attention (qkv, out) and MLP (up, down) have one all-reduce each way, of [b/n, s, h]: two a block forward, two
backward. Where blocks are recomputed, all of the forward pass's all-reduces come again that the recomputation contains:
two a block as the papers write it, one where nothing reads a block's last product again, which JAX then leaves out.
An embedding cut by rows is a product that reads something cut. So are experts: the gate's columns are cut, and with
them the slots that tokens are dispatched to; each device computes its experts on all tokens, and the product that
combines them is one all-reduce, in the forward pass alone: that of the backward pass is the gate's. A sum, maximum or
pick over a cut dimension (a softmax over a cut vocabulary) is one all-reduce of its result, and one of the same size in
the backward pass. A cut activation that meets a whole one, as where a residual connection is projected, is gathered.
Where t divides no column, rows are cut and the gradient of X is gathered. Gradients of what is whole (a norm's scale)
come out the same everywhere.

With sequence parallelism, all-reduces are a scatter and a gather, with the norms on a device's own part of the sequence
between them: the same bytes, but a gather more of every X that is not kept whole (in the backward pass, and in what is
recomputed), and the gradients of what is whole are summed over `tensor` too. A plan that gathers activations over
`tensor` is held against this, one that does not against the former; what counts is the time, or the bytes on the wire,
of all that goes over the axis.

Reference: Rajbhandari et al., "ZeRO" (SC 2020), sections 5 and 7; Shoeybi et al., "Megatron-LM" (2019), section 3;
Korthikanti et al. (2205.05198), section 4, for a gather and a scatter in the place of an all-reduce.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.causes import Program, Region, Sent, Spot, Value, all_reduce_seconds, is_early, layer_of, when
from passes.cluster import collectives
from passes.ir import Node, item_nbytes, phase
from passes.rules import ShardingRule, rule_of
from passes.text import quantities

ROUNDING = 1 + 1e-6

EARLY = "reduced, then added to what is reduced too: one would do"


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
    """What the textbook sends for one cause: how many tensors, of how many bytes on one device, in what time."""

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


@dataclass(kw_only=True)
class Verdict:
    """What the textbook sends, and what of the plan is unexplained; `charges` are seconds over the axes `tensor`."""

    allowed: list[Allowed] = field(default_factory=list[Allowed])
    findings: list[Finding] = field(default_factory=list[Finding])
    charges: list[tuple[Sent, float]] = field(default_factory=list[tuple[Sent, float]])

    @property
    def surplus_seconds(self) -> float:
        """What a step takes longer than the textbook has it."""
        return sum(finding.surplus_seconds for finding in self.findings)


def payload(sent: Sent, ranks: int) -> int:
    """Bytes on the larger side of one device's buffer, of all of them."""
    return sent.count * (sent.nbytes * ranks if sent.kind == "reduce_scatter" else sent.nbytes)


def on_wire(kind: collectives.Kind, nbytes: int) -> int:
    """Bytes that a ring sends, times n / (n-1): an all-reduce goes round twice."""
    return 2 * nbytes if kind == "all_reduce" else nbytes


def sent_on_wire(program: Program, sends: Sequence[Sent]) -> int:
    """The same of what a plan sends."""
    return sum(on_wire(s.kind, payload(s, program.mesh.group(s.axes).ranks)) for s in sends)


def judge(program: Program, style: Style) -> Verdict:
    """The plan held against its textbook."""
    verdict = Verdict()
    by_role: dict[str, list[Sent]] = defaultdict(list)
    everything = list(program.sent())
    early = _before_sums(program, everything)
    verdict.findings += [Finding(sent=s, surplus_seconds=s.seconds, why=EARLY) for s in early]
    for sent in everything:
        if sent not in early:
            by_role[sent.role].append(sent)
    gathers = (s for s in everything if s.kind == "all_gather" and s.role.startswith("activation"))
    style = replace(style, sequence=any(set(s.axes) & set(style.tensor) for s in gathers))
    for position in sorted(program.parameters):
        for role in ("gradient", "parameter", "updated parameter"):
            own = [s for s in by_role[role] if s.parameter == position]
            _parameter(program, style, position, role, own, verdict)
    _statistics(program, by_role["statistic"], verdict)
    verdict.allowed += list(megatron(program, style))
    for role in ("activation", "activation gradient", "constant", "optimizer state"):
        for s in by_role[role]:
            if role.startswith("activation") and set(s.axes) <= set(style.tensor):
                verdict.charges.append((s, s.seconds))
            else:
                rows = "each device has its own rows of the batch: the textbook sends none"
                why = rows if role.startswith("activation") else "the textbook sends none"
                verdict.findings.append(Finding(sent=s, surplus_seconds=s.seconds, why=why))
    _over_tensor(program, verdict)
    return verdict


def _before_sums(program: Program, everything: Sequence[Sent]) -> list[Sent]:
    """Reductions whose results are only added up: all but one of those that a sum reads."""
    found: list[Sent] = []
    waiting: dict[tuple[int, int, tuple[str, ...]], dict[int, Sent]] = defaultdict(dict)
    for s in everything:
        region = program.regions[s.value[0]]
        readers = set(region.graph.consumers.get(s.value[1], ()))
        if s.kind not in ("all_reduce", "reduce_scatter") or len(readers) != 1 or s.value[1] in region.graph.outputs:
            continue
        (reader,) = readers
        if rule_of(region.graph.nodes[reader], region.graph).adds:
            waiting[region.number, reader, s.axes][s.value[1]] = s
    for sums in waiting.values():
        found += sorted(sums.values(), key=lambda s: s.seconds)[:-1]
    return found


def _parameter(program: Program, style: Style, position: int, role: str, own: Sequence[Sent], verdict: Verdict) -> None:
    """What is sent of a parameter, of its gradient or of its update."""
    mesh, spec = program.mesh, program.plan.inputs[position]
    type = program.graph.types[program.graph.inputs[position]]
    cut = {axis for axes in spec.dims for axis in axes} & set(style.tensor)
    ranks = math.prod(map(mesh.axis_size, style.data))
    scattered = style.stage > 0 and any(size % ranks == 0 for size in type.shape)
    kind: collectives.Kind = "all_gather"
    if role == "gradient":
        wanted, kind = ("backward",), "reduce_scatter" if scattered else "all_reduce"
    elif role == "parameter":
        wanted = ("forward", "backward") if style.stage == 3 and scattered else ()
    else:
        wanted = ("apply",) if style.stage in (1, 2) and scattered else ()
    slots: dict[str, list[Sent]] = {slot: [] for slot in wanted}
    for sent in own:
        # A gradient that is scattered in the loop over layers and gathered after it is reduced all the same.
        late = role == "gradient" or sent.phase == "recomputed"
        slots.setdefault("backward" if late else sent.phase, []).append(sent)
    for slot, sends in slots.items():
        trips = max((s.count for s in sends), default=1)
        width = item_nbytes(sends[0].dtype) if len(sends) == 1 else type.item_nbytes
        nbytes = type.size * width // math.prod(map(mesh.axis_size, cut))
        whole = style.sequence and role == "gradient" and not cut
        axes = (*style.data, *style.tensor) if whole else style.data
        allowed = None
        if slot in wanted and axes:
            allowed = Allowed(
                role=role,
                phase=slot,
                axes=axes,
                layer=sends[0].layer if sends else "",
                count=trips,
                nbytes=nbytes,
                wire=on_wire(kind, nbytes),
                seconds=trips * seconds_of(program, kind, axes, nbytes / trips),
            )
            verdict.allowed.append(allowed)
        if sends:
            _exceeding(program, style, sends, allowed, verdict)


def _exceeding(
    program: Program, style: Style, sends: Sequence[Sent], allowed: Allowed | None, verdict: Verdict
) -> None:
    """Adds what takes more time and more bytes than is allowed, to what goes over `tensor` if some of it does."""
    spent, wire = sum(s.seconds for s in sends), sent_on_wire(program, sends)
    seconds = allowed.seconds if allowed else 0.0
    if allowed and (spent <= seconds * ROUNDING or wire <= allowed.wire):
        return
    most = max(sends, key=lambda s: s.seconds)
    if over := [s for s in sends if set(s.axes) & set(style.tensor)]:
        verdict.charges.append((max(over, key=lambda s: s.seconds), spent - seconds))
        return
    kinds = ", ".join(sorted({s.kind for s in sends}))
    wanted = f"{allowed.wire:,}" if allowed else "none"
    why = f"{wire:,} bytes on the wire by {sum(s.count for s in sends)} {kinds}, the textbook {wanted}"
    verdict.findings.append(Finding(sent=most, surplus_seconds=spent - seconds, why=why))


def _over_tensor(program: Program, verdict: Verdict) -> None:
    """Names what makes the time over `tensor` longer than Megatron's: what it does not have comes first."""
    own = [a for a in verdict.allowed if a.role.startswith("activation")]
    allowed = sum(a.seconds for a in own)
    rest = sum(seconds for _, seconds in verdict.charges) - allowed * ROUNDING
    if sent_on_wire(program, [s for s, _ in verdict.charges]) <= sum(a.wire for a in own):
        return

    def strange(charge: tuple[Sent, float]) -> tuple[bool, bool, float]:
        sent, seconds = charge
        return not sent.role.startswith("activation"), sent.kind not in ("all_reduce", "reduce_scatter"), seconds

    for sent, seconds in sorted(verdict.charges, key=strange, reverse=True):
        if rest <= 0:
            return
        why = f"over this axis Megatron takes {quantities.seconds(allowed)} in all"
        verdict.findings.append(Finding(sent=sent, surplus_seconds=min(seconds, rest), why=why))
        rest -= seconds


def seconds_of(program: Program, kind: collectives.Kind, axes: Sequence[str], nbytes: float) -> float:
    """Seconds of one collective of `nbytes` on the larger side, its launch included."""
    mesh = program.mesh
    launch = mesh.cluster.group().device.launch_seconds
    return collectives.seconds(kind, nbytes, mesh.group(tuple(axes))) + launch


def _statistics(program: Program, sent: Sequence[Sent], verdict: Verdict) -> None:
    """What is summed over the batch: components of collectives that finish the same sums, each sum once."""
    groups: list[tuple[set[Spot], list[Sent]]] = []
    for s in sent:
        if s.kind not in ("all_reduce", "reduce_scatter"):
            verdict.findings.append(Finding(sent=s, surplus_seconds=s.seconds, why="sums are reduced, not gathered"))
            continue
        spots = set().union(*(program.origins(s.value, axis) for axis in s.axes))
        joined = [s]
        for group in [g for g in groups if g[0] & spots]:
            groups.remove(group)
            spots |= group[0]
            joined = [*group[1], *joined]
        groups.append((spots, joined))
    for spots, joined in groups:
        axes = tuple(dict.fromkeys(axis for s in joined for axis in s.axes))
        seconds, nbytes = 0.0, 0
        for spot in spots:
            type, spec, trips = program.made(spot)
            own = spec.local_nbytes(type, program.mesh)
            seconds += trips * all_reduce_seconds(program.mesh, axes, own)
            nbytes += trips * own
        one = joined[0]
        verdict.allowed.append(
            Allowed(
                role="statistic",
                phase=one.phase,
                axes=axes,
                layer=one.layer,
                count=sum(program.made(spot)[2] for spot in spots),
                nbytes=nbytes,
                wire=2 * nbytes,
                seconds=seconds,
            )
        )
        spent = sum(s.seconds for s in joined)
        if spent > seconds * ROUNDING:
            most = max(joined, key=lambda s: s.seconds)
            why = f"{sum(s.count for s in joined)} collectives finish {len(spots)} sums"
            verdict.findings.append(Finding(sent=most, surplus_seconds=spent - seconds, why=why))


def is_matrix(program: Program, region: Region, value: int) -> bool:
    """Whether a value depends on one parameter alone, and is a matrix."""
    bits = program.sources.get((region.number, value), 0)
    only = bits.bit_count() == 1 and (bits.bit_length() - 1) in program.parameters
    return only and region.graph.types[value].rank > 1


def megatron(program: Program, style: Style) -> Iterator[Allowed]:
    """What Megatron sends of activations over the axes `tensor`, found by walking through the forward pass."""
    if style.tensor:
        yield from _Walk(program=program, style=style).run()


@dataclass(kw_only=True)
class _Walk:
    """Which dimensions of every activation may be cut over `tensor` as columns are; none means that it is whole.

    `read` are the whole activations that products have read, by the value that they are copies of.
    """

    program: Program
    style: Style
    cut: dict[Value, frozenset[int]] = field(default_factory=dict[Value, frozenset[int]])
    same: dict[Value, Value] = field(default_factory=dict[Value, Value])
    read: set[Value] = field(default_factory=set[Value])
    found: list[Allowed] = field(default_factory=list[Allowed])

    @property
    def parts(self) -> int:
        """The devices of `tensor`."""
        return math.prod(map(self.program.mesh.axis_size, self.style.tensor))

    def run(self) -> list[Allowed]:
        self._region(self.program.root)
        return self.found

    def _region(self, region: Region) -> None:
        graph = region.graph
        for index, node in enumerate(graph.nodes):
            if index in region.joints:
                self._joint(region, index)
            elif is_early(node):
                self._node(region, node, rule_of(node, graph))

    def _joint(self, region: Region, index: int) -> None:
        control, bodies = region.joints[index]
        node, here = region.graph.nodes[index], region.number
        slots: dict[int, frozenset[int]] = {}
        for value, wire in zip(node.inputs, control.operands, strict=True):
            dims = self.cut.get((here, value), frozenset())
            slots[wire.slot] = frozenset(d - wire.stacked for d in dims if d >= wire.stacked)
        for body, inner in zip(control.bodies, bodies, strict=True):
            for value, slot in zip(body.graph.inputs, body.inputs, strict=True):
                self.cut[inner.number, value] = slots.get(slot, frozenset())
            self._region(inner)
            for value, slot in zip(body.graph.outputs, body.outputs, strict=True):
                slots[slot] = self.cut.get((inner.number, value), frozenset())
        for value, wire in zip(node.outputs, control.results, strict=True):
            dims = slots.get(wire.slot, frozenset())
            self.cut[here, value] = frozenset(d + wire.stacked for d in dims)

    def _node(self, region: Region, node: Node, rule: ShardingRule) -> None:
        here, graph = region.number, region.graph
        if rule.alias:
            for value, result in zip(node.inputs, node.outputs, strict=True):
                self._copy((here, value), (here, result))
            return
        batch = self.program.batch
        pairs = list(zip(node.inputs, rule.operands, strict=True))
        moving = [(v, f) for v, f in pairs if (here, v) in batch and self.program.is_moving((here, v))]
        if not moving:
            return
        weights = [(v, f) for v, f in pairs if is_matrix(self.program, region, v)]
        cut = [(v, f, frozenset(f[d] for d in self.cut.get((here, v), ()))) for v, f in moving]
        made = {f for factors in rule.results for f in factors if f >= 0}
        wanted = frozenset().union(*(own for _, _, own in cut))
        if weights and not rule.light:
            self._product(region, node, rule, wanted, made, moving, weights)
            return
        kept = frozenset(f for f in wanted if f in made and all(f in own or f not in fs for _, fs, own in cut))
        reduced = frozenset(f for f in wanted if f not in made and f >= 0)
        if wanted and not kept:
            meets = not reduced
            result = max(node.outputs, key=lambda v: graph.types[v].nbytes)
            # A product's gradient is cut as its operands are, of a whole gradient: none comes back.
            mirrored = rule.light and not meets
            self._send(region, node, result, "all_gather" if meets else "all_reduce", mirrored=mirrored)
        for value, factors in zip(node.outputs, rule.results, strict=True):
            self.cut[here, value] = frozenset(d for d, f in enumerate(factors) if f in kept)
        if len(moving) == 1 and len(pairs) == 1 and graph.types[node.outputs[0]].size == graph.types[moving[0][0]].size:
            self.same[here, node.outputs[0]] = self._root((here, moving[0][0]))

    def _product(
        self,
        region: Region,
        node: Node,
        rule: ShardingRule,
        wanted: frozenset[int],
        made: set[int],
        moving: Sequence[tuple[int, tuple[int, ...]]],
        weights: Sequence[tuple[int, tuple[int, ...]]],
    ) -> None:
        """A product of an activation with a weight."""
        own = {f for _, factors in weights for f in factors if f >= 0}
        shared = {f for _, factors in moving for f in factors}
        left = frozenset(wanted & made)
        if wanted and left:
            kept = left
        elif wanted or not own & shared:  # rows; an embedding shares no dimension with the tokens that it is read at
            kept = frozenset()
            self._send(region, node, node.outputs[0], "all_reduce", mirrored=False)
        else:
            kept = frozenset(f for f in own - shared if f in made and rule.factors[f].size % self.parts == 0)
            self._columns(region, node, moving[0][0], rows=not kept)
        for value, factors in zip(node.outputs, rule.results, strict=True):
            self.cut[region.number, value] = frozenset(d for d, f in enumerate(factors) if f in kept)

    def _columns(self, region: Region, node: Node, value: int, *, rows: bool) -> None:
        """A product that reads a whole activation; one that cuts `rows` after all sends what it makes as well."""
        kind = "all_gather" if rows else "all_reduce"
        if rows:
            self._send(region, node, node.outputs[0], "all_reduce", mirrored=False)
        if self.style.sequence:
            self._add(region, node, value, "all_gather", "recomputed" if when(node) == "recomputed" else "backward")
        root = self._root((region.number, value))
        if root not in self.read and phase(node) == "forward" and self._has_gradient(region, value):
            self.read.add(root)
            self._add(region, node, value, kind, "backward")

    def _has_gradient(self, region: Region, value: int) -> bool:
        """Whether a value depends on a parameter: only then the backward pass goes on."""
        bits = self.program.sources.get((region.number, value), 0)
        return any(bits >> i & 1 for i in self.program.parameters)

    def _copy(self, value: Value, result: Value) -> None:
        self.cut[result] = self.cut.get(value, frozenset())
        self.same[result] = self._root(value)

    def _root(self, value: Value) -> Value:
        return self.same.get(value, value)

    def _send(self, region: Region, node: Node, value: int, kind: collectives.Kind, *, mirrored: bool) -> None:
        self._add(region, node, value, kind, "recomputed" if when(node) == "recomputed" else "forward")
        if mirrored and phase(node) == "forward":
            self._add(region, node, value, kind, "backward")

    def _add(self, region: Region, node: Node, value: int, kind: collectives.Kind, phase: str) -> None:
        mesh, type = self.program.mesh, region.graph.types[value]
        parts = math.prod(map(mesh.axis_size, self.style.data)) if (region.number, value) in self.program.batch else 1
        nbytes = type.nbytes // parts
        self.found.append(
            Allowed(
                role="activation gradient" if phase == "backward" else "activation",
                phase=phase,
                axes=self.style.tensor,
                layer=layer_of(node.scope),
                count=region.trips,
                nbytes=nbytes * region.trips,
                wire=on_wire(kind, nbytes * region.trips),
                seconds=region.trips * seconds_of(self.program, kind, self.style.tensor, nbytes),
            )
        )


def by_phase(allowed: Sequence[Allowed]) -> dict[tuple[str, str, tuple[str, ...]], Allowed]:
    """What is allowed by role, phase and axes."""
    found: dict[tuple[str, str, tuple[str, ...]], Allowed] = {}
    for one in allowed:
        key = one.role, one.phase, one.axes
        known = found.get(key)
        found[key] = (
            one
            if known is None
            else replace(
                known,
                count=known.count + one.count,
                nbytes=known.nbytes + one.nbytes,
                wire=known.wire + one.wire,
                seconds=known.seconds + one.seconds,
            )
        )
    return found


def by_cause(sends: Iterable[Sent]) -> dict[tuple[str, str, tuple[str, ...]], list[Sent]]:
    """What is sent by role, phase and axes; what parameters are recomputed with belongs to the backward pass."""
    found: dict[tuple[str, str, tuple[str, ...]], list[Sent]] = defaultdict(list)
    for sent in sends:
        phase = "backward" if sent.role == "parameter" and sent.phase == "recomputed" else sent.phase
        found[sent.role, phase, sent.axes].append(sent)
    return dict(found)


def judge_any(program: Program) -> Verdict:
    """A searched plan held against what every textbook has in common."""
    verdict = Verdict()
    everything = list(program.sent())
    early = _before_sums(program, everything)
    verdict.findings += [Finding(sent=s, surplus_seconds=s.seconds, why=EARLY) for s in early]
    rest = [s for s in everything if s not in early]
    _statistics(program, [s for s in rest if s.role == "statistic"], verdict)
    verdict.findings += [
        Finding(sent=s, surplus_seconds=s.seconds, why="the textbook sends none") for s in rest if s.role == "constant"
    ]
    again: dict[tuple[int, str, str, bool, tuple[str, ...]], list[Sent]] = defaultdict(list)
    for s in rest:
        if s.parameter is not None:
            phase = "backward" if s.phase == "recomputed" else s.phase
            again[s.parameter, s.role, phase, s.kind in ("all_reduce", "reduce_scatter"), s.axes].append(s)
    for (position, *_), same in again.items():
        wanted = program.graph.types[program.graph.inputs[position]].item_nbytes
        once = max(on_wire(s.kind, payload(s, program.mesh.group(s.axes).ranks)) // item_nbytes(s.dtype) for s in same)
        if sent_on_wire(program, same) <= max(once * wanted, *(sent_on_wire(program, [s]) for s in same)):
            continue
        for first, second in itertools.combinations(sorted(same, key=lambda s: -s.seconds), 2):
            surplus = second.seconds - _instead(program, first, second)
            if surplus > (ROUNDING - 1) * second.seconds:
                why = f"{len(same)} times in one phase, the textbook once"
                verdict.findings.append(Finding(sent=second, surplus_seconds=surplus, why=why))
                break
    return verdict


def _instead(program: Program, first: Sent, second: Sent) -> float:
    """Seconds to do without the second: a gathered copy is brought where the other is wanted, or a summand to where the
    other is before both are reduced. They may lie so differently that this takes as long.
    """
    if first.type.shape != second.type.shape:
        return 0.0
    reduced = second.kind in ("all_reduce", "reduce_scatter")
    ends = (second.before, first.before) if reduced else (first.after, second.after)
    return second.count * program.resharder.cost(second.type, *ends)


def best_of(program: Program, hands: Mapping[str, float], verdict: Verdict) -> None:
    """Adds what makes a searched plan slower than the best textbook plan: the most that it sends of activations."""
    name = min(hands, key=hands.__getitem__)
    rest = program.plan.step_seconds - hands[name] * ROUNDING - verdict.surplus_seconds
    sends = sorted(program.sent(), key=lambda s: (not s.role.startswith("activation"), -s.seconds))
    for sent in sends:
        if rest <= 0:
            return
        why = f"{name} would take {quantities.seconds(hands[name])} in all"
        verdict.findings.append(Finding(sent=sent, surplus_seconds=min(rest, sent.seconds), why=why))
        rest -= sent.seconds
