"""What the textbook plans forbid: strategies of a sharding problem ruled out, the rest still solved for.

A plan's name says little about its optimizer, its embedding or its loss; ruling out what the textbook does not do and
solving the rest fills those gaps the best way, and puts the plan on the path that every other plan takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import cast

import numpy as np

from passes.cluster import Cluster
from passes.errors import PlanningError, explain
from passes.ir import Graph
from passes.mesh import Mesh
from passes.microbatch import loop_of, microbatch_stacks
from passes.moves import weights
from passes.phases import phase
from passes.problem import Assembly, Region
from passes.sharding import ShardingSpec
from passes.strategies import PARTIAL, Strategy


def check_sizes(sizes: Mapping[str, int], cluster: Cluster) -> None:
    """Raises PlanningError unless the sizes are positive and multiply to the cluster's devices."""
    asked = f"Megatron({', '.join(f'{name}={size!r}' for name, size in sizes.items())})"
    if not all(isinstance(cast(object, size), int) and size > 0 for size in sizes.values()):
        raise PlanningError(explain(asked, "sizes are whole numbers from 1", "", "write, say, data=2, tensor=4"))
    total = math.prod(sizes.values())
    if total != cluster.n_devices:
        rule = f"this makes {total} devices, and cluster {cluster.name!r} has {cluster.n_devices}"
        raise PlanningError(explain(asked, rule, "", "choose sizes whose product is the number of devices"))


Value = tuple[int, int]
"""(`Region.number`, value): a value of the program or of a loop's or branch's body."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What values are: `batch` inputs and the dimension that the batch is on (those in microbatches, if any are);
    `parameters` are state that the loss reads, be it updated in another stage, `state` is the rest of what the step
    returns again; `weights` are parameters and their slices inside loops, with the dimensions that are their own.
    `batch_classes[n]` are the classes of bundle node n on the batch.
    """

    batch: Mapping[int, int]
    parameters: frozenset[int]
    state: frozenset[int]
    weights: Mapping[Value, int]
    batch_classes: Mapping[int, frozenset[int]]


def roles(assembly: Assembly) -> Roles:
    """The roles of a step's inputs. Raises PlanningError when no input looks like a batch."""
    graph = assembly.root.graph
    stacks = microbatch_stacks(graph)
    returned = {graph.inputs[i] for _, i in assembly.tied} - stacks
    shared = _shared(graph, returned, stacks)
    parameters = {value for value in returned if in_forward(graph, value)} | shared
    batch = {
        v: int(v in stacks)
        for v in graph.inputs
        if v in stacks or (v not in returned and not stacks)
        if graph.types[v].rank > int(v in stacks) and not graph.types[v].dtype.startswith("key<")
    }
    if not batch:
        raise PlanningError(
            "data parallelism needs an input that is not returned as state and has a batch dimension; this function "
            "has none: return the state that the step updates, or use planner=Auto()"
        )
    return Roles(
        batch=batch,
        parameters=frozenset(parameters),
        state=frozenset(returned - parameters),
        weights=_weights(assembly.root, {v: graph.types[v].rank for v in parameters}),
        batch_classes=_batch_classes(assembly.root, batch),
    )


def in_forward(graph: Graph, value: int) -> bool:
    """Whether the forward pass reads a value, in the loop over microbatches if there is one."""
    loop = loop_of(graph)
    for reader in graph.consumers.get(value, ()):
        node = graph.nodes[reader]
        if phase(node) == "forward":
            return True
        if reader == loop:
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


