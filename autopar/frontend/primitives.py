"""Primitives as tracing reads them: which are only calls, which have bodies, and their parameters as plain data."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.errors import UnsupportedError, explain
from autopar.frontend.placements import Placed, placement_of, specified
from autopar.frontend.products import without_transposes, without_vectors
from autopar.plan import axes_of
from passes.ir import TensorType

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "core_call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
}
"""Primitives that are only a call, and the parameter that holds what they call."""

BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""Primitives that stay nodes, and the parameters that hold their bodies in the order of `Node.subgraphs`."""

PLACED = frozenset({"sharding_constraint", "shard_map"})
"""Primitives whose parameters mean different things for other operands."""

ALONE = PLACED | {
    "cond",
    "pure_callback",
    "io_callback",
    "debug_callback",
    "ffi_call",
    "rng_bit_generator",
    "rng_uniform",
}
"""Primitives that are another thing for several rows at once: both branches, fewer calls, other dimensions, or numbers
that the first row's key draws for all.
"""

KERNELS = frozenset({"mosaic"})
"""Platforms on which Pallas lowers the inside of a kernel, and JAX no program."""

THREEFRY = "key<fry>"
"""The dtype of keys each of which draws its own numbers, however many keys there are."""

_HINTS = frozenset({"reshard", "mesh_cast"})
"""Primitives that only say where a value is to live, which the plan does."""

PUTS = frozenset({"device_put"})
"""Primitives that put their operands where their parameter `devices` says."""

_ATTENTION_BACKWARD = "dot_product_attention_bwd_wrapper"

_CALLABLE_DATA = (type, jax.sharding.Mesh, jax.sharding.AbstractMesh)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# What a program fingerprints must be the same in another process: large arrays in parameters count by size alone.
_LARGEST_ARRAY_PARAM = 64


_REDUCTIONS = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}


def dimension_reduction(equation: Any) -> Any:
    """The jaxpr of a collective over an axis of `vmap`, as a reduction over dimensions; None for any other equation."""
    reduce, params = _REDUCTIONS.get(equation.primitive.name), equation.params
    if reduce is None or params["axis_index_groups"] or not all(isinstance(axis, int) for axis in params["axes"]):
        return None
    return traced_for(lambda *xs: [reduce(x, params["axes"]) if params["axes"] else x for x in xs], equation)


def linear_solver(equation: Any) -> tuple[Any, Sequence[int]] | None:
    """(the jaxpr that a `jax.lax.custom_linear_solve` runs, the positions of its operands); None for any other
    equation.

    The other jaxprs are for derivatives, which have been taken.
    """
    if equation.primitive.name != "custom_linear_solve":
        return None
    counts, solve = equation.params["const_lengths"], equation.params["jaxprs"].solve
    first, sides = counts.matvec + counts.vecmat, sum(counts)
    return solve, (*range(first, first + counts.solve), *range(sides, len(equation.invars)))


def passes_on(equation: Any) -> bool:
    """Whether an equation's results are its operands: those of a hint, the one part of a split, a sum over nothing, or
    wide numbers in the precision that they have, as JAX rounds what is saved of a recomputed function.

    `jax.flatten_util.ravel_pytree`, and so `odeint`, splits the flat elements of a single array into one part; a part
    is of elements that may lie on several devices, so the split would bring them all to each. Derivatives sum over
    nothing where the caller has set a mesh.
    """
    name = equation.primitive.name
    is_one_part = name == "split" and len(equation.outvars) == 1
    is_of_nothing = name == "reduce_sum" and not equation.params["axes"]
    return name in _HINTS or is_one_part or is_of_nothing or _is_precise(equation)


def _is_precise(equation: Any) -> bool:
    """Whether an equation rounds float32 or float64 to no less than it has; XLA keeps bfloat16 in more than it has."""
    dtype, params = equation.invars[0].aval.dtype if equation.invars else None, equation.params
    if equation.primitive.name != "reduce_precision" or dtype not in (np.float32, np.float64):
        return False
    limits = jnp.finfo(dtype)
    return params["exponent_bits"] >= limits.nexp and params["mantissa_bits"] >= limits.nmant


def outside_kernels(equation: Any) -> tuple[Any, Sequence[int]] | None:
    """(the jaxpr that a choice by platform runs outside of kernels, the positions of its operands); None if there is no
    such choice.

    `jnp.diagonal` has a branch for kernels. A branch that never runs would have its collectives planned and priced.
    """
    platforms = equation.params.get("branches_platforms") or ()
    runs = [i for i, names in enumerate(platforms) if names is None or not KERNELS.issuperset(names)]
    return (equation.params["branches"][runs[0]], range(1, len(equation.invars))) if len(runs) == 1 else None


