"""Restrictions to textbook plans: strategies of a sharding problem that they do not have are ruled out, the rest is
solved.

A plan's name says little about its optimizer, its embedding or its loss; ruling out what the textbook does not do and
solving the rest fills those gaps the best way, and puts the plan on the path that every other plan takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import cast

import numpy as np

from passes.cluster import Cluster, Mesh
from passes.errors import PlanningError, explain
from passes.intra_op.assembly import Assembly, Subproblem
from passes.intra_op.axis_choices import PARTIAL
from passes.intra_op.roles import Roles, Value, a_loop_runs_over, frozen, in_forward, origin, recurrent, roles
from passes.intra_op.strategies import Strategy
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

_ROUNDING = 1e-9
"""The share by which equal sums of bytes may differ: they are sums over shares, which are not whole."""


def check_sizes(sizes: Mapping[str, int], cluster: Cluster) -> None:
    """Raises PlanningError unless the sizes are positive and multiply to the cluster's devices."""
    call = f"Megatron({', '.join(f'{name}={size!r}' for name, size in sizes.items())})"
    if not all(isinstance(cast(object, size), int) and size > 0 for size in sizes.values()):
        raise PlanningError(explain(call, "sizes are whole numbers from 1", "", "write, say, data=2, tensor=4"))
    total = math.prod(sizes.values())
    if total != cluster.n_devices:
        rule = f"this makes {total} devices, and cluster {cluster.name!r} has {cluster.n_devices}"
        raise PlanningError(explain(call, rule, "", "choose sizes whose product is the number of devices"))


def check_optimizer_stage(stage: int) -> None:
    """Raises PlanningError unless ZeRO's stage is one that stands beside tensors and pipelines: none, or 1."""
    if type(stage) is not int or stage not in (0, 1):
        rule = "beside tensors and stages optimizer state alone is cut over the data devices: zero=0 or 1"
        remedy = "use zero=1, or planner=Zero(3) over all devices"
        raise PlanningError(explain(f"Megatron(zero={stage!r})", rule, "", remedy))


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


def restricted(
    assembly: Assembly,
    allows: Callable[[Subproblem, int, Strategy], bool],
    allows_input: Callable[[int, ShardingSpec], bool],
    allows_port: Callable[[Value, ShardingSpec], bool] = lambda value, spec: True,
    allows_stacked: Callable[[ShardingSpec], bool] = lambda spec: True,
    nbytes_of: Callable[[Value, ShardingSpec], float] = lambda value, spec: 0.0,
) -> Assembly:
    """The assembly without the strategies that the predicates refuse; a node that would lose all keeps all.

    Of those that a node keeps, only the ones under which its values take the fewest bytes, as `nbytes_of` counts them.
    """
    root, seconds = assembly.root, list(assembly.problem.seconds)

    def keep(node: int, is_kept: Sequence[bool], nbytes: Sequence[float]) -> None:
        if any(is_kept):
            smallest = min(n for stays, n in zip(is_kept, nbytes, strict=True) if stays)
            few = np.array(is_kept) & (np.array(nbytes) <= smallest * (1 + _ROUNDING))
            seconds[node] = np.where(few, seconds[node], np.inf)

    for subproblem in root.all():
        values_at: dict[int, list[tuple[Value, Sequence[ShardingSpec]]]] = defaultdict(list)
        for value, site in subproblem.sites.items():
            values_at[site.node].append(((subproblem.number, value), site.specs))
        for b, table in enumerate(subproblem.tables):
            absorbed = {v: subproblem.sites[v].specs for v in subproblem.grouping.operator_groups[b].inputs}
            legal = [allows(subproblem, b, strategy) for strategy in table.strategies]
            fits = [all(allows_input(v, specs[s]) for v, specs in absorbed.items()) for s in range(len(legal))]
            # Where an input cannot lie as it should beside what reads it, as running statistics of a batch that is cut,
            # it gives way.
            legal_and_allowed = [is_legal and is_allowed for is_legal, is_allowed in zip(legal, fits, strict=True)]
            kept_strategies = legal_and_allowed if any(legal_and_allowed) else legal
            ours = values_at[subproblem.first + b]
            nbytes = [sum(nbytes_of(value, specs[s]) for value, specs in ours) for s in range(len(kept_strategies))]
            keep(subproblem.first + b, kept_strategies, nbytes)
        for control_join in subproblem.control_joins.values():
            for body, inner in zip(control_join.control.bodies, control_join.bodies, strict=True):
                for value, port in zip(body.graph.inputs, body.inputs, strict=True):
                    site, where = control_join.ports[port], (inner.number, value)
                    kept_strategies = [allows_port(where, spec) for spec in site.specs]
                    keep(site.node, kept_strategies, [nbytes_of(where, spec) for spec in site.specs])
                for value, port in zip(body.graph.outputs, body.outputs, strict=True):
                    site, where = control_join.ports[port], (inner.number, inner.grouping.roots.get(value, value))
                    if control_join.control.ports[port].stacked:
                        kept_strategies = [allows_stacked(spec) for spec in site.specs]
                        keep(site.node, kept_strategies, [nbytes_of(where, spec) for spec in site.specs])
    for value in root.grouping.loose:
        site, where = root.sites[value], (root.number, value)
        keep(
            site.node,
            [allows_input(value, spec) for spec in site.specs],
            [nbytes_of(where, s) for s in site.specs],
        )
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)))


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
    return restricted(
        assembly,
        lambda subproblem, operator_group, strategy: _on_batch(
            values, subproblem.first + operator_group, strategy, axis
        ),
        lambda value, spec: (axis in spec.dims[values.batch[value]]) if value in values.batch else not _cut(spec, axis),
    )


