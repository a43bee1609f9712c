"""Stages: a step in microbatches cut into programs that run on submeshes of their own, one after the other.

Forward operators are cut where the layers are; everything else follows. A backward operator runs where its forward
operator ran, an update where its gradient is, and what depends on no stage (a step counter) on every stage that needs
it. Sums of a tied weight's gradients that several stages hold are accumulated apart and added once. What crosses
stages inside the loop crosses once a microbatch, as a *stream*; what crosses outside it crosses once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from passes.errors import InternalError, PlanningError, explain
from passes.ir import Graph, Node, Scan, StatePairs, TensorType, has_effect, phase, scan_of
from passes.layers import adds_up, after_backward, everywhere, forward_scope
from passes.rules import rule_of, sum_of
from passes.transforms.microbatch import loop_of
from passes.transforms.stage_parts import Draft, Origin, Part, Stages, renamed


def state_pairs_of(part: Part, graph: Graph, state_pairs: StatePairs) -> StatePairs:
    """The (output, input) positions of a part that are one state, from those of the step."""
    inputs = {value: i for i, value in enumerate(part.graph.inputs)}
    outputs = {value: i for i, value in enumerate(part.graph.outputs)}
    pairs = ((graph.outputs[o], graph.inputs[i]) for o, i in state_pairs)
    return tuple((outputs[o], inputs[i]) for o, i in pairs if o in outputs and i in inputs)


def donations(part: Part, graph: Graph, donated: Sequence[bool]) -> tuple[bool, ...]:
    """Which of a part's inputs are donated, from those of the step's."""
    given = {value for value, gone in zip(graph.inputs, donated, strict=False) if gone}
    return tuple(value in given for value in part.graph.inputs)


def cut(graph: Graph, firsts: Sequence[int], state_pairs: StatePairs = ()) -> Stages:
    """The step with stages that begin at the body's nodes `firsts`, of which the first is 0.

    Raises PlanningError for a step with callbacks: a stage is there for what it hands on.
    """
    if effect := next((node for node in graph.nodes if has_effect(node)), None):
        where = f" at {effect.source}" if effect.source else ""
        rule = "a callback runs once a step, on whole operands, which no stage of a pipeline has"
        raise PlanningError(
            explain(f"{effect.primitive}{where} in a pipeline", rule, "", "drop the callback, or plan without stages")
        )
    return _Cutter(graph, tuple(firsts), state_pairs).run()


class _Cutter:
    def __init__(self, graph: Graph, firsts: tuple[int, ...], state_pairs: StatePairs) -> None:
        self.graph, self.firsts, self.state_pairs = graph, firsts, state_pairs
        index = loop_of(graph)
        if index is None:
            raise InternalError("stages are cut from a step in microbatches")
        self.loop = index
        self.node = graph.nodes[index]
        self.body = self.node.subgraphs[0]
        scan = scan_of(self.node)
        if scan is None:
            raise InternalError("the loop over microbatches has no slices")
        self.count, self.n_constants, self.n_carries = scan.length, scan.constants, scan.carries
        self.types = list(graph.types)
        self.body_types = list(self.body.types)
        self.literals = dict(graph.literals)
        self.drafts = [Draft() for _ in firsts]
        self.late = after_backward(self.body)
        self.everywhere = everywhere(self.body)
        self.stage: dict[int, int] = {}  # of the body's nodes
        self.made: dict[int, int] = {}  # of the body's values
        self.home: dict[int, int] = {}  # of the step's values that belong to one stage
        self.extra: list[tuple[Origin, Node]] = []  # sums of what several stages accumulate
        self.renamed: dict[int, int] = {}

    def run(self) -> Stages:
        self._assign()
        self._fill_bodies()
        order = self._assign_after()
        self._collect(order)
        stream_of = {v: self._fresh(self._stacked(v)) for v in sorted(set[int]().union(*(d.sent for d in self.drafts)))}
        readers = self._home_inputs()
        parts = tuple(self._part(k, draft, stream_of, order) for k, draft in enumerate(self.drafts))
        return Stages(
            parts=parts,
            homes=tuple(readers[v] for v in self.graph.inputs),
            owners=tuple(self._owner(v) for v in self.graph.outputs),
            microbatches=self.count,
        )

    def _fresh(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def _stacked(self, value: int) -> TensorType:
        type = self.body.types[value]
        return TensorType(shape=(self.count, *type.shape), dtype=type.dtype)

    def _assign(self) -> None:
        """The stage of every node of the body, and of the values they make."""
        body = self.body
        places: dict[str, set[int]] = {}
        for index, node in enumerate(body.nodes):
            if index in self.everywhere:
                continue
            if adds_up(node):
                at = max((self.made[v] for v in node.inputs if v in self.made), default=0)
            elif index not in self.late:
                at = max(sum(first <= index for first in self.firsts) - 1, 0)
                places.setdefault(node.scope, set()).add(at)
            else:
                at = self._backward_stage(node, places)
            self.stage[index] = at
            self.made.update(dict.fromkeys(node.outputs, at))

    def _backward_stage(self, node: Node, places: Mapping[str, set[int]]) -> int:
        """Where its forward operator ran, if all that it needs is there by then; else where what was saved is."""
        producers = self.body.producers
        backward = [self.made[v] for v in node.inputs if v in self.made and producers[v] in self.late]
        latest = min(backward, default=len(self.firsts) - 1)
        own = places.get(forward_scope(node.scope), set[int]())
        if len(own) == 1 and (only := next(iter(own))) <= latest:
            return only
        saved = {v: at for v in node.inputs if (at := self._at_hand(v, latest)) is not None}
        return saved[max(saved, key=lambda v: self.body.types[v].nbytes)] if saved else latest

    def _at_hand(self, value: int, latest: int) -> int | None:
        """The last stage up to `latest` that made or read a value of the forward pass, a weight or the batch."""
        if self.body.producers.get(value) in self.late:
            return None
        readers = (self.stage.get(r) for r in self.body.consumers[value] if r not in self.late)
        places = {self.made.get(value), *readers} - {None}
        return max((at for at in places if at is not None and at <= latest), default=None)

    def _fill_bodies(self) -> None:
        body, outputs = self.body, self.body.outputs
        carried = {outputs[i]: i for i in range(self.n_carries)}
        for index, node in enumerate(body.nodes):
            if index in self.stage and not any(v in carried for v in node.outputs):
                self.drafts[self.stage[index]].body_nodes.append((("loop", index), node))
        for value, i in carried.items():
            self._accumulate(i, value)
        for position, value in enumerate(outputs[self.n_carries :], self.n_carries):
            at = self.made.get(value, 0)
            self.drafts[at].rows.append((value, self.node.outputs[position]))
            self.home[self.node.outputs[position]] = at
        for at, draft in enumerate(self.drafts):
            here = {v for _, node in draft.body_nodes for v in node.outputs}
            read = {v for _, node in draft.body_nodes for v in node.inputs} | {v for v, _ in draft.rows}
            for value in read - here:
                if self.made.get(value, at) != at:
                    draft.received.add(value)
                    self.drafts[self.made[value]].sent.add(value)

    def _accumulate(self, position: int, leaving: int) -> None:
        """One running sum, or one for each stage that has summands of it: of a cotangent that several stages have."""
        body = self.body
        index = body.producers[leaving]
        node = body.nodes[index]
        entering = body.inputs[self.n_constants + position]
        summand = next(v for v in node.inputs if v != entering)
        summands = self._summands(summand, body.producers.get(leaving))
        result = self.node.outputs[position]
        init = self.node.inputs[self.n_constants + position]
        by_stage: dict[int, list[int]] = {}
        for value in summands:
            by_stage.setdefault(self.made.get(value, 0), []).append(value)
        results: list[int] = []
        for number, (at, values) in enumerate(sorted(by_stage.items())):
            draft, total = self.drafts[at], entering
            if number:
                total = self._fresh_inside(body.types[entering])
            start = total
            for value in values:
                after = self._fresh_inside(body.types[leaving])
                draft.body_nodes.append((("loop", index), renamed(node, (total, value), (after,))))
                total = after
            own = result if len(by_stage) == 1 else self._fresh(self.graph.types[result])
            self.home[own] = at
            results.append(own)
            draft.carries.append((init, start, total, own))
        first, *others = results
        for n, other in enumerate(others):
            total = result if n == len(others) - 1 else self._fresh(self.graph.types[result])
            late = sum_of(first, other, total, source=node.source, scope=LATE_SUM)
            self.extra.append((("loop", index), late))
            first = total

    def _summands(self, value: int, reader: int | None) -> list[int]:
        """What a value is the sum of, as far as stages differ; the sums themselves are not computed any more."""
        body = self.body
        producer = body.producers.get(value)
        if producer is None or body.consumers[value] != (reader,):
            return [value]
        node = body.nodes[producer]
        if not rule_of(node, body).accumulates:
            return [value]
        found = [leaf for v in node.inputs for leaf in self._summands(v, producer)]
        if len({self.made.get(v, 0) for v in found}) == 1:
            return [value]
        draft = self.drafts[self.stage[producer]]
        draft.body_nodes = [(origin, n) for origin, n in draft.body_nodes if origin != ("loop", producer)]
        return found

    def _fresh_inside(self, type: TensorType) -> int:
        self.body_types.append(type)
        return len(self.body_types) - 1

    def _assign_after(self) -> list[tuple[int, Origin, Node]]:
        """The nodes outside the loop in order, numbered; each value that depends on the loop gets its home."""
        order: list[tuple[int, Origin, Node]] = []
        for index, node in enumerate(self.graph.nodes):
            if index == self.loop:
                order.extend((len(self.graph.nodes) + n, origin, extra) for n, (origin, extra) in enumerate(self.extra))
            else:
                order.append((index, ("step", index), node))
        for _, _, node in order:
            homes = [v for v in node.inputs if v in self.home]
            if homes:
                largest = max(homes, key=lambda v: (self.types[v].nbytes, -self.home[v]))
                self.home.update(dict.fromkeys(node.outputs, self.home[largest]))
        return order

    def _collect(self, order: Sequence[tuple[int, Origin, Node]]) -> None:
        """What each stage computes outside the loop: its own, and whatever of no stage that it needs."""
        makers = {v: (number, origin, node) for number, origin, node in order for v in node.outputs}
        results = {
            result for draft in self.drafts for _, result in (*draft.rows, *((c[1], c[3]) for c in draft.carries))
        }
        constants = set(self.graph.constants)
        pending: list[tuple[int, int]] = []
        for at, draft in enumerate(self.drafts):
            read = {v for _, node in draft.body_nodes for v in node.inputs} | {v for v, _ in draft.rows}
            read |= {v for _, node in self._made_here(read) for v in node.inputs}
            entering = zip(self.body.inputs, self.node.inputs, strict=True)
            pending += [(at, outer) for inner, outer in entering if inner in read]
            pending += [(at, init) for init, _, _, _ in draft.carries]
        pending += [(self._owner(v), v) for v in self.graph.outputs]
        seen: set[tuple[int, int]] = set()
        while pending:
            at, value = pending.pop()
            if (at, value) in seen or value in self.literals or value in constants:
                continue
            seen.add((at, value))
            draft, home = self.drafts[at], self.home.get(value)
            if home is not None and home != at:
                draft.needed.add(value)
                self.drafts[home].given.add(value)
                pending.append((home, value))
            elif value in makers:
                number, origin, node = makers[value]
                draft.nodes[number] = (origin, node)
                pending += [(at, v) for v in node.inputs]
            elif value not in results:
                draft.needed.add(value)

    def _owner(self, value: int) -> int:
        """The stage that makes an output: its home, else the first that computes or reads it anyway."""
        if value in self.home:
            return self.home[value]
        for at, draft in enumerate(self.drafts):
            if value in draft.needed or any(value in node.outputs for _, node in draft.nodes.values()):
                return at
        return 0

    def _home_inputs(self) -> dict[int, int]:
        """The stage where each input lives: where the next step's value of it is made, else where it is read first."""
        found: dict[int, int] = {}
        for value in self.graph.inputs:
            found[value] = next((at for at, draft in enumerate(self.drafts) if value in draft.needed), 0)
        for output, position in self.state_pairs:
            found[self.graph.inputs[position]] = self._owner(self.graph.outputs[output])
        return found

    def _part(
        self, at: int, draft: Draft, stream_of: Mapping[int, int], order: Sequence[tuple[int, Origin, Node]]
    ) -> Part:
        body, node = self.body, self.node
        read = {v for _, inner in draft.body_nodes for v in inner.inputs} | {v for v, _ in draft.rows}
        read |= {v for _, inner in self._made_here(read) for v in inner.inputs}
        pairs = list(zip(body.inputs, node.inputs, strict=True))
        fixed = self.n_constants + self.n_carries
        constants = [(inner, outer) for inner, outer in pairs[: self.n_constants] if inner in read]
        stacks = [(inner, outer) for inner, outer in pairs[fixed:] if inner in read]
        stacks += [(v, stream_of[v]) for v in sorted(draft.received)]
        carries = draft.carries
        sent = sorted(draft.sent)
        inner_nodes = [*self._made_here(read | set(sent)), *draft.body_nodes]
        inner_nodes.sort(key=lambda one: (one[0][1], one[1].outputs))
        read |= {v for _, inner in inner_nodes for v in inner.inputs}
        inner = Graph(
            types=tuple(self.body_types),
            nodes=tuple(n for _, n in inner_nodes),
            inputs=(*(v for v, _ in constants), *(c[1] for c in carries), *(v for v, _ in stacks)),
            outputs=(*(c[2] for c in carries), *(v for v, _ in draft.rows), *sent),
            constants=tuple(v for v in body.constants if v in read),
            literals={v: x for v, x in body.literals.items() if v in read},
        )
        inner.verify()
        loop = Scan(constants=len(constants), carries=len(carries), length=self.count).node(
            inner,
            inputs=(*(v for _, v in constants), *(c[0] for c in carries), *(v for _, v in stacks)),
            outputs=(*(c[3] for c in carries), *(v for _, v in draft.rows), *(stream_of[v] for v in sent)),
            source=node.source,
            scope=node.scope,
        )
        return self._outside(at, draft, loop, inner_nodes, stream_of, order)

    def _outside(
        self,
        at: int,
        draft: Draft,
        loop: Node,
        inner_nodes: Sequence[tuple[Origin, Node]],
        stream_of: Mapping[int, int],
        order: Sequence[tuple[int, Origin, Node]],
    ) -> Part:
        """The part around a loop."""
        graph = self.graph
        numbers = [number for number, _, _ in order if number in draft.nodes]
        before = [n for n in numbers if n < self.loop and self.home.keys().isdisjoint(draft.nodes[n][1].outputs)]
        early = set(before)
        after = [n for n in numbers if n not in early]
        picked = [draft.nodes[n] for n in before] + [(("step", self.loop), loop)] + [draft.nodes[n] for n in after]
        received = sorted(draft.needed)
        streams = {stream_of[v]: v for v in sorted(draft.received | draft.sent)}
        read = {v for _, n in picked for v in n.inputs}
        owned = [v for v in dict.fromkeys(graph.outputs) if self._owner(v) == at]
        outputs = tuple(dict.fromkeys((*owned, *sorted(draft.given), *(stream_of[v] for v in sorted(draft.sent)))))
        names = dict(zip(graph.inputs, graph.input_names, strict=False))
        labels = dict(zip(graph.outputs, graph.output_names, strict=False))
        inputs = (*received, *(stream_of[v] for v in sorted(draft.received)))
        found = Graph(
            types=tuple(self.types),
            nodes=tuple(n for _, n in picked),
            inputs=inputs,
            outputs=outputs,
            constants=tuple(v for v in graph.constants if v in read or v in owned),
            literals={v: x for v, x in graph.literals.items() if v in read or v in outputs},
            input_names=tuple(names.get(v, f"{'stream' if v in streams else 'value'} {v}") for v in inputs),
            output_names=tuple(labels.get(v, f"{'stream' if v in streams else 'value'} {v}") for v in outputs),
        )
        found.verify()
        return Part(
            graph=found,
            origins=tuple(origin for origin, _ in picked),
            inside=tuple(origin for origin, _ in inner_nodes),
            forward=self._forward(inner_nodes),
            streams=streams,
        )

    def _forward(self, nodes: Sequence[tuple[Origin, Node]]) -> frozenset[int]:
        """The nodes of a stage's body that need nothing of the backward pass."""
        late = {v for i in self.late for v in self.body.nodes[i].outputs}
        found: set[int] = set()
        for position, (_, node) in enumerate(nodes):
            if phase(node) == "backward" or not late.isdisjoint(node.inputs):
                late.update(node.outputs)
            else:
                found.add(position)
        return frozenset(found)

    def _made_here(self, read: Iterable[int]) -> list[tuple[Origin, Node]]:
        """The nodes of no stage that values come from."""
        body, found, pending = self.body, set[int](), list(read)
        while pending:
            index = body.producers.get(pending.pop())
            if index in self.everywhere and index not in found:
                found.add(index)
                pending.extend(body.nodes[index].inputs)
        return [(("loop", index), body.nodes[index]) for index in sorted(found)]


LATE_SUM = "microbatches/stages"
"""The scope of sums of what several stages have accumulated."""
