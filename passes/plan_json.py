"""The parts of a plan as JSON and back, in a form that people can read and edit: one operator a line.

Specs are stored as their text (`[x, -] add@y`). Operators stand in runs that share a source line and a scope, each as
`["dot_general", "[x, -] [-, y] -> [x, y]"]`. Readers raise PlanningError and name the place in the file.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import cast

from passes.collectives import Collective
from passes.errors import PlanningError
from passes.ir import TensorType
from passes.mesh import Mesh
from passes.moves import Placement
from passes.plan_parts import Operator, Solution
from passes.plan_text import placement_text
from passes.sharding import ShardingSpec, parse_spec

Json = Mapping[str, object]

_SPEC = re.compile(r"\[[^\[\]]*\](?: \w+@[^\s\[\]]+)?")
_AXIS = r"[A-Za-z_]\w*"
_DIM = rf"(?:-|{_AXIS}(?:\+{_AXIS})*)"
_WELL_FORMED = re.compile(rf"\[(?:{_DIM}(?:, {_DIM})*)?\](?: (?:add|max|min|mul|or|and)@{_AXIS}(?:\+{_AXIS})*)?")


def version() -> str:
    """The installed autopar's version, `unknown` when it runs from a folder."""
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:
        return "unknown"


def text(data: Mapping[str, object]) -> str:
    """JSON text with every list of the top level, and every run of operators, one entry a line."""
    fields = ",\n".join(f"  {json.dumps(key)}: {_lines(value, '  ')}" for key, value in data.items())
    return "{\n" + fields + "\n}\n"


def _lines(value: object, indent: str) -> str:
    match value:
        case {"source": _, "scope": _, "run": run}:
            head = json.dumps({key: item for key, item in cast(Json, value).items() if key != "run"})
            return f'{head[:-1]}, "run": {_lines(run, indent)}}}'
        case list() if value and (indent == "  " or isinstance(value[0], list)):
            inner = indent + "  "
            entries = ",\n".join(f"{inner}{_lines(item, inner)}" for item in cast(list[object], value))
            return f"[\n{entries}\n{indent}]" if indent == "  " or isinstance(value[0], list) else json.dumps(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


# Reading values of a known kind


def field(data: Json, name: str, where: str = "the plan") -> object:
    """`data[name]`. Raises PlanningError where it is missing."""
    if name not in data:
        raise PlanningError(f"{where} has no field {name!r}; it was cut short or edited. Plan again to get a whole one")
    return data[name]


def _wrong(value: object, wanted: str, where: str) -> PlanningError:
    return PlanningError(f"{where} should be {wanted}, and is {json.dumps(value, default=repr)[:60]}")


def as_object(value: object, where: str) -> Json:
    """`value` as a JSON object. Raises PlanningError for anything else, as the readers below do."""
    if not isinstance(value, dict):
        raise _wrong(value, "an object", where)
    return cast(Json, value)


def as_list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise _wrong(value, "a list", where)
    return cast(Sequence[object], value)


def as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "text", where)
    return value


