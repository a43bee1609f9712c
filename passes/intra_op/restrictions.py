"""Restrictions to hand-made plans: strategies of a sharding problem that such plans do not have are ruled out, and the
rest is solved.

The name of a hand-made plan says little about its optimizer, its embedding or its loss. Solving what it leaves open
gives the best plan of its kind, and one that is priced as every other plan is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import NamedTuple

from passes.cluster import Mesh
from passes.errors import PlanningError, explain
from passes.intra_op.assembly import Assembly, Subproblem
from passes.intra_op.axis_choices import PARTIAL
from passes.intra_op.batch_reach import a_loop_runs_over
from passes.intra_op.roles import Roles, Value, frozen, in_forward, is_in_parts, origin, recurrent, roles
from passes.intra_op.strategies import Strategy
from passes.intra_op.strategy_filter import StrategyFilter, restricted
from passes.ir import Graph, StatePairs, phase
from passes.layers import OTHERWISE, taken_for
from passes.placement import weights
from passes.rules import rule_of
from passes.sharding import ShardingSpec
from passes.transforms import microbatch_stacks

Restriction = Callable[[Assembly], Assembly]
"""A function from an assembly to one with fewer strategies, those of a hand-made plan; raises PlanningError if none is
left.
"""

BATCH_FIRST = (
    "a loop's iterations follow each other: if it runs over time, put the batch first in what the step takes; "
)
"""The first remedy of an error where a loop runs over what was taken for the batch."""

ROWS_FIRST = (
    "if rows are along another dimension, as those of several views are, put them first in what the step takes; "
)
"""The first remedy of an error where the leading dimension has fewer elements than there are devices, which divide
another.
"""


def data_parallel(
    assembly: Assembly, batch: Sequence[int] | None = None, rows: Mapping[int, int] = MappingProxyType({})
) -> Assembly:
    """The assembly with the strategies of data parallelism alone.

    The `batch` is the inputs at these positions; inputs of a stage have the batch along the dimension that `rows`
    names.
    """
    if not assembly.mesh.axes:
        return assembly
    values, axis = roles(assembly, batch, rows), assembly.mesh.axes[0]
    _check_batch(assembly, values.batch, (axis,))
    return restricted(assembly, _DataParallel(values=values, axis=axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataParallel(StrategyFilter):
    """The filter for strategies that cut the batch over an axis, and nothing else."""

    values: Roles
    axis: str

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        return _on_batch(self.values, subproblem.first + group, strategy, self.axis)

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        if value in self.values.rows:
            return self.axis in spec.dims[self.values.rows[value]]
        return not _cut(spec, self.axis)

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        """Whether a stack made in a loop may have this placement: weights stay whole, or each would be gathered when it
        is read again.
        """
        return value in self.values.on_batch or not _cut(spec, self.axis)


def sharded_by_zero(stage: int, graph: Graph, state_pairs: StatePairs, batch: Sequence[int]) -> list[int]:
    """The inputs that ZeRO cuts: optimizer state and, in stage 3, parameters, including those that are not updated."""
    returned = {graph.inputs[i] for _, i in state_pairs} - microbatch_stacks(graph)
    if stage < 3:
        return sorted(v for v in returned if not in_forward(graph, v))
    return sorted(returned | frozen(graph, state_pairs, [graph.inputs[i] for i in batch]))


def zero(
    assembly: Assembly,
    stage: int,
    batch: Sequence[int] | None = None,
    rows: Mapping[int, int] = MappingProxyType({}),
) -> Assembly:
    """The assembly with the strategies of ZeRO's stage 1, 2 or 3 alone: the batch is cut over all axes of the mesh.

    State, and in stage 3 weights as well, is cut over as many devices as its dimensions allow.
    """
    axes = assembly.mesh.axes
    if not axes:
        return assembly
    values, root = roles(assembly, batch, rows), assembly.root
    _check_batch(assembly, values.batch, axes)
    sharded = {(root.number, v) for v in values.state | (values.parameters if stage == 3 else frozenset[int]())}
    if stage == 3:
        fetched = replace(values, weights={v: values.weights[v] for v in values.weights.keys() - recurrent(root)})
        sharded |= fetched.weights.keys()
        sharded |= {(each.number, v) for each in root.all() for v in _made_of_weights(each, fetched)}
    graphs = {each.number: each.graph for each in root.all()}
    strategies = _Zero(mesh=assembly.mesh, root=root, values=values, sharded=frozenset(sharded), graphs=graphs)
    return restricted(assembly, strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Zero(StrategyFilter):
    """The filter for strategies that cut the batch over all axes, and the `sharded` values as far as possible."""

    mesh: Mesh
    root: Subproblem
    values: Roles
    sharded: frozenset[Value]
    graphs: Mapping[int, Graph]

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        node, axes = subproblem.first + group, self.mesh.axes
        is_off_batch = node not in self.values.batch_classes
        return is_off_batch or all(_on_batch(self.values, node, strategy, axis) for axis in axes)

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        if value in self.values.rows:
            return spec.dims[self.values.rows[value]] == self.mesh.axes
        return (self.root.number, value) in self.sharded or spec.is_replicated

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        """Whether a stack made in a loop may have this placement: gradients of layers are scattered one by one, as ZeRO
        never holds all of them whole.
        """
        return not spec.partial

    def nbytes(self, value: Value, spec: ShardingSpec) -> float:
        if value not in self.sharded:
            return 0.0
        number, inner = value
        return spec.local_nbytes(self.graphs[number].types[inner], self.mesh)


def _made_of_weights(subproblem: Subproblem, values: Roles) -> Iterator[int]:
    """The values that a subproblem makes of one weight alone, such as a cast: they are cut like weights, and gathered
    for use.

    Other values, such as a transpose, do not count if the forward pass also reads the weight itself: they are made of
    the copy that is gathered for that.
    """
    graph, weights_here = subproblem.graph, {value for where, value in values.weights if where == subproblem.number}
    light, copied = weights(graph), set[int]()
    uncut = {
        value
        for node in graph.nodes
        if phase(node) == "forward" and not node.subgraphs and light.isdisjoint(node.outputs)
        for value in node.inputs
    }
    for node in graph.nodes:  # in order: what is made of a copy is one
        fetched = copied if rule_of(node, graph).casts else copied | uncut
        if not fetched.isdisjoint(node.inputs):
            copied |= light.intersection(node.outputs)
    for value in sorted((light - copied) & subproblem.sites.keys()):
        if origin(subproblem, value, weights_here) is not None:
            yield value


def megatron(
    assembly: Assembly,
    data: str = "data",
    tensor: str = "tensor",
    *,
    batch: Sequence[int] | None = None,
    is_state_cut: bool = False,
    rows: Mapping[int, int] = MappingProxyType({}),
) -> Assembly:
    """The assembly with strategies alone that cut the batch over the axis `data`, and every matrix that is multiplied
    or looked up over `tensor`.

    With `is_state_cut`, optimizer state is cut over `data` as well, as ZeRO-1 does.
    """
    axes = assembly.mesh.axes
    if tensor not in axes:
        return zero(assembly, 1, batch, rows) if is_state_cut else data_parallel(assembly, batch, rows)
    values, root = roles(assembly, batch, rows), assembly.root
    if data in axes:
        _check_batch(assembly, values.batch, (data,))
    state = {(root.number, v) for v in values.state} if is_state_cut and data in axes else set[Value]()
    strategies = _Megatron(
        assembly=assembly,
        values=values,
        data=data if data in axes else "",
        tensor=tensor,
        weight_classes={
            each.first + group: classes for each in root.all() for group, classes in _weight_classes(each, values)
        },
        matrices=frozenset(value for value in _multiplied(root, values) if values.weights[value] > 1),
        state=frozenset(state),
    )
    return restricted(assembly, strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Megatron(StrategyFilter):
    """The filter for strategies that cut the batch over the axis `data`, if there is one, and the `matrices` over
    `tensor`.

    `weight_classes` are the classes of operator groups that are dimensions of matrices. With `state`, that is cut as
    well.
    """

    assembly: Assembly
    values: Roles
    data: str
    tensor: str
    weight_classes: Mapping[int, frozenset[int]]
    matrices: frozenset[Value]
    state: frozenset[Value]

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        node = subproblem.first + group
        is_update = bool(self.state) and node not in self.values.batch_classes
        if self.data and not is_update and not _on_batch(self.values, node, strategy, self.data):
            return False
        cls = _class_on(strategy, self.tensor)
        if self.weight_classes[node]:
            return cls in self.weight_classes[node]
        return cls not in self.values.batch_classes.get(node, ())

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        rows = self.values.rows
        if value in rows:
            return (not self.data or self.data in spec.dims[rows[value]]) and not _cut(spec, self.tensor)
        # Beside state, that is a gradient that another stage hands on.
        may_be_cut = self.state and value not in self.values.parameters
        if self.data and _cut(spec, self.data) and not may_be_cut:
            return False
        return self.keeps_port((self.assembly.root.number, value), spec)

    def keeps_port(self, value: Value, spec: ShardingSpec) -> bool:
        return value not in self.matrices or _cut(spec, self.tensor)

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        is_free = not self.data or bool(self.state) or value in self.values.on_batch
        return is_free or not _cut(spec, self.data)

    def nbytes(self, value: Value, spec: ShardingSpec) -> float:
        if value not in self.state:
            return 0.0
        return spec.local_nbytes(self.assembly.root.graph.types[value[1]], self.assembly.mesh)


@dataclass(frozen=True, slots=True)
class Along:
    """The restriction of `megatron` along axes of these names; an empty name stands for no axis."""

    data: str
    tensor: str

    def __call__(self, assembly: Assembly) -> Assembly:
        return megatron(assembly, self.data, self.tensor)


class HandMade(NamedTuple):
    """A hand-made plan that is possible on a mesh, as a restriction; with `regather`, weights are gathered at every
    use.
    """

    restrict: Restriction
    regather: bool = False


def hand_made_plans(mesh: Mesh, batch: Sequence[int] | None = None) -> Iterator[HandMade]:
    """The hand-made plans that are possible on a mesh, whatever its axes are called."""
    if len(mesh.axes) == 1:
        yield HandMade(partial(data_parallel, batch=batch))
        yield HandMade(partial(megatron, data="", tensor=mesh.axes[0], batch=batch))
    alike = len({mesh.group((axis,)) for axis in mesh.axes}) == 1  # then the order of axes is naming
    for data, tensor in list(permutations(mesh.axes, 2))[: 1 if alike else None]:
        if len(mesh.axes) == 2:
            yield HandMade(partial(megatron, data=data, tensor=tensor, batch=batch))
    for stage in (1, 3):
        yield HandMade(partial(zero, stage=stage, batch=batch), regather=stage == 3)


def _check_batch(assembly: Assembly, batch: Mapping[int, int], axes: Sequence[str]) -> None:
    """Raises PlanningError unless the axes divide the batch dimension of every batch input."""
    graph, parts = assembly.root.graph, math.prod(map(assembly.mesh.axis_size, axes))
    for position, value in enumerate(graph.inputs):
        size = graph.types[value].shape[batch[value]] if value in batch else 0
        if size % parts:
            name = graph.input_names[position] if position < len(graph.input_names) else f"input {position}"
            dim, shape = batch[value], graph.types[value].shape
            in_parts = bool(dim) and (value in microbatch_stacks(graph) or is_in_parts(graph, value))
            larger = -(-size // parts) * parts * (shape[0] if in_parts else 1)
            along = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {', '.join(map(repr, axes))}"
            behind = f"dimension {dim}, behind time, of" if dim else "leading dimension of"
            of_each = f"rows of each of {shape[0]} microbatches, which are" if in_parts else behind
            rule = f"{parts} devices on {along} do not divide its {of_each} {size}"
            context = taken_for(graph, [i for i, v in enumerate(graph.inputs) if v in batch])
            fewer = "fewer microbatches, " if in_parts else ""
            inner = shape[dim + 1 : -1]  # the last one has features
            is_led = 1 < size < parts and any(n and n % parts == 0 for n in inner)
            first = BATCH_FIRST if a_loop_runs_over(assembly.root, batch) else ROWS_FIRST if is_led else ""
            remedy = f"{first}use a batch of {larger}, {fewer}fewer devices or planner=Auto(), or {OTHERWISE}"
            raise PlanningError(explain(f"{name} of type {graph.types[value]}", rule, context, remedy))


def _cut(spec: ShardingSpec, axis: str) -> bool:
    return any(axis in axes for axes in spec.dims)


def _class_on(strategy: Strategy, axis: str) -> int | None:
    """The class of dimensions that an axis cuts in a strategy; None if it cuts none."""
    return dict(strategy.axis_choice).get(axis)


def _on_batch(values: Roles, node: int, strategy: Strategy, axis: str) -> bool:
    """Whether an axis cuts the batch wherever a node has it, and otherwise at most what is broadcast over the batch."""
    classes = values.batch_classes.get(node)
    cls = _class_on(strategy, axis)
    return cls in classes if classes else cls in (None, PARTIAL, *values.aligned_classes.get(node, ()))


def _multiplied(subproblem: Subproblem, values: Roles) -> set[Value]:
    """The weights that heavy operators read; a table of positions, which is only added, is not among them."""
    graph, grouping, number = subproblem.graph, subproblem.grouping, subproblem.number
    weights = {value for where, value in values.weights if where == number}
    read = [
        v for b in grouping.operator_groups if not b.light for member in b.members for v in graph.nodes[member].inputs
    ]
    for index, control_join in subproblem.control_joins.items():
        inside = set[Value]().union(*(_multiplied(inner, values) for inner in control_join.bodies))
        bodies = zip(control_join.control.bodies, control_join.bodies, strict=True)
        entering = [(n.number, v, port) for b, n in bodies for v, port in zip(b.graph.inputs, b.inputs, strict=True)]
        ports = {port for number, value, port in entering if (number, value) in inside}
        operands = zip(graph.nodes[index].inputs, control_join.control.operands, strict=True)
        read += [value for value, port_use in operands if port_use.port in ports]
    return {(number, source) for v in read if (source := origin(subproblem, v, weights)) is not None}.union(
        *(
            _multiplied(inner, values)
            for control_join in subproblem.control_joins.values()
            for inner in control_join.bodies
        )
    )


def _weight_classes(subproblem: Subproblem, values: Roles) -> Iterator[tuple[int, frozenset[int]]]:
    """The classes of every operator group, by node, that are dimensions of a weight matrix in its heavy members, or of
    the gradient of one.
    """
    graph, grouping = subproblem.graph, subproblem.grouping
    weights = {value: rank for (where, value), rank in values.weights.items() if where == subproblem.number}
    for index, operator_group in enumerate(grouping.operator_groups):
        classes: set[int] = set()
        for member in operator_group.members if not operator_group.light else ():
            member_classes = [operator_group.find(cls) for cls in operator_group.factor_classes[member]]
            operands = zip(graph.nodes[member].inputs, grouping.rules[member].operands, strict=True)
            for value, factors in operands:
                if graph.types[value].rank > 1 and origin(subproblem, value, weights) is not None:
                    classes |= {member_classes[f] for f in factors if f >= 0}
            kept = {member_classes[f] for factors in grouping.rules[member].results for f in factors if f >= 0}
            batch = values.batch_classes.get(subproblem.first + index, frozenset[int]())
            if batch.intersection(member_classes) and batch.isdisjoint(kept):
                classes |= kept
        yield index, frozenset(classes)