def without_elements(equation: Any) -> Any:
    """The jaxpr of an equation whose values without elements need nothing of the operands; None for any other.

    Such are empty results, empty parts, joins with empty arrays, and padding of them. `jax.lax.associative_scan` ends
    in such slices and joins. An array without elements is never sharded, so the slice that makes it would gather its
    whole operand on every device.
    """
    if all(0 not in var.aval.shape for side in (equation.invars, equation.outvars) for var in side):
        return None
    operands, results = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
    is_number = all(jnp.issubdtype(aval.dtype, np.number) or aval.dtype == bool for aval in results)
    if equation.effects or not is_number:
        return None
    name, params = equation.primitive.name, equation.params
    is_made = all(map(_is_empty, results)) and any(not isinstance(var, jax_compat.Literal) for var in equation.invars)
    if not is_made and name not in ("concatenate", "split") and not (name == "pad" and _is_empty(operands[0])):
        return None

    def rewritten(*xs: jax.Array) -> list[jax.Array]:
        match name:
            case _ if is_made:
                return [jax.lax.full(aval.shape, 0, aval.dtype) for aval in results]
            case "concatenate":
                return [jax.lax.concatenate([x for x in xs if x.size], params["dimension"])]
            case "split":
                parts = iter(jax.lax.split(xs[0], tuple(filter(None, params["sizes"])), params["axis"]))
                return [jax.lax.full(aval.shape, 0, aval.dtype) if _is_empty(aval) else next(parts) for aval in results]
            case _:
                return [jax.lax.full(results[0].shape, xs[1])]

    return traced_for(rewritten, equation)


def computed_equations(jaxpr: Any) -> list[Any]:
    """The equations of an open jaxpr, in which no product is only transposed, or of arrays as vectors, none says where
    arguments arrived, and cuDNN's attention computes no gradient of a bias that nobody reads.

    A mask is such a bias: JAX asks for the gradient of each, as large as the mask itself.
    """
    equations = without_vectors([_without_arrival(equation) for equation in jaxpr.eqns])
    equations = without_transposes(equations, jaxpr.outvars)
    if all(equation.primitive.name != _ATTENTION_BACKWARD for equation in equations):
        return equations
    atoms = [*jaxpr.outvars, *(atom for equation in equations for atom in equation.invars)]
    read = {atom for atom in atoms if not isinstance(atom, jax_compat.Literal)}
    return [_without_bias_gradient(equation, read) for equation in equations]


def _without_arrival(equation: Any) -> Any:
    """The equation without parameters that are shardings on a mesh whose axes JAX leaves to the compiler.

    A derivative has its operands' there, which says nothing. With it, a step called with arrays on a mesh would be
    another program than the same step called with arrays on one device.
    """
    if equation.primitive.name in PLACED:
        return equation
    sides = {key: value for key, value in equation.params.items() if isinstance(value, NamedSharding)}
    rank = len(equation.outvars[0].aval.shape) if sides else 0
    # JAX writes a cast's derivative on an empty mesh where its operand is on none, and nothing in other parameters.
    nowhere = NamedSharding(AbstractMesh((), ()), PartitionSpec(*[None] * rank)) if _casts(equation) else None
    left_open = {key: nowhere for key, value in sides.items() if {*value.mesh.axis_types} == {AxisType.Auto}}
    return equation.replace(params=equation.params | left_open) if left_open else equation


def _casts(equation: Any) -> bool:
    return equation.primitive.name == "convert_element_type"


def _without_bias_gradient(equation: Any, read: Collection[Any]) -> Any:
    """The equation, with three results if it is an attention's backward pass whose fourth nobody reads."""
    if equation.primitive.name != _ATTENTION_BACKWARD or not set(equation.outvars[3:]).isdisjoint(read):
        return equation
    has_bias, _ = equation.params["variadic_args"]
    params = equation.params | {"variadic_args": (has_bias, False)}
    return equation.replace(outvars=equation.outvars[:3], params=params)


def type_of(aval: Any) -> TensorType:
    """The planner's name for a JAX type."""
    name = dtype_name(aval.dtype)
    return TensorType(shape=tuple(int(d) for d in aval.shape), dtype="float0" if name == "void" else name)


def traced_for(fun: Callable[..., Any], equation: Any) -> Any:
    """The jaxpr of a function, traced for the operands of an equation."""
    with jax_compat.no_mesh():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars))


def without_dead_code(jaxpr: Any) -> tuple[Any, tuple[bool, ...]]:
    """(a closed jaxpr without equations that no output needs, in loops and branches too; which inputs it reads).

    That is what `jax.jit` compiles. All inputs are kept.
    """
    opened, constants = jax_compat.open_jaxpr(jaxpr)
    live, _ = dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)
    atoms = [*live.outvars, *(atom for equation in live.eqns for atom in equation.invars)]
    read = {atom for atom in atoms if not isinstance(atom, jax_compat.Literal)}
    return ClosedJaxpr(live, constants), tuple(var in read for var in live.invars)


def _is_empty(aval: Any) -> bool:
    return 0 in aval.shape


