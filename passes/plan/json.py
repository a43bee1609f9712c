"""The parts of a plan as JSON and back, in a form that people can read and edit: one operator a line.

Specs are stored as their text (`[x, -] add@y`). Operators stand in runs that share a source line and a scope, each as
`["dot_general", "[x, -] [-, y] -> [x, y]"]`. Readers raise PlanningError and name the place in the file.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NoReturn, cast, get_args

from passes.cluster import Cluster, Collective, Kind, Mesh
from passes.errors import PlanningError
from passes.files import write_whole
from passes.ir import TensorType
from passes.memory import Holder
from passes.placement import Layout, Placement
from passes.plan.parts import MemoryReport, Operator
from passes.plan.text import placement_text
from passes.sharding import REDUCTIONS, ShardingSpec, parse_spec

_SPEC = re.compile(r"\[[^\[\]]*\](?: \w+@[^\s\[\]]+)?")
_AXIS = r"[^\s\[\],+@-][^\s\[\],+@]*"
_DIM = rf"(?:-|{_AXIS}(?:\+{_AXIS})*)"
_WELL_FORMED = re.compile(rf"\[(?:{_DIM}(?:, {_DIM})*)?\](?: (?:{'|'.join(REDUCTIONS)})@{_AXIS}(?:\+{_AXIS})*)?")


def version() -> str:
    """The installed autopar's version, `unknown` when it runs from a folder."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("autopar")
    return "unknown"


def text(data: Mapping[str, object]) -> str:
    """JSON text, one entry a line in the lists of the top level, and in every run of operators."""
    fields = ",\n".join(f"  {_dump(key)}: {_field(value, '  ')}" for key, value in data.items())
    return f"{{\n{fields}\n}}\n"


def write(path: str | os.PathLike[str], data: Mapping[str, object]) -> None:
    """Writes a file at once: a reader sees the old one or all of the new one. Raises PlanningError where it cannot."""
    try:
        write_whole(path, text(data).encode())
    except OSError as error:
        raise PlanningError(f"{os.fspath(path)}: the plan cannot be written: {error.strerror}") from error


_REMEDY = "name a file that plan.save(path) or `autopar plan --out` wrote"


def read(path: str | os.PathLike[str]) -> object:
    """The JSON in a file. Raises PlanningError where there is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refused)
    except OSError as error:
        raise PlanningError(f"the plan cannot be read: {error.strerror}\n  {_REMEDY}") from error
    except ValueError as error:
        raise PlanningError(f"this is not JSON: {error}\n  {_REMEDY}") from error


def _refused(name: str) -> NoReturn:
    """Raises ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def _field(value: object, indent: str) -> str:
    entries = cast(list[object], value) if isinstance(value, list) else []
    if not entries:
        return _dump(cast(object, value))
    lines = ",\n".join(f"{indent}  {_entry(entry, indent + '  ')}" for entry in entries)
    return f"[\n{lines}\n{indent}]"


def _entry(value: object, indent: str) -> str:
    """The JSON of a value on one line, except for a stage, and for a run of operators, the last field of its object."""
    head = dict(cast(Mapping[str, object], value)) if isinstance(value, dict) else {}
    if "operators" in head:
        return text(head).rstrip().replace("\n", f"\n{indent}")
    if "run" not in head:
        return _dump(cast(object, value))
    run = head.pop("run")
    return f'{_dump(head)[:-1]}, "run": {_field(run, indent)}}}'


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a JSON object, read by name and kind; `where` is the object's place in the file."""

    data: Mapping[str, object]
    where: str = ""

    def of(self, name: str) -> object:
        """The field of that name. Raises PlanningError if it is missing, as the readers below do for another kind."""
        if name not in self.data:
            raise PlanningError(
                f"{self.where or 'the plan'} has no field {name!r}; it was cut short or edited. "
                "Plan again to get a whole one"
            )
        return self.data[name]

    def place(self, name: str) -> str:
        return f"{self.where}.{name}".lstrip(".")

    def text(self, name: str) -> str:
        return as_text(self.of(name), self.place(name))

    def int(self, name: str) -> int:
        return as_int(self.of(name), self.place(name))

    def float(self, name: str) -> float:
        return as_float(self.of(name), self.place(name))

    def list(self, name: str) -> Sequence[object]:
        return as_list(self.of(name), self.place(name))

    def object(self, name: str) -> Fields:
        return as_object(self.of(name), self.place(name))


def _wrong(value: object, expected: str, where: str) -> PlanningError:
    return PlanningError(f"{where} should be {expected}, and is {json.dumps(value, default=repr)[:60]}")


def as_object(value: object, where: str) -> Fields:
    """The fields of `value`, which must be an object.

    Raises PlanningError for anything else, as the readers below do.
    """
    if not isinstance(value, dict):
        raise _wrong(value, "an object", where)
    return Fields(cast(Mapping[str, object], value), where)