def as_int(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(value, "a whole number", where)
    return value


def as_float(value: object, where: str) -> float:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(value, "a number", where)
    return float(value)


def number(value: float) -> float | str:
    """A float as JSON can hold it: text where it is not finite."""
    return value if math.isfinite(value) else repr(float(value))


# Parts


def spec_from_text(value: object, mesh: Mesh, where: str) -> ShardingSpec:
    """The spec of a text form. Raises PlanningError unless it parses and uses axes of `mesh`, each once."""
    written = as_text(value, where)
    if not _WELL_FORMED.fullmatch(written):
        raise PlanningError(
            f"{where}: {written!r} is not a placement; write one entry a dimension, as in '[x, -]' or '[x+y, -] add@z'"
        )
    spec = parse_spec(written)
    used = [axis for axes in (*spec.dims, spec.partial) for axis in axes]
    for axis in used:
        if axis not in mesh.axes:
            raise PlanningError(f"{where}: {written} uses axis {axis!r}; the mesh has {', '.join(mesh.axes) or 'none'}")
        if used.count(axis) > 1:
            raise PlanningError(f"{where}: {written} uses axis {axis!r} twice; one axis can cut one dimension of a value")
    return spec


def placement_from_text(value: object, mesh: Mesh, where: str) -> Placement:
    """The placement whose text is `[x, -] [-, y] -> [x, y]`."""
    written = as_text(value, where)
    operands, arrow, results = written.partition("->")
    if not arrow or _SPEC.sub("", operands + results).strip():
        raise PlanningError(
            f"{where}: {written!r} is not operands, an arrow and results, as in '[x, -] [-, y] -> [x, y]'"
        )
    return Placement(
        operands=tuple(spec_from_text(s, mesh, f"{where}, operand {i}") for i, s in enumerate(_SPEC.findall(operands))),
        results=tuple(spec_from_text(s, mesh, f"{where}, result {i}") for i, s in enumerate(_SPEC.findall(results))),
    )


def operators_to_json(operators: Sequence[Operator]) -> list[object]:
    """Operators in runs that share a source line and a scope."""
    runs = itertools.groupby(operators, key=lambda op: (op.source, op.scope))
    return [
        {"source": source, "scope": scope, "run": [[op.primitive, placement_text(op.placement)] for op in run]}
        for (source, scope), run in runs
    ]


def operators_from_json(value: object, mesh: Mesh) -> tuple[Operator, ...]:
    found: list[Operator] = []
    for r, entry in enumerate(as_list(value, "operators")):
        run = as_object(entry, f"operators[{r}]")
        source = as_text(field(run, "source", f"operators[{r}]"), f"operators[{r}].source")
        scope = as_text(field(run, "scope", f"operators[{r}]"), f"operators[{r}].scope")
        for pair in as_list(field(run, "run", f"operators[{r}]"), f"operators[{r}].run"):
            match pair:
                case [str(primitive), str(written)]:
                    where = f"operator {len(found)} ({primitive} at {source})" if source else f"operator {len(found)}"
                    placement = placement_from_text(written, mesh, where)
                    found.append(Operator(primitive=primitive, source=source, scope=scope, placement=placement))
                case _:
                    raise _wrong(pair, "[primitive, placement]", f"operator {len(found)} (in operators[{r}])")
    return tuple(found)


def values_to_json(names: Sequence[str], types: Sequence[TensorType], specs: Sequence[ShardingSpec]) -> list[object]:
    """Inputs or outputs: name, placement, and the type where it is known."""
    shown = [{"type": str(type)} for type in types] or [{}] * len(specs)
    return [
        {"name": name, "placement": str(spec), **type} for name, spec, type in zip(names, specs, shown, strict=True)
    ]


def values_from_json(
    value: object, mesh: Mesh, kind: str
) -> tuple[tuple[str, ...], tuple[TensorType, ...], tuple[ShardingSpec, ...]]:
    """Names, types and specs of inputs or outputs; no types where any is missing."""
    entries = [as_object(entry, f"{kind}s[{i}]") for i, entry in enumerate(as_list(value, f"{kind}s"))]
    names = tuple(as_text(field(e, "name", f"{kind}s[{i}]"), f"{kind}s[{i}].name") for i, e in enumerate(entries))
    where = [f"{kind} {name}" for name in names]
    specs = tuple(spec_from_text(field(e, "placement", w), mesh, w) for e, w in zip(entries, where, strict=True))
    types = tuple(type_from_text(e["type"], w) for e, w in zip(entries, where, strict=True) if "type" in e)
    return names, types if len(types) == len(entries) else (), specs


def type_from_text(value: object, where: str) -> TensorType:
    """The type whose text form is `float32[8,64]`."""
    found = re.fullmatch(r"([^\[\]]+)\[((?:\d+(?:,\d+)*)?)\]", as_text(value, where))
    if not found:
        raise _wrong(value, "a type like float32[8,64]", where)
    dtype, sizes = found.groups()
    return TensorType(shape=tuple(int(size) for size in sizes.split(",") if size), dtype=dtype)


def collective_to_json(c: Collective) -> dict[str, object]:
    axes = list(c.axes)
    return dict(kind=c.kind, axes=axes, dtype=c.dtype, nbytes=c.nbytes, count=c.count, where=c.where)


def collective_from_json(value: object, where: str) -> Collective:
    data = as_object(value, where)
    return Collective(
        kind=as_text(field(data, "kind", where), where),  # type: ignore[arg-type]
        axes=tuple(as_text(axis, where) for axis in as_list(field(data, "axes", where), where)),
        dtype=as_text(field(data, "dtype", where), where),
        nbytes=as_int(field(data, "nbytes", where), where),
        count=as_int(field(data, "count", where), where),
        where=as_text(field(data, "where", where), where),
    )


def solution_to_json(solution: Solution) -> dict[str, object]:
    return {
        "planner": solution.planner,
        "status": solution.status,
        "objective_seconds": number(solution.objective),
        "bound_seconds": number(solution.bound),
        "phase_seconds": {name: number(seconds) for name, seconds in solution.phase_seconds.items()},
    }


def solution_from_json(value: object) -> Solution:
    data = as_object(value, "solution")
    phases = as_object(field(data, "phase_seconds", "solution"), "solution.phase_seconds")
    return Solution(
        planner=as_text(field(data, "planner", "solution"), "solution.planner"),
        status=as_text(field(data, "status", "solution"), "solution.status"),
        objective=as_float(field(data, "objective_seconds", "solution"), "solution.objective_seconds"),
        bound=as_float(field(data, "bound_seconds", "solution"), "solution.bound_seconds"),
        phase_seconds={name: as_float(seconds, f"solution.phase_seconds.{name}") for name, seconds in phases.items()},
    )
