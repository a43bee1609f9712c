"""The roles of a training step's values: weights, the dimension of the batch, what stages share."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from passes.errors import PlanningError, explain
from passes.intra_op.assembly import Assembly, Subproblem
from passes.ir import Graph, PortUse, StatePairs, TensorType, control_of, phase
from passes.layers import OTHERWISE, batch_inputs, split_for_loop
from passes.rules import rule_of
from passes.transforms import loop_of, microbatch_stacks

QUANTIZED = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})
"""The integers that weights are stored as; wider ones are positions and counts."""

Value = tuple[int, int]
"""(`Subproblem.number`, value): a value of the program or of a loop's or branch's body."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of values: `batch` inputs and the dimension that the batch is on (those in microbatches, if any are);
    `parameters` are what the loss reads of its state, be it updated in another stage, and weights that nobody updates;
    `state` is the rest of what the step returns again; `weights` are parameters and their slices inside loops, with the
    dimensions that are their own. `batch_classes[n]` are the classes of operator group node n on the batch;
    `aligned_classes[n]`, of a node off the batch, are those along which its results meet it, as a mask does that is
    broadcast over the batch, and those along which parts of the batch lie that a loop takes one after the other.
    """

    batch: Mapping[int, int]
    parameters: frozenset[int]
    state: frozenset[int]
    weights: Mapping[Value, int]
    batch_classes: Mapping[int, frozenset[int]]
    aligned_classes: Mapping[int, frozenset[int]]


def roles(
    assembly: Assembly, batch_at: Sequence[int] | None = None, rows: Mapping[int, int] = MappingProxyType({})
) -> Roles:
    """The roles of a step's inputs, of which those at `batch_at` are the batch, by default what looks like one.

    In microbatches it is whatever is stacked, with its rows second where `rows` has no other dimension for it.

    Raises PlanningError when there is none, but of a stage, which may have nothing to do with it.
    """
    graph = assembly.root.graph
    stacks = microbatch_stacks(graph)
    returned = {graph.inputs[i] for _, i in assembly.state_pairs} - stacks
    shared = _shared(graph, returned, stacks)
    if stacks:
        batch = {v: rows.get(v, 1) for v in stacks if graph.types[v].rank > 1 and not graph.types[v].is_key}
    else:
        at = batch_inputs(graph, assembly.state_pairs) if batch_at is None else batch_at
        batch = {graph.inputs[i]: int(_is_in_parts(graph, graph.inputs[i])) for i in at}
    parameters = {value for value in returned if in_forward(graph, value)} | shared
    parameters |= frozen(graph, assembly.state_pairs, batch)
    gradients = _types_of_gradients(graph)
    stored = {value for value in returned if graph.types[value] not in gradients}
    on_batch, aligned = _batch_classes(assembly.root, batch, parameters, stored)
    if not batch and not on_batch and loop_of(graph) is None:
        rule = "it needs an input that is not returned as state and has a batch dimension; this function has none"
        remedy = f"return the state that the step updates, {OTHERWISE}, or use planner=Auto()"
        raise PlanningError(explain("data parallelism", rule, "", remedy))
    return Roles(
        batch=batch,
        parameters=frozenset(parameters),
        state=frozenset(returned - parameters),
        weights=_weights(assembly.root, {v: graph.types[v].rank for v in parameters}),
        batch_classes=on_batch,
        aligned_classes=aligned,
    )


def _is_in_parts(graph: Graph, value: int) -> bool:
    """Whether a loop with a whole step in it takes an input part by part: the user adds gradients of microbatches up,
    and the rows of each are cut.
    """
    for node in (graph.nodes[reader] for reader in graph.consumers.get(value, ())):
        control = control_of(node, graph)
        if control is not None and any(body.is_step for body in control.bodies):
            uses = zip(node.inputs, control.operands, strict=True)
            return graph.types[value].rank > 1 and all(use.stacked for v, use in uses if v == value)
    return False


def frozen(graph: Graph, state_pairs: StatePairs, batch: Collection[int]) -> frozenset[int]:
    """The inputs beside the batch that are weights though the step does not update them: a base that is adapted, a
    teacher, a policy that another is held against.
    """
    others = set(graph.inputs) - {graph.inputs[i] for _, i in state_pairs} - microbatch_stacks(graph) - set(batch)
    weights = (v for v in others if _is_of_weights(graph.types[v]))
    return frozenset(v for v in weights if in_forward(graph, v) or _is_multiplied(graph, v))


def _is_multiplied(graph: Graph, value: int) -> bool:
    """Whether a product or lookup reads a value or a copy of it, as those of a teacher do beside both passes."""
    for reader in graph.consumers.get(value, ()):
        node = graph.nodes[reader]
        rule, control = rule_of(node, graph), control_of(node, graph)
        if rule.is_product or rule.sparse:
            return True
        read = [(graph, v) for v in node.outputs if rule.casts or rule.permutes]
        if control is not None:
            ports = {use.port for v, use in zip(node.inputs, control.operands, strict=True) if v == value}
            read = [
                (body.graph, v)
                for body in control.bodies
                for v, port in zip(body.graph.inputs, body.inputs, strict=True)
                if port in ports
            ]
        if any(_is_multiplied(*inner) for inner in read):
            return True
    return False


def _is_of_weights(type: TensorType) -> bool:
    """Whether an array may hold weights: numbers with a fraction, or quantized ones."""
    return bool(type.rank) and (type.dtype in QUANTIZED or type.is_float)


def in_forward(graph: Graph, value: int) -> bool:
    """Whether the forward pass reads a value, in the loop over microbatches if there is one."""
    for reader in graph.consumers.get(value, ()):
        node = graph.nodes[reader]
        if phase(node) == "forward":
            return True
        if node.subgraphs and reader == loop_of(graph):
            (body,) = node.subgraphs
            entering = zip(node.inputs, body.inputs, strict=True)
            if any(outer == value and in_forward(body, inner) for outer, inner in entering):
                return True
    return False


def _shared(graph: Graph, returned: Collection[int], stacks: Collection[int]) -> frozenset[int]:
    """The parameters that another stage updates: this one reads them in each microbatch and hands on a gradient."""
    loop = loop_of(graph)
    if loop is None:
        return frozenset()
    ours = set(graph.inputs) - set(returned) - set(stacks)
    gradients = {graph.types[v] for v in graph.outputs if v in graph.nodes[loop].outputs}
    return frozenset(v for v in ours if graph.types[v] in gradients and in_forward(graph, v))


def _weights(subproblem: Subproblem, entering: Mapping[int, int]) -> dict[Value, int]:
    """The weights of a subproblem and of those inside it: a parameter's slice in a loop has a dimension less.

    What a loop stacks of its weights, casts that it keeps for the backward pass, is a weight again.
    """
    ranks, weights_here = {(subproblem.number, value): rank for value, rank in entering.items()}, dict(entering)
    for index, control_join in subproblem.control_joins.items():
        node, control = subproblem.graph.nodes[index], control_join.control
        ports: dict[int, int] = {}
        for value, port_use in zip(node.inputs, control.operands, strict=True):
            is_carry, source = control.ports[port_use.port].carry, origin(subproblem, value, weights_here)
            if source is not None and not is_carry:
                ports[port_use.port] = weights_here[source] - port_use.stacked
                ranks[subproblem.number, source] = ports[port_use.port]
        for body, inner in zip(control.bodies, control_join.bodies, strict=True):
            inside = {v: ports[port] for v, port in zip(body.graph.inputs, body.inputs, strict=True) if port in ports}
            ranks |= _weights(inner, inside)
            for value, port in zip(body.graph.outputs, body.outputs, strict=True):
                if control.ports[port].stacked and (source := origin(inner, value, inside)) is not None:
                    ports[port] = inside[source]
        for value, port_use in zip(node.outputs, control.results, strict=True):
            if port_use.stacked and port_use.port in ports:
                weights_here[value], ranks[subproblem.number, value] = ports[port_use.port] + 1, ports[port_use.port]
    return ranks


def recurrent(subproblem: Subproblem) -> set[Value]:
    """The values that all iterations of a loop read alike, in its bodies, as a recurrent cell's weights: fetched once
    for all of them.

    A loop that goes forward and backward in one iteration is one over microbatches, with the whole model in it, of
    which no device has room for more than a part at a time.
    """
    read: set[Value] = set()
    for control_join in subproblem.control_joins.values():
        control = control_join.control
        constant = {use.port for use in control.operands if not use.stacked and not control.ports[use.port].carry}
        for body, inner in zip(control.bodies, control_join.bodies, strict=True):
            if body.share == 1 and not body.is_step:
                ports = zip(body.graph.inputs, body.inputs, strict=True)
                read.update((inner.number, value) for value, port in ports if port in constant)
            read |= recurrent(inner)
    return read


def _types_of_gradients(graph: Graph) -> set[TensorType]:
    """The types of what the backward pass makes: state of another type has no gradient."""
    loop = loop_of(graph)
    bodies = graph.nodes[loop].subgraphs if loop is not None else (graph,)
    return {body.types[v] for body in bodies for node in body.nodes if phase(node) == "backward" for v in node.outputs}


def _batch_classes(
    root: Subproblem, batch: Mapping[int, int], parameters: Collection[int], stored: Collection[int]
) -> tuple[_Classes, _Classes]:
    """The classes of every operator group that the batch dimension reaches through the operators' factors, and, of
    operator groups that it does not reach, those from which it is reached and those of its parts inside loops over it.

    What is drawn at random for each row, as the noise that a generator turns into images, is of the batch as well, and
    so are rows for which a loop draws, and those that are drawn from what is `stored` in the state, as from a memory of
    transitions.
    """
    onward: dict[_Place, list[_Place]] = defaultdict(list)
    back: dict[_Place, list[_Place]] = defaultdict(list)
    for subproblem in root.all():
        for before, after in _onward(subproblem):
            onward[before].append(after)
            back[after].append(before)
    weighty = _reached([_Dim(root.number, v, d) for v in parameters for d in range(root.graph.types[v].rank)], onward)
    for before, after in itertools.chain.from_iterable(map(_moved, root.all())):
        onward[before].append(after)
        back[after].append(before)
    reached = _reached([_Dim(root.number, value, dim) for value, dim in batch.items()], onward)
    # Of a batch in microbatches, rows are drawn for all of them before the loop.
    rows = {
        math.prod(root.graph.types[value].shape[first : dim + 1]) for value, dim in batch.items() for first in {0, dim}
    }
    of_rows = itertools.chain.from_iterable(_drawn(each, rows) for each in root.all())
    for place in (*of_rows, *_drawn_from(root, stored, onward)):
        drawn = _reached([place], onward)
        if weighty.isdisjoint(drawn):  # noise on weights is none
            reached |= drawn
    on_batch = _classes_of(reached)
    parts = _reached((place for each in root.all() for place in _inside_parts(each, reached)), onward)
    aligned = _classes_of(_reached(reached, back) | parts)
    return on_batch, {node: classes for node, classes in aligned.items() if node not in on_batch}


def a_loop_runs_over(root: Subproblem, batch: Mapping[int, int]) -> bool:
    """Whether a loop takes what these inputs have along these dimensions one after the other."""
    onward: dict[_Place, list[_Place]] = defaultdict(list)
    for before, after in itertools.chain.from_iterable(map(_onward, root.all())):
        onward[before].append(after)
    reached = _reached([_Dim(root.number, value, dim) for value, dim in batch.items()], onward)
    return any(True for each in root.all() for _ in _inside_parts(each, reached))


def _inside_parts(subproblem: Subproblem, reached: Collection[_Place]) -> Iterator[_Place]:
    """The first dimension of each part in which a loop runs over the batch: nothing else of it is left to be cut."""
    number, graph = subproblem.number, subproblem.graph
    for index, control_join in subproblem.control_joins.items():
        for value, use in zip(graph.nodes[index].inputs, control_join.control.operands, strict=True):
            if use.stacked and graph.types[value].rank > 1 and _Dim(number, value, 0) in reached:
                yield _Port(number, index, use.port, 0)


def _drawn(subproblem: Subproblem, rows: Collection[int] | None = None) -> Iterator[_Dim]:
    """The rows of the values that are drawn at random, of so many rows; by default of any number."""
    graph = subproblem.graph
    for node, rule in zip(graph.nodes, subproblem.grouping.rules, strict=True):
        if rule.draws:
            drawn = (v for v in node.outputs if graph.types[v].rank)
            ours = (value for value in drawn if rows is None or graph.types[value].shape[0] in rows)
            yield from (_Dim(subproblem.number, value, 0) for value in ours)


def _drawn_from(
    root: Subproblem, stored: Collection[int], onward: Mapping[_Place, Sequence[_Place]]
) -> Iterator[_Place]:
    """The rows of what lookups take from `stored` inputs, or from what they have become, by indices that are drawn."""
    drawn = _reached(itertools.chain.from_iterable(map(_drawn, root.all())), onward)
    places = {_Dim(root.number, value, 0) for value in stored if root.graph.types[value].rank}
    tables = {place[:2] for place in _reached(places, onward) if isinstance(place, _Dim)}
    for each in root.all() if drawn and tables else ():
        for node, rule in zip(each.graph.nodes, each.grouping.rules, strict=True):
            if rule.sparse and (each.number, node.inputs[0]) in tables:
                rows = (_Dim(each.number, value, 0) for value in node.outputs if each.graph.types[value].rank)
                yield from (place for place in rows if place in drawn)


def _reached(starts: Iterable[_Place], onward: Mapping[_Place, Sequence[_Place]]) -> set[_Place]:
    """The places that can be reached, the starts included."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        more = [place for place in onward.get(pending.pop(), ()) if place not in reached]
        reached.update(more)
        pending += more
    return reached


