"""Restrictions to textbook plans: strategies of a sharding problem that they do not have are ruled out, the rest is
solved.

A plan's name says little about its optimizer, its embedding or its loss; ruling out what the textbook does not do and
solving the rest fills those gaps the best way, and puts the plan on the path that every other plan takes.
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
from passes.intra_op.roles import Roles, Value, frozen, in_forward, origin, recurrent, roles
from passes.intra_op.strategies import Strategy
from passes.intra_op.strategy_filter import StrategyFilter, restricted
from passes.ir import Graph, StatePairs, phase
from passes.layers import OTHERWISE, taken_for
from passes.placement import weights
from passes.rules import rule_of
from passes.sharding import ShardingSpec
from passes.transforms import microbatch_stacks

Restriction = Callable[[Assembly], Assembly]
"""An assembly to one with fewer strategies, as a planner by hand has; raises PlanningError if none are left."""

BATCH_FIRST = (
    "a loop's iterations follow each other: if it runs over time, put the batch first in what the step takes; "
)
"""What comes before other remedies where a loop runs over what was taken for the batch."""

ROWS_FIRST = (
    "if rows are along another dimension, as those of several views are, put them first in what the step takes; "
)
"""What comes before other remedies where what leads is fewer than the devices, which divide another dimension."""


def data_parallel(
    assembly: Assembly, batch: Sequence[int] | None = None, rows: Mapping[int, int] = MappingProxyType({})
) -> Assembly:
    """The assembly with strategies of data parallelism alone, of the `batch` at these positions of inputs, of which
    what a stage takes has its `rows` along these dimensions.
    """
    if not assembly.mesh.axes:
        return assembly
    values, axis = roles(assembly, batch, rows), assembly.mesh.axes[0]
    _check_batch(assembly, values.batch, (axis,))
    return restricted(assembly, _DataParallel(values=values, axis=axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataParallel(StrategyFilter):
    """The batch cut over an axis, and nothing else."""

    values: Roles
    axis: str

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        return _on_batch(self.values, subproblem.first + group, strategy, self.axis)

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        if value in self.values.batch:
            return self.axis in spec.dims[self.values.batch[value]]
        return not _cut(spec, self.axis)

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        """Weights that a loop stacks are whole, as they were: cut, each would be gathered when it is read again."""
        return value in self.values.on_batch or not _cut(spec, self.axis)


def sharded_by_zero(stage: int, graph: Graph, state_pairs: StatePairs, batch: Sequence[int]) -> list[int]:
    """The inputs that ZeRO cuts: optimizer state, and in stage 3 parameters, those too that are not updated."""
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
    """The assembly with strategies of ZeRO's stage 1, 2 or 3 alone: the batch is cut over all axes of the mesh.

    State is cut over as many devices as its dimensions allow, in stage 3 weights are too.
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
    """The batch cut over all axes, and the `sharded` values cut as far as can be."""

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
        if value in self.values.batch:
            return spec.dims[self.values.batch[value]] == self.mesh.axes
        return (self.root.number, value) in self.sharded or spec.is_replicated

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        """Gradients of a loop's layers are scattered one by one: all of them whole are what ZeRO is there to avoid."""
        return not spec.partial

    def nbytes(self, value: Value, spec: ShardingSpec) -> float:
        if value not in self.sharded:
            return 0.0
        number, inner = value
        return spec.local_nbytes(self.graphs[number].types[inner], self.mesh)


def _made_of_weights(subproblem: Subproblem, values: Roles) -> Iterator[int]:
    """The values that a subproblem derives from one weight alone, such as a cast: they are weights too, cut alike and
    gathered for use.

    What is no cast, a transpose for one, of a weight that the forward pass reads as it is too, is none: it is made of
    the copy that is fetched for the other reader, where it would be fetched a second time itself.
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
    batch: Sequence[int] | None = None,
    is_state_cut: bool = False,
    rows: Mapping[int, int] = MappingProxyType({}),
) -> Assembly:
    """The assembly with strategies alone that cut the batch over `data` and every matrix that is multiplied or looked
    up over `tensor`; if `is_state_cut`, optimizer state is cut over `data` too, as ZeRO-1 does.
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
    """The batch cut over the axis `data`, if there is one, and the `matrices` over `tensor`.

    `weight_classes` are those of operator groups that stand for dimensions of matrices. The `state` is cut as well.
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
        batch = self.values.batch
        if value in batch:
            return (not self.data or self.data in spec.dims[batch[value]]) and not _cut(spec, self.tensor)
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
    """The restriction of `megatron` along axes of these names, the empty name for no axis."""

    data: str
    tensor: str

    def __call__(self, assembly: Assembly) -> Assembly:
        return megatron(assembly, self.data, self.tensor)


class HandMade(NamedTuple):
    """The plans that a planner by hand may make on a mesh; with `regather`, weights are gathered once a use."""

    restrict: Restriction
    regather: bool = False


def textbook(mesh: Mesh, batch: Sequence[int] | None = None) -> Iterator[HandMade]:
    """The planners by hand on a mesh, by any names of its axes."""
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
            count = graph.types[value].shape[0] if batch[value] else 1
            larger = -(-size // parts) * parts * count
            along = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {', '.join(map(repr, axes))}"
            of_each = f"rows of each of {count} microbatches, which are" if batch[value] else "leading dimension of"
            rule = f"{parts} devices on {along} do not divide its {of_each} {size}"
            context = taken_for(graph, [i for i, v in enumerate(graph.inputs) if v in batch])
            fewer = "fewer microbatches, " if batch[value] else ""
            inner = graph.types[value].shape[batch[value] + 1 : -1]  # the last one has features
            is_led = 1 < size < parts and any(n and n % parts == 0 for n in inner)
            first = BATCH_FIRST if a_loop_runs_over(assembly.root, batch) else ROWS_FIRST if is_led else ""
            remedy = f"{first}use a batch of {larger}, {fewer}fewer devices or planner=Auto(), or {OTHERWISE}"
            raise PlanningError(explain(f"{name} of type {graph.types[value]}", rule, context, remedy))


def _cut(spec: ShardingSpec, axis: str) -> bool:
    return any(axis in axes for axes in spec.dims)


def _class_on(strategy: Strategy, axis: str) -> int | None:
    """The class of dimensions that an axis cuts in a strategy; None for none."""
    return dict(strategy.axis_choice).get(axis)


def _on_batch(values: Roles, node: int, strategy: Strategy, axis: str) -> bool:
    """Whether the axis cuts the batch where there is one, and nothing elsewhere but what is broadcast over it."""
    classes = values.batch_classes.get(node)
    cls = _class_on(strategy, axis)
    return cls in classes if classes else cls in (None, PARTIAL, *values.aligned_classes.get(node, ()))


def _multiplied(subproblem: Subproblem, values: Roles) -> set[Value]:
    """The weights that heavy operators read; a table of positions, which is merely added, is none of them."""
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
    """Every operator group of a subproblem, with the classes of its heavy members that stand for dimensions of a weight
    matrix, or of the gradient of one: what sums over the batch.
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