def _weights(region: Region, entering: Mapping[int, int]) -> dict[Value, int]:
    """The weights of a region and of those inside it: a parameter's slice in a loop has a dimension less.

    What a loop stacks of its weights, casts that it keeps for the backward pass, is a weight again.
    """
    found, known = {(region.number, value): rank for value, rank in entering.items()}, dict(entering)
    for index, joint in region.joints.items():
        node, control = region.graph.nodes[index], joint.control
        slots: dict[int, int] = {}
        for value, wire in zip(node.inputs, control.operands, strict=True):
            if (source := origin(region, value, known)) is not None and not control.slots[wire.slot].carry:
                slots[wire.slot] = known[source] - wire.stacked
                found[region.number, source] = slots[wire.slot]
        for body, inner in zip(control.bodies, joint.bodies, strict=True):
            inside = {v: slots[slot] for v, slot in zip(body.graph.inputs, body.inputs, strict=True) if slot in slots}
            found |= _weights(inner, inside)
            for value, slot in zip(body.graph.outputs, body.outputs, strict=True):
                if control.slots[slot].stacked and (source := origin(inner, value, inside)) is not None:
                    slots[slot] = inside[source]
        for value, wire in zip(node.outputs, control.results, strict=True):
            if wire.stacked and wire.slot in slots:
                known[value], found[region.number, value] = slots[wire.slot] + 1, slots[wire.slot]
    return found


def _batch_classes(root: Region, batch: Mapping[int, int]) -> dict[int, frozenset[int]]:
    """The classes of every bundle that the batch dimension reaches through the operators' factors."""
    dims: set[tuple[int, int, int]] = {(root.number, value, dim) for value, dim in batch.items()}
    classes: set[tuple[int, int]] = set()
    while True:
        before = len(dims) + len(classes)
        for region in root.all():
            _spread(region, dims, classes)
        if len(dims) + len(classes) == before:
            break
    found: dict[int, set[int]] = defaultdict(set)
    for node, cls in classes:
        found[node].add(cls)
    return {node: frozenset(own) for node, own in found.items()}


def _spread(region: Region, dims: set[tuple[int, int, int]], classes: set[tuple[int, int]]) -> None:
    """Adds the dimensions and classes that one pass over a region's nodes reaches."""
    graph, grouping, here = region.graph, region.grouping, region.number
    for index, node in enumerate(graph.nodes):
        rule, home = grouping.rules[index], grouping.bundle_of(node)
        if index in region.joints:
            _through_slots(region, index, dims)
        elif rule.alias:
            pairs = zip(node.inputs, node.outputs, strict=True)
            dims |= {(here, b, d) for a, b in pairs for d in range(graph.types[a].rank) if (here, a, d) in dims}
        elif home is not None:
            bundle, at = grouping.bundles[home], region.first + home
            own = [bundle.find(cls) for cls in bundle.factor_classes[index]]
            for value, factors in zip(node.inputs, rule.operands, strict=True):
                classes |= {(at, own[f]) for d, f in enumerate(factors) if f >= 0 and (here, value, d) in dims}
            for value, factors in zip(node.outputs, rule.results, strict=True):
                dims |= {(here, value, d) for d, f in enumerate(factors) if f >= 0 and (at, own[f]) in classes}


def _through_slots(region: Region, index: int, dims: set[tuple[int, int, int]]) -> None:
    """Carries batch dimensions from operands to slots, into and out of bodies, and to results."""
    joint, node, here = region.joints[index], region.graph.nodes[index], region.number
    slots: set[tuple[int, int]] = set()
    for value, wire in zip(node.inputs, joint.control.operands, strict=True):
        slots |= {(wire.slot, d - wire.stacked) for r, v, d in dims if (r, v) == (here, value) and d >= wire.stacked}
    for body, inner in zip(joint.control.bodies, joint.bodies, strict=True):
        for value, slot in zip(body.graph.outputs, body.outputs, strict=True):
            slots |= {(slot, d) for r, v, d in dims if (r, v) == (inner.number, value)}
    for body, inner in zip(joint.control.bodies, joint.bodies, strict=True):
        for value, slot in zip(body.graph.inputs, body.inputs, strict=True):
            dims |= {(inner.number, value, d) for s, d in slots if s == slot}
    for value, wire in zip(node.outputs, joint.control.results, strict=True):
        dims |= {(here, value, d + wire.stacked) for s, d in slots if s == wire.slot}