def _classes_of(places: Iterable[_Place]) -> _Classes:
    """The classes among places, by operator group node."""
    classes_of: dict[int, set[int]] = defaultdict(set)
    for place in places:
        if isinstance(place, _Class):
            classes_of[place.node].add(place.cls)
    return {node: frozenset(classes) for node, classes in classes_of.items()}


class _Dim(NamedTuple):
    """A dimension of a value of a subproblem."""

    subproblem: int
    value: int
    dim: int


class _Class(NamedTuple):
    """A class of factors of an operator group, by its node in the problem."""

    node: int
    cls: int


class _Port(NamedTuple):
    """A dimension of what a port of a loop or branch holds, by the subproblem and the node in it."""

    subproblem: int
    node: int
    port: int
    dim: int


_Place = _Dim | _Class | _Port
_Classes = dict[int, frozenset[int]]


def _onward(subproblem: Subproblem) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions that the nodes of a subproblem carry over: from operands to results."""
    graph, grouping, number = subproblem.graph, subproblem.grouping, subproblem.number
    for index, node in enumerate(graph.nodes):
        rule, operator_group_number = grouping.rules[index], grouping.operator_group_of(node)
        if index in subproblem.control_joins:
            yield from _through_ports(subproblem, index)
        elif rule.alias:
            for a, b in zip(node.inputs, node.outputs, strict=True):
                yield from ((_Dim(number, a, d), _Dim(number, b, d)) for d in range(graph.types[a].rank))
        elif operator_group_number is not None:
            operator_group = grouping.operator_groups[operator_group_number]
            at = subproblem.first + operator_group_number
            for before, after in split_for_loop(graph, node, rule):
                yield _Dim(number, node.inputs[0], before), _Dim(number, node.outputs[0], after)
            classes = [_Class(at, operator_group.find(cls)) for cls in operator_group.factor_classes[index]]
            for value, factors in zip(node.inputs, rule.operands, strict=True):
                yield from ((_Dim(number, value, d), classes[f]) for d, f in enumerate(factors) if f >= 0)
            for value, factors in zip(node.outputs, rule.results, strict=True):
                yield from ((classes[f], _Dim(number, value, d)) for d, f in enumerate(factors) if f >= 0)


def _moved(subproblem: Subproblem) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions along which operands' elements go on in another order or number."""
    grouping, number = subproblem.grouping, subproblem.number
    for index, (node, rule) in enumerate(zip(subproblem.graph.nodes, grouping.rules, strict=True)):
        operator_group_number = grouping.operator_group_of(node)
        if not rule.moves or operator_group_number is None:
            continue
        operator_group = grouping.operator_groups[operator_group_number]
        at = subproblem.first + operator_group_number
        for (operand, before, after), (value, factors) in itertools.product(
            rule.moves, list(zip(node.outputs, rule.results, strict=True))
        ):
            cls = operator_group.factor_classes[index][factors[after]] if factors[after] >= 0 else -1
            to = _Class(at, operator_group.find(cls)) if cls >= 0 else _Dim(number, value, after)
            yield _Dim(number, node.inputs[operand], before), to


