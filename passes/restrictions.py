"""What the textbook plans forbid: strategies of a sharding problem ruled out, the rest still solved for.

A plan's name says little about its optimizer, its embedding or its loss; ruling out what the textbook does not do and
solving the rest fills those gaps the best way, and puts the plan on the path that every other plan takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from passes.bundles import Grouping
from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.intra_op import Floats
from passes.ir import Graph
from passes.problem import Assembly
from passes.sharding import ShardingSpec
from passes.strategies import PARTIAL, Strategy


def check_sizes(sizes: Mapping[str, int], cluster: Cluster) -> None:
    """Raises PlanningError unless the sizes are positive and multiply to the cluster's devices."""
    total = int(np.prod(list(sizes.values())))
    if min(sizes.values()) < 1 or total != cluster.n_devices:
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise PlanningError(
            f"{asked} makes {total} devices, the cluster {cluster.name!r} has {cluster.n_devices}; "
            "choose sizes whose product is the number of devices"
        )


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the inputs are: `batch` inputs carry the batch on dimension 0, `parameters` are state that the loss reads,
    `state` is the rest of what the step returns again; `batch_classes[b]` are the classes of bundle b on the batch.
    """

    batch: frozenset[int]
    parameters: frozenset[int]
    state: frozenset[int]
    batch_classes: tuple[frozenset[int], ...]


def roles(assembly: Assembly) -> Roles:
    """The roles of a step's inputs. Raises PlanningError when no input looks like a batch."""
    graph, grouping = assembly.graph, assembly.grouping
    returned = {graph.inputs[i] for _, i in assembly.tied}
    parameters: set[int] = set()
    for value in returned:
        readers = {grouping.home.get(graph.nodes[r].outputs[0]) for r in graph.consumers.get(value, ())}
        if any(b is not None and grouping.bundles[b].phase == "forward" for b in readers):
            parameters.add(value)
    batch = {
        v
        for v in graph.inputs
        if v not in returned and graph.types[v].rank and not graph.types[v].dtype.startswith("key<")
    }
    if not batch:
        raise PlanningError(
            "data parallelism needs an input that is not returned as state and has a batch dimension; this function "
            "has none: return the state that the step updates, or use planner=Auto()"
        )
    return Roles(
        batch=frozenset(batch),
        parameters=frozenset(parameters),
        state=frozenset(returned - parameters),
        batch_classes=_batch_classes(graph, grouping, batch),
    )


def _batch_classes(graph: Graph, grouping: Grouping, batch: set[int]) -> tuple[frozenset[int], ...]:
    """The classes of every bundle that the batch dimension reaches through the operators' factors."""
    dims = {(value, 0) for value in batch}
    classes: set[tuple[int, int]] = set()
    while True:
        before = len(dims) + len(classes)
        for index, node in enumerate(graph.nodes):
            rule = grouping.rules[index]
            if rule.alias:
                pairs = zip(node.inputs, node.outputs, strict=True)
                dims |= {(b, d) for a, b in pairs for d in range(graph.types[a].rank) if (a, d) in dims}
                continue
            home = grouping.home.get(node.outputs[0])
            if home is None:
                continue
            bundle = grouping.bundles[home]
            own = [bundle.find(cls) for cls in bundle.factor_classes[index]]
            for value, factors in zip(node.inputs, rule.operands, strict=True):
                classes |= {(home, own[f]) for d, f in enumerate(factors) if f >= 0 and (value, d) in dims}
            for value, factors in zip(node.outputs, rule.results, strict=True):
                dims |= {(value, d) for d, f in enumerate(factors) if f >= 0 and (home, own[f]) in classes}
        if len(dims) + len(classes) == before:
            break
    return tuple(frozenset(c for b, c in classes if b == i) for i in range(len(grouping.bundles)))


def _check_batch(assembly: Assembly, batch: frozenset[int], axis: str) -> None:
    """Raises PlanningError unless the axis divides the leading dimension of every batch input."""
    graph, parts = assembly.graph, assembly.mesh.axis_size(axis)
    for position, value in enumerate(graph.inputs):
        size = graph.types[value].shape[0] if value in batch else 0
        if size % parts:
            name = graph.input_names[position] if position < len(graph.input_names) else f"input {position}"
            larger = -(-size // parts) * parts
            raise PlanningError(
                f"{name} has type {graph.types[value]}: {parts} devices on axis {axis!r} do not divide its leading "
                f"dimension of {size}. Use a batch of {larger}, fewer devices, or planner=Auto()"
            )


def _restrict(
    assembly: Assembly,
    allows: Callable[[int, Strategy], bool],
    allows_input: Callable[[int, ShardingSpec], bool],
) -> Assembly:
    """The assembly without the strategies that the predicates refuse; a node that would lose all keeps all."""
    seconds: list[Floats] = []
    absorbed = [tuple(bundle.inputs) for bundle in assembly.grouping.bundles]
    for b, (table, own) in enumerate(zip(assembly.tables, assembly.problem.seconds, strict=False)):
        kept = np.array(
            [
                allows(b, strategy) and all(allows_input(v, assembly.borders[v].specs[s]) for v in absorbed[b])
                for s, strategy in enumerate(table.strategies)
            ]
        )
        seconds.append(_keep(own, kept))
    for value, own in zip(assembly.grouping.loose, assembly.problem.seconds[len(assembly.tables) :], strict=True):
        kept = np.array([allows_input(value, spec) for spec in assembly.borders[value].specs])
        seconds.append(_keep(own, kept))
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)))


