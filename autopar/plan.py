"""A plan that knows the function it belongs to, and so can answer in the user's pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

import passes.plan
from autopar.errors import ArgumentError, UnboundPlanError, explain
from autopar.jax_compat import PyTreeDef
from passes.sharding import ShardingSpec


@dataclass(frozen=True, kw_only=True)
class Plan(passes.plan.Plan):
    """A plan bound to the pytrees of a function's arguments and results; a plan from a file is not bound yet."""

    in_tree: PyTreeDef | None = field(default=None, compare=False, repr=False)
    out_tree: PyTreeDef | None = field(default=None, compare=False, repr=False)

    @classmethod
    def bind(cls, plan: passes.plan.Plan, in_tree: PyTreeDef | None = None, out_tree: PyTreeDef | None = None) -> Self:
        """`plan` for a function whose (args, kwargs) and results have these trees."""
        chosen = {f.name: getattr(plan, f.name) for f in fields(passes.plan.Plan)}
        return cls(**chosen, in_tree=in_tree, out_tree=out_tree)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan saved at `path`, not bound to a function. Raises PlanningError for a file that is no plan."""
        return cls.bind(passes.plan.Plan.load(path))

    @property
    def shardings(self) -> tuple[Any, Any]:
        """(inputs, outputs): a PartitionSpec for each array; inputs as the pair (args, kwargs), statics left out.

        Raises UnboundPlanError for a plan that was loaded from a file, ArgumentError for a pytree of arrays alone.
        """
        if self.in_tree is None or self.out_tree is None:
            raise UnboundPlanError(
                explain(
                    f"plan.shardings of plan {self.fingerprint}",
                    "a plan from a file has specs but not the pytrees of a function's arguments and results",
                    "",
                    "bind it: parallelize(train_step, planner=Manual(path)).plan(state, batch).shardings, "
                    "or read plan.inputs beside plan.input_names",
                )
            )
        inputs = unflattened(self.in_tree, partition_specs(self.inputs), "plan.shardings")
        return inputs, unflattened(self.out_tree, partition_specs(self.outputs), "plan.shardings")


def unflattened(tree: PyTreeDef, leaves: Sequence[Any], what: str) -> Any:
    """The leaves, which are no arrays, in a function's own pytree.

    Raises ArgumentError, naming `what` they are, where a node of it takes nothing but arrays.
    """
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception as error:  # a node of the user's may raise anything
        rule = f"a node of the function's pytree takes no {type(leaves[0]).__name__}: {error}"
        remedy = "read plan.inputs and plan.outputs, which are flat, or let the node's unflatten take any leaf"
        raise ArgumentError(explain(what, rule, f"its tree is {tree}", remedy)) from error


def partition_specs(specs: Sequence[ShardingSpec]) -> tuple[PartitionSpec, ...]:
    """Each spec as JAX writes it, trailing uncut dimensions left out."""
    return tuple(map(partition_spec, specs))


def partition_spec(spec: ShardingSpec) -> PartitionSpec:
    """`PartitionSpec('data', None, ('a', 'b'))` for `[data, -, a+b, -]`."""
    dims = [axes[0] if len(axes) == 1 else axes or None for axes in spec.dims]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)
