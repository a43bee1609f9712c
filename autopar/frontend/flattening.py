"""A jaxpr as the planner's `Graph`: calls inlined, scalars as numbers, parameters as plain data, dead nodes removed.

`scan`, `while` and `cond` stay nodes with their bodies as subgraphs. A sharding constraint of the user's becomes the
devices of every piece, and so do other statements of where a value is (options of a `jit` inside, `device_put`); a
`shard_map` becomes the placements of its operands and results; `reshard`, which JAX leaves around them, says nothing
more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax.lax import broadcast_in_dim_p, concatenate_p, reshape_p, sharding_constraint_p, slice_p
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.errors import UnsupportedError
from autopar.frontend.bodies import Body, Equation, live_body
from autopar.frontend.by_row import (
    GATHER,
    SCATTERS,
    Count,
    Rows,
    Values,
    by_row,
    columns_of,
    entering,
    leaving,
    taken_whole,
)
from autopar.frontend.extremes import by_extreme
from autopar.frontend.known_numbers import as_number, branch_taken, computed, number_of, slice_taken
from autopar.frontend.placements import Placed, placement_of
from autopar.frontend.primitives import (
    BODIES,
    CALLS,
    PLACED,
    PUTS,
    computed_equations,
    dimension_reduction,
    dtype_name,
    linear_solver,
    node_params,
    outside_kernels,
    passes_on,
    placed_by,
    plain_params,
    type_of,
    unsupported,
    without_elements,
)
from autopar.frontend.row_loops import RowLoops
from autopar.frontend.row_tests import tested_by_row
from autopar.frontend.single_elements import without_windows
from autopar.frontend.sums_of_parts import joined_sum
from passes.ir import Node, TensorType

ROWWISE = SCATTERS | {GATHER}
"""Primitives that may take one element of each row."""

SIMPLER = (dimension_reduction, without_elements, by_extreme, tested_by_row, without_windows)
"""Functions to the jaxpr of simpler equations in place of one; to None where there is none."""


def flatten(
    jaxpr: Any,
    *,
    input_names: tuple[str, ...] = (),
    output_names: tuple[str, ...] = (),
    out_shardings: Placed = (),
    row_loops: RowLoops | None = None,
    single_loops: bool = False,
) -> Body:
    """The body of a closed jaxpr, with its outputs in these shardings where there are any; rows of `row_loops` run side
    by side. A loop of one iteration becomes what it runs, except where `single_loops` are wanted as loops.

    Raises UnsupportedError for a side effect or reference that no plan can keep.
    """
    opened, consts = jax_compat.open_jaxpr(jaxpr)
    build = _Builder(row_loops or RowLoops(), single_loops)
    inputs = [build.fresh(var.aval) for var in opened.invars]
    outputs = build.inline(opened, consts, inputs, Site())
    outputs = list(build.constrained(outputs, out_shardings, Site()))
    return _finished(build, inputs, outputs, input_names, output_names)


def _inner(jaxpr: Any, call: Site, counts: Sequence[Count | None], single: bool) -> tuple[Body, list[Count | None]]:
    """(the body of a loop or branch at `call`, how its outputs count) for inputs that count as given."""
    opened, consts = jax_compat.open_jaxpr(jaxpr)
    build = _Builder(RowLoops(), single)
    inputs = [build.fresh(var.aval) for var in opened.invars]
    build.values.give(inputs, counts)
    outputs = build.inline(opened, consts, inputs, call)
    return _finished(build, inputs, outputs, (), ()), list(map(build.values.count, outputs))


@dataclass(frozen=True, slots=True)
class Site:
    """The place of an equation: its name stack and the user's line, or those of the call around it."""

    scope: str = ""
    source: str = ""

    def inside(self, equation: Any) -> Site:
        scope = "/".join(filter(None, (self.scope, jax_compat.scope_of(equation))))
        return Site(scope, jax_compat.source_of(equation, self.source))


