"""A function that follows another one: arrays that the other one's plan has placed are taken as they are, and the rest
is planned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar.errors import ArgumentError, explain
from autopar.frontend import Placed, Signature, Traced
from autopar.options import Settings
from autopar.plan import PipelinePlan, Plan, partition_spec
from passes.ir import TensorType
from passes.planners import Auto, FollowingStages, counterparts


class Followed(Protocol):
    """A planned function: its program, plan and settings."""

    traced: Traced
    settings: Settings

    def plan(self) -> Plan | PipelinePlan: ...


@dataclass(frozen=True, slots=True, eq=False)
class _ThisPlan:
    """A key for a plan that equals only that plan's own key."""

    plan: Plan | PipelinePlan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisPlan) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@dataclass(frozen=True, slots=True)
class Following:
    """The plan of another function, where the state that it places is an argument of this one."""

    followed: Followed
    plan: Plan | PipelinePlan

    @property
    def key(self) -> Hashable:
        """A key for the plan; it keeps the plan alive, so that no other one gets its id."""
        return _ThisPlan(self.plan)

    def placed(
        self, signature: Signature, dynamic: Any, n_args: int, structs: Sequence[jax.ShapeDtypeStruct], kept: Placed
    ) -> Placed:
        """The sharding of each flat argument that is state of the other function; for others that in which it is to be
        `kept`, None where nothing says so.

        Arguments of a pipeline have None: its planner finds state on its stages.
        """
        (first, *_), graph = self.plan.programs, self.followed.traced.graph
        if self.plan.timeline is not None or not first.mesh.axes:
            return ()
        mesh = first.mesh
        state = sorted({i for _, i in self.followed.traced.state_pairs})
        known = [(graph.input_names[i], graph.types[graph.inputs[i]]) for i in state]
        types = [TensorType(shape=tuple(struct.shape), dtype=str(struct.dtype.name)) for struct in structs]
        places = counterparts(list(zip(signature.names(dynamic, n_args), types, strict=True)), known)
        on = AbstractMesh(mesh.sizes, mesh.axes, (AxisType.Auto,) * len(mesh.axes))
        specs = [None if place is None else partition_spec(first.inputs[state[place]]) for place in places]
        ours = (spec if spec is None else NamedSharding(on, spec) for spec in specs)
        return tuple(there or kept_there for there, kept_there in zip_longest(ours, kept))

    def settings(self, settings: Settings) -> Settings:
        """The settings with the other plan's devices and stages, where the user does not say otherwise."""
        theirs = self.followed
        if settings.devices is None and settings.cluster is None:
            devices = theirs.traced.devices or theirs.settings.devices
            settings = replace(settings, devices=devices, cluster=self.plan.cluster)
        if self.plan.timeline is not None and settings.planner == Auto():
            settings = replace(settings, planner=FollowingStages(followed=cast("PipelinePlan", self.plan)))
        return settings


def following(followed: Followed | None, name: str, source: str) -> Following:
    """The plan to be followed. Raises ArgumentError where the other function, `name`, has none yet."""
    if followed is None:
        rule = "it has not been planned yet, so nothing is known of where its state lies"
        raise ArgumentError(explain(f"follow={name}", rule, source, "call it, or its .plan(...), first"))
    return Following(followed, followed.plan())