def as_list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise _wrong(value, "a list", where)
    return cast(Sequence[object], value)


def positions(entries: Sequence[object], size: int, where: str) -> tuple[int, ...]:
    """The positions in a list, each below `size`. Raises PlanningError for anything else."""
    for i, entry in enumerate(entries):
        if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < size:
            raise PlanningError(f"{where}[{i}] should be a whole number from 0 to {size - 1}, it is {entry!r}")
    return tuple(cast("Sequence[int]", entries))


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
    """A float as JSON can hold it: as text if it is not finite."""
    return value if math.isfinite(value) else repr(float(value))


def numbers(values: Mapping[str, float]) -> dict[str, float | str]:
    """Floats by name as JSON can hold them."""
    return {name: number(value) for name, value in values.items()}


FORBIDDEN = "forbidden"


def mesh_to_json(mesh: Mesh) -> dict[str, object]:
    """The mesh as `mesh_from_json` reads it."""
    axes: dict[str, object] = dict(zip(mesh.axes, mesh.sizes, strict=True))
    return axes | ({FORBIDDEN: list(mesh.forbidden)} if mesh.forbidden else {})


def mesh_from_json(axes: Fields, cluster: Cluster) -> Mesh:
    """The mesh that `{axis: size}` describes, with a list of `forbidden` kinds of collectives if there are any.

    Raises PlanningError for axes that are not valid, or for a cluster of too few devices.
    """
    written = axes.data.get(FORBIDDEN)
    forbidden = tuple(map(str, cast("Sequence[object]", written))) if isinstance(written, list) else ()
    axes = as_object({name: size for name, size in axes.data.items() if not (forbidden and name == FORBIDDEN)}, "mesh")
    for name in axes.data:
        if not re.fullmatch(_AXIS, name):
            raise PlanningError(f"mesh axis {name!r} is not a name; write no spaces, brackets, commas, + or @")
        if axes.int(name) < 1:
            raise PlanningError(f"mesh axis {name!r} has size {axes.int(name)}; the least is 1")
    sizes = tuple(axes.int(name) for name in axes.data)
    mesh = Mesh(axes=tuple(axes.data), sizes=sizes, cluster=cluster, forbidden=forbidden)
    if mesh.size > cluster.n_devices:
        raise PlanningError(f"mesh {mesh} needs {mesh.size} devices; cluster {cluster.name!r} has {cluster.n_devices}")
    return mesh


def spec_from_text(written: str, mesh: Mesh, where: str) -> ShardingSpec:
    """The spec of a text form. Raises PlanningError unless it parses and uses axes of `mesh`, each once."""
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
            raise PlanningError(f"{where}: {written} uses axis {axis!r} twice; an axis can cut only one dimension")
    return spec


def placement_from_text(written: str, mesh: Mesh, where: str) -> Placement:
    """The placement whose text is `[x, -] [-, y] -> [x, y]`. Raises PlanningError for one that is not valid."""
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
        {"source": source, "scope": scope, "run": [_operator_to_json(op) for op in run]}
        for (source, scope), run in runs
    ]


def _operator_to_json(operator: Operator) -> list[object]:
    """`[primitive, placement]`, for a loop or branch followed by its bodies."""
    bodies = [
        {
            "inputs": [str(spec) for spec in layout.inputs],
            "outputs": [str(spec) for spec in layout.outputs],
            "operators": operators_to_json(inside),
        }
        for layout, inside in zip(operator.placement.bodies, operator.bodies, strict=True)
    ]
    head: list[object] = [operator.primitive, placement_text(operator.placement)]
    return [*head, bodies] if bodies else head


def operators_from_json(
    entries: Sequence[object], mesh: Mesh, within: str = "", parsed: dict[str, Placement] | None = None
) -> tuple[Operator, ...]:
    """The operators of all runs, in order; `parsed` has the placements so far, by their text."""
    parsed = {} if parsed is None else parsed
    operators: list[Operator] = []
    for r, entry in enumerate(entries):
        run = as_object(entry, f"{within}operators[{r}]")
        source, scope = run.text("source"), run.text("scope")
        for item in run.list("run"):
            match item:
                case [str(primitive), str(written)] | [str(primitive), str(written), list()]:
                    where = f"{within}operator {len(operators)} ({primitive}{f' at {source}' if source else ''})"
                    placement = parsed.get(written) or placement_from_text(written, mesh, where)
                    parsed[written] = placement
                    bodies = cast(Sequence[Sequence[object]], item)[2:]
                    read = [
                        _body_from_json(body, mesh, f"{where}, body {i}: ", parsed)
                        for i, body in enumerate(bodies[0] if bodies else ())
                    ]
                    operators.append(
                        Operator(
                            primitive=primitive,
                            source=source,
                            scope=scope,
                            placement=replace(placement, bodies=tuple(lay for lay, _ in read)) if read else placement,
                            bodies=tuple(inside for _, inside in read),
                        )
                    )
                case _:
                    where = f"{within}operator {len(operators)} (in operators[{r}])"
                    raise _wrong(item, "[primitive, placement]", where)
    return tuple(operators)


