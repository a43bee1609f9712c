"""The user's own mesh and placements of inputs, around which the rest of the program is planned."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from passes.cluster import Cluster, Mesh
from passes.errors import NoLegalPlanError, PlanningError, close, explain
from passes.intra_op.assembly import Assembly
from passes.ir import Graph, TensorType
from passes.plan import json as plan_json
from passes.sharding import ShardingSpec, parse_spec, spec_on
from passes.text import count, plain_integer

KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""The kinds of collectives that move values within a mesh."""

Pins = tuple[tuple[str, ShardingSpec], ...]
"""Patterns of names, each with a placement whose trailing uncut dimensions may be left out."""


def checked_pins(pins: object) -> Pins:
    """The pins that a user wrote, such as `{"params/*/kernel": P(None, "x")}` or `"[-, x]"` as text; none for None.

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
        spec = parse_spec(placement)
        if unnamed := [axis for axes in spec.dims for axis in axes if not axis.isidentifier()]:
            rule = f"{unnamed[0]!r} is no mesh axis"
            raise PlanningError(explain(what, rule, "", 'write axes, joined by "+", and "-" for none: "[-, x+y]"'))
        return spec
    entries = list(cast("Iterable[object]", placement)) if isinstance(placement, Iterable) else None
    if entries is None or isinstance(placement, str):
        rule = 'a placement is a PartitionSpec, P(None, "x"), or text, "[-, x]"'
        raise PlanningError(explain(what, rule, "", "write one entry a dimension, in brackets where it is text"))
    dims: list[tuple[str, ...]] = []
    for entry in entries:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in cast("Any", axes)):
            rule = f"{entry!r} is not None, a mesh axis or a tuple of axes"
            raise PlanningError(explain(what, rule, "", 'write, say, P(None, ("x", "y"))'))
        dims.append(cast("tuple[str, ...]", axes))
    return ShardingSpec(dims=tuple(dims))


def _is_axis(name: object, size: object) -> bool:
    """Whether this is an axis name and a size: XLA ends the process for a name that is not ASCII, and saved plans
    reserve one.
    """
    is_name = isinstance(name, str) and name.isascii() and name.isidentifier() and name != plan_json.FORBIDDEN
    return is_name and type(size) is int and size > 0


def checked_mesh(mesh: object) -> tuple[tuple[str, int], ...]:
    """The axes and sizes that a user wrote as `{"data": 4, "model": 2}`; none for None. Raises PlanningError."""
    if mesh is None or isinstance(mesh, tuple):
        return cast("tuple[tuple[str, int], ...]", mesh or ())
    written: Mapping[object, object] = cast("Any", mesh) if isinstance(mesh, Mapping) else {}
    axes: dict[object, object] = {name: plain_integer(size) for name, size in written.items()}
    if not axes or not all(_is_axis(name, size) for name, size in axes.items()):
        rule = "a mesh is a dict from names of axes (ASCII letters, digits, _; not 'forbidden') to numbers of devices"
        raise PlanningError(explain(f"mesh={mesh!r:.60}", rule, "", 'write, say, mesh={"data": 4, "model": 2}'))
    return tuple(cast("Mapping[str, int]", axes).items())


def checked_kinds(allow: Iterable[str] | None, forbid: Iterable[str]) -> tuple[str, ...]:
    """The kinds of collectives that a plan must not use. Raises PlanningError for unknown kinds."""
    for name, kinds in (("allow", () if allow is None else allow), ("forbid", forbid)):
        is_list = isinstance(cast("object", kinds), Iterable) and not isinstance(kinds, str)
        unknown = [kind for kind in kinds if kind not in KINDS] if is_list else [kinds]
        if unknown:
            rule = f"{unknown[0]!r} is no kind of collective; these are {', '.join(KINDS)}"
            shown = repr(list(kinds)) if is_list else f"{kinds!r:.60}"
            raise PlanningError(explain(f"{name}={shown}", rule, "", f'write, say, {name}={{"all_to_all"}}'))
    forbidden = set(forbid)
    if allow is not None and forbidden:
        rule = "kinds of collectives are allowed or forbidden, not both"
        raise PlanningError(explain("Auto(allow=, forbid=)", rule, "", "leave one of them out"))
    allowed = set(KINDS if allow is None else allow) - forbidden
    return tuple(kind for kind in KINDS if kind not in allowed)


def without(mesh: Mesh, kinds: tuple[str, ...]) -> Mesh:
    """The mesh on which plans use none of these kinds of collectives."""
    return replace(mesh, forbidden=kinds) if kinds else mesh


def mesh_named(cluster: Cluster, axes: Sequence[tuple[str, int]], stage_devices: int | None = None) -> Mesh:
    """The mesh of these axes over all devices of a cluster, or over the devices of a stage.

    Raises PlanningError where the axes have more or fewer devices.
    """
    total = math.prod(size for _, size in axes)
    if total != (stage_devices or cluster.n_devices):
        holder = (
            f"the stage has {stage_devices}" if stage_devices else f"cluster {cluster.name!r} has {cluster.n_devices}"
        )
        rule = f"this makes {count(total, 'device')}, and {holder}"
        raise PlanningError(
            explain(f"mesh={dict(axes)}", rule, "", "choose sizes whose product is the number of devices")
        )
    return Mesh(axes=tuple(name for name, _ in axes), sizes=tuple(size for _, size in axes), cluster=cluster)


def path_of(name: str) -> str:
    """The name of an input as a path: `state/params/Block_0/kernel` of `state.params['Block_0']['kernel']`."""
    return "/".join(re.findall(r"[^\[\]'\".]+", name))


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    """The positions of the inputs that a pattern names: a whole path or its end, `*` standing for anything.

    It may be written as plans show names, too: `state.step`, `state.params['kernel']`.
    """
    pattern = path_of(pattern).strip("/")
    paths = [path_of(name) for name in names]
    return [i for i, path in enumerate(paths) if fnmatch.fnmatchcase(f"/{path}", f"*/{pattern}")]


def guesses(pattern: str, names: Sequence[str]) -> str:
    """The inputs that a pattern which matches none may mean, as text for an error; the first inputs if none
    is similar.
    """
    paths = [path_of(name) for name in names]
    listed = f"{', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}"
    return close(pattern, paths) or f"inputs are {listed or 'none'}"


def placed_inputs(pins: Pins, names: Sequence[str], types: Sequence[TensorType]) -> dict[int, ShardingSpec]:
    """The placement of each input that is pinned, by its position. Raises PlanningError for a pin of no input."""
    chosen: dict[int, ShardingSpec] = {}
    for pattern, spec in pins:
        positions = matching(pattern, names)
        if not positions:
            rule = "no input of the step has such a name"
            raise PlanningError(explain(f"pins[{pattern!r}]", rule, guesses(pattern, names), "name one"))
        for position in positions:
            rank = types[position].rank
            if len(spec.dims) > rank:
                rule = (
                    f"{spec} has {len(spec.dims)} dimensions, {path_of(names[position])} {types[position]} has {rank}"
                )
                raise PlanningError(explain(f"pins[{pattern!r}]", rule, "", "write one entry a dimension"))
            chosen[position] = replace(spec, dims=spec.dims + ((),) * (rank - len(spec.dims)))
    return chosen


@dataclass(frozen=True, slots=True)
class ByName:
    """The restriction of a program to placements of its inputs by their names; pins that match no input are ignored."""

    pins: Pins

    def placed(self, graph: Graph) -> dict[int, ShardingSpec]:
        """The placement of each input of a program that is pinned, by its position."""
        names, types = graph.input_names, [graph.types[v] for v in graph.inputs]
        here = tuple((pattern, spec) for pattern, spec in self.pins if matching(pattern, names))
        return placed_inputs(here, names, types)

    def check(self, graph: Graph) -> None:
        """Raises PlanningError for a pin of no input of a program."""
        placed_inputs(self.pins, graph.input_names, [graph.types[v] for v in graph.inputs])

    def __call__(self, assembly: Assembly) -> Assembly:
        return pinned(assembly, self.placed(assembly.root.graph))


@dataclass(frozen=True, slots=True)
class Both:
    """The restriction that applies two others, one after the other."""

    first: Callable[[Assembly], Assembly]
    second: Callable[[Assembly], Assembly]

    def __call__(self, assembly: Assembly) -> Assembly:
        return self.second(self.first(assembly))


_OTHERWISE = "plan with Auto() and without stages, or leave it out of in_shardings= and placed="


def pinned(
    assembly: Assembly, chosen: Mapping[int, ShardingSpec], kind: str = "the pin", remedy: str = "pin it otherwise"
) -> Assembly:
    """The assembly in which inputs have the pinned placements. Raises NoLegalPlanError where this mesh does not allow
    them.
    """
    graph, root = assembly.root.graph, assembly.root
    seconds = list(assembly.problem.seconds)
    for position, spec in chosen.items():
        value = graph.inputs[position]
        site = root.sites.get(value)
        if site is None:  # nothing reads it: it is whole everywhere
            continue
        is_pinned = np.array([other == spec for other in site.specs])
        if not np.isfinite(np.where(is_pinned, seconds[site.node], np.inf)).any():
            what = f"{kind} {spec} of {path_of(graph.input_names[position])} {graph.types[value]}"
            raise _impossible(what, graph.types[value], spec, assembly.mesh, site.specs, remedy)
        seconds[site.node] = np.where(is_pinned, seconds[site.node], np.inf)
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(seconds)))


def arriving(assembly: Assembly) -> Assembly:
    """The assembly in which inputs arrive in the user's placements. Raises NoLegalPlanError where the mesh has no such
    axes.
    """
    graph, chosen = assembly.root.graph, dict[int, ShardingSpec]()
    for position, placement in graph.pinned.items():
        spec = spec_on(placement, assembly.mesh)
        if spec is None:
            what = f"the sharding {placement} of {graph.input_names[position]} {graph.types[graph.inputs[position]]}"
            rule = f"no axes of the mesh {assembly.mesh} cut it so"
            raise NoLegalPlanError(explain(what, rule, "", _OTHERWISE))
        chosen[position] = spec
    return pinned(assembly, chosen, "the sharding", _OTHERWISE)


def _impossible(
    what: str, type: TensorType, spec: ShardingSpec, mesh: Mesh, possible: Sequence[ShardingSpec], remedy: str
) -> NoLegalPlanError:
    """The error of an input whose pinned placement is not possible."""
    unknown = sorted({axis for axes in spec.dims for axis in axes} - set(mesh.axes))
    uneven = [
        f"{'+'.join(axes)} of {parts} does not divide dimension {dim} of {type.shape[dim]}"
        for dim, axes in enumerate(spec.dims)
        if not unknown and type.shape[dim] % (parts := int(np.prod([mesh.axis_size(axis) for axis in axes])))
    ]
    used = Counter(axis for axes in spec.dims for axis in axes)
    twice = [
        f"axis {axis!r} is written {times} times, and an axis cuts once" for axis, times in used.items() if times > 1
    ]
    missing = [f"mesh {mesh} has no axis {', '.join(map(repr, unknown))}"] if unknown else []
    reasons = "; ".join(missing or twice or uneven)
    rule = reasons or f"no operator can take it so on mesh {mesh}, beside the other pins"
    options = ", ".join(dict.fromkeys(str(other) for other in possible if not other.partial))
    return NoLegalPlanError(explain(what, rule, f"possible: {options}", remedy))
