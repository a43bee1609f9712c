"""The collectives of data parallelism, ZeRO and Megatron, derived from a program, and what of a plan goes beyond them.

Over the axis `data`, of n devices, for a parameter of B bytes (or B/t where t devices of `tensor` cut it):

    data parallel   one all-reduce of B for its gradient
    ZeRO-1, ZeRO-2  one reduce-scatter of B for its gradient, one all-gather of B for its update
    ZeRO-3          one all-gather of B in the forward pass, one in the backward pass (what is recomputed uses the
                    same), one reduce-scatter of B for its gradient

and, whatever the planner, one all-reduce for everything else that is summed over the batch (the loss; a mean that
normalises; a sum that a gradient follows from, but the rest of the backward pass as well, as where a batch norm
multiplies its scale by 1/std): one for every operator that sums it, of what that operator makes. Activations have the
batch on one of their dimensions: each device has its own rows of it, and nothing brings them elsewhere.

A gradient may be a sum of k summands that are cast from a narrower dtype first, of B/2 bytes each: where a parameter is
read k times, each time cast. To reduce it once, every device casts and adds them whole, 3B/2 bytes read and written for
a cast and 3B for a sum; to scatter each of them as it is, only a part of them, but kB/2 bytes are sent. The textbook
is the faster way of the two.

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
`tensor` is compared with these, any other with the former; it goes beyond them where all that it sends over the axis
takes more time and more bytes on the wire.

Reference: Rajbhandari et al., "ZeRO" (SC 2020), sections 5 and 7; Shoeybi et al., "Megatron-LM" (2019), section 3;
Korthikanti et al. (2205.05198), section 4, for a gather and a scatter in the place of an all-reduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.batch_sums import batch_sums
from benchmarks.causes import Program, Sent
from benchmarks.megatron import megatron
from benchmarks.verdicts import ROUNDING, Allowed, Finding, Style, Verdict, on_wire, seconds_of, sent_on_wire
from passes.cluster import collectives
from passes.ir import item_nbytes, phase
from passes.rules import rule_of
from passes.text import quantities

CASTS = frozenset({"convert_element_type", "add_any"})
"""The operators on a gradient's summands, each of which the cost model prices as a kernel of its own."""

EARLY = "reduced before it is added to what is reduced too: one reduction of the sum would do"


def judge(program: Program, style: Style) -> Verdict:
    """The collectives of a style's textbook for a planned program, and what of the plan goes beyond them."""
    verdict = Verdict()
    by_role: dict[str, list[Sent]] = defaultdict(list)
    everything = list(program.sent())
    early = before_sums(program, everything)
    verdict.findings += [Finding(sent=s, surplus_seconds=s.seconds, why=EARLY) for s in early]
    for sent in everything:
        if sent not in early:
            by_role[sent.role].append(sent)
    gathers = (s for s in everything if s.kind == "all_gather" and s.role.startswith("activation"))
    style = replace(style, sequence=any(set(s.axes) & set(style.tensor) for s in gathers))
    for position in sorted(program.parameters):
        for role in ("gradient", "parameter", "updated parameter"):
            sends = [s for s in by_role[role] if s.parameter == position]
            _parameter(program, style, position, role, sends, verdict)
    batch_sums(program, by_role["statistic"], verdict)
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


def before_sums(program: Program, everything: Sequence[Sent]) -> list[Sent]:
    """The needless reductions: of those whose results one sum alone reads, over the same axes, all but the longest."""
    unneeded: list[Sent] = []
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
        unneeded += sorted(sums.values(), key=lambda s: s.seconds)[:-1]
    return unneeded