def _through_ports(subproblem: Subproblem, index: int) -> Iterator[tuple[_Place, _Place]]:
    """The pairs of dimensions that a control node carries over: operands, ports, inputs of bodies and results."""
    control_join, node, here = subproblem.control_joins[index], subproblem.graph.nodes[index], subproblem.number

    def hung(number: int, graph: Graph, value: int, port_use: PortUse) -> Iterator[tuple[_Place, _Place]]:
        """The dimensions of a value with those of the port that it hangs on."""
        for dim in range(int(port_use.stacked), graph.types[value].rank):
            yield _Dim(number, value, dim), _Port(here, index, port_use.port, dim - port_use.stacked)

    for value, port_use in zip(node.inputs, control_join.control.operands, strict=True):
        yield from hung(here, subproblem.graph, value, port_use)
    for body, inner in zip(control_join.control.bodies, control_join.bodies, strict=True):
        for value, port in zip(body.graph.outputs, body.outputs, strict=True):
            yield from hung(inner.number, body.graph, value, PortUse(port=port))
        for value, port in zip(body.graph.inputs, body.inputs, strict=True):
            yield from ((to, at) for at, to in hung(inner.number, body.graph, value, PortUse(port=port)))
    for value, port_use in zip(node.outputs, control_join.control.results, strict=True):
        yield from ((to, at) for at, to in hung(here, subproblem.graph, value, port_use))


def origin(subproblem: Subproblem, value: int, weights: Collection[int]) -> int | None:
    """The weight that a value is, or is a transposed, reshaped or cast copy of; None for anything else."""
    graph, roots = subproblem.graph, subproblem.grouping.roots
    value = roots.get(value, value)
    while value in graph.producers:
        node = graph.nodes[graph.producers[value]]
        arrays = [v for v in node.inputs if v not in graph.literals]
        if node.subgraphs or len(arrays) != 1 or graph.types[arrays[0]].size != graph.types[value].size:
            return None
        value = roots.get(arrays[0], arrays[0])
    return value if value in weights else None
