"""A step with fewer of its equal blocks (a sample), by which a deep model is priced at the cost of a shallow one.

Of each stretch of equal blocks of a forward pass, the first two and the last two are kept, with their backward passes,
weights and updates. Those between are left out; they must equal the second, operator by operator and operand by
operand. Readers of a block that is left out read the kept block in its place, and sums over all layers, such as the
norm of all gradients, have no terms of those. A step for which this cannot be shown has no sample.

    step       before | 0 | 1 | 2 | ... | n-3 | n-2 | n-1 | after
    sample     before | 0 | 1 |                 n-2 | n-1 | after
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.ir import Graph, Node, StatePairs, phase
from passes.layers.forward import forward_nodes, forward_scope
from passes.layers.repeats import stretches
from passes.rules import rule_of

SAMPLE_BLOCKS = 4
"""The number of blocks that are kept: two at each end. The ends differ from the others, and the two in the middle show
what each hands to the next; with only two, no block would have equal neighbours.
"""

OUTSIDE = -1
"""The block number of nodes that are in no block."""

Slot = tuple[object, int]
"""The place of a value in its block: the operator that writes it or is the first to read it, and which operand."""


@dataclass(frozen=True, kw_only=True)
class SampleGraph:
    """The step without so many blocks of each stretch (`left_out`); `nodes`, `inputs` and `outputs` are indices into
    the whole step.
    """

    graph: Graph
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    state_pairs: StatePairs
    left_out: tuple[int, ...]


def sample_graph(graph: Graph, state_pairs: StatePairs) -> SampleGraph | None:
    """The step with only four of the equal blocks of each stretch; None if there are no more than that, or they are not
    shown to be equal.
    """
    sample = SampleGraph(
        graph=graph,
        nodes=tuple(range(len(graph.nodes))),
        inputs=tuple(range(len(graph.inputs))),
        outputs=tuple(range(len(graph.outputs))),
        state_pairs=tuple(state_pairs),
        left_out=(0,) * len(stretches(graph)),
    )
    for number in range(len(sample.left_out)):
        sample = _shortened(sample, number)
    return sample if any(sample.left_out) else None


def are_blocks_of(body: Graph, left_out: Sequence[int]) -> bool:
    """Whether a program has as many stretches of blocks, of which those that were shortened have four blocks left."""
    lengths = [len(stretch) - 1 for stretch in stretches(body, covered=0.0)]
    return len(lengths) == len(left_out) and all(
        length == SAMPLE_BLOCKS for length, missing in zip(lengths, left_out, strict=True) if missing
    )


def _shortened(sample: SampleGraph, number: int) -> SampleGraph:
    """The sample with four blocks of one more stretch; as it is if that has no more, or they are not equal."""
    graph, repeated = sample.graph, stretches(sample.graph, covered=0.0)
    if len(repeated) != len(sample.left_out) or len(repeated[number]) - 1 <= SAMPLE_BLOCKS:
        return sample
    firsts = repeated[number]
    matched = _Matched(
        graph=graph, firsts=firsts, block_of=_blocks_of_nodes(graph, firsts), state_pairs=sample.state_pairs
    )
    shorter = matched.without() if matched.match() else None
    left_out = tuple(len(matched.gone) if k == number else count for k, count in enumerate(sample.left_out))
    if shorter is None or not are_blocks_of(shorter.graph, left_out):
        return sample
    return replace(
        shorter,
        nodes=tuple(sample.nodes[i] for i in shorter.nodes),
        inputs=tuple(sample.inputs[i] for i in shorter.inputs),
        outputs=tuple(sample.outputs[o] for o in shorter.outputs),
        left_out=left_out,
    )


def _blocks_of_nodes(graph: Graph, firsts: Sequence[int]) -> tuple[int, ...]:
    """The block of every node: by its place in the forward pass, or that of the operator whose gradient it is.

    Other nodes belong to the block of the largest value that they read, those of the forward pass first, but for what
    blocks read that are no neighbours. A node that reads from no block belongs to the one block that reads it.
    """
    block_of = [OUTSIDE] * len(graph.nodes)
    forward = [index for index in forward_nodes(graph) if index < firsts[-1]]
    scopes: dict[str, set[int]] = {}
    for index in forward:
        block_of[index] = bisect_right(firsts, index) - 1
        scopes.setdefault(graph.nodes[index].scope, set()).add(block_of[index])
    places = set(forward)
    block_of_value = dict.fromkeys(graph.inputs, OUTSIDE) | {
        v: block_of[i] for i in forward for v in graph.nodes[i].outputs
    }
    for value in block_of_value:
        readers = {block_of[reader] for reader in graph.consumers.get(value, ()) if reader in places}
        is_far = max(readers, default=0) - min(readers, default=0) > 1
        is_shared = is_far and value in graph.producers  # as what an encoder hands to a decoder
        block_of_value[value] = OUTSIDE if is_shared else max(readers, default=block_of_value[value])
    forward_values = frozenset(block_of_value)
    for index, node in enumerate(graph.nodes):
        if index not in places:
            same_scope = scopes.get(forward_scope(node.scope), set[int]()) if phase(node) == "backward" else set[int]()
            read = [
                (v not in forward_values, -graph.types[v].nbytes, block_of_value[v])
                for v in node.inputs
                if v in block_of_value
            ]
            largest = min((operand for operand in read if operand[2] != OUTSIDE), default=(False, 0, OUTSIDE))[2]
            block_of[index] = next(iter(same_scope)) if len(same_scope) == 1 else largest
            block_of_value.update(dict.fromkeys(node.outputs, block_of[index]))
    return _adopted(graph, block_of)


def _adopted(graph: Graph, block_of: list[int]) -> tuple[int, ...]:
    """The blocks of all nodes, in which a node without a block has joined the one block that reads it."""
    leaving = set(graph.outputs)
    for index in range(len(graph.nodes) - 1, -1, -1):
        outputs = graph.nodes[index].outputs
        if block_of[index] == OUTSIDE and leaving.isdisjoint(outputs):
            read = {block_of[reader] for value in outputs for reader in graph.consumers.get(value, ())}
            block_of[index] = next(iter(read)) if len(read) == 1 else OUTSIDE
    return tuple(block_of)


def _is_ordered(graph: Graph) -> bool:
    """Whether every value is written before it is read."""
    written = {*graph.inputs, *graph.constants, *graph.literals}
    for node in graph.nodes:
        if not written.issuperset(node.inputs):
            return False
        written.update(node.outputs)
    return written.issuperset(graph.outputs)


@dataclass(slots=True, kw_only=True)
class _Matched:
    """The blocks of a step, matched operator by operator; values with equal `slots` correspond in two blocks."""

    graph: Graph
    firsts: tuple[int, ...]
    block_of: tuple[int, ...]
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
        """Whether all blocks but the first and the last are equal."""
        graph = self.graph
        self.owner = {v: self.block_of[i] for v, i in graph.producers.items()} | self._owned_inputs()
        self.far = self._read_from_far()
        if any(self.owner.get(value) in self.gone for value in self.far):
            return False
        numbers: dict[object, int] = {}
        self.types = tuple(numbers.setdefault(type, len(numbers)) for type in graph.types)
        self._name_all()
        middle = range(1, self.last)
        lines: dict[int, set[object]] = {block: set() for block in middle}
        for node, block in zip(graph.nodes, self.block_of, strict=True):
            if block in lines:
                lines[block].add(self._line(node, block))
        alike = {frozenset(block_lines) for block_lines in lines.values()}
        ends = {self._ends(block) for block in middle}
        chained = all(len(sources) == 1 for sources in self.chain.values())
        return len(alike) == len(ends) == 1 and chained

    def _owned_inputs(self) -> dict[int, int]:
        """The inputs that only one block reads, with that block."""
        readers = {v: {self.block_of[i] for i in self.graph.consumers.get(v, ())} for v in self.graph.inputs}
        return {value: next(iter(reading)) for value, reading in readers.items() if len(reading) == 1}

    def _read_from_far(self) -> frozenset[int]:
        """The values that a block reads from beyond its neighbours, which must be the same for all blocks."""
        return frozenset(
            value
            for index, node in enumerate(self.graph.nodes)
            for value in node.inputs
            if 0 < self.block_of[index] < self.last and abs(self.owner.get(value, OUTSIDE) - self.block_of[index]) > 1
        )

    def _name_all(self) -> None:
        """Gives a slot to each value that a block makes or reads.

        Values made of inputs alone (a moment times its decay) look like many others, so they are named by their
        readers.
        """
        numbers: dict[object, int] = {}
        occurrences = Counter[tuple[int, int]]()
        pending: list[int] = []
        for later in (False, True):
            for index in pending if later else range(len(self.graph.nodes)):
                node, block = self.graph.nodes[index], self.block_of[index]
                if not 0 < block < self.last or any(value in self.slots for value in node.outputs):
                    continue
                if not later and self._is_rooted(node, block):
                    pending.append(index)
                    continue
                number = numbers.setdefault(self._content(node, block), len(numbers))
                self._settle(node, block, (number, occurrences[block, number]))
                occurrences[block, number] += 1

    def _is_rooted(self, node: Node, block: int) -> bool:
        """Whether a node depends on inputs alone."""
        if all(self._is_root(value, block) for value in node.inputs):
            self.roots.update(node.outputs)
            return True
        return False

    def _is_root(self, value: int, block: int) -> bool:
        """Whether a value is an input of its block, comes from outside all blocks, or depends on such values alone."""
        owner = self.owner.get(value, OUTSIDE)
        outside = owner == OUTSIDE or value in self.far or value in self.graph.literals
        return outside or value in self.roots or (owner == block and value not in self.graph.producers)

    def _spelled(self, node: Node) -> tuple[object, ...]:
        """The operator of a node without its operands: primitive, parameters, bodies, phase and result types."""
        if id(node.params) not in self.spelled:
            self.spelled[id(node.params)] = repr(sorted(node.params.items()))
        results = tuple(self.types[value] for value in node.outputs)
        bodies = tuple(body.fingerprint for body in node.subgraphs)
        return node.primitive, self.spelled[id(node.params)], bodies, phase(node), results

    def _content(self, node: Node, block: int) -> object:
        """A key that tells the operators of a block apart, by what is known of their operands so far."""
        return self._spelled(node), tuple(self._operand(value, block) for value in node.inputs)

    def _operand(self, value: int, block: int) -> object:
        """An operand as a key: its slot, or the key of the operator that computes it if it has none yet."""
        if self.owner.get(value, OUTSIDE) != block or value in self.far or value in self.slots:
            return self._reference(value, block)
        producer = self.graph.producers.get(value)
        return self.types[value] if producer is None else self._content(self.graph.nodes[producer], block)

    def _reference(self, value: int, block: int) -> object:
        """An operand relative to its block: equal for operands that correspond in two blocks."""
        graph, owner, type = self.graph, self.owner.get(value, OUTSIDE), self.types[value]
        if value in graph.literals:
            return "literal", repr(graph.literals[value]), type
        if owner == OUTSIDE or value in self.far:
            return "outside", value
        return ("own", self.slots[value]) if owner == block else ("chain", owner - block, type)

    def _line(self, node: Node, block: int) -> object:
        """A node with its slots and operands relative to its block: equal for equal operators of two blocks."""
        place = tuple(self.slots[value] for value in node.outputs)
        return place, self._spelled(node), tuple(self._reference(value, block) for value in node.inputs)

    def _settle(self, node: Node, block: int, place: object) -> None:
        """Gives slots to the results of an operator, and to values that it is the first to read."""
        for number, value in enumerate(node.outputs):
            self._name(value, block, (place, number))
        for number, value in enumerate(node.inputs):
            owner = self.owner.get(value, OUTSIDE)
            if value in self.far or owner == OUTSIDE:
                continue
            if owner not in (block, 0, self.last):
                self.chain.setdefault((place, number), set()).add((owner - block, self.slots.get(value)))
            producer = self.graph.producers.get(value)
            if owner == block and value not in self.slots and producer is not None:
                self._settle(self.graph.nodes[producer], block, (place, -1 - number))
            elif owner == block and value not in self.slots:
                self._name(value, block, (place, -1 - number))

    def _name(self, value: int, block: int, slot: Slot) -> None:
        self.slots[value] = slot
        self.at[block, slot] = value

    def _ends(self, block: int) -> frozenset[object]:
        """The slots of a block's state and results."""
        graph, slots = self.graph, self.slots
        results = {o: slots[v] for o, v in enumerate(graph.outputs) if self.owner.get(v) == block}
        state_slots = {i: slots[v] for i, v in enumerate(graph.inputs) if self.owner.get(v) == block}
        state = dict(self.state_pairs)
        return frozenset((slot, state_slots.get(state.get(o, -1))) for o, slot in results.items()) | frozenset(
            state_slots.values()
        )

    def without(self) -> SampleGraph | None:
        """The step without the blocks in the middle; None if an operator would read a value before it is written."""
        graph, gone, sums = self.graph, self.gone, _sums(self)
        nodes = tuple(
            i
            for i, block in enumerate(self.block_of)
            if block not in gone and sums.keys().isdisjoint(graph.nodes[i].outputs)
        )
        inputs = tuple(i for i, value in enumerate(graph.inputs) if self.owner.get(value) not in gone)
        outputs = tuple(o for o, value in enumerate(graph.outputs) if self.owner.get(value) not in gone)
        entering, leaving = ({at: i for i, at in enumerate(positions)} for positions in (inputs, outputs))
        short = replace(
            graph,
            nodes=tuple(self._kept(graph.nodes[i], self.block_of[i], sums) for i in nodes),
            inputs=tuple(graph.inputs[i] for i in inputs),
            outputs=tuple(sums.get(graph.outputs[o], graph.outputs[o]) for o in outputs),
            input_names=tuple(graph.input_names[i] for i in inputs) if graph.input_names else (),
            output_names=tuple(graph.output_names[o] for o in outputs) if graph.output_names else (),
        )
        if not _is_ordered(short):
            return None
        state_pairs = tuple((leaving[o], entering[i]) for o, i in self.state_pairs if o in leaving and i in entering)
        return SampleGraph(
            graph=short, nodes=nodes, inputs=inputs, outputs=outputs, state_pairs=state_pairs, left_out=()
        )

    def _kept(self, node: Node, block: int, sums: Mapping[int, int]) -> Node:
        """A node that stays, reading kept blocks in place of those that are left out."""
        inputs = tuple(self._instead(sums.get(value, value), block) for value in node.inputs)
        return node if inputs == node.inputs else replace(node, inputs=inputs)

    def _instead(self, value: int, reader: int) -> int:
        """The value of a kept block that `reader` reads in place of a value of a block that is left out.

        The two kept blocks next to those left out, `first` and `last`, each read the other; any other reader reads the
        one that runs earlier: `first` in the forward pass, `last` in the backward pass.
        """
        if self.owner.get(value) not in self.gone:
            return value
        first, last = 1, self.last - 1
        producer = self.graph.producers.get(value)
        late = producer is not None and phase(self.graph.nodes[producer]) == "backward"
        source = {first: last, last: first}.get(reader, last if late else first)
        return self.at[source, self.slots[value]]


def _sums(matched: _Matched) -> dict[int, int]:
    """The running sums over blocks that add a term of a block that is left out, each with the sum before that.

    Additions within a block, such as those of a loss that each block hands on, are none of these.
    """
    graph, gone, before = matched.graph, matched.gone, dict[int, int]()
    for node, block in zip(graph.nodes, matched.block_of, strict=True):
        rest = [value for value in node.inputs if matched.owner.get(value) not in gone]
        reads_of_both = not 0 < block < matched.last and len(rest) + 1 == len(node.inputs) == 2
        if reads_of_both and not graph.types[node.outputs[0]].shape and rule_of(node, graph).sums:
            before[node.outputs[0]] = before.get(rest[0], rest[0])
    return before
