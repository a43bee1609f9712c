"""The nodes, reads and results of each stage of a step, inside its loop over microbatches and outside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from passes.errors import InternalError
from passes.ir import Graph, Node, Scan, StatePairs, TensorType, scan_of
from passes.layers import forward, rows_along
from passes.rules import sum_of
from passes.transforms.late_summands import Made, Summand, summands_of
from passes.transforms.microbatch import loop_of, microbatch_stacks
from passes.transforms.stage_assignment import StageAssignment
from passes.transforms.stage_parts import Origin

LATE_SUM = "microbatches/stages"
"""The scope of sums of what several stages have accumulated."""

Numbered = tuple[int, Origin, Node]
"""A node outside the loop with its place in the order of all."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A stage while it is assembled."""

    body_nodes: list[tuple[Origin, Node]] = field(default_factory=list)
    carries: list[tuple[int, int, int, int]] = field(default_factory=list)  # (init, in, out, result)
    received: set[int] = field(default_factory=set)  # body values that come from other stages
    sent: set[int] = field(default_factory=set)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (body output, result)
    nodes: dict[int, tuple[Origin, Node]] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)  # values of the step that come from elsewhere
    given: set[int] = field(default_factory=set)  # and that others need


class LoopDrafts:
    """The stages of a step with what each computes inside the loop; `types` and `body_types` include those of new
    values.

    `stage_of` has the stage of those of the step's values that belong to one; `sums` add up what several stages have
    accumulated. The values of the body in `made_late` come after its backward pass has begun. `rows` says along which
    dimension a value that is sent has the rows of a microbatch.
    """

    def __init__(self, graph: Graph, firsts: tuple[int, ...]) -> None:
        self.graph = graph
        self.loop, self.node, self.scan = _loop(graph)
        self.body = self.node.subgraphs[0]
        self.types, self.body_types = list(graph.types), list(self.body.types)
        self.late, self.anywhere = forward.after_backward(self.body), forward.everywhere(self.body)
        self.made_late = {v for i in self.late for v in self.body.nodes[i].outputs}
        assignment = StageAssignment(body=self.body, firsts=firsts, late=self.late, anywhere=self.anywhere)
        self.stage, self.made = assignment.stage, assignment.made
        self.drafts = tuple(Draft() for _ in firsts)
        self.stage_of: dict[int, int] = {}
        self.sums: list[tuple[Origin, Node]] = []
        self._fill()
        sent = sorted(set[int]().union(*(draft.sent for draft in self.drafts)))
        self.stream_of = {v: self._fresh(self._stacked(v)) for v in sent}
        stacks = microbatch_stacks(graph)
        slices = [v for v, stack in zip(self.body.inputs, self.node.inputs, strict=True) if stack in stacks]
        self.rows = rows_along(self.body, dict.fromkeys(slices, 0), sent)

    def made_anywhere(self, read: Iterable[int]) -> list[tuple[Origin, Node]]:
        """The nodes without a stage from which these values of the body are made."""
        body, values, pending = self.body, set[int](), list(read)
        while pending:
            index = body.producers.get(pending.pop())
            if index in self.anywhere and index not in values:
                values.add(index)
                pending.extend(body.nodes[index].inputs)
        return [(("loop", index), body.nodes[index]) for index in sorted(values)]

    def _fresh(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def _fresh_inside(self, type: TensorType) -> int:
        self.body_types.append(type)
        return len(self.body_types) - 1

    def _stacked(self, value: int) -> TensorType:
        type = self.body.types[value]
        return replace(type, shape=(self.scan.length, *type.shape))

    def _fill(self) -> None:
        body, outputs = self.body, self.body.outputs
        carried = {outputs[i]: i for i in range(self.scan.carries)}
        for index, node in enumerate(body.nodes):
            if index in self.stage and not any(v in carried for v in node.outputs):
                self.drafts[self.stage[index]].body_nodes.append((("loop", index), node))
        for value, i in carried.items():
            self._accumulate(i, value)
        for position, value in enumerate(outputs[self.scan.carries :], self.scan.carries):
            at = self.made.get(value, 0)
            self.drafts[at].rows.append((value, self.node.outputs[position]))
            self.stage_of[self.node.outputs[position]] = at
        for at, draft in enumerate(self.drafts):
            computed = {v for _, node in draft.body_nodes for v in node.outputs}
            read = {v for _, node in draft.body_nodes for v in node.inputs} | {v for v, _ in draft.rows}
            for value in read - computed:
                if self.made.get(value, at) != at:
                    draft.received.add(value)
                    self.drafts[self.made[value]].sent.add(value)

    def _accumulate(self, position: int, leaving: int) -> None:
        """One running sum, or one for each stage that has summands of it, for a cotangent that several stages have."""
        body = self.body
        index = body.producers[leaving]
        node = body.nodes[index]
        entering = body.inputs[self.scan.constants + position]
        summand = next(v for v in node.inputs if v != entering)
        result, init = self.node.outputs[position], self.node.inputs[self.scan.constants + position]
        by_stage: dict[int, list[Summand]] = {}
        for part in self._summands(summand, index):
            by_stage.setdefault(self.made.get(part.value, 0), []).append(part)
        results: list[int] = []
        for number, (at, values) in enumerate(sorted(by_stage.items())):
            draft = self.drafts[at]
            start = total = self._fresh_inside(body.types[entering]) if number else entering
            for value in self._added_up(draft, values):
                new_total = self._fresh_inside(body.types[leaving])
                draft.body_nodes.append((("loop", index), _renamed(node, (total, value), (new_total,))))
                total = new_total
            partial_sum = result if len(by_stage) == 1 else self._fresh(self.graph.types[result])
            self.stage_of[partial_sum] = at
            results.append(partial_sum)
            draft.carries.append((init, start, total, partial_sum))
        first, *summands = results
        for n, other in enumerate(summands):
            total = result if n == len(summands) - 1 else self._fresh(self.graph.types[result])
            self.sums.append((("loop", index), sum_of(first, other, total, source=node.source, scope=LATE_SUM)))
            first = total

    def _summands(self, value: int, reader: int) -> tuple[Summand, ...]:
        """The values of which a value is the sum, as far as stages differ; the sums are no longer computed."""
        summed = summands_of(self.body, self.made, value, reader)
        for index in summed.replaced:
            draft = self.drafts[self.stage[index]]
            draft.body_nodes = [(origin, n) for origin, n in draft.body_nodes if origin != ("loop", index)]
        return summed.summands

    def _added_up(self, draft: Draft, summands: Sequence[Summand]) -> list[int]:
        """The values that a stage adds to its running sum, those of the backward pass first: a sum that the forward
        pass began would lack the microbatch before.

        Of summands of which the same is made, that is made of their sum.
        """
        alike: dict[tuple[Made, ...], list[int]] = {}
        for summand in sorted(summands, key=lambda summand: summand.value not in self.made_late):
            alike.setdefault(summand.then, []).append(summand.value)
        return [v for then, values in alike.items() for v in (self._made_of(draft, then, values) if then else values)]

    def _made_of(self, draft: Draft, then: tuple[Made, ...], values: Sequence[int]) -> list[int]:
        """The value that operators make, one after another, of the sum of some values."""
        body, (total, *rest) = self.body, values
        first = body.nodes[then[0].node]
        for value in rest:
            added = self._fresh_inside(body.types[value])
            node = sum_of(total, value, added, source=first.source, scope=first.scope)
            adder = body.producers[first.inputs[then[0].operand]]  # the sum that all of them are summands of
            draft.body_nodes.append((("loop", adder), node))
            total = added
        for made in then:
            node = body.nodes[made.node]
            operands = (*node.inputs[: made.operand], total, *node.inputs[made.operand + 1 :])
            total = self._fresh_inside(body.types[node.outputs[0]])
            draft.body_nodes.append((("loop", made.node), _renamed(node, operands, (total,))))
        return [total]


class StepDrafts:
    """The stages of a step with what each computes outside the loop: its own nodes, and those without a stage that it
    needs.

    `order` has the nodes outside the loop, the new sums among them, and `place` the position of each in it.
    """

    def __init__(self, loop: LoopDrafts, state_pairs: StatePairs) -> None:
        self.graph, self.drafts, self.stage_of, self.state_pairs = loop.graph, loop.drafts, loop.stage_of, state_pairs
        self.order = self._ordered(loop)
        self.place = {number: place for place, (number, _, _) in enumerate(self.order)}
        for _, _, node in self.order:
            placed_inputs = [v for v in node.inputs if v in self.stage_of]
            if placed_inputs:
                largest = max(placed_inputs, key=lambda v: (loop.types[v].nbytes, -self.stage_of[v]))
                self.stage_of.update(dict.fromkeys(node.outputs, self.stage_of[largest]))
        self._first_stage = dict[int, int]()
        self._collect(loop, self._wanted(loop))
        self._collect(loop, [(self.stage_of_output(v), v) for v in self.graph.outputs if v not in self.stage_of])
        self._keep_state()

    def stage_of_output(self, value: int) -> int:
        """The stage that makes an output: the one it is placed on, else the first that computes or reads it anyway."""
        return self.stage_of[value] if value in self.stage_of else self._first_stage.get(value, 0)

    def _keep_state(self) -> None:
        """Lets each stage have the state whose next value it makes, which those that read it get from there."""
        needed = set[int]().union(*(draft.needed for draft in self.drafts))
        for output, position in self.state_pairs:
            if (value := self.graph.inputs[position]) in needed:
                self.drafts[self.stage_of_output(self.graph.outputs[output])].needed.add(value)

    def input_stages(self) -> tuple[int, ...]:
        """The stage of each input: that of its next step's value, else the first that reads it."""
        stage_of: dict[int, int] = {}
        for value in self.graph.inputs:
            stage_of[value] = next((at for at, draft in enumerate(self.drafts) if value in draft.needed), 0)
        for output, position in self.state_pairs:
            stage_of[self.graph.inputs[position]] = self.stage_of_output(self.graph.outputs[output])
        return tuple(stage_of[value] for value in self.graph.inputs)

    def _ordered(self, loop: LoopDrafts) -> list[Numbered]:
        nodes, numbered = self.graph.nodes, list[Numbered]()
        for index, node in enumerate(nodes):
            if index == loop.loop:
                numbered.extend((len(nodes) + n, origin, extra) for n, (origin, extra) in enumerate(loop.sums))
            else:
                numbered.append((index, ("step", index), node))
        return numbered

    def _wanted(self, loop: LoopDrafts) -> Iterable[tuple[int, int]]:
        """(stage, value of the step) for every value that a loop reads, and for the outputs that have a stage."""
        for at, draft in enumerate(self.drafts):
            read = {v for _, node in draft.body_nodes for v in node.inputs} | {v for v, _ in draft.rows}
            read |= {v for _, node in loop.made_anywhere(read) for v in node.inputs}
            entering = zip(loop.body.inputs, loop.node.inputs, strict=True)
            yield from ((at, outer) for inner, outer in entering if inner in read)
            yield from ((at, init) for init, _, _, _ in draft.carries)
        yield from ((self.stage_of[v], v) for v in self.graph.outputs if v in self.stage_of)

    def _collect(self, loop: LoopDrafts, values: Iterable[tuple[int, int]]) -> None:
        """Adds to each stage what it makes of the step for its own of these (stage, value), and what it needs."""
        makers = {v: (number, origin, node) for number, origin, node in self.order for v in node.outputs}
        results = {
            result for draft in self.drafts for _, result in (*draft.rows, *((c[1], c[3]) for c in draft.carries))
        }
        everywhere = {*self.graph.constants, *self.graph.literals}
        pending, visited = list(values), set[tuple[int, int]]()
        while pending:
            at, value = pending.pop()
            if (at, value) in visited or value in everywhere:
                continue
            visited.add((at, value))
            draft, stage = self.drafts[at], self.stage_of.get(value)
            if stage is not None and stage != at:
                draft.needed.add(value)
                self.drafts[stage].given.add(value)
                pending.append((stage, value))
            elif value in makers:
                number, origin, node = makers[value]
                draft.nodes[number] = (origin, node)
                pending += [(at, v) for v in node.inputs]
            elif value not in results:
                draft.needed.add(value)
        for at, draft in enumerate(self.drafts):
            made = (v for _, node in draft.nodes.values() for v in node.outputs)
            for value in (*draft.needed, *made):
                self._first_stage.setdefault(value, at)


def _loop(graph: Graph) -> tuple[int, Node, Scan]:
    """The loop over microbatches: its number, its node, its operands' order."""
    index = loop_of(graph)
    scan = None if index is None else scan_of(graph.nodes[index])
    if index is None or scan is None:
        raise InternalError("stages are cut from a step in microbatches")
    return index, graph.nodes[index], scan


def _renamed(node: Node, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Node:
    return Node(
        primitive=node.primitive,
        inputs=inputs,
        outputs=outputs,
        params=node.params,
        source=node.source,
        scope=node.scope,
    )
