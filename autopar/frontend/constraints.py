"""`autopar.constrain`: a value inside a step in a sharding that its user chooses, by the axes of the plan's mesh."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, explain
from autopar.plan import axes_of

Value = TypeVar("Value")

constrain_p = Primitive("autopar_constrain")
"""The identity, with the mesh axes that cut each dimension of its result; None where the planner decides."""

constrain_p.def_impl(lambda x, *, axes: x)
constrain_p.def_abstract_eval(lambda x, *, axes: x)
mlir.register_lowering(constrain_p, lambda ctx, x, *, axes: [x])
# What is read of a value and what is added to its gradient lie alike, as with `jax.lax.with_sharding_constraint`.
ad.deflinear2(constrain_p, lambda cotangent, x, *, axes: [constrain_p.bind(cotangent, axes=axes)])


def _batched(operands: Any, dims: Any, *, axes: tuple[tuple[str, ...] | None, ...]) -> tuple[Any, int]:
    (x,), (dim,) = operands, dims
    return constrain_p.bind(x, axes=(*axes[:dim], None, *axes[dim:])), dim


batching.primitive_batchers[constrain_p] = _batched


def constrain(value: Value, spec: PartitionSpec) -> Value:
    """`value`, an array or a pytree of arrays, for which plans use the sharding `spec`, by the names of their mesh's
    axes.

    Dimensions that the spec leaves out are replicated, and those of `P.UNCONSTRAINED` are for the planner to decide.
    Outside a planned step this is the identity. Name the axes by `Auto(mesh={"data": 4, "model": 2})`. Raises
    ArgumentError for a spec that does not fit the value.
    """
    return jax.tree.map(lambda x: constrain_p.bind(x, axes=_axes(x, spec)), value)


def _axes(x: Any, spec: Any) -> tuple[tuple[str, ...] | None, ...]:
    """The axes of every dimension of an array."""
    rank, written = jax.numpy.ndim(x), f"constrain(..., {spec!r:.60})"
    if not isinstance(spec, PartitionSpec):
        rule = "a placement is a PartitionSpec"
        raise ArgumentError(explain(written, rule, "", 'write, say, jax.P(None, "model"), one entry a dimension'))
    if len(spec) > rank:
        rule = f"it has {len(spec)} entries, and {jax.typeof(x)} has {rank} dimensions"
        raise ArgumentError(explain(written, rule, "", "write one entry a dimension"))
    entries = (*spec, *(None,) * (rank - len(spec)))
    axes = tuple(None if entry is PartitionSpec.UNCONSTRAINED else axes_of(entry) for entry in entries)
    names = [name for each in axes for name in each or ()]
    if strange := [name for name in names if not isinstance(name, str)]:
        rule, remedy = f"{strange[0]!r:.40} is no name of a mesh axis", 'write, say, jax.P(None, "model")'
        raise ArgumentError(explain(written, rule, "", remedy))
    if twice := [name for name in names if names.count(name) > 1]:
        rule = f"axis {twice[0]!r} is written {names.count(twice[0])} times, and an axis cuts once"
        raise ArgumentError(explain(written, rule, "", "name another axis, or None"))
    return axes
