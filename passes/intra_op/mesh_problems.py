"""The sharding problems of one step on several meshes, each built once, and the bytes that their answers need.

A mesh may have a second problem, its twin, in which weights are gathered at every use. Rows count the bytes that are
live at a node under every strategy, and are estimates; `peak` is what the compiled program needs by the compiler's
model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import numpy as np

from passes.cluster import Mesh
from passes.intra_op.assembly import Assembly
from passes.intra_op.build_problem import assemble
from passes.intra_op.extract import donations, extract_plan
from passes.intra_op.memory_budgets import live, resident
from passes.intra_op.offloading import away, idle_state, offloaded_nbytes, row_with_host, with_host, with_offloaded
from passes.intra_op.peak_node import NodePath, peak_node
from passes.intra_op.pins import arriving
from passes.intra_op.restrictions import Restriction
from passes.memory import Memory, peak
from passes.placement import Grouping, Layout, ReshardingPlan, group, resharding_plan
from passes.plan import Plan
from passes.sharding import Resharder
from passes.solver import Answer, Budget, Search
from passes.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The node at which most bytes are live, and the bytes."""

    at: NodePath
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The sharding problem of a mesh with an answer, and the search that found it, if there was one."""

    assembly: Assembly
    answer: Answer
    search: Search | None = None

    @classmethod
    def unsolved(cls, assembly: Assembly) -> Solved:
        """A mesh's problem with each node at its cheapest strategy, and no bound: it takes no solver."""
        choice = tuple(int(np.argmin(seconds)) for seconds in assembly.problem.seconds)
        nothing = Answer(
            choice=choice, objective=math.inf, bound=0.0, status="near optimal", build_seconds=0.0, solve_seconds=0.0
        )
        return cls(assembly=assembly, answer=nothing)

    @property
    def key(self) -> tuple[Mesh, bool]:
        """The mesh, and whether weights are gathered at every use: the identity of one of a program's problems."""
        return self.assembly.mesh, self.assembly.regather


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowest:
    """An answer to a mesh's problem, and the bytes that it needs on a device."""

    nbytes: float
    solved: Solved
    choice: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class MeshProblems:
    """The sharding problems of a step on every mesh, with the memory of each answer that was looked at.

    `peak_nodes` maps the peak nodes of answers that exceeded the limit to the factor by which the row there
    overestimated; `hand_made_peak_nodes` are those of hand-made plans. The first answer needed `scale` times what its
    row counted. `lowest` is the answer of least bytes on a device. With `offload`, the state at the inputs `idle` may
    be in the host's memory between steps. `resharders` cache the seconds of reshardings by mesh; `phase_seconds` are
    those that each part of the work took.
    """

    step: Step
    restrict: Restriction | None = None
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    offload: InitVar[bool] = False
    peak_nodes: dict[NodePath, float] = field(default_factory=dict[NodePath, float], init=False)
    hand_made_peak_nodes: dict[NodePath, float] = field(default_factory=dict[NodePath, float], init=False)
    scale: float = field(default=1.0, init=False)
    lowest: Lowest | None = field(default=None, init=False)
    idle: tuple[int, ...] = field(init=False)
    phase_seconds: dict[str, float] = field(init=False)
    grouping: Grouping = field(init=False)
    _twins: dict[Mesh, Solved | None] = field(default_factory=dict[Mesh, Solved | None], init=False)
    _rows: dict[object, Budget] = field(default_factory=dict[object, Budget], init=False)
    _peaks: dict[object, Peak] = field(default_factory=dict[object, Peak], init=False)
    _layouts: dict[object, list[tuple[ReshardingPlan, Peak, Memory]]] = field(
        default_factory=dict[object, "list[tuple[ReshardingPlan, Peak, Memory]]"], init=False
    )

    def __post_init__(self, offload: bool) -> None:
        start = time.perf_counter()
        self.grouping = group(self.step.graph)
        self.idle = self._idle(offload=offload)
        self.phase_seconds = {"grouping": time.perf_counter() - start, "tables": 0.0, "build": 0.0, "solve": 0.0}

    def offloading(self, *, offload: bool) -> MeshProblems:
        """The same problems for plans that may `offload` state, or may not."""
        other = copy(self)
        other.idle = other._idle(offload=offload)
        other.peak_nodes, other.hand_made_peak_nodes = dict(self.peak_nodes), dict(self.hand_made_peak_nodes)
        other.lowest, other._rows = None, {}  # peaks stay: without the host, strategies have the same numbers
        other._twins = {mesh: twin and other.as_offloading(twin) for mesh, twin in self._twins.items()}
        return other

    def _idle(self, *, offload: bool) -> tuple[int, ...]:
        """The inputs, by position, whose state may be in the host's memory between steps."""
        return idle_state(self.step.graph, self.step.state_pairs) if offload else ()

    def as_offloading(self, solved: Solved) -> Solved:
        """A solved problem with its answer, as one of plans that may offload state, or may not."""
        assembly = solved.assembly.on_device or solved.assembly
        answer = replace(solved.answer, choice=solved.assembly.placements_of(solved.answer.choice))
        return replace(solved, assembly=self._with_host(assembly), answer=answer, search=None)

    def _with_host(self, assembly: Assembly) -> Assembly:
        return with_host(assembly, self.idle) if self.idle else assembly

    def assembled(self, mesh: Mesh, *, regather: bool) -> Assembly:
        """The sharding problem on a mesh; with `regather`, weights are gathered at every use."""
        began = time.perf_counter()
        step, resharder = self.step, self._resharder(mesh)
        assembly = assemble(step.graph, mesh, self.grouping, resharder, step.state_pairs, regather=regather)
        assembly = self.restrict(assembly) if self.restrict else assembly
        assembly = self._with_host(arriving(assembly) if step.graph.pinned else assembly)
        self.phase_seconds["tables"] += time.perf_counter() - began
        return assembly

    def count_solve(self, build_seconds: float, solve_seconds: float) -> None:
        """Adds the seconds of a solve: those of building the integer program, and those of the solver."""
        self.phase_seconds["build"] += build_seconds
        self.phase_seconds["solve"] += solve_seconds

    def twin(self, solved: Solved) -> Solved | None:
        """A mesh's problem with weights gathered at every use, which takes no less time; None where it is the same."""
        mesh = solved.assembly.mesh
        if mesh not in self._twins and any(twin is None for twin in self._twins.values()):
            self._twins[mesh] = None  # no value of the program is fetched twice, on any mesh
        if mesh not in self._twins:
            assembly = self.assembled(mesh, regather=True)
            answer = replace(solved.answer, objective=assembly.problem.evaluate(solved.answer.choice))
            is_other = any(again for _, _, again in assembly.groups)
            self._twins[mesh] = Solved(assembly=assembly, answer=answer) if is_other else None
        return self._twins[mesh]

    def with_twin(self, solved: Solved) -> list[Solved] | None:
        """A mesh's problem and, if it differs, its twin; None where the twin has not been built yet."""
        mesh = solved.assembly.mesh
        if solved.assembly.regather or any(twin is None for twin in self._twins.values()):
            return [solved]
        twin = self._twins.get(mesh)
        return None if twin is None else [solved, twin]

    @property
    def twins(self) -> list[Solved]:
        """The twins that were built so far."""
        return [twin for twin in self._twins.values() if twin is not None]

    def row(self, solved: Solved, at: NodePath) -> Budget:
        """The row of all values live at a node of a mesh's program, under every strategy, without a limit."""
        key = solved.key, at
        if key not in self._rows:
            self._rows[key] = row_with_host(partial(live, at=at, limit=math.inf), solved.assembly)
        return self._rows[key]

    def resident(self, solved: Solved) -> Budget:
        """The row of the bytes on a device for the whole step, under every strategy of a mesh's program, without a
        limit.

        Every plan needs these bytes, while rows of single nodes are estimates.
        """
        if solved.key not in self._rows:
            self._rows[solved.key] = row_with_host(partial(resident, limit=math.inf), solved.assembly)
        return self._rows[solved.key]

    def least_nbytes(self, solved: Solved, restricted: Assembly | None = None) -> float:
        """The fewest bytes that an answer on a mesh may need, with each array as small as can be.

        It is the most of the peak nodes seen, each divided by the factor by which its row overestimates.
        """
        problem = (restricted or solved.assembly).problem
        places = {**self.hand_made_peak_nodes, **self.peak_nodes}
        return max((problem.least(self.row(solved, at)) / excess for at, excess in places.items()), default=0.0)

    def expected_nbytes(self, solved: Solved, restricted: Assembly | None = None) -> float:
        """The fewest bytes that answers on a mesh are expected to need, scaled as the first answer's peak was."""
        return self.scale * self.least_nbytes(solved, restricted)

    def _excess(self, solved: Solved, choice: Sequence[int], point: Peak) -> float:
        """The factor, at least 1, by which the row at the peak of an answer overestimates."""
        return max(1.0, solved.assembly.problem.usage(self.row(solved, point.at), choice) / max(point.nbytes, 1.0))

    def peak(self, solved: Solved, choice: Sequence[int]) -> Peak:
        """The node where the plan of an answer needs most memory, and the bytes."""
        key = solved.key, tuple(choice)
        if key not in self._peaks:
            self._peaks[key] = self._peak(solved, choice)
        point = self._peaks[key]
        if point.nbytes < self.lowest_nbytes:
            self.lowest = Lowest(nbytes=point.nbytes, solved=solved, choice=tuple(choice))
        return point

    def _peak(self, solved: Solved, choice: Sequence[int]) -> Peak:
        graph, mesh = self.step.graph, solved.assembly.mesh
        layout = solved.assembly.layout(choice)
        if offloaded := solved.assembly.offloaded(choice):
            point = self.peak(solved, solved.assembly.placements_of(choice))
            return replace(point, nbytes=point.nbytes - away(offloaded_nbytes(graph, layout, offloaded, mesh)))
        reshardings = resharding_plan(graph, layout, self._resharder(mesh), regather=solved.assembly.regather)
        return self._memory(mesh, layout, reshardings)[0]

    def _memory(self, mesh: Mesh, layout: Layout, reshardings: ReshardingPlan) -> tuple[Peak, Memory]:
        """The peak of a layout and what takes room then, predicted once: a mesh's problem and its twin mostly move the
        same, and the plan that is chosen is one whose peak was looked at.
        """
        graph, grouping, donated = self.step.graph, self.grouping, donations(self.step.graph, self.step.donated)
        alike = self._layouts.setdefault((mesh, layout.inputs, layout.placements, layout.outputs), [])
        for known, point, memory in alike:
            if known == reshardings:
                return point, memory
        memory = peak(graph, grouping, mesh, layout, reshardings, self.step.state_pairs, donated)
        point = Peak(at=peak_node(graph, grouping, mesh, layout, reshardings), nbytes=memory.peak_nbytes)
        alike.append((reshardings, point, memory))
        return point, memory

    def look(self, solved: Solved, limit: float) -> None:
        """Notes the peak node of an answer that exceeds the limit, if none has been looked at yet."""
        if not self.peak_nodes and (point := self.peak(solved, solved.answer.choice)).nbytes > limit:
            self.note_peak(solved, solved.answer.choice, point)
            used = solved.assembly.problem.usage(self.row(solved, point.at), solved.answer.choice)
            self.scale = max(1.0, point.nbytes / max(used, 1.0))

    def note_peak(self, solved: Solved, choice: Sequence[int], point: Peak, *, hand_made: bool = False) -> None:
        """Notes the peak node of an answer that exceeds the limit, unless it is known."""
        noted = self.hand_made_peak_nodes if hand_made else self.peak_nodes
        if point.at not in noted and point.at not in self.peak_nodes:
            noted[point.at] = self._excess(solved, choice, point)

    @property
    def lowest_nbytes(self) -> float:
        """Bytes of the answer that needs the least, of those whose peak is known."""
        return self.lowest.nbytes if self.lowest else math.inf

    def least_memory(self) -> tuple[Solved, Answer] | None:
        """The answer that needs the least bytes, of those whose peak is known; None if there is none."""
        if self.lowest is None:
            return None
        solved, choice = self.lowest.solved, self.lowest.choice
        return solved, replace(solved.answer, choice=choice, objective=solved.assembly.problem.evaluate(choice))

    def plan(self, planner: str, solved: Solved, answer: Answer) -> Plan:
        """The plan that an answer stands for, as one of this planner, with state offloaded where the answer says so."""
        assembly, resharder = solved.assembly, self._resharder(solved.assembly.mesh)

        def memory_of(layout: Layout, reshardings: ReshardingPlan) -> Memory:
            return self._memory(assembly.mesh, layout, reshardings)[1]

        plan = extract_plan(planner, assembly, answer, resharder, memory_of, self.phase_seconds)
        return with_offloaded(plan, self.step.graph, solved.assembly.offloaded(answer.choice))

    def _resharder(self, mesh: Mesh) -> Resharder:
        return self.resharders.setdefault(mesh, Resharder(mesh))
