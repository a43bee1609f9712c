"""Recomputation: values of the forward pass that are computed again for the backward pass instead of being kept.

A *layer* keeps everything, the results of its products with weights (attention's own products have batch dimensions,
and are none of these), or its inputs alone. The other values that the backward pass reads are recomputed by copies of
the layer's nodes. They stand just before their first reader, behind an `optimization_barrier` that also waits for a
cotangent: so they run late, and XLA does not merge them with the first ones. Chen's checkpoints every sqrt(n) layers
and Megatron's selective recomputation are two of these choices.

Reference: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (1604.06174); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2205.05198), section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import PlanningError, explain
from passes.ir import Graph, Node, TensorType, control_of, phase, scan_of
from passes.layers import forward, modules
from passes.placement import is_free
from passes.rules import barrier
from passes.transforms.remat_loops import BodyOrigins, Loop, loops, recompute_loop
from passes.transforms.remat_policy import KEPT, Kept, is_kept, transposed


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """A program with recomputation; `origins[i]` is the node of the old program that node i is or repeats.

    None stands for a barrier. The bodies of the nodes in `bodies` are new, and made of old ones; those of the nodes in
    `inside` have recomputation of their own.
    """

    graph: Graph
    origins: tuple[int | None, ...]
    bodies: Mapping[int, BodyOrigins] = field(default_factory=dict[int, BodyOrigins])
    inside: Mapping[int, Recomputed] = field(default_factory=dict[int, "Recomputed"])


def kept_of(names: Sequence[str]) -> tuple[Kept, ...]:
    """The policies of layers, given by name. Raises PlanningError for another name."""
    policies: dict[str, Kept] = {kept: kept for kept in KEPT}
    for name in names:
        if name not in policies:
            rule = f"a layer keeps one of {', '.join(KEPT)}"
            raise PlanningError(explain(f"recomputation {name!r}", rule, "", "plan again, or mend the plan's file"))
    return tuple(policies[name] for name in names)


def layers(graph: Graph) -> tuple[int, ...]:
    """The first node of every layer of the forward pass and, last, of what follows the last numbered module; empty if
    there are none.

    Layers are loops, of which each is one, for what its iterations keep, if most of the work is in those; or numbered
    modules (`Block_0`, `Block_1`, ...); or even parts where few bytes cross.
    """
    if not any(phase(graph.nodes[i]) == "forward" for i in forward.forward_nodes(graph)):
        return ()
    looped = tuple(loop.forward for loop in loops(graph))
    if looped and modules.is_most_work(graph, looped):
        return looped
    return modules.numbered_modules(graph) or looped or modules.even_parts(graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layering:
    """The layers of a step for which it can be chosen what they keep: how many, and whether they are loops."""

    count: int
    are_loops: bool


def layering(graph: Graph) -> Layering:
    """The layers of a program, or of the loop in it that has a forward and a backward pass in each iteration."""
    index = _step_loop(graph)
    if index is not None:
        return layering(graph.nodes[index].subgraphs[0])
    return Layering(count=len(layers(graph)), are_loops=_are_loops(graph))


def _step_loop(graph: Graph) -> int | None:
    """The loop that has a forward and a backward pass in each iteration, such as one over parts of a batch whose
    gradients it adds up; None where the program itself has them, or several loops do.
    """
    if layers(graph):
        return None
    controls = ((i, control_of(node, graph)) for i, node in enumerate(graph.nodes) if scan_of(node))
    steps = [i for i, control in controls if control is not None and control.bodies[0].is_step]
    return steps[0] if len(steps) == 1 else None


def _are_loops(graph: Graph) -> bool:
    """Whether the `layers` of a program are loops, which stack what their iterations keep."""
    firsts = layers(graph)
    return bool(firsts) and {loop.forward for loop in loops(graph)} >= set(firsts)


def recompute(graph: Graph, kept: Sequence[Kept]) -> Recomputed:
    """The program in which layer k keeps `kept[k]` for its backward pass; layers are those of its `layering`.

    Raises PlanningError where there are not as many layers.
    """
    if (index := _step_loop(graph)) is not None:
        nodes = list(graph.nodes)
        inside = recompute(nodes[index].subgraphs[0], kept)
        nodes[index] = replace(nodes[index], subgraphs=(inside.graph,))
        origins = tuple(range(len(nodes)))
        return Recomputed(graph=replace(graph, nodes=tuple(nodes)), origins=origins, inside={index: inside})
    firsts = layers(graph)
    if len(firsts) != len(kept):
        rule = f"the forward pass has {len(firsts)} layers, and what each keeps is to be said"
        remedy = "give as many names, or one for all; of a plan in a file, plan again"
        raise PlanningError(explain(f"recomputation for {len(kept)} layers", rule, "", remedy))
    if _are_loops(graph):
        around = {loop.forward: loop for loop in loops(graph)}
        return _looped(graph, [(around[first], choice) for first, choice in zip(firsts, kept, strict=True)])
    draft = _Draft(graph=graph, firsts=firsts)
    for layer, choice in enumerate(kept):
        if choice != "everything":
            draft.repeat(layer, choice)
    return draft.finish()


def _looped(graph: Graph, choices: Sequence[tuple[Loop, Kept]]) -> Recomputed:
    """The program whose loops over layers keep what these choices say."""
    bodies: dict[int, BodyOrigins] = {}
    for loop, choice in choices:
        graph, changed = recompute_loop(graph, loop, choice)
        bodies.update(changed)
    return Recomputed(graph=graph, origins=tuple(range(len(graph.nodes))), bodies=bodies)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A program while copies are added: `inserted[i]` stand before node i; late readers of v read `again[v]`, and node
    i reads `awaited[i][v]`.
    """

    graph: Graph
    firsts: tuple[int, ...]
    types: list[TensorType] = field(default_factory=list[TensorType])
    inserted: dict[int, list[tuple[int | None, Node]]] = field(default_factory=dict[int, list[tuple[int | None, Node]]])
    again: dict[int, int] = field(default_factory=dict[int, int])
    awaited: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    layer: dict[int, int] = field(default_factory=dict[int, int])
    late: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        nodes = self.graph.nodes
        self.types = list(self.graph.types)
        self.late = frozenset(i for i, node in enumerate(nodes) if phase(node) == "backward")
        forward = [i for i, node in enumerate(nodes) if phase(node) == "forward"]
        self.layer = {i: max(sum(first <= i for first in self.firsts) - 1, 0) for i in forward}

    def repeat(self, layer: int, kept: Kept) -> None:
        """Adds copies of the nodes whose results the backward pass reads and a layer does not keep."""
        graph = self.graph
        members = [i for i, number in self.layer.items() if number == layer]
        gone = {
            v for i in members if not is_kept(graph, i, kept) for v in graph.nodes[i].outputs if self._inside(v, layer)
        }
        needed = {v for v in gone if self._late_readers(v)}
        copied: list[int] = []
        for index in reversed(members):
            node = graph.nodes[index]
            if not needed.isdisjoint(node.outputs):
                copied.append(index)
                needed.update(v for v in node.inputs if v in gone)
        for run in self._runs(copied[::-1]):
            self._insert(run)

    def _runs(self, copied: Sequence[int]) -> Iterator[list[int]]:
        """The nodes by the passes that they belong to: a step may go forward and backward several times.

        A pass ends where the backward pass has read its values, and the next forward pass begins.
        """
        run: list[int] = []
        read = len(self.graph.nodes)
        for index in copied:
            if index > read:
                yield run
                run, read = [], len(self.graph.nodes)
            run.append(index)
            read = min([read, *(r for v in self.graph.nodes[index].outputs for r in self._late_readers(v))])
        if run:
            yield run

    def _is_made(self, value: int) -> bool:
        """Whether a value is computed from other values, not from scalars alone."""
        producer = self.graph.producers.get(value)
        return producer is not None and not is_free(self.graph, producer)

    def _inside(self, value: int, layer: int) -> bool:
        """Whether only this layer and the backward pass read a value."""
        if value in self.graph.returned:
            return False
        readers = self.graph.consumers.get(value, ())
        return all(r in self.late or self.layer.get(r) == layer for r in readers)

    def _late_readers(self, value: int) -> list[int]:
        return [r for r in self.graph.consumers.get(value, ()) if r in self.late]

    def _insert(self, copied: Sequence[int]) -> None:
        """Adds copies of these nodes before the first reader of their results."""
        graph = self.graph
        copies = {v for i in copied for v in graph.nodes[i].outputs}
        readers = [r for v in copies for r in self._late_readers(v)]
        if not readers:
            return  # another pass's copies read them, as they are
        place = min(readers)
        entering = dict.fromkeys(
            v for i in copied for v in graph.nodes[i].inputs if self._is_made(v) and v not in copies
        )
        anchor = self._anchor(place)
        operands = tuple(dict.fromkeys((*entering, *(() if anchor is None else (anchor,)))))
        scope = transposed(graph.nodes[copied[0]].scope)
        source = graph.nodes[copied[0]].source
        new = {v: self._fresh(v) for v in operands}
        nodes_there = self.inserted.setdefault(place, [])
        if operands:
            nodes_there.append((None, barrier(operands, tuple(new.values()), source=source, scope=scope)))
        for index in copied:
            node = graph.nodes[index]
            inputs = tuple(new.get(v, v) for v in node.inputs)
            new |= {v: self._fresh(v) for v in node.outputs}
            outputs = tuple(new[v] for v in node.outputs)
            nodes_there.append((index, replace(node, inputs=inputs, outputs=outputs, scope=transposed(node.scope))))
        self.again |= {v: new[v] for v in copies}
        if anchor is not None:
            # Read from behind the barrier, or XLA drops it from there as a result that nobody wants.
            self.awaited[place] = {**self.awaited.get(place, {}), anchor: new[anchor]}

    def _anchor(self, place: int) -> int | None:
        """A cotangent that exists when node `place` runs, for which the recomputation waits."""
        nodes, producers = self.graph.nodes, self.graph.producers
        cotangents = [v for v in nodes[place].inputs if producers.get(v) in self.late and self._is_made(v)]
        earlier = (v for i in reversed(range(place)) if i in self.late for v in nodes[i].outputs if self._is_made(v))
        return cotangents[-1] if cotangents else next(earlier, None)

    def _fresh(self, value: int) -> int:
        self.types.append(self.graph.types[value])
        return len(self.types) - 1

    def finish(self) -> Recomputed:
        nodes: list[Node] = []
        origins: list[int | None] = []
        for index, node in enumerate(self.graph.nodes):
            for origin, copy in self.inserted.get(index, ()):
                nodes.append(copy)
                origins.append(origin)
            inputs = node.inputs
            if index in self.late:
                replaced = self.awaited.get(index, {})
                inputs = tuple(replaced.get(v, self.again.get(v, v)) for v in inputs)
            nodes.append(replace(node, inputs=inputs))
            origins.append(index)
        return Recomputed(
            graph=replace(self.graph, types=tuple(self.types), nodes=tuple(nodes)), origins=tuple(origins)
        )
