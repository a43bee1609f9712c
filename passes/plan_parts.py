"""What a plan is made of: how it was found, its operators, its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir import Graph
from passes.mesh import Mesh
from passes.moves import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """How the placements were found: `objective` and `bound` in seconds, `status` in words, phases timed in seconds."""

    planner: str
    status: str
    objective: float
    bound: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: 0 is proven optimal."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node as the plan's reader sees it: what it is, where it stands in the user's code, how it is placed.

    `bodies` are the operators inside a loop or branch, placed as `placement.bodies` says.
    """

    primitive: str
    source: str
    scope: str
    placement: Placement
    bodies: tuple[tuple[Operator, ...], ...] = ()


def operators(graph: Graph, placements: Sequence[Placement]) -> tuple[Operator, ...]:
    """The nodes of a graph with their placements."""
    return tuple(
        Operator(
            primitive=node.primitive,
            source=node.source,
            scope=node.scope,
            placement=placement,
            bodies=tuple(
                operators(body, inside.placements)
                for body, inside in zip(node.subgraphs, placement.bodies, strict=False)
            ),
        )
        for node, placement in zip(graph.nodes, placements, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive operators on one mesh; this version plans one stage that covers the program."""

    mesh: Mesh
    first: int
    last: int
