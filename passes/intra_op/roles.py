"""The roles of a training step's values: the batch, the weights, and the rest of the state.

Hand-made plans are defined by them (`passes.intra_op.restrictions`): data parallelism cuts the batch, ZeRO the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from passes.errors import PlanningError, explain
from passes.intra_op.assembly import Assembly, Subproblem
from passes.intra_op.batch_reach import Classes, batch_reach
from passes.ir import LOOP, Graph, StatePairs, TensorType, control_of, phase
from passes.layers import OTHERWISE, batch_inputs, row_dims, rows_along
from passes.rules import rule_of
from passes.transforms import loop_of, microbatch_stacks

QUANTIZED = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})
"""The integers that weights are stored as; wider ones are positions and counts."""

Value = tuple[int, int]
"""(`Subproblem.number`, value): a value of the program, or of the body of a loop or branch."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of values, and the dimensions of operators that belong to the batch.

    `batch` maps inputs to the dimension that the batch is on; if any come in microbatches, it has only those.
    `rows` are those and state that has the batch's rows, such as what a recurrent network hands on to the next step.
    `parameters` are what the loss reads of the state, even if another stage updates it, and weights that nothing
    updates; `state` is the rest of what the step returns. `weights` maps parameters, and their slices inside loops, to
    the number of their own dimensions.

    Values `on_batch` have a dimension along which the batch goes on. `batch_classes[n]` are the classes of operator
    group node n on the batch. For a node off the batch, `aligned_classes[n]` are those along which its results meet the
    batch, as a mask that is broadcast over it does, and those of the parts of a batch that a loop takes one after the
    other.
    """

    batch: Mapping[int, int]
    rows: Mapping[int, int]
    parameters: frozenset[int]
    state: frozenset[int]
    weights: Mapping[Value, int]
    batch_classes: Classes
    aligned_classes: Classes
    on_batch: frozenset[Value]


def roles(
    assembly: Assembly, batch_at: Sequence[int] | None = None, rows: Mapping[int, int] = MappingProxyType({})
) -> Roles:
    """The roles of a step's inputs; those at `batch_at` are the batch, by default the inputs that look like one.

    In microbatches the batch is whatever is stacked, with its rows along dimension 1 unless `rows` names another.

    Raises PlanningError where there is none; a stage may have none.
    """
    graph = assembly.root.graph
    stacks = microbatch_stacks(graph)
    returned = {graph.inputs[i] for _, i in assembly.state_pairs} - stacks
    shared = _shared(graph, returned, stacks)
    if stacks:
        batch = {v: rows.get(v, 1) for v in stacks if graph.types[v].rank > 1 and not graph.types[v].is_key}
    else:
        at = batch_inputs(graph, assembly.state_pairs) if batch_at is None else batch_at
        batch = _of_rows(graph, assembly.state_pairs, at)
    of_rows = {} if stacks else rows_along(graph, batch, returned)
    parameters = {value for value in returned - of_rows.keys() if in_forward(graph, value)} | shared
    parameters |= frozen(graph, assembly.state_pairs, batch)
    gradients = _types_of_gradients(graph)
    stored = {value for value in returned if graph.types[value] not in gradients}
    # Weights that noise is added to before the gradient is taken are read by no operator of the forward pass.
    weights = parameters | (returned - stored - of_rows.keys())
    reach = batch_reach(assembly.root, batch, weights, stored, assembly.mesh.size)
    if not batch and not reach.classes and loop_of(graph) is None:
        rule = "it needs an input that is not returned as state and has a batch dimension; this function has none"
        remedy = f"return the state that the step updates, {OTHERWISE}, or use planner=Auto()"
        raise PlanningError(explain("data parallelism", rule, "", remedy))
    return Roles(
        batch=batch,
        rows={**of_rows, **batch},
        parameters=frozenset(parameters),
        state=frozenset(returned - parameters - of_rows.keys()),
        weights=_weights(assembly.root, {v: graph.types[v].rank for v in parameters}),
        batch_classes=reach.classes,
        aligned_classes=reach.aligned,
        on_batch=reach.values,
    )


def _of_rows(graph: Graph, state_pairs: StatePairs, at: Sequence[int]) -> dict[int, int]:
    """The dimension along which each input of the batch has its rows: behind that of time or of parts, else the first.

    Where rows lie behind time, every input that has them is of the batch, also one that is not `at` its positions.
    """
    state = {i for _, i in state_pairs}
    others = tuple(i for i in range(len(graph.inputs)) if i not in state and graph.types[graph.inputs[i]].rank)
    if behind_time := row_dims(graph, tuple(at), others):
        return {graph.inputs[i]: dim for i, dim in behind_time.items()}
    return {graph.inputs[i]: int(is_in_parts(graph, graph.inputs[i])) for i in at}


def is_in_parts(graph: Graph, value: int) -> bool:
    """Whether a loop with a whole step in it takes an input part by part, where the user adds up gradients of
    microbatches by hand: then the rows of each part are cut.
    """
    for node in (graph.nodes[reader] for reader in graph.consumers.get(value, ())):
        control = control_of(node, graph)
        if control is not None and any(body.is_step for body in control.bodies):
            uses = zip(node.inputs, control.operands, strict=True)
            return graph.types[value].rank > 1 and all(use.stacked for v, use in uses if v == value)
    return False


def frozen(graph: Graph, state_pairs: StatePairs, batch: Collection[int]) -> frozenset[int]:
    """The inputs beside the batch that are weights though the step does not update them: the base of adapters, a
    teacher, a reference policy.
    """
    others = set(graph.inputs) - {graph.inputs[i] for _, i in state_pairs} - microbatch_stacks(graph) - set(batch)
    weights = (v for v in others if _is_of_weights(graph.types[v]))
    return frozenset(v for v in weights if in_forward(graph, v) or _is_multiplied(graph, v))


def _is_multiplied(graph: Graph, value: int) -> bool:
    """Whether a product or lookup reads a value or a copy of it, in any phase, as those of a teacher model do."""
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
    """Whether an array may hold weights: its elements are floating-point numbers, or quantized ones."""
    return bool(type.rank) and (type.dtype in QUANTIZED or type.is_inexact)


def in_forward(graph: Graph, value: int) -> bool:
    """Whether the forward pass reads a value, in a loop over microbatches if there is one."""
    for node in (graph.nodes[reader] for reader in graph.consumers.get(value, ())):
        if phase(node) == "forward":
            return True
        if node.scope == LOOP and node.subgraphs:
            (body,) = node.subgraphs
            entering = zip(node.inputs, body.inputs, strict=True)
            if any(outer == value and in_forward(body, inner) for outer, inner in entering):
                return True
    return False


def _shared(graph: Graph, returned: Collection[int], stacks: Collection[int]) -> frozenset[int]:
    """The parameters that another stage updates: this one reads them in each microbatch and sends a gradient back."""
    loop = loop_of(graph)
    if loop is None:
        return frozenset()
    ours = set(graph.inputs) - set(returned) - set(stacks)
    gradients = {graph.types[v] for v in graph.outputs if v in graph.nodes[loop].outputs}
    return frozenset(v for v in ours if graph.types[v] in gradients and in_forward(graph, v))


def _weights(subproblem: Subproblem, entering: Mapping[int, int]) -> dict[Value, int]:
    """The weights of a subproblem and of those inside it; the slice of a parameter in a loop has one dimension less.

    Weights that a loop stacks, such as casts that it keeps for the backward pass, are weights again.
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
    """The values that all iterations of a loop read alike, such as the weights of a recurrent cell, in the loops'
    bodies: gathered once for all.

    A loop with a forward and a backward pass in one iteration is one over microbatches, with the whole model in it; no
    device has room for more than a part of that at a time.
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
    """The types of the values that the backward pass makes: state of another type has no gradient."""
    bodies = [body for node in graph.nodes if node.scope == LOOP for body in node.subgraphs] or [graph]
    return {body.types[v] for body in bodies for node in body.nodes if phase(node) == "backward" for v in node.outputs}


def origin(subproblem: Subproblem, value: int, weights: Collection[int]) -> int | None:
    """The weight that a value is, or is a transposed, reshaped or cast copy of; None for any other value."""
    graph, roots = subproblem.graph, subproblem.grouping.roots
    value = roots.get(value, value)
    while value in graph.producers:
        node = graph.nodes[graph.producers[value]]
        arrays = [v for v in node.inputs if v not in graph.literals]
        if node.subgraphs or len(arrays) != 1 or graph.types[arrays[0]].size != graph.types[value].size:
            return None
        value = roots.get(arrays[0], arrays[0])
    return value if value in weights else None