class _Builder:
    """A graph under construction: values are numbered as they appear and renumbered at the end."""

    def __init__(self, row_loops: RowLoops, single_loops: bool) -> None:
        self.row_loops, self.single_loops = row_loops, single_loops
        self.types: list[TensorType] = []
        self._known_types: dict[Any, TensorType] = {}
        self._known_params: dict[tuple[object, ...], dict[str, object]] = {}
        self.nodes: list[Node] = []
        self.makers: dict[int, Node] = {}
        self.equations: list[Equation] = []
        self.kept: set[int] = set()  # nodes with an effect, which live without a reader
        self.literals: dict[int, float | int | bool | str] = {}
        self.constants: dict[int, Any] = {}
        self._literal_values: dict[tuple[str, str], int] = {}
        self._constant_values: dict[int, int] = {}
        self.values = Values(types=self.types, makers=self.makers, constants=self.constants, literals=self.literals)

    def fresh(self, aval: Any) -> int:
        key = (aval.shape, aval.dtype)
        if key not in self._known_types:
            self._known_types[key] = type_of(aval)
        return self.of_type(self._known_types[key])

    def of_type(self, type: TensorType) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def constant(self, array: Any, aval: Any) -> int:
        """The value of a captured array, one for each array however often it is captured."""
        if id(array) not in self._constant_values:
            self._constant_values[id(array)] = value = self.fresh(aval)
            self.constants[value] = array
        return self._constant_values[id(array)]

    def literal(self, literal: Any) -> int:
        """The value of a literal: a number if it is one, else a constant."""
        number = as_number(literal.val, literal.aval)
        dtype = literal.aval.dtype
        return self.constant(literal.val, literal.aval) if number is None else self._number(number, dtype)

    def _number(self, number: float | int | bool, dtype: Any) -> int:
        """The value of a number, the same for equal numbers."""
        key = (repr(number), dtype_name(dtype))
        if key not in self._literal_values:
            self._literal_values[key] = value = self.fresh(jax.ShapeDtypeStruct((), dtype))
            self.literals[value] = number
        return self._literal_values[key]

    def _spread(self, number: float | int | bool, aval: Any, site: Site) -> int:
        """The value of an array of which every element is this number."""
        value = self._number(number, aval.dtype)
        params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
        return self.write(broadcast_in_dim_p, (value,), (self.fresh(aval),), params, site)[0] if aval.shape else value

    def inline(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], call: Site) -> list[int]:
        """The output values of an open jaxpr called at `call`, with its equations appended."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            values[var] = self.constant(array, var.aval)

        def read(atom: Any) -> int:
            return self.literal(atom) if isinstance(atom, jax_compat.Literal) else values[atom]

        for equation in computed_equations(jaxpr):
            results = self.add(equation, tuple(map(read, equation.invars)), call.inside(equation))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def add(self, equation: Any, inputs: tuple[int, ...], site: Site) -> Sequence[int]:
        """The output values of an equation."""
        name = equation.primitive.name
        if passes_on(equation):
            return inputs
        if name in CALLS:
            inputs = _barrier(self, equation, inputs, site)
            operands, results = placed_by(equation)
            inner, consts = jax_compat.open_jaxpr(equation.params[CALLS[name]])
            outputs = self.inline(inner, consts, self.constrained(inputs, operands, site), site)
            return self.constrained(outputs, results, site)
        if name in PUTS and all(shardings := placed_by(equation)[1]):
            return self.constrained(inputs, shardings, site)
        if (callee := linear_solver(equation) or outside_kernels(equation)) is not None:
            jaxpr, taken = callee
            return self.inline(*jax_compat.open_jaxpr(jaxpr), [inputs[i] for i in taken], site)
        for simpler in (*SIMPLER, self.row_loops.of):
            if (jaxpr := simpler(equation)) is not None:
                return self.inline(*jax_compat.open_jaxpr(jaxpr), inputs, site)
        if (simplified := self._of_known(equation, inputs, site)) is not None:
            return simplified
        if reason := jax_compat.unkept_effect(equation):
            raise UnsupportedError(unsupported(name, reason, site.source))
        jaxprs = (jaxpr for key in BODIES.get(name, ()) for jaxpr in _several(equation.params[key]))
        into = entering(equation, list(map(self.values.count, inputs))) if name in BODIES else ()
        inner = [_inner(jaxpr, site, counts, self.single_loops) for jaxpr, counts in zip(jaxprs, into, strict=True)]
        bodies = tuple(body for body, _ in inner)
        outputs = tuple(self.fresh(var.aval) for var in equation.outvars)
        if inner:
            self.values.give(outputs, leaving(equation, [counts for _, counts in inner]))
        if equation.effects:
            self.kept.add(len(self.nodes))
        return self.append(
            Node(
                primitive=name,
                inputs=inputs,
                outputs=outputs,
                params=self._params(equation, site.source),
                subgraphs=tuple(body.graph for body in bodies),
                source=site.source,
                scope=site.scope,
            ),
            Equation(primitive=equation.primitive, params=equation.params, bodies=bodies),
        )

    def _of_known(self, equation: Any, inputs: tuple[int, ...], site: Site) -> Sequence[int] | None:
        """The output values of an equation that is simpler by what is known of its operands; None for any other."""
        if (number := computed(equation, inputs, self.values)) is not None:
            return (self._spread(number, equation.outvars[0].aval, site),)
        if (taken := branch_taken(equation, inputs, self.values)) is not None:
            return self.inline(*jax_compat.open_jaxpr(taken), inputs[1:], site)
        if not self.single_loops and equation.params.get("length") == 1 and "jaxpr" in equation.params:
            return _once(self, equation, inputs, site)
        if (places := slice_taken(equation, inputs, self.values)) is not None:
            return self.write(slice_p, inputs[:1], (self.fresh(equation.outvars[0].aval),), places, site)
        if (joined := joined_sum(equation, inputs, self.values)) is not None:
            return _joined(self, equation, joined, site)
        if equation.primitive.name not in ROWWISE:
            return None
        if number_of(inputs[1], self.values) == 0 and (jaxpr := taken_whole(equation)) is not None:
            return self.inline(*jax_compat.open_jaxpr(jaxpr), inputs, site)
        rows = by_row(equation.primitive.name, equation.params, inputs, self.values)
        return _by_row(self, equation, inputs, rows, site) if rows else None

    def write(
        self,
        primitive: jax_compat.Primitive,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        params: Mapping[str, Any],
        site: Site,
    ) -> tuple[int, ...]:
        """The output values of a primitive that the user's program does not have in this form."""
        node = Node(
            primitive=primitive.name,
            inputs=inputs,
            outputs=outputs,
            params=self._known_params.setdefault((primitive.name, repr(params)), plain_params(dict(params))),
            source=site.source,
            scope=site.scope,
        )
        return self.append(node, Equation(primitive=primitive, params=params))

    def constrained(self, values: Sequence[int], shardings: Placed, site: Site) -> tuple[int, ...]:
        """The values in these shardings, where there are any."""
        return tuple(self._constrained(v, s, site) for v, s in zip_longest(values, shardings))

    def _constrained(self, value: int, sharding: Sharding | None, site: Site) -> int:
        type = self.types[value]
        if sharding is None or not type.rank:
            return value
        placement = placement_of(sharding, type.shape, source=site.source)
        node = Node(
            primitive=sharding_constraint_p.name,
            inputs=(value,),
            outputs=(self.of_type(type),),
            params={"dims": placement.dims, "devices": placement.devices},
            source=site.source,
            scope=site.scope,
        )
        return self.append(node, Equation(primitive=sharding_constraint_p, params={"sharding": sharding}))[0]

    def _params(self, equation: Any, source: str) -> dict[str, object]:
        """The parameters of a node, converted once for equal ones; values that are equal but of other type
        stay apart.
        """
        values = tuple(equation.params.values())
        key = (equation.primitive.name, *equation.params, *map(type, values), *values)
        try:
            cached = self._known_params.get(key)
        except TypeError:  # unhashable
            return node_params(equation, source)
        if cached is None or equation.primitive.name in PLACED:
            cached = self._known_params[key] = node_params(equation, source)
        return cached

    def append(self, node: Node, equation: Equation) -> tuple[int, ...]:
        self.nodes.append(node)
        self.equations.append(equation)
        self.makers.update(dict.fromkeys(node.outputs, node))
        return node.outputs


