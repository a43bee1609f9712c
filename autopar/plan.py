"""Plans that know their function, and so can answer in the user's pytrees."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import singledispatch
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import passes.plan
from autopar.errors import ArgumentError, UnboundPlanError, explain
from autopar.jax_compat import PyTreeDef
from passes import page
from passes.errors import InternalError
from passes.plan import STAGE, AnyPlan
from passes.sharding import ShardingSpec

Leaves = tuple[PyTreeDef, tuple[PartitionSpec, ...]]
"""A pytree of placements, taken apart."""


@dataclass(frozen=True, kw_only=True, repr=False)
class _Bound(AnyPlan):
    """A plan with the placements of a function's arguments and results; a plan from a file has none yet."""

    bound: tuple[Leaves, Leaves] | None = field(default=None, compare=False)

    @property
    def shardings(self) -> tuple[Any, Any]:
        """(inputs, outputs): a PartitionSpec for each array; inputs as the pair (args, kwargs), without static
        arguments.

        They are on the plan's mesh, or on that of the stage that has the array. An array whose rows are on several
        stages is cut over the axis `stage`, and on each stage as on the first of them.

        Raises UnboundPlanError for a plan that was loaded from a file, ArgumentError for a pytree that accepts only
        arrays.
        """
        if self.bound is None:
            raise UnboundPlanError(
                explain(
                    f"plan.shardings of plan {self.fingerprint}",
                    "a plan from a file has specs but not the pytrees of a function's arguments and results",
                    "",
                    "bind it: parallelize(train_step, planner=Manual(path)).plan(state, batch).shardings, "
                    "or read plan.inputs beside plan.input_names",
                )
            )
        arguments, results = self.bound
        return unflattened(*arguments, "plan.shardings"), unflattened(*results, "plan.shardings")

    def to_html(self, measured: str | os.PathLike[str] | None = None) -> str:
        """The plan as a self-contained web page: what was chosen, what it costs, and what was rejected.

        `measured` is a file that `train_step.report(...).write(path)` wrote: its measured steps are shown as well.
        """
        return page.html(self, page.Measured.load(Path(measured)) if measured else None)

    def _repr_html_(self) -> str:
        """The plan's page in a frame, as notebooks show it."""
        frame = 'title="plan" style="width:100%;height:48rem;border:0"'
        return f'<iframe {frame} srcdoc="{html.escape(self.to_html())}"></iframe>'


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(_Bound, passes.plan.Plan):
    """A plan of one program on one mesh, with the user's own pytrees."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PipelinePlan(_Bound, passes.plan.PipelinePlan):
    """A plan of a pipeline of several programs, with the user's own pytrees."""


@singledispatch
def bound(plan: AnyPlan, shardings: tuple[Leaves, Leaves]) -> Plan | PipelinePlan:
    """A plan with these placements of a function's arguments and results."""
    raise InternalError(f"a {type(plan).__name__} cannot be bound to a function")


@bound.register
def _(plan: passes.plan.Plan, shardings: tuple[Leaves, Leaves]) -> Plan:
    return Plan(**_fields(plan, passes.plan.Plan), bound=shardings)


@bound.register
def _(plan: passes.plan.PipelinePlan, shardings: tuple[Leaves, Leaves]) -> PipelinePlan:
    return PipelinePlan(**_fields(plan, passes.plan.PipelinePlan), bound=shardings)


def _fields(plan: AnyPlan, kind: type[passes.plan.Plan | passes.plan.PipelinePlan]) -> dict[str, Any]:
    return {f.name: getattr(plan, f.name) for f in fields(kind)}


def unflattened(tree: PyTreeDef, leaves: Sequence[Any], what: str) -> Any:
    """The leaves, which are not arrays, in a function's own pytree.

    Raises ArgumentError, which says `what` they are, if a node of the pytree accepts only arrays.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception as error:  # a node of the user's may raise anything
        rule = f"a node of the function's pytree takes no {type(leaves[0]).__name__}: {error}"
        remedy = "read plan.inputs and plan.outputs, which are flat, or let the node's unflatten take any leaf"
        raise ArgumentError(explain(what, rule, f"its tree is {tree}", remedy)) from error


def partition_specs(specs: Sequence[ShardingSpec]) -> tuple[PartitionSpec, ...]:
    """Each spec as a PartitionSpec, without trailing uncut dimensions."""
    return tuple(map(partition_spec, specs))


def partition_spec(spec: ShardingSpec) -> PartitionSpec:
    """`PartitionSpec('data', None, ('a', 'b'))` for `[data, -, a+b, -]`."""
    dims = [axes[0] if len(axes) == 1 else axes or None for axes in spec.dims]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec: None, an axis or a tuple of axes."""
    if isinstance(entry, tuple):
        return entry
    return () if entry is None else (entry,)


def joined_spec(pieces: Sequence[PartitionSpec]) -> PartitionSpec:
    """The placement of an array whose rows are on the stages of a pipeline, one part after the other."""
    if len(pieces) == 1:
        return pieces[0]
    rows, *inner = pieces[0] or (None,)
    axes = axes_of(rows)
    return PartitionSpec((STAGE, *axes) if axes else STAGE, *inner)