def _check_batch(assembly: Assembly, batch: Mapping[int, int], axes: Sequence[str]) -> None:
    """Raises PlanningError unless the axes divide the batch dimension of every batch input."""
    graph, parts = assembly.root.graph, math.prod(map(assembly.mesh.axis_size, axes))
    for position, value in enumerate(graph.inputs):
        size = graph.types[value].shape[batch[value]] if value in batch else 0
        if size % parts:
            name = graph.input_names[position] if position < len(graph.input_names) else f"input {position}"
            larger = -(-size // parts) * parts
            what = "leading dimension" if batch[value] == 0 else "microbatches, which have a dimension"
            along = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {', '.join(map(repr, axes))}"
            raise PlanningError(
                f"{name} has type {graph.types[value]}: {parts} devices on {along} do not divide its {what} "
                f"of {size}. Use a batch of {larger}, fewer devices, or planner=Auto()"
            )


def _restrict(
    assembly: Assembly,
    allows: Callable[[Region, int, Strategy], bool],
    allows_input: Callable[[int, ShardingSpec], bool],
    allows_slot: Callable[[Value, ShardingSpec], bool] = lambda value, spec: True,
    allows_stacked: Callable[[ShardingSpec], bool] = lambda spec: True,
    held: Callable[[Value, ShardingSpec], float] = lambda value, spec: 0.0,
) -> Assembly:
    """The assembly without the strategies that the predicates refuse; a node that would lose all keeps all.

    Of those that a node keeps, only the ones under which its values take the fewest bytes, as `held` counts them.
    """
    root, seconds = assembly.root, list(assembly.problem.seconds)

    def keep(node: int, kept: Sequence[bool], nbytes: Sequence[float]) -> None:
        if any(kept):
            least = min(n for one, n in zip(kept, nbytes, strict=True) if one)
            few = np.array(kept) & (np.array(nbytes) <= least * (1 + 1e-9))
            seconds[node] = np.where(few, seconds[node], np.inf)

    for region in root.all():
        made: dict[int, list[tuple[Value, Sequence[ShardingSpec]]]] = defaultdict(list)
        for value, border in region.borders.items():
            made[border.node].append(((region.number, value), border.specs))
        for b, table in enumerate(region.tables):
            absorbed = {v: region.borders[v].specs for v in region.grouping.bundles[b].inputs}
            legal = [allows(region, b, strategy) for strategy in table.strategies]
            fits = [all(allows_input(v, specs[s]) for v, specs in absorbed.items()) for s in range(len(legal))]
            # Where an input cannot lie as it should beside what reads it, as running statistics of a batch that is cut,
            # it gives way.
            both = [one and other for one, other in zip(legal, fits, strict=True)]
            kept = both if any(both) else legal
            ours = made[region.first + b]
            nbytes = [sum(held(value, specs[s]) for value, specs in ours) for s in range(len(kept))]
            keep(region.first + b, kept, nbytes)
        for joint in region.joints.values():
            for body, inner in zip(joint.control.bodies, joint.bodies, strict=True):
                for value, slot in zip(body.graph.inputs, body.inputs, strict=True):
                    border, where = joint.slots[slot], (inner.number, value)
                    kept = [allows_slot(where, spec) for spec in border.specs]
                    keep(border.node, kept, [held(where, spec) for spec in border.specs])
                for value, slot in zip(body.graph.outputs, body.outputs, strict=True):
                    border, where = joint.slots[slot], (inner.number, inner.grouping.roots.get(value, value))
                    if joint.control.slots[slot].stacked:
                        kept = [allows_stacked(spec) for spec in border.specs]
                        keep(border.node, kept, [held(where, spec) for spec in border.specs])
    for value in root.grouping.loose:
        border, where = root.borders[value], (root.number, value)
        keep(border.node, [allows_input(value, spec) for spec in border.specs], [held(where, s) for s in border.specs])
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)))


def _cut(spec: ShardingSpec, axis: str) -> bool:
    return any(axis in axes for axes in spec.dims)


def _picked(strategy: Strategy, axis: str) -> int | None:
    return dict(strategy.picks).get(axis)


def _on_batch(found: Roles, node: int, strategy: Strategy, axis: str) -> bool:
    """Whether the axis cuts the batch where there is one, and nothing elsewhere."""
    classes = found.batch_classes.get(node)
    pick = _picked(strategy, axis)
    return pick in classes if classes else pick in (None, PARTIAL)


