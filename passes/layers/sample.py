"""A step with fewer of its equal blocks: what it takes to price a deep model is found on a shallow one.

Of the blocks in which a forward pass repeats itself, the first two and the last two are kept, with their backward
passes, weights and updates; those between must be the same as the second, operator by operator and operand by operand,
and go. What read them reads the block that is kept in their place. Nothing is abridged where that cannot be shown.

    step       before | 0 | 1 | 2 | ... | n-3 | n-2 | n-1 | after
    abridged   before | 0 | 1 |                 n-2 | n-1 | after
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.ir import Graph, Node, StatePairs, phase
from passes.layers.forward import forward_nodes, forward_scope
from passes.layers.repeats import blocks

KEPT = 4
"""So many blocks are kept: the two ends, and two in the middle that follow each other."""

OUTSIDE = -1

Slot = tuple[object, int]
"""What a value is to its block: the number of its operator there, or of the first that reads it, and which operand."""


@dataclass(frozen=True, kw_only=True)
class Abridged:
    """The step without `left_out` of its blocks; what is kept by number: nodes, and positions of inputs and outputs."""

    graph: Graph
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    state_pairs: StatePairs
    left_out: int


def abridge(graph: Graph, state_pairs: StatePairs) -> Abridged | None:
    """The step with fewer blocks; None if it has too few that are shown to be equal."""
    firsts = blocks(graph)
    if len(firsts) - 1 <= KEPT:
        return None
    matched = _Matched(graph=graph, firsts=firsts, home=_homes(graph, firsts), state_pairs=tuple(state_pairs))
    return matched.without() if matched.match() else None


def _homes(graph: Graph, firsts: Sequence[int]) -> tuple[int, ...]:
    """The block of every node: by its place in the forward pass, or that of the operator that it is the gradient of.

    Otherwise it is that of the largest value that it reads, those of the forward pass before others. What reads from
    no block belongs to the one block that reads it.
    """
    homes = [OUTSIDE] * len(graph.nodes)
    forward = [index for index in forward_nodes(graph) if index < firsts[-1]]
    scopes: dict[str, set[int]] = {}
    for index in forward:
        homes[index] = bisect_right(firsts, index) - 1
        scopes.setdefault(graph.nodes[index].scope, set()).add(homes[index])
    places = set(forward)
    made = dict.fromkeys(graph.inputs, OUTSIDE) | {v: homes[i] for i in forward for v in graph.nodes[i].outputs}
    for value in made:
        readers = {homes[reader] for reader in graph.consumers.get(value, ()) if reader in places}
        made[value] = max(readers, default=made[value])
    early = frozenset(made)
    for index, node in enumerate(graph.nodes):
        if index not in places:
            own = scopes.get(forward_scope(node.scope), set[int]()) if phase(node) == "backward" else set[int]()
            read = [(v not in early, -graph.types[v].nbytes, made[v]) for v in node.inputs if v in made]
            largest = min((one for one in read if one[2] != OUTSIDE), default=(False, 0, OUTSIDE))[2]
            homes[index] = next(iter(own)) if len(own) == 1 else largest
            made.update(dict.fromkeys(node.outputs, homes[index]))
    return _adopted(graph, homes)


def _adopted(graph: Graph, homes: list[int]) -> tuple[int, ...]:
    """The homes, with those of the one block that reads what has none."""
    leaving = set(graph.outputs)
    for index in range(len(graph.nodes) - 1, -1, -1):
        outputs = graph.nodes[index].outputs
        if homes[index] == OUTSIDE and leaving.isdisjoint(outputs):
            read = {homes[reader] for value in outputs for reader in graph.consumers.get(value, ())}
            homes[index] = next(iter(read)) if len(read) == 1 else OUTSIDE
    return tuple(homes)


def _is_ordered(graph: Graph) -> bool:
    """Whether every value is made before it is read."""
    known = {*graph.inputs, *graph.constants, *graph.literals}
    for node in graph.nodes:
        if not known.issuperset(node.inputs):
            return False
        known.update(node.outputs)
    return known.issuperset(graph.outputs)


@dataclass(slots=True, kw_only=True)
class _Matched:
    """The blocks of a step, operator by operator: `slots` are equal for what is the same in two blocks."""

    graph: Graph
    firsts: tuple[int, ...]
    home: tuple[int, ...]
    state_pairs: StatePairs
    slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    owner: dict[int, int] = field(default_factory=dict[int, int])
    at: dict[tuple[int, Slot], int] = field(default_factory=dict[tuple[int, Slot], int])
    far: frozenset[int] = frozenset()
    chain: dict[tuple[object, int], set[object]] = field(default_factory=dict[tuple[object, int], set[object]])
    spelled: dict[int, str] = field(default_factory=dict[int, str])
    types: tuple[int, ...] = ()
    roots: set[int] = field(default_factory=set[int])

    @property
    def last(self) -> int:
        """The number of the last block."""
        return len(self.firsts) - 2

    @property
    def gone(self) -> range:
        return range(2, self.last - 1)

    def match(self) -> bool:
        """Whether the blocks but for the first and the last are the same."""
        graph = self.graph
        self.owner = {v: self.home[i] for v, i in graph.producers.items()} | self._owned_inputs()
        self.far = self._read_from_far()
        if any(self.owner.get(value) in self.gone for value in self.far):
            return False
        numbers: dict[object, int] = {}
        self.types = tuple(numbers.setdefault(type, len(numbers)) for type in graph.types)
        self._name_all()
        middle = range(1, self.last)
        lines: dict[int, set[object]] = {home: set() for home in middle}
        for node, home in zip(graph.nodes, self.home, strict=True):
            if home in lines:
                lines[home].add(self._line(node, home))
        alike = {frozenset(found) for found in lines.values()}
        ends = {self._ends(home) for home in middle}
        chained = all(len(found) == 1 for found in self.chain.values())
        return len(alike) == len(ends) == 1 and chained

    def _owned_inputs(self) -> dict[int, int]:
        """Inputs that one block alone reads."""
        readers = {v: {self.home[i] for i in self.graph.consumers.get(v, ())} for v in self.graph.inputs}
        return {value: next(iter(homes)) for value, homes in readers.items() if len(homes) == 1}

    def _read_from_far(self) -> frozenset[int]:
        """Values that a block reads which neither it nor one next to it makes: those must be the same for all."""
        return frozenset(
            value
            for index, node in enumerate(self.graph.nodes)
            for value in node.inputs
            if 0 < self.home[index] < self.last and abs(self.owner.get(value, OUTSIDE) - self.home[index]) > 1
        )

    def _name_all(self) -> None:
        """Gives what each block makes and reads its slot.

        What is made of inputs alone (a moment times its decay) looks like many others; it is named by what reads it.
        """
        known: dict[object, int] = {}
        seen = Counter[tuple[int, int]]()
        pending: list[int] = []
        for later in (False, True):
            for index in pending if later else range(len(self.graph.nodes)):
                node, home = self.graph.nodes[index], self.home[index]
                if not 0 < home < self.last or any(value in self.slots for value in node.outputs):
                    continue
                if not later and self._is_rooted(node, home):
                    pending.append(index)
                    continue
                number = known.setdefault(self._content(node, home), len(known))
                self._settle(node, home, (number, seen[home, number]))
                seen[home, number] += 1

    def _is_rooted(self, node: Node, home: int) -> bool:
        """Whether a node reads nothing of blocks but inputs, and what is made of inputs."""
        if all(self._is_root(value, home) for value in node.inputs):
            self.roots.update(node.outputs)
            return True
        return False

    def _is_root(self, value: int, home: int) -> bool:
        owner = self.owner.get(value, OUTSIDE)
        outside = owner == OUTSIDE or value in self.far or value in self.graph.literals
        return outside or value in self.roots or (owner == home and value not in self.graph.producers)

    def _spelled(self, node: Node) -> tuple[object, ...]:
        """An operator without its operands."""
        if id(node.params) not in self.spelled:
            self.spelled[id(node.params)] = repr(sorted(node.params.items()))
        results = tuple(self.types[value] for value in node.outputs)
        bodies = tuple(body.fingerprint for body in node.subgraphs)
        return node.primitive, self.spelled[id(node.params)], bodies, phase(node), results

    def _content(self, node: Node, home: int) -> object:
        """What tells the operators of a block apart, as far as that is known when they are met."""
        return self._spelled(node), tuple(self._operand(value, home) for value in node.inputs)

    def _operand(self, value: int, home: int) -> object:
        """An operand by its slot; by what it is made of if it has none yet."""
        if self.owner.get(value, OUTSIDE) != home or value in self.far or value in self.slots:
            return self._reference(value, home)
        made = self.graph.producers.get(value)
        return self.types[value] if made is None else self._content(self.graph.nodes[made], home)

    def _reference(self, value: int, home: int) -> object:
        """An operand as a block knows it."""
        graph, owner, type = self.graph, self.owner.get(value, OUTSIDE), self.types[value]
        if value in graph.literals:
            return "literal", repr(graph.literals[value]), type
        if owner == OUTSIDE or value in self.far:
            return "outside", value
        return ("own", self.slots[value]) if owner == home else ("chain", owner - home, type)

    def _line(self, node: Node, home: int) -> object:
        """An operator with its operands and its place: equal for what is the same in two blocks."""
        place = tuple(self.slots[value] for value in node.outputs)
        return place, self._spelled(node), tuple(self._reference(value, home) for value in node.inputs)

    def _settle(self, node: Node, home: int, place: object) -> None:
        """Gives the results of an operator, and what it is the first to read, their slots."""
        for number, value in enumerate(node.outputs):
            self._name(value, home, (place, number))
        for number, value in enumerate(node.inputs):
            owner = self.owner.get(value, OUTSIDE)
            if value in self.far or owner == OUTSIDE:
                continue
            if owner not in (home, 0, self.last):
                self.chain.setdefault((place, number), set()).add((owner - home, self.slots.get(value)))
            made = self.graph.producers.get(value)
            if owner == home and value not in self.slots and made is not None:
                self._settle(self.graph.nodes[made], home, (place, -1 - number))
            elif owner == home and value not in self.slots:
                self._name(value, home, (place, -1 - number))

    def _name(self, value: int, home: int, slot: Slot) -> None:
        self.slots[value] = slot
        self.at[home, slot] = value

    def _ends(self, home: int) -> frozenset[object]:
        """Where a block's state and results are in it."""
        graph, slots = self.graph, self.slots
        made = {o: slots[v] for o, v in enumerate(graph.outputs) if self.owner.get(v) == home}
        read = {i: slots[v] for i, v in enumerate(graph.inputs) if self.owner.get(v) == home}
        state = dict(self.state_pairs)
        return frozenset((slot, read.get(state.get(o, -1))) for o, slot in made.items()) | frozenset(read.values())

    def without(self) -> Abridged | None:
        """The step without the blocks between; None if what stays would read what is not made yet."""
        graph, gone = self.graph, self.gone
        nodes = tuple(i for i, home in enumerate(self.home) if home not in gone)
        inputs = tuple(i for i, value in enumerate(graph.inputs) if self.owner.get(value) not in gone)
        outputs = tuple(o for o, value in enumerate(graph.outputs) if self.owner.get(value) not in gone)
        entering, leaving = ({at: i for i, at in enumerate(kept)} for kept in (inputs, outputs))
        short = replace(
            graph,
            nodes=tuple(self._kept(graph.nodes[i], self.home[i]) for i in nodes),
            inputs=tuple(graph.inputs[i] for i in inputs),
            outputs=tuple(graph.outputs[o] for o in outputs),
            input_names=tuple(graph.input_names[i] for i in inputs) if graph.input_names else (),
            output_names=tuple(graph.output_names[o] for o in outputs) if graph.output_names else (),
        )
        if not _is_ordered(short):
            return None
        state_pairs = tuple((leaving[o], entering[i]) for o, i in self.state_pairs if o in leaving and i in entering)
        return Abridged(
            graph=short, nodes=nodes, inputs=inputs, outputs=outputs, state_pairs=state_pairs, left_out=len(gone)
        )

    def _kept(self, node: Node, home: int) -> Node:
        """A node that stays, reading what stays."""
        if not any(self.owner.get(value) in self.gone for value in node.inputs):
            return node
        return replace(node, inputs=tuple(self._instead(value, home) for value in node.inputs))

    def _instead(self, value: int, reader: int) -> int:
        """What a block that stays has in the place of a value of one that goes.

        Of the two blocks in the middle each reads the other. Others read the one that has made it by then.
        """
        if self.owner.get(value) not in self.gone:
            return value
        first, last = 1, self.last - 1
        producer = self.graph.producers.get(value)
        late = producer is not None and phase(self.graph.nodes[producer]) == "backward"
        source = {first: last, last: first}.get(reader, last if late else first)
        return self.at[source, self.slots[value]]
