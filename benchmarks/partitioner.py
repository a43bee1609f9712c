"""A plan's program by XLA's own partitioner, to check autopar's lowering against: `constrain`.

It computes on whole arrays under `jax.jit`, with a `with_sharding_constraint` on every result and on every step of a
resharding, and XLA finds the collectives. No constraint can say that an array is a partial sum: a partial result is
constrained to the sharding of its dimensions alone, and the steps that would reduce it have nothing left to do.

Only chains of single-axis constraints are followed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import NamedSharding

from autopar.frontend import Traced
from autopar.jax_compat import Device
from autopar.lowering.localize import Arrays, Cut, rebind
from autopar.lowering.lower import Program, body_of, build, device_mesh, reshardings_of, walk
from autopar.plan import partition_spec
from passes.cluster import Mesh
from passes.placement import Resharding
from passes.plan import Plan
from passes.sharding import ShardingSpec


def constrain(traced: Traced, plan: Plan, devices: Sequence[Device]) -> Program:
    """The program that a plan describes, left to XLA's partitioner; equal to `build`'s but for the collectives."""
    if not plan.mesh.axes:
        return build(traced, plan, devices)
    mesh = device_mesh(plan.mesh, devices)
    body, reshardings = body_of(traced), reshardings_of(traced, plan)
    semantics = OnWholes(mesh, plan.mesh)
    return Program(
        function=lambda *inputs: walk(body, plan.layout, reshardings, semantics, inputs),
        in_shardings=tuple(NamedSharding(mesh, partition_spec(spec)) for spec in plan.inputs),
        out_shardings=tuple(NamedSharding(mesh, partition_spec(spec)) for spec in plan.outputs),
        reshardings=reshardings,
    )


@dataclass(frozen=True, slots=True)
class OnWholes:
    """The meaning of a plan on whole arrays: placements and reshardings are sharding constraints on `mesh`."""

    mesh: jax.sharding.Mesh
    planned: Mesh

    def bind(self, cut: Cut, operands: Arrays) -> Arrays:
        """The results of an operator on whole operands, each constrained to its placement."""
        results = rebind(cut, operands)
        return [self._constrain(x, spec) for x, spec in zip(results, cut.placement.results, strict=True)]

    def move(self, array: jax.Array, move: Resharding) -> jax.Array:
        """An array brought from placement to placement by constraints, step by step.

        One in which several are packed has dimensions of its own, and stays as it is: whole, it is reduced.
        """
        spec = move.before
        if array.ndim != len(spec.dims):
            return array
        for step in move.steps:
            spec = step.apply(spec)
            array = self._constrain(array, spec)
        return array

    def share(self, array: jax.Array, spec: ShardingSpec) -> jax.Array:
        """The array as it is: it is whole."""
        return array

    def _constrain(self, array: jax.Array, spec: ShardingSpec) -> jax.Array:
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, partition_spec(spec)))