def data_parallel(assembly: Assembly) -> Assembly:
    """Only strategies of data parallelism along the mesh's one axis."""
    if not assembly.mesh.axes:
        return assembly
    found, axis = roles(assembly), assembly.mesh.axes[0]
    _check_batch(assembly, found.batch, (axis,))
    return _restrict(
        assembly,
        lambda region, bundle, strategy: _on_batch(found, region.first + bundle, strategy, axis),
        lambda value, spec: (axis in spec.dims[found.batch[value]]) if value in found.batch else not _cut(spec, axis),
    )


def zero(stage: int) -> Callable[[Assembly], Assembly]:
    """The restriction of ZeRO's stage 1, 2 or 3 on a mesh of one or more axes: the batch is cut over all of them.

    State is cut over as many devices as its dimensions allow. Raises PlanningError for another stage.
    """
    if stage not in (1, 2, 3):
        raise PlanningError(
            f"Zero(stage={stage!r}): ZeRO has stages 1, 2 and 3; use one of them, or DataParallel() for none"
        )

    def restrict(assembly: Assembly) -> Assembly:
        mesh, axes = assembly.mesh, assembly.mesh.axes
        if not axes:
            return assembly
        found, root = roles(assembly), assembly.root
        graphs = {region.number: region.graph for region in root.all()}
        _check_batch(assembly, found.batch, axes)
        sharded = {(root.number, v) for v in found.state | (found.parameters if stage == 3 else frozenset[int]())}
        if stage == 3:
            sharded |= found.weights.keys()
            sharded |= {(region.number, v) for region in root.all() for v in _made_of_weights(region, found)}

        def allows(region: Region, bundle: int, strategy: Strategy) -> bool:
            node = region.first + bundle
            return node not in found.batch_classes or all(_on_batch(found, node, strategy, axis) for axis in axes)

        def allows_input(value: int, spec: ShardingSpec) -> bool:
            if value in found.batch:
                return spec.dims[found.batch[value]] == axes
            return (root.number, value) in sharded or spec.is_replicated

        def held(value: Value, spec: ShardingSpec) -> float:
            return spec.local_nbytes(graphs[value[0]].types[value[1]], mesh) if value in sharded else 0.0

        # Gradients of a loop's layers are scattered one by one: all of them whole would be what ZeRO is there to avoid.
        return _restrict(assembly, allows, allows_input, allows_stacked=lambda spec: not spec.partial, held=held)

    return restrict


def _made_of_weights(region: Region, found: Roles) -> Iterator[int]:
    """What a region makes of one weight, a cast for one: it is a weight as well, cut as that is and fetched for use.

    What is no cast, a transpose for one, of a weight that the forward pass reads as it is too, is none: it is made of
    the copy that is fetched for the other reader, where it would be fetched a second time itself.
    """
    graph, own = region.graph, {value for where, value in found.weights if where == region.number}
    light, copied = weights(graph), set[int]()
    whole = {
        value
        for node in graph.nodes
        if phase(node) == "forward" and not node.subgraphs and light.isdisjoint(node.outputs)
        for value in node.inputs
    }
    for node in graph.nodes:  # in order: what is made of a copy is one
        fetched = copied if node.primitive == "convert_element_type" else copied | whole
        if not fetched.isdisjoint(node.inputs):
            copied |= light.intersection(node.outputs)
    for value in sorted((light - copied) & region.borders.keys()):
        if origin(region, value, own) is not None:
            yield value