def _parameter(
    program: Program, style: Style, position: int, role: str, sends: Sequence[Sent], verdict: Verdict
) -> None:
    """Adds what the textbook sends of a parameter, of its gradient or of its update, and what the plan sends beyond."""
    mesh, spec = program.mesh, program.plan.inputs[position]
    type = program.graph.types[program.graph.inputs[position]]
    cut = {axis for axes in spec.dims for axis in axes} & set(style.tensor)
    ranks = math.prod(map(mesh.axis_size, style.data))
    scattered = style.stage > 0 and any(size % ranks == 0 for size in type.shape)
    kind: collectives.Kind = "all_gather"
    if role == "gradient":
        phases, kind = ("backward",), "reduce_scatter" if scattered else "all_reduce"
    elif role == "parameter":
        phases = ("forward", "backward") if style.stage == 3 and scattered else ()
    else:
        phases = ("apply",) if style.stage in (1, 2) and scattered else ()
    slots: dict[str, list[Sent]] = {slot: [] for slot in phases}
    for sent in sends:
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
        if slot in phases and axes:
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
            if role == "gradient" and len(sends) > 1:
                allowed = replace(allowed, seconds=allowed.seconds + casting_seconds(program, sends, type.dtype))
            verdict.allowed.append(allowed)
        if sends:
            _exceeding(program, style, sends, allowed, verdict)


def casting_seconds(program: Program, sends: Sequence[Sent], dtype: str) -> float:
    """Seconds that the casts of a gradient's summands to `dtype`, and their sums, take longer on whole arrays than on
    the parts that they are scattered in; none where a summand is of that dtype, or is not scattered.
    """
    if any(s.dtype == dtype or s.kind != "reduce_scatter" for s in sends):
        return 0.0
    pending, seen, nbytes = [s.value for s in sends], set[tuple[int, int]](), 0
    while pending:
        number, value = pending.pop()
        graph = program.regions[number].graph
        for reader in graph.consumers.get(value, ()):
            node = graph.nodes[reader]
            made = number, node.outputs[0]
            if made in seen or phase(node) != "backward" or made not in program.families:
                continue
            seen.add(made)
            pending.append(made)
            if node.primitive in CASTS:
                nbytes += sum(graph.types[v].nbytes for v in (*node.inputs, *node.outputs))
    mesh = program.mesh
    ranks = min(mesh.group(s.axes).ranks for s in sends)
    return nbytes * (1 - 1 / ranks) / mesh.cluster.group().device.achieved_bytes_per_second


def _exceeding(
    program: Program, style: Style, sends: Sequence[Sent], allowed: Allowed | None, verdict: Verdict
) -> None:
    """Adds a finding where collectives take more time and more bytes than is allowed.

    Where some go over `tensor` the surplus is a charge, which `_over_tensor` settles.
    """
    spent, wire = sum(s.seconds for s in sends), sent_on_wire(program, sends)
    seconds = allowed.seconds if allowed else 0.0
    if allowed and (spent <= seconds * ROUNDING or wire <= allowed.wire):
        return
    most = max(sends, key=lambda s: s.seconds)
    if over := [s for s in sends if set(s.axes) & set(style.tensor)]:
        verdict.charges.append((max(over, key=lambda s: s.seconds), spent - seconds))
        return
    kinds = ", ".join(sorted({s.kind for s in sends}))
    allowed_wire = f"{allowed.wire:,}" if allowed else "none"
    why = f"{wire:,} bytes on the wire by {sum(s.count for s in sends)} {kinds}, the textbook {allowed_wire}"
    verdict.findings.append(Finding(sent=most, surplus_seconds=spent - seconds, why=why))


def _over_tensor(program: Program, verdict: Verdict) -> None:
    """Adds findings for the time over `tensor` beyond Megatron's, first for collectives that Megatron does not have."""
    activations = [a for a in verdict.allowed if a.role.startswith("activation")]
    allowed = sum(a.seconds for a in activations)
    rest = sum(seconds for _, seconds in verdict.charges) - allowed * ROUNDING
    if sent_on_wire(program, [s for s, _ in verdict.charges]) <= sum(a.wire for a in activations):
        return

    def is_unlike_megatron(charge: tuple[Sent, float]) -> tuple[bool, bool, float]:
        sent, seconds = charge
        return not sent.role.startswith("activation"), sent.kind not in ("all_reduce", "reduce_scatter"), seconds

    for sent, seconds in sorted(verdict.charges, key=is_unlike_megatron, reverse=True):
        if rest <= 0:
            return
        why = f"over this axis Megatron takes {quantities.seconds(allowed)} in all"
        verdict.findings.append(Finding(sent=sent, surplus_seconds=min(seconds, rest), why=why))
        rest -= seconds
