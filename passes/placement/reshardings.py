"""The reshardings that a choice of placements implies, in the order in which they run.

Lowering executes these reshardings and the plan lists their collectives, so the two cannot disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

from passes.cluster import Collective, Kind, Mesh
from passes.gc_pause import without_gc
from passes.ir import Graph, Node, Phase, TensorType, control_of, phase
from passes.placement.background import Background, derived
from passes.rules import Assignment, ShardingRule, made_anywhere, makes_the_same, remembered, rules_of
from passes.sharding import ANY, Behind, ShardingSpec, Step, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placements of one node's operands and results, with the layouts of its bodies."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    bodies: tuple[Layout, ...] = ()

    @classmethod
    def of(cls, rule: ShardingRule, assignment: Assignment) -> Self:
        """The placement of a node when each axis of `assignment` cuts its factor of the node's rule."""
        return cls(
            operands=tuple(rule.operand_spec(o, assignment) for o in range(len(rule.operands))),
            results=tuple(rule.result_spec(r, assignment) for r in range(len(rule.results))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The placements of everything in a graph: its inputs, one `Placement` for each node, and its outputs."""

    inputs: tuple[ShardingSpec, ...]
    placements: tuple[Placement, ...]
    outputs: tuple[ShardingSpec, ...]


def shared(layout: Layout) -> Layout:
    """An equal layout in which equal specs and placements are the same objects, so that comparing them is fast."""
    specs: dict[ShardingSpec, ShardingSpec] = {}
    placements: dict[tuple[object, ...], Placement] = {}
    objects = {id(placement): placement for placement in layout.placements}
    for key, placement in objects.items():
        operands, results = (
            tuple([specs.setdefault(spec, spec) for spec in side]) for side in (placement.operands, placement.results)
        )
        same = (*map(id, operands), None, *map(id, results), *map(id, placement.bodies))
        if same not in placements:
            placements[same] = Placement(operands=operands, results=results, bodies=placement.bodies)
        objects[key] = placements[same]
    return Layout(
        inputs=tuple([specs.setdefault(spec, spec) for spec in layout.inputs]),
        placements=tuple([objects[id(placement)] for placement in layout.placements]),
        outputs=tuple([specs.setdefault(spec, spec) for spec in layout.outputs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """A resharding of `value` from `before` to `after` by `steps`, just before the first node that needs it.

    `before` is the placement in which the value is made or, if it is made partial, the one it was reduced to.
    `after_value` must exist before the resharding starts: it keeps a weight that is gathered again for the backward
    pass from being gathered early, in the forward pass (ZeRO-3's second gather).
    """

    value: int
    before: ShardingSpec
    after: ShardingSpec
    steps: tuple[Step, ...]
    phase: Phase
    after_value: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Reductions by the same steps, of values of these `types` and of one dtype, which a program runs as one."""

    reductions: tuple[Resharding, ...]
    types: tuple[TensorType, ...]

    def nbytes(self, mesh: Mesh) -> int:
        """Bytes of one device's array in which all of them lie side by side."""
        pairs = zip(self.reductions, self.types, strict=True)
        return sum(reduction.after.local_nbytes(type, mesh) for reduction, type in pairs)


def is_free(graph: Graph, node: int) -> bool:
    """Whether a node costs nothing in any placement that its readers need, like a broadcast of literals."""
    candidate = graph.nodes[node]
    return made_anywhere(candidate) and all(value in graph.literals for value in candidate.inputs)


@remembered
def weights(graph: Graph) -> frozenset[int]:
    """The graph's inputs, and values of equal size that the forward pass makes of one of them alone, such as a cast.

    The backward pass may gather them again.
    """
    return derived(graph, graph.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardingPlan:
    """The reshardings `before` each node [nodes + 1], the last ones those of outputs; `bodies` has those of loops, by
    node.

    Values that are computed twice are resharded once: `same` maps each to the one that is. `packs` has the reductions
    of `before` that a program runs as one all-reduce, by the node that reads the first of them. `early` has those of
    `before` that a program starts at an earlier node, so that the products between the two hide them.
    """

    before: tuple[tuple[Resharding, ...], ...]
    bodies: Mapping[int, tuple[ReshardingPlan, ...]] = field(default_factory=dict[int, "tuple[ReshardingPlan, ...]"])
    same: Mapping[int, int] = field(default_factory=dict[int, int])
    packs: Mapping[int, tuple[Pack, ...]] = field(default_factory=dict[int, "tuple[Pack, ...]"])
    early: Mapping[int, tuple[Resharding, ...]] = field(default_factory=dict[int, "tuple[Resharding, ...]"])


class Steps(Protocol):
    """A source of the steps from one placement of a value to another."""

    def steps(self, type: TensorType, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]: ...

    def is_packed(self, type: TensorType, after: ShardingSpec, steps: Sequence[Step]) -> bool: ...

    @property
    def hides_gathers(self) -> bool: ...


@without_gc()
def resharding_plan(
    graph: Graph, layout: Layout, resharder: Steps, *, regather: bool = True, in_turn: bool = False
) -> ReshardingPlan:
    """The reshardings that a layout implies; with `regather`, weights are gathered again for the backward pass.

    Passes that run `in_turn`, as a pipeline's do for each microbatch, share no collective.
    """
    return _Moving(graph, shared(layout), resharder, regather, in_turn).run()


class _Moving:
    """The placements of values while nodes run: at `home`, or open for those that are `free`; `done` has the
    reshardings made.

    For values that are partial at home, `reduced` is the placement after their first reduction: there is no second.
    """

    def __init__(self, graph: Graph, layout: Layout, resharder: Steps, regather: bool, in_turn: bool) -> None:
        self.graph, self.layout, self.resharder, self.regather = graph, layout, resharder, regather
        self.in_turn = in_turn
        self.weights = weights(graph) if regather else frozenset[int]()
        self.home: dict[int, ShardingSpec] = dict(zip(graph.inputs, layout.inputs, strict=True))
        self.home |= {value: replicated(graph.types[value].rank) for value in graph.constants}
        self.free: set[int] = set()
        self.done: set[tuple[int, ShardingSpec, Phase]] = set()
        self.reduced: dict[int, ShardingSpec] = {}
        self.backward: set[int] = set()
        self.known: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.same: dict[int, int] = {}

    def run(self) -> ReshardingPlan:
        graph, layout, placement_of = self.graph, self.layout, self.home
        before: list[tuple[Resharding, ...]] = []
        bodies: dict[int, tuple[ReshardingPlan, ...]] = {}
        for index, (node, placement) in enumerate(zip(graph.nodes, layout.placements, strict=True)):
            if is_free(graph, index):
                self.free.update(node.outputs)
                self._recognise(node, None)
                before.append(())
                continue
            if placement.bodies:
                inner = zip(node.subgraphs, placement.bodies, strict=True)
                inside_of = partial(resharding_plan, resharder=self.resharder, regather=self.regather, in_turn=True)
                plans = [inside_of(body, inside) for body, inside in inner]
                bodies[index] = _by_row(node, placement, plans)
            operands = [
                (value, spec)
                for value, spec in zip(node.inputs, placement.operands, strict=True)
                if (at := placement_of.get(value, spec)) is not spec and at != spec
            ]
            before.append(self._before(node, operands) if operands else ())
            for value, spec in zip(node.outputs, placement.results, strict=True):
                placement_of[value] = spec
            self._recognise(node, placement)
            if self.regather and phase(node) == "backward":
                self.backward.update(node.outputs)
        leaving = zip(graph.outputs, layout.outputs, strict=True)
        brought = (self._bring(value, spec, "forward", None) for value, spec in leaving)
        before.append(tuple(m for m in brought if m))
        early, packs = early_gathers(graph, before) if self.resharder.hides_gathers else {}, self._packs(before)
        return ReshardingPlan(before=tuple(before), bodies=bodies, same=self.same, packs=packs, early=early)

    def _packs(self, before: Sequence[Sequence[Resharding]]) -> dict[int, tuple[Pack, ...]]:
        """The packs of reductions, by the node that reads the first: all that they reduce exists before that."""
        graph, gathered = self.graph, dict[object, list[tuple[int, list[Resharding]]]]()
        for index, moves in enumerate(before):
            for move in moves:
                type = graph.types[move.value]
                is_sum = move.before.partial and move.before.reduction == "add" and move.after_value is None
                if not is_sum or not self.resharder.is_packed(type, move.after, move.steps):
                    continue
                producer = graph.producers.get(move.value, -1)
                turn = phase(graph.nodes[producer]) if self.in_turn and producer >= 0 else None
                packs = gathered.setdefault((move.steps, type.dtype, turn), [])
                if packs and producer < packs[-1][0]:
                    packs[-1][1].append(move)
                else:
                    packs.append((index, [move]))
        by_node: dict[int, tuple[Pack, ...]] = {}
        for index, pack in itertools.chain.from_iterable(gathered.values()):
            if len(pack) > 1:
                types = tuple(graph.types[move.value] for move in pack)
                by_node[index] = (*by_node.get(index, ()), Pack(reductions=tuple(pack), types=types))
        return by_node

    def _recognise(self, node: Node, placement: Placement | None) -> None:
        """Records that a node repeats an earlier one, free or in the same placement, which XLA computes only once.

        Parameters and placements are compared by identity: equal ones are the same objects in almost every graph.
        """
        operands = tuple([self.same.get(value, value) for value in node.inputs])
        key = (node.primitive, id(node.params), id(placement), operands)
        first = self.known.setdefault(key, node.outputs)
        if first is not node.outputs and makes_the_same(node):
            self.same.update(zip(node.outputs, first, strict=True))

    def _before(self, node: Node, operands: Sequence[tuple[int, ShardingSpec]]) -> tuple[Resharding, ...]:
        """The reshardings that a node waits for."""
        when = phase(node)
        anchor = next((value for value in node.inputs if value in self.backward), None)
        return tuple(move for value, spec in operands if (move := self._bring(value, spec, when, anchor)))

    def _bring(self, value: int, target: ShardingSpec, when: Phase, anchor: int | None) -> Resharding | None:
        when = "backward" if self.regather and when == "backward" and value in self.weights else "forward"
        value = self.same.get(value, value)
        if value in self.graph.literals or value in self.free:
            return None
        source = self.home[value]
        if source == target or (value, target, when) in self.done:
            return None
        self.done.add((value, target, when))
        if source.partial:
            source = self.reduced.get(value, source)
            if not target.partial:
                self.reduced.setdefault(value, target)
        steps = self.resharder.steps(self.graph.types[value], source, target)
        late = anchor if when == "backward" and not all(step.is_local for step in steps) else None
        return Resharding(value=value, before=source, after=target, steps=steps, phase=when, after_value=late)


def early_gathers(graph: Graph, before: Sequence[Sequence[Resharding]]) -> dict[int, tuple[Resharding, ...]]:
    """The gathers for the backward pass by the node before which they start: the product of the weight before it.

    A gather waits for what that product reads, and is hidden behind it, as FSDP's prefetch is: one more weight is whole.

    Reference: Zhao et al., "PyTorch FSDP" (VLDB 2023), section 3.3.2.
    """
    late = {move.value for moves in before for move in moves if move.after_value is not None}
    early: dict[int, tuple[Resharding, ...]] = {}
    backward, last = set[int](), dict[int, tuple[int, int]]()
    for index, node in enumerate(graph.nodes if late else ()):
        at = max((last[value] for value in node.inputs if value in last), default=None)
        for move in before[index]:
            if move.after_value is not None and at is not None and graph.producers.get(move.value, -1) < at[0]:
                early[at[0]] = (*early.get(at[0], ()), replace(move, after_value=at[1]))
        if phase(node) != "backward":
            continue
        awaited = next((value for value in node.inputs if value in backward), None)
        if awaited is not None and not late.isdisjoint(node.inputs) and rules_of(graph)[index].is_product:
            at = index, awaited
        backward.update(node.outputs)
        last.update(dict.fromkeys(node.outputs, at) if at else {})
    return early


def _by_row(node: Node, placement: Placement, bodies: Sequence[ReshardingPlan]) -> tuple[ReshardingPlan, ...]:
    """The reshardings in the bodies of a loop of which each device runs its own rows until these have ended.

    Devices that share nothing else in the loop need not tell each other whether any row goes on.
    """
    *_, inside = placement.bodies
    tests = [move for move in bodies[-1].before[-1] if move.before.partial and move.before.reduction == ANY]
    if not tests or any(map(_runs_together, node.subgraphs)):
        return tuple(bodies)
    others = (move for body in bodies for move in _moves(body) if not any(move is test for test in tests))
    shared = {axis for move in others for step in move.steps if not step.is_local for axis in step.axes}
    producers = node.subgraphs[-1].producers
    for test in tests:
        dims = inside.placements[producers[test.value]].operands[0].dims if test.value in producers else ()
        has_others = any(spec.dims and spec.dims[: len(dims)] != dims for spec in placement.results)
        if not dims or has_others or not shared.isdisjoint(test.before.partial):
            return tuple(bodies)
    alone = tuple(replace(move, steps=()) if any(move is t for t in tests) else move for move in bodies[-1].before[-1])
    return (*bodies[:-1], replace(bodies[-1], before=(*bodies[-1].before[:-1], alone)))


def _runs_together(graph: Graph) -> bool:
    """Whether some node communicates by itself, or is run by one device for all."""
    is_so = any(rule.pinned or rule.once for rule in rules_of(graph))
    return is_so or any(_runs_together(body) for node in graph.nodes for body in node.subgraphs)


def _moves(plan: ReshardingPlan) -> Iterator[Resharding]:
    """Every resharding of a plan, in loops and branches too."""
    yield from itertools.chain.from_iterable(plan.before)
    for body in itertools.chain.from_iterable(plan.bodies.values()):
        yield from _moves(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One occurrence of a resharding: of a value of `type`, before the node of that `scope` at the source line `where`.

    It runs `trips` times a step, each time with probability `share`, in the node's `phase`, hidden `behind` computing
    as `Background.behind` says; if it is in a `pack`, with the others of that.
    """

    move: Resharding
    type: TensorType
    where: str
    scope: str
    phase: Phase
    trips: int = 1
    share: float = 1.0
    behind: Behind | None = None
    pack: Pack | None = None


def occurrences(
    graph: Graph,
    reshardings: ReshardingPlan,
    *,
    trips: int = 1,
    share: float = 1.0,
    end: str = "output",
    end_scope: str = "",
    background: Background | None = None,
) -> Iterator[Occurrence]:
    """Every occurrence of a resharding, those in loops and branches included; `end` is the source line of outputs."""
    background = background or Background.of(graph)
    packed = {id(move): pack for packs in reshardings.packs.values() for pack in packs for move in pack.reductions}
    for index, moves_before in enumerate(reshardings.before):
        if not moves_before and index not in reshardings.bodies:
            continue
        node = graph.nodes[index] if index < len(graph.nodes) else None
        where, scope, when = (node.source, node.scope, phase(node)) if node else (end, end_scope, "apply")
        for move in moves_before:
            yield Occurrence(
                move=move,
                type=graph.types[move.value],
                where=where,
                scope=scope,
                phase=when,
                trips=trips,
                share=share,
                behind=background.behind(move.value),
                pack=packed.get(id(move)),
            )
        control = control_of(node, graph) if node and index in reshardings.bodies else None
        if control:
            within = background.inside(index, control)
            for body, inner, beside in zip(control.bodies, reshardings.bodies[index], within, strict=True):
                inside, chance = trips * body.trips, share * body.share
                ends = {"end": where, "end_scope": scope}
                yield from occurrences(body.graph, inner, trips=inside, share=chance, background=beside, **ends)


def collectives(graph: Graph, reshardings: ReshardingPlan, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives of the reshardings; equal ones of one source line are counted together, loops included.

    A pack is one collective, of the line that reads the first of it.
    """
    counted: dict[tuple[Kind, tuple[str, ...], str, int, str], int] = {}
    for occurrence in occurrences(graph, reshardings):
        move, pack = occurrence.move, occurrence.pack
        if pack and move is not pack.reductions[0]:
            continue
        spec = move.before
        for step in move.steps:
            spec = step.apply(spec)
            if step.kind == "slice" or step.kind == "keep":
                continue
            nbytes = pack.nbytes(mesh) if pack else spec.local_nbytes(occurrence.type, mesh)
            key = (step.kind, step.axes, occurrence.type.dtype, nbytes, occurrence.where)
            counted[key] = counted.get(key, 0) + occurrence.trips
    return tuple(
        Collective(kind=kind, axes=axes, dtype=dtype, nbytes=nbytes, count=count, where=where)
        for (kind, axes, dtype, nbytes, where), count in counted.items()
    )