def megatron(assembly: Assembly, data: str = "data", tensor: str = "tensor") -> Assembly:
    """Only strategies that cut the batch over `data` and every matrix that is multiplied or looked up over `tensor`."""
    axes = assembly.mesh.axes
    if tensor not in axes:
        return data_parallel(assembly)
    found = roles(assembly)
    if data in axes:
        _check_batch(assembly, found.batch, (data,))
    weighty = {region.first + b: own for region in assembly.root.all() for b, own in _weight_classes(region, found)}
    multiplied = _multiplied(assembly.root, found)
    matrices = {value for value in multiplied if found.weights[value] > 1}

    def allows(region: Region, bundle: int, strategy: Strategy) -> bool:
        node = region.first + bundle
        if data in axes and not _on_batch(found, node, strategy, data):
            return False
        pick = _picked(strategy, tensor)
        if weighty[node]:
            return pick in weighty[node]
        return pick not in found.batch_classes.get(node, ())

    def allows_input(value: int, spec: ShardingSpec) -> bool:
        if value in found.batch:
            return (data not in axes or data in spec.dims[found.batch[value]]) and not _cut(spec, tensor)
        if data in axes and _cut(spec, data):
            return False
        return (assembly.root.number, value) not in matrices or _cut(spec, tensor)

    def allows_slot(value: Value, spec: ShardingSpec) -> bool:
        return value not in matrices or _cut(spec, tensor)

    return _restrict(assembly, allows, allows_input, allows_slot)


def textbook(mesh: Mesh) -> Iterator[tuple[Callable[[Assembly], Assembly], bool]]:
    """What planners by hand forbid on a mesh, whatever its axes are called, and whether each fetches weights anew."""
    if len(mesh.axes) == 1:
        yield data_parallel, False
        yield partial(megatron, data="", tensor=mesh.axes[0]), False
    for data, tensor in permutations(mesh.axes, 2):
        if len(mesh.axes) == 2:
            yield partial(megatron, data=data, tensor=tensor), False
    for stage in (1, 3):
        yield zero(stage), stage == 3


def _multiplied(region: Region, found: Roles) -> set[Value]:
    """The weights that heavy operators read; a table of positions, which is merely added, is none of them."""
    graph, grouping, here = region.graph, region.grouping, region.number
    weights = {value for where, value in found.weights if where == here}
    read = [v for b in grouping.bundles if not b.light for member in b.members for v in graph.nodes[member].inputs]
    for index, joint in region.joints.items():
        inside = set[Value]().union(*(_multiplied(inner, found) for inner in joint.bodies))
        bodies = zip(joint.control.bodies, joint.bodies, strict=True)
        entering = [(n.number, v, slot) for b, n in bodies for v, slot in zip(b.graph.inputs, b.inputs, strict=True)]
        slots = {slot for number, value, slot in entering if (number, value) in inside}
        operands = zip(graph.nodes[index].inputs, joint.control.operands, strict=True)
        read += [value for value, wire in operands if wire.slot in slots]
    return {(here, source) for v in read if (source := origin(region, v, weights)) is not None}.union(
        *(_multiplied(inner, found) for joint in region.joints.values() for inner in joint.bodies)
    )


def _weight_classes(region: Region, found: Roles) -> Iterator[tuple[int, frozenset[int]]]:
    """Every bundle of a region with the classes of its heavy members that stand on a weight matrix."""
    graph, grouping = region.graph, region.grouping
    weights = {value: rank for (where, value), rank in found.weights.items() if where == region.number}
    for index, bundle in enumerate(grouping.bundles):
        classes: set[int] = set()
        for member in bundle.members if not bundle.light else ():
            own = [bundle.find(cls) for cls in bundle.factor_classes[member]]
            operands = zip(graph.nodes[member].inputs, grouping.rules[member].operands, strict=True)
            for value, factors in operands:
                if graph.types[value].rank > 1 and origin(region, value, weights) is not None:
                    classes |= {own[f] for f in factors if f >= 0}
        yield index, frozenset(classes)


def origin(region: Region, value: int, weights: Collection[int]) -> int | None:
    """The weight that a value is, or is once it is transposed, reshaped or cast; None for anything else."""
    graph, roots = region.graph, region.grouping.roots
    value = roots.get(value, value)
    while value in graph.producers:
        node = graph.nodes[graph.producers[value]]
        arrays = [v for v in node.inputs if v not in graph.literals]
        if node.subgraphs or len(arrays) != 1 or graph.types[arrays[0]].size != graph.types[value].size:
            return None
        value = roots.get(arrays[0], arrays[0])
    return value if value in weights else None