def node_params(equation: Any, source: str) -> dict[str, object]:
    """An equation's parameters as planning reads them: the user's placements, a loop's counts, or all as they are.

    Raises UnsupportedError for a `shard_map` that leaves axes to the plan.
    """
    params = equation.params
    match equation.primitive.name:
        case "sharding_constraint":
            shape, free = equation.invars[0].aval.shape, params["unconstrained_dims"] or ()
            placement = placement_of(params["sharding"], shape, free, source)
            return {"dims": placement.dims, "devices": placement.devices}
        case "shard_map":
            mesh = params["mesh"]
            if len(jax_compat.manual_axes(params)) < len(mesh.axis_names):
                raise UnsupportedError(
                    explain(
                        f"shard_map over some axes of mesh {tuple(mesh.axis_names)}",
                        "a plan decides nothing inside a shard_map, so all of its axes must be manual",
                        source,
                        "drop axis_names, or take the shard_map away and let the plan cut what it computes",
                    )
                )
            sides = (("in_specs", equation.invars), ("out_specs", equation.outvars))
            specs = {s: tuple(map(_spec, params[s], (v.aval.ndim for v in values))) for s, values in sides}
            return {**specs, "mesh": dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))}
        case "scan":
            plain = {key: value for key, value in params.items() if key not in ("ft_in", "ft_out")}
            return plain_params(plain) | jax_compat.scan_counts(params)
        case _:
            return plain_params(params)


def placed_by(equation: Any) -> tuple[Placed, Placed]:
    """The shardings in which an equation has its operands and its results; None, or empty, where it says nothing.

    Transfers to another memory are left alone.
    """
    params = equation.params
    if equation.primitive.name in PUTS:
        kinds = (None, "device")
        return (), tuple(s if s and s.memory_kind in kinds else None for s in specified(params["devices"]))
    return specified(params.get("in_shardings", ())), specified(params.get("out_shardings", ()))


def meshes_of(equation: Any) -> list[Any]:
    """The shardings and meshes in an equation's parameters."""
    params = equation.params
    match equation.primitive.name:
        case "sharding_constraint":
            return [params["sharding"]]
        case "shard_map":
            return [params["mesh"]]
        case name if name in CALLS or name in PUTS:
            operands, results = placed_by(equation)
            return [sharding for sharding in (*operands, *results) if sharding]
        case _:
            return []


def _spec(spec: Any, rank: int) -> str:
    """A PartitionSpec as planning writes it."""
    parts = [*spec, *(None,) * (rank - len(spec))]
    return f"[{', '.join('+'.join(axes_of(part)) or '-' for part in parts)}]"


def plain_params(params: Mapping[str, Any]) -> dict[str, object]:
    """Parameters as plain data with the same text in every process; jaxprs and callables are left out."""
    return {key: _plain(value) for key, value in params.items() if not _is_code(value)}


def _plain(value: Any) -> object:
    match value:
        case None | str():
            return value
        case enum.Enum():
            return value.name
        case bool() | np.bool_():
            return bool(value)
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            return float(value)
        case np.dtype():
            return dtype_name(value)
        case tuple() if hasattr(value, "_fields"):
            fields = zip(getattr(value, "_fields", ()), value, strict=True)
            return {key: _plain(item) for key, item in fields if not _is_code(item)}
        case tuple() | list():
            return tuple(_plain(item) for item in value if not _is_code(item))
        case Mapping():
            return {str(key): _plain(item) for key, item in sorted(value.items(), key=str) if not _is_code(item)}
        case frozenset() | set():
            return tuple(sorted(map(str, value)))
        case object() if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        case np.ndarray() if value.size <= _LARGEST_ARRAY_PARAM:
            return _plain(value.tolist())
        case np.ndarray():
            return f"{value.dtype.name}{list(value.shape)}"
        case type() if issubclass(value, np.generic):
            return np.dtype(value).name
    return _ADDRESS.sub("", str(value))


def _is_code(value: Any) -> bool:
    """Whether a parameter is a program or a collection of programs rather than data.

    Types and meshes are data, though both can be called.
    """
    if isinstance(value, tuple | list):
        return len(value) > 0 and all(map(_is_code, value))
    return jax_compat.is_jaxpr(value) or (callable(value) and not isinstance(value, _CALLABLE_DATA))


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype, cached, as NumPy composes it anew each time."""
    return str(dtype.name)


def unsupported(primitive: str, reason: str, source: str) -> str:
    """The message about a primitive whose effect no plan can keep, for this reason."""
    if "reference" in reason:
        remedy = "carry the value through the function as an argument and a result instead of updating it in place"
    else:
        remedy = "drop ordered=True, or move the callback out of the planned function"
    return explain(
        f"{primitive} {reason}",
        "a plan may run the program's operations on many devices at once, in any order that its values allow",
        source,
        remedy,
    )