def _keep(seconds: Floats, kept: np.ndarray) -> Floats:
    return np.where(kept, seconds, np.inf) if kept.any() else seconds


def _cut(spec: ShardingSpec, axis: str) -> bool:
    return any(axis in axes for axes in spec.dims)


def _picked(strategy: Strategy, axis: str) -> int | None:
    return dict(strategy.picks).get(axis)


def _on_batch(found: Roles, bundle: int, strategy: Strategy, axis: str) -> bool:
    """Whether the axis cuts the batch where there is one, and nothing elsewhere."""
    classes = found.batch_classes[bundle]
    pick = _picked(strategy, axis)
    return pick in classes if classes else pick in (None, PARTIAL)


def data_parallel(assembly: Assembly) -> Assembly:
    """Only strategies of data parallelism along the mesh's one axis."""
    if not assembly.mesh.axes:
        return assembly
    found, axis = roles(assembly), assembly.mesh.axes[0]
    _check_batch(assembly, found.batch, axis)
    return _restrict(
        assembly,
        lambda bundle, strategy: _on_batch(found, bundle, strategy, axis),
        lambda value, spec: (axis in spec.dims[0]) if value in found.batch else not _cut(spec, axis),
    )


def zero(stage: int) -> Callable[[Assembly], Assembly]:
    """The restriction of ZeRO's stage 1, 2 or 3. Raises PlanningError for another stage."""
    if stage not in (1, 2, 3):
        raise PlanningError(
            f"Zero(stage={stage}): ZeRO has stages 1, 2 and 3; use one of them, or DataParallel() for none"
        )

    def restrict(assembly: Assembly) -> Assembly:
        if not assembly.mesh.axes:
            return assembly
        found, axis = roles(assembly), assembly.mesh.axes[0]
        _check_batch(assembly, found.batch, axis)
        sharded = found.state | (found.parameters if stage == 3 else frozenset[int]())
        shardable = {
            v for v in sharded if any(_cut(spec, axis) for spec in assembly.borders[v].specs if v in assembly.borders)
        }

        def allows(bundle: int, strategy: Strategy) -> bool:
            return not found.batch_classes[bundle] or _on_batch(found, bundle, strategy, axis)

        def allows_input(value: int, spec: ShardingSpec) -> bool:
            if value in found.batch:
                return axis in spec.dims[0]
            return _cut(spec, axis) == (value in shardable)

        return _restrict(assembly, allows, allows_input)

    return restrict


def megatron(assembly: Assembly) -> Assembly:
    """Only strategies that cut the batch over `data` and every weight matrix over `tensor`."""
    axes = assembly.mesh.axes
    if "tensor" not in axes:
        return data_parallel(assembly)
    found, graph, grouping = roles(assembly), assembly.graph, assembly.grouping
    if "data" in axes:
        _check_batch(assembly, found.batch, "data")
    weighty: list[frozenset[int]] = []
    for bundle in grouping.bundles:
        classes: set[int] = set()
        for member in bundle.members if not bundle.light else ():
            own = [bundle.find(cls) for cls in bundle.factor_classes[member]]
            operands = zip(graph.nodes[member].inputs, grouping.rules[member].operands, strict=True)
            for value, factors in operands:
                if _comes_from(graph, grouping, value, found.parameters) and graph.types[value].rank > 1:
                    classes |= {own[f] for f in factors if f >= 0}
        weighty.append(frozenset(classes))
    matrices = {v for v in found.parameters if graph.types[v].rank > 1 and v in assembly.borders}

    def allows(bundle: int, strategy: Strategy) -> bool:
        if "data" in axes and not _on_batch(found, bundle, strategy, "data"):
            return False
        pick = _picked(strategy, "tensor")
        if weighty[bundle]:
            return pick in weighty[bundle]
        return pick not in found.batch_classes[bundle]

    def allows_input(value: int, spec: ShardingSpec) -> bool:
        if value in found.batch:
            return ("data" not in axes or "data" in spec.dims[0]) and not _cut(spec, "tensor")
        if "data" in axes and _cut(spec, "data"):
            return False
        return value not in matrices or _cut(spec, "tensor")

    return _restrict(assembly, allows, allows_input)


def _comes_from(graph: Graph, grouping: Grouping, value: int, parameters: frozenset[int]) -> bool:
    """Whether a value is a parameter, or a parameter transposed, reshaped or cast."""
    value = grouping.roots.get(value, value)
    while value in graph.producers:
        node = graph.nodes[graph.producers[value]]
        arrays = [v for v in node.inputs if v not in graph.literals]
        if len(arrays) != 1 or graph.types[arrays[0]].size != graph.types[value].size:
            return False
        value = grouping.roots.get(arrays[0], arrays[0])
    return value in parameters