def sharded_by_zero(stage: int, graph: Graph, state_pairs: StatePairs, batch: Sequence[int]) -> list[int]:
    """The inputs that ZeRO cuts: optimizer state, and in stage 3 parameters, those too that are not updated."""
    returned = {graph.inputs[i] for _, i in state_pairs} - microbatch_stacks(graph)
    if stage < 3:
        return sorted(v for v in returned if not in_forward(graph, v))
    return sorted(returned | frozen(graph, state_pairs, [graph.inputs[i] for i in batch]))


def zero(
    stage: int, batch: Sequence[int] | None = None, rows: Mapping[int, int] = MappingProxyType({})
) -> Callable[[Assembly], Assembly]:
    """The restriction of ZeRO's stage 1, 2 or 3 on a mesh of one or more axes: the batch is cut over all of them.

    State is cut over as many devices as its dimensions allow. Raises PlanningError for another stage.
    """
    if type(stage) is not int or stage not in (1, 2, 3):
        raise PlanningError(
            f"Zero(stage={stage!r}): ZeRO has stages 1, 2 and 3; use one of them, or DataParallel() for none"
        )

    def restrict(assembly: Assembly) -> Assembly:
        mesh, axes = assembly.mesh, assembly.mesh.axes
        if not axes:
            return assembly
        values, root = roles(assembly, batch, rows), assembly.root
        graphs = {subproblem.number: subproblem.graph for subproblem in root.all()}
        _check_batch(assembly, values.batch, axes)
        sharded = {(root.number, v) for v in values.state | (values.parameters if stage == 3 else frozenset[int]())}
        if stage == 3:
            fetched = replace(values, weights={v: values.weights[v] for v in values.weights.keys() - recurrent(root)})
            sharded |= fetched.weights.keys()
            sharded |= {
                (subproblem.number, v) for subproblem in root.all() for v in _made_of_weights(subproblem, fetched)
            }

        def allows(subproblem: Subproblem, operator_group: int, strategy: Strategy) -> bool:
            node = subproblem.first + operator_group
            return node not in values.batch_classes or all(_on_batch(values, node, strategy, axis) for axis in axes)

        def allows_input(value: int, spec: ShardingSpec) -> bool:
            if value in values.batch:
                return spec.dims[values.batch[value]] == axes
            return (root.number, value) in sharded or spec.is_replicated

        def nbytes_of(value: Value, spec: ShardingSpec) -> float:
            return spec.local_nbytes(graphs[value[0]].types[value[1]], mesh) if value in sharded else 0.0

        # Gradients of a loop's layers are scattered one by one: all of them whole would be what ZeRO is there to avoid.
        return restricted(
            assembly, allows, allows_input, allows_stacked=lambda spec: not spec.partial, nbytes_of=nbytes_of
        )

    return restrict


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
        return zero(1, batch, rows)(assembly) if is_state_cut else data_parallel(assembly, batch, rows)
    values = roles(assembly, batch, rows)
    if data in axes:
        _check_batch(assembly, values.batch, (data,))
    weighty = {
        subproblem.first + b: classes
        for subproblem in assembly.root.all()
        for b, classes in _weight_classes(subproblem, values)
    }
    multiplied = _multiplied(assembly.root, values)
    matrices = {value for value in multiplied if values.weights[value] > 1}
    root = assembly.root.number
    state = {(root, v) for v in values.state} if is_state_cut and data in axes else set[Value]()
    types = assembly.root.graph.types

    def allows(subproblem: Subproblem, operator_group: int, strategy: Strategy) -> bool:
        node = subproblem.first + operator_group
        is_update = bool(state) and node not in values.batch_classes
        if data in axes and not is_update and not _on_batch(values, node, strategy, data):
            return False
        cls = _class_on(strategy, tensor)
        if weighty[node]:
            return cls in weighty[node]
        return cls not in values.batch_classes.get(node, ())

    def allows_input(value: int, spec: ShardingSpec) -> bool:
        if value in values.batch:
            return (data not in axes or data in spec.dims[values.batch[value]]) and not _cut(spec, tensor)
        # Beside state, that is a gradient that another stage hands on.
        if data in axes and _cut(spec, data) and not (state and value not in values.parameters):
            return False
        return (root, value) not in matrices or _cut(spec, tensor)

    def allows_port(value: Value, spec: ShardingSpec) -> bool:
        return value not in matrices or _cut(spec, tensor)

    def nbytes_of(value: Value, spec: ShardingSpec) -> float:
        return spec.local_nbytes(types[value[1]], assembly.mesh) if value in state else 0.0

    return restricted(assembly, allows, allows_input, allows_port, nbytes_of=nbytes_of)


@dataclass(frozen=True, slots=True)
class Along:
    """The restriction of `megatron` along axes of these names, the empty name for no axis."""

    data: str
    tensor: str

    def __call__(self, assembly: Assembly) -> Assembly:
        return megatron(assembly, self.data, self.tensor)


def textbook(mesh: Mesh, batch: Sequence[int] | None = None) -> Iterator[tuple[Callable[[Assembly], Assembly], bool]]:
    """The restrictions of planners by hand on a mesh, by any names of its axes, and whether each regathers weights."""
    if len(mesh.axes) == 1:
        yield partial(data_parallel, batch=batch), False
        yield partial(megatron, data="", tensor=mesh.axes[0], batch=batch), False
    alike = len({mesh.group((axis,)) for axis in mesh.axes}) == 1  # then the order of axes is naming
    for data, tensor in list(permutations(mesh.axes, 2))[: 1 if alike else None]:
        if len(mesh.axes) == 2:
            yield partial(megatron, data=data, tensor=tensor, batch=batch), False
    for stage in (1, 3):
        yield zero(stage, batch), stage == 3


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