def _once(build: _Builder, equation: Any, inputs: Sequence[int], site: Site) -> list[int]:
    """The output values of a loop of one iteration, which is its body on the only slice of what it goes over."""
    params, types, counts = equation.params, build.types, jax_compat.scan_counts(equation.params)
    carried, fixed = counts["num_carry"], counts["num_consts"] + counts["num_carry"]
    slices = [_reshaped(build, v, types[v].shape[1:], site) for v in inputs[fixed:]]
    outputs = build.inline(*jax_compat.open_jaxpr(params["jaxpr"]), [*inputs[:fixed], *slices], site)
    return outputs[:carried] + [_reshaped(build, v, (1, *types[v].shape), site) for v in outputs[carried:]]


def _joined(build: _Builder, equation: Any, parts: Sequence[int | tuple[int, ...]], site: Site) -> Sequence[int]:
    """The output value of parts that are joined, a shape standing for zeros."""
    (result,) = equation.outvars
    zeros = partial(jax.ShapeDtypeStruct, dtype=result.aval.dtype)
    operands = tuple(p if isinstance(p, int) else build._spread(0.0, zeros(p), site) for p in parts)
    return build.write(concatenate_p, operands, (build.fresh(result.aval),), {"dimension": 0}, site)


def _by_row(build: _Builder, equation: Any, inputs: tuple[int, ...], rows: Rows, site: Site) -> Sequence[int]:
    """The output values of a gather or scatter rewritten to take rows one by one."""
    indices = build.types[inputs[1]]
    columns = tuple(_column(build, inputs[1], place, site) for place in rows.columns)
    (first, *others) = columns
    if others:
        joined = build.of_type(replace(indices, shape=(*indices.shape[:-1], len(columns))))
        (first,) = build.write(concatenate_p, columns, (joined,), {"dimension": indices.rank - 1}, site)
    outputs = tuple(build.fresh(var.aval) for var in equation.outvars)
    return build.write(equation.primitive, (inputs[0], first, *inputs[2:]), outputs, rows.params, site)


