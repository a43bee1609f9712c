"""A mesh and placements of inputs that the user has chosen: the rest of the program is solved for around them."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from passes.cluster import Cluster, Mesh
from passes.errors import NoLegalPlanError, PlanningError, close, explain
from passes.intra_op.assembly import Assembly
from passes.ir import TensorType
from passes.sharding import ShardingSpec, parse_spec

Pins = tuple[tuple[str, ShardingSpec], ...]
"""Patterns of names, each with a placement whose trailing uncut dimensions may be left out."""


def checked_pins(pins: object) -> Pins:
    """The pins that a user wrote, as `{"params/*/kernel": P(None, "x")}` or with text, `"[-, x]"`; none for None.

    Raises PlanningError for anything else.
    """
    if pins is None:
        return ()
    if isinstance(pins, tuple):
        return cast("Pins", pins)
    remedy = 'write, say, pins={"params/*/mlp/kernel": P(None, "x")}'
    if not isinstance(pins, Mapping):
        raise PlanningError(explain(f"pins={pins!r:.60}", "pins are a dict from names to placements", "", remedy))
    return tuple((str(pattern), _spec(pattern, placement)) for pattern, placement in cast("Any", pins).items())


def _spec(pattern: object, placement: object) -> ShardingSpec:
    """The spec of a PartitionSpec, or of its text form. Raises PlanningError."""
    what = f"pins[{pattern!r}]={placement!r:.60}"
    if isinstance(placement, ShardingSpec):
        return placement
    if isinstance(placement, str) and re.fullmatch(r"\[.*\]", placement):
        return parse_spec(placement)
    entries = list(cast("Iterable[object]", placement)) if isinstance(placement, Iterable) else None
    if entries is None or isinstance(placement, str):
        rule = 'a placement is a PartitionSpec, P(None, "x"), or text, "[-, x]"'
        raise PlanningError(explain(what, rule, "", "write one entry a dimension"))
    dims: list[tuple[str, ...]] = []
    for entry in entries:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in cast("Any", axes)):
            rule = f"{entry!r} is not None, a mesh axis or a tuple of axes"
            raise PlanningError(explain(what, rule, "", 'write, say, P(None, ("x", "y"))'))
        dims.append(cast("tuple[str, ...]", axes))
    return ShardingSpec(dims=tuple(dims))


def _is_axis(name: object, size: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and type(size) is int and size > 0


def checked_mesh(mesh: object) -> tuple[tuple[str, int], ...]:
    """The axes and sizes that a user wrote as `{"data": 4, "model": 2}`; none for None. Raises PlanningError."""
    if mesh is None or isinstance(mesh, tuple):
        return cast("tuple[tuple[str, int], ...]", mesh or ())
    axes = dict(cast("Mapping[object, object]", mesh)) if isinstance(mesh, Mapping) else {}
    if not axes or not all(_is_axis(name, size) for name, size in axes.items()):
        rule = "a mesh is a dict from names of axes to whole numbers of devices"
        raise PlanningError(explain(f"mesh={mesh!r:.60}", rule, "", 'write, say, mesh={"data": 4, "model": 2}'))
    return tuple(cast("Mapping[str, int]", axes).items())


def mesh_named(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> Mesh:
    """The mesh of these axes over all devices of a cluster. Raises PlanningError where there are more or fewer."""
    total = math.prod(size for _, size in axes)
    if total != cluster.n_devices:
        rule = f"this makes {total} devices, and cluster {cluster.name!r} has {cluster.n_devices}"
        raise PlanningError(
            explain(f"mesh={dict(axes)}", rule, "", "choose sizes whose product is the number of devices")
        )
    return Mesh(axes=tuple(name for name, _ in axes), sizes=tuple(size for _, size in axes), cluster=cluster)


def path_of(name: str) -> str:
    """The name of an input as a path: `state/params/Block_0/kernel` of `state.params['Block_0']['kernel']`."""
    return "/".join(re.findall(r"[^\[\]'\".]+", name))


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    """The positions of the inputs that a pattern names: all of a path or its end, `*` for anything."""
    pattern = path_of(pattern) if "[" in pattern else pattern.strip("/")
    paths = [path_of(name) for name in names]
    return [i for i, path in enumerate(paths) if fnmatch.fnmatchcase(f"/{path}", f"*/{pattern}")]


def placed_inputs(pins: Pins, names: Sequence[str], types: Sequence[TensorType]) -> dict[int, ShardingSpec]:
    """The placement of each input that is pinned, by its position. Raises PlanningError for a pin of no input."""
    chosen: dict[int, ShardingSpec] = {}
    for pattern, spec in pins:
        positions = matching(pattern, names)
        if not positions:
            paths = [path_of(name) for name in names]
            known = close(pattern, paths) or f"inputs are {', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}"
            raise PlanningError(
                explain(f"pins[{pattern!r}]", "no input of the step has such a name", known, "name one")
            )
        for position in positions:
            rank = types[position].rank
            if len(spec.dims) > rank:
                rule = (
                    f"{spec} has {len(spec.dims)} dimensions, {path_of(names[position])} {types[position]} has {rank}"
                )
                raise PlanningError(explain(f"pins[{pattern!r}]", rule, "", "write one entry a dimension"))
            chosen[position] = replace(spec, dims=spec.dims + ((),) * (rank - len(spec.dims)))
    return chosen


def pinned(assembly: Assembly, chosen: Mapping[int, ShardingSpec]) -> Assembly:
    """The assembly in which inputs lie as they are pinned. Raises NoLegalPlanError where they cannot on this mesh."""
    graph, root = assembly.root.graph, assembly.root
    seconds = list(assembly.problem.seconds)
    for position, spec in chosen.items():
        value = graph.inputs[position]
        site = root.sites.get(value)
        if site is None:  # nothing reads it: it is whole everywhere
            continue
        is_pinned = np.array([other == spec for other in site.specs])
        if not np.isfinite(np.where(is_pinned, seconds[site.node], np.inf)).any():
            raise _impossible(graph.input_names[position], graph.types[value], spec, assembly.mesh, site.specs)
        seconds[site.node] = np.where(is_pinned, seconds[site.node], np.inf)
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)))


def _impossible(
    name: str, type: TensorType, spec: ShardingSpec, mesh: Mesh, possible: Sequence[ShardingSpec]
) -> NoLegalPlanError:
    """The error of an input that cannot lie as it is pinned."""
    unknown = sorted({axis for axes in spec.dims for axis in axes} - set(mesh.axes))
    uneven = [
        f"{'+'.join(axes)} of {parts} does not divide dimension {dim} of {type.shape[dim]}"
        for dim, axes in enumerate(spec.dims)
        if not unknown and type.shape[dim] % (parts := int(np.prod([mesh.axis_size(axis) for axis in axes])))
    ]
    missing = f"mesh {mesh} has no axis {', '.join(map(repr, unknown))}" if unknown else ""
    rule = missing or "; ".join(uneven) or f"no operator can take it so on mesh {mesh}, beside the other pins"
    options = ", ".join(dict.fromkeys(str(other) for other in possible if not other.partial))
    return NoLegalPlanError(
        explain(f"the pin {spec} of {path_of(name)} {type}", rule, f"possible: {options}", "pin it otherwise")
    )