def _body_from_json(
    entry: object, mesh: Mesh, where: str, parsed: dict[str, Placement]
) -> tuple[Layout, tuple[Operator, ...]]:
    """The layout and the operators of a loop's or branch's body."""
    body = as_object(entry, where.rstrip(": "))
    inside = operators_from_json(body.list("operators"), mesh, where, parsed)
    inputs, outputs = (
        tuple(
            spec_from_text(as_text(spec, f"{where}{kind}[{i}]"), mesh, f"{where}{kind}[{i}]")
            for i, spec in enumerate(body.list(kind))
        )
        for kind in ("inputs", "outputs")
    )
    placements = tuple(operator.placement for operator in inside)
    return Layout(inputs=inputs, placements=placements, outputs=outputs), inside


def values_to_json(names: Sequence[str], types: Sequence[TensorType], specs: Sequence[ShardingSpec]) -> list[object]:
    """Inputs or outputs: name, placement, and the type where it is known."""
    shown = [{"type": str(type)} for type in types] or [{}] * len(specs)
    entries = zip(names, specs, shown, strict=True)
    return [{"name": name, "placement": str(spec), **type} for name, spec, type in entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Inputs or outputs as read; `types` is empty where any is missing."""

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    specs: tuple[ShardingSpec, ...]


def values_from_json(entries: Sequence[object], mesh: Mesh, kind: str) -> Values:
    """The `kind` (`input` or `output`) values of a plan."""
    fields = [as_object(entry, f"{kind}s[{i}]") for i, entry in enumerate(entries)]
    named = [(f, f"{kind} {f.text('name')}") for f in fields]
    types = tuple(_type(f.text("type"), where) for f, where in named if "type" in f.data)
    return Values(
        names=tuple(f.text("name") for f in fields),
        types=types if len(types) == len(fields) else (),
        specs=tuple(spec_from_text(f.text("placement"), mesh, where) for f, where in named),
    )


def _type(written: str, where: str) -> TensorType:
    """The type whose text form is `float32[8,64]`."""
    match = re.fullmatch(r"([^\[\]]+)\[((?:\d+(?:,\d+)*)?)\]", written)
    if not match:
        raise _wrong(written, "a type like float32[8,64]", where)
    dtype, sizes = match.groups()
    return TensorType(shape=tuple(int(size) for size in sizes.split(",") if size), dtype=dtype)


def collective_to_json(c: Collective) -> dict[str, object]:
    """One collective, its axes as `x+y`."""
    axes = "+".join(c.axes)
    return {"kind": c.kind, "axes": axes, "dtype": c.dtype, "nbytes": c.nbytes, "count": c.count, "where": c.where}


def collective_from_json(data: Fields) -> Collective:
    """One collective. Raises PlanningError for a kind that does not exist."""
    kind = data.text("kind")
    if kind not in get_args(Kind):
        raise PlanningError(f"{data.place('kind')} is {kind!r}; the kinds are {', '.join(get_args(Kind))}")
    return Collective(
        kind=cast(Kind, kind),
        axes=tuple(data.text("axes").split("+")),
        dtype=data.text("dtype"),
        nbytes=data.int("nbytes"),
        count=data.int("count"),
        where=data.text("where"),
    )


def memory_to_json(memory: MemoryReport) -> dict[str, object]:
    """A plan's report of one device's memory, as JSON data."""
    holders = [{"name": h.name, "nbytes": h.nbytes, "cause": h.cause} for h in memory.holders]
    layers = {"layers": dict(memory.layers)} if memory.layers else {}
    return {"where": memory.where, "over_time": list(memory.over_time), "holders": holders, **layers}


def memory_from_json(data: Fields) -> MemoryReport:
    """A plan's report of one device's memory."""
    layers = data.object("layers") if "layers" in data.data else None
    holders = [as_object(entry, data.place(f"holders[{i}]")) for i, entry in enumerate(data.list("holders"))]
    return MemoryReport(
        where=data.text("where"),
        holders=tuple(Holder(name=h.text("name"), nbytes=h.int("nbytes"), cause=h.text("cause")) for h in holders),
        over_time=tuple(as_int(x, data.place(f"over_time[{i}]")) for i, x in enumerate(data.list("over_time"))),
        layers={name: layers.int(name) for name in layers.data} if layers else {},
    )