def _reshaped(build: _Builder, value: int, shape: tuple[int, ...], site: Site) -> int:
    """The value with its elements in an array of another shape."""
    params = {"new_sizes": shape, "dimensions": None, "sharding": None}
    return build.write(reshape_p, (value,), (build.of_type(replace(build.types[value], shape=shape)),), params, site)[0]


def _column(build: _Builder, value: int, place: int, site: Site) -> int:
    """The value of a column of the last dimension."""
    if parts := columns_of(build.makers.get(value), build.types):
        return parts[place]
    type = build.types[value]
    *rows, _ = type.shape
    params = {"start_indices": (*[0] * len(rows), place), "limit_indices": (*rows, place + 1), "strides": None}
    return build.write(slice_p, (value,), (build.of_type(replace(type, shape=(*rows, 1))),), params, site)[0]


def _barrier(build: _Builder, equation: Any, inputs: tuple[int, ...], site: Site) -> tuple[int, ...]:
    """The inputs of a recomputation behind a barrier, without which XLA merges it with the first computation."""
    is_recomputation = equation.params.get("differentiated") and equation.params.get("prevent_cse")
    if not is_recomputation:
        return inputs
    every = is_recomputation if isinstance(is_recomputation, tuple) else (True,) * len(inputs)
    values = [v for v, hold in zip(inputs, every, strict=True) if hold and v not in build.literals]
    unique = tuple(dict.fromkeys(values))
    if not unique:
        return inputs
    outputs = tuple(build.of_type(build.types[v]) for v in unique)
    behind = dict(zip(unique, build.write(jax_compat.optimization_barrier_p, unique, outputs, {}, site), strict=True))
    return tuple(behind.get(v, v) if hold else v for v, hold in zip(inputs, every, strict=True))


def _finished(
    build: _Builder, inputs: list[int], outputs: list[int], input_names: tuple[str, ...], output_names: tuple[str, ...]
) -> Body:
    """The program written so far."""
    steps = list(zip(build.nodes, build.equations, strict=True))
    body = live_body(build.types, steps, build.kept, inputs, outputs, build.literals, build.constants)
    return replace(body, graph=replace(body.graph, input_names=input_names, output_names=output_names))


def _several(jaxprs: Any) -> tuple[Any, ...]:
    return tuple(jaxprs) if isinstance(jaxprs, tuple | list) else (jaxprs,)
