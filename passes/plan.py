"""Everything that planning chose for one program on one cluster: frozen, printable, comparable, storable.

A saved plan is a planner: `autopar.Manual("plan.json")` replays it without solving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from passes.cluster import Cluster
from passes.collectives import Collective
from passes.errors import PlanMismatchError
from passes.ir import Graph
from passes.mesh import Mesh
from passes.moves import Placement
from passes.sharding import ShardingSpec

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """How the placements were found: `objective` and `bound` in seconds, `status` in words, phases timed in seconds."""

    planner: str
    status: str
    objective: float
    bound: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: 0 is proven optimal."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node as the plan's reader sees it: what it is, where it stands in the user's code, how it is placed."""

    primitive: str
    source: str
    scope: str
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive operators on one mesh; this version plans one stage that covers the program."""

    mesh: Mesh
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The placements of every operator, input and output, and what they cost.

    `seconds` holds the predicted step time by cause (`compute`, `memory`, `communication`, ...); `nbytes` the peak
    bytes of one device by cause. `replicated` names operators that had no rule, as `primitive at source`.
    `input_names` and `output_names` are argument paths in the user's words.
    """

    fingerprint: str
    cluster: Cluster
    mesh: Mesh
    operators: tuple[Operator, ...]
    inputs: tuple[ShardingSpec, ...]
    outputs: tuple[ShardingSpec, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    collectives: tuple[Collective, ...]
    seconds: Mapping[str, float]
    nbytes: Mapping[str, int]
    solution: Solution
    replicated: tuple[str, ...] = ()
    microbatches: int = 1

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step."""
        return sum(self.seconds.values())

    @property
    def peak_nbytes(self) -> int:
        """Predicted peak bytes on one device."""
        return sum(self.nbytes.values())

    @property
    def gap(self) -> float:
        """How far the answer may be from the best of its kind; 0 is proven optimal."""
        return self.solution.gap

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(mesh=self.mesh, first=0, last=len(self.operators)),)

    def check(self, graph: Graph) -> None:
        """Raises PlanMismatchError unless this plan was made for a program with the same operations and shapes."""
        if graph.fingerprint != self.fingerprint:
            raise PlanMismatchError(
                f"the plan was made for program {self.fingerprint} ({len(self.operators)} operators, "
                f"{len(self.inputs)} inputs), this function traces to {graph.fingerprint} ({len(graph.nodes)} operators, "
                f"{len(graph.inputs)} inputs); a plan belongs to one function, its shapes and its dtypes. "
                "Plan again, or call the function with the arguments that the plan was made for"
            )
