"""The sharding problems of one program on several meshes, and what answers to them need on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from passes.cluster import Mesh
from passes.intra_op.assembly import Assembly
from passes.intra_op.build_problem import assemble
from passes.intra_op.extract import extract_plan
from passes.intra_op.memory_budgets import live, resident
from passes.intra_op.offloading import (
    away,
    buffers,
    idle_state,
    offloaded_nbytes,
    row_with_host,
    transfer_seconds,
    with_host,
)
from passes.intra_op.peak_node import NodePath, peak_node
from passes.intra_op.pins import arriving
from passes.intra_op.restrictions import Restriction
from passes.ir import Graph, StatePairs
from passes.memory import peak
from passes.placement import Grouping, group, resharding_plan
from passes.plan import Plan
from passes.sharding import Resharder
from passes.solver import Answer, Budget, Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The place where most is live, and the bytes."""

    at: NodePath
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A mesh with its sharding problem, the answer to it, and the search for that where there was one.

    Weights are gathered once a step, or with `regather` once a use.
    """

    assembly: Assembly
    answer: Answer
    regather: bool
    search: Search | None = None

    @classmethod
    def unsolved(cls, assembly: Assembly, regather: bool) -> Solved:
        """A mesh's problem with each node at its cheapest strategy, and no bound: what is known without a solver."""
        choice = tuple(int(np.argmin(seconds)) for seconds in assembly.problem.seconds)
        nothing = Answer(
            choice=choice, objective=math.inf, bound=0.0, status="near optimal", build_seconds=0.0, solve_seconds=0.0
        )
        return cls(assembly=assembly, answer=nothing, regather=regather)


@dataclass(slots=True, kw_only=True)
class MeshProblems:
    """The sharding problems of a program on every mesh, with the memory of each answer that was looked at.

    Answers were busiest at the nodes `seen`, the first of them by `scale` more than what is live there, and plans by
    hand that did not fit at those `crowded`, each with the factor by which its row counted more than there was.
    `lowest` needs the least bytes of a device. If `offload`, state at the inputs `idle` may rest with the host.
    `resharders` hold what is known of meshes, `phases` the seconds that all of it took.
    """

    graph: Graph
    state_pairs: StatePairs
    donated: Sequence[bool]
    restrict: Restriction | None = None
    resharders: dict[Mesh, Resharder] = field(default_factory=dict[Mesh, Resharder])
    offload: bool = False
    seen: dict[NodePath, float] = field(default_factory=dict[NodePath, float])
    crowded: dict[NodePath, float] = field(default_factory=dict[NodePath, float])
    scale: float = 1.0
    lowest: tuple[float, Solved, tuple[int, ...]] | None = None
    idle: tuple[int, ...] = field(init=False)
    phases: dict[str, float] = field(init=False)
    grouping: Grouping = field(init=False)
    _twins: dict[Mesh, Solved | None] = field(default_factory=dict[Mesh, Solved | None])
    _rows: dict[object, Budget] = field(default_factory=dict[object, Budget])
    _points: dict[object, Point] = field(default_factory=dict[object, Point])

    def __post_init__(self) -> None:
        start = time.perf_counter()
        self.grouping = group(self.graph)
        self.idle = idle_state(self.graph, self.state_pairs) if self.offload else ()
        self.phases = {"grouping": time.perf_counter() - start, "tables": 0.0, "build": 0.0, "solve": 0.0}

    def offloading(self, offload: bool) -> MeshProblems:
        """The same problems, of plans that may offload or do not."""
        other = copy(self)
        other.offload, other.idle = offload, idle_state(self.graph, self.state_pairs) if offload else ()
        other.seen, other.crowded = dict(self.seen), dict(self.crowded)
        other.lowest, other._rows = None, {}  # points stay: without the host, strategies have the same numbers
        other._twins = {mesh: twin and other.as_offloading(twin) for mesh, twin in self._twins.items()}
        return other

    def as_offloading(self, solved: Solved) -> Solved:
        """A problem and what is known of it without a limit, as one of plans that may offload or do not."""
        assembly = solved.assembly.on_device or solved.assembly
        answer = replace(solved.answer, choice=solved.assembly.placements_of(solved.answer.choice))
        return replace(solved, assembly=self._with_host(assembly), answer=answer, search=None)

    def _with_host(self, assembly: Assembly) -> Assembly:
        return with_host(assembly, self.idle) if self.idle else assembly

    def assembled(self, mesh: Mesh, regather: bool) -> Assembly:
        """The sharding problem on a mesh."""
        began = time.perf_counter()
        assembly = assemble(self.graph, mesh, self.grouping, self._resharder(mesh), self.state_pairs, regather=regather)
        assembly = self.restrict(assembly) if self.restrict else assembly
        assembly = self._with_host(arriving(assembly) if self.graph.pinned else assembly)
        self.phases["tables"] += time.perf_counter() - began
        return assembly

    def twin(self, solved: Solved) -> Solved | None:
        """A mesh's problem with weights fetched once a use, which takes no less time; None where it is the same."""
        mesh = solved.assembly.mesh
        if mesh not in self._twins and any(twin is None for twin in self._twins.values()):
            self._twins[mesh] = None  # no value of the program is fetched twice, on any mesh
        if mesh not in self._twins:
            assembly = self.assembled(mesh, regather=True)
            answer = replace(solved.answer, objective=assembly.problem.evaluate(solved.answer.choice))
            is_other = any(again for _, _, again in assembly.groups)
            self._twins[mesh] = Solved(assembly=assembly, answer=answer, regather=True) if is_other else None
        return self._twins[mesh]

    def forms(self, solved: Solved) -> list[Solved] | None:
        """A mesh's problem and, if that is another, its twin; None where the twin has not been built yet."""
        mesh = solved.assembly.mesh
        if solved.regather or any(twin is None for twin in self._twins.values()):
            return [solved]
        twin = self._twins.get(mesh)
        return None if twin is None else [solved, twin]

    @property
    def twins(self) -> list[Solved]:
        """The problems with weights fetched once a use that were asked for so far."""
        return [twin for twin in self._twins.values() if twin is not None]

    def row(self, solved: Solved, at: NodePath) -> Budget:
        """The row of all that is live at a node of a mesh's program, under every strategy; without a limit."""
        key = solved.assembly.mesh, solved.regather, at
        if key not in self._rows:
            self._rows[key] = row_with_host(partial(live, at=at, limit=math.inf), solved.assembly)
        return self._rows[key]

    def resident(self, solved: Solved) -> Budget:
        """The row of what is on a device for the whole step, under every strategy of a mesh's program; without a limit.

        It says what no plan does without, where rows of busy nodes are estimates.
        """
        key = solved.assembly.mesh, solved.regather
        if key not in self._rows:
            self._rows[key] = row_with_host(partial(resident, limit=math.inf), solved.assembly)
        return self._rows[key]

    def least_nbytes(self, solved: Solved, restricted: Assembly | None = None) -> float:
        """The fewest bytes that answers on a mesh are thought to need: at the peak nodes seen, each array as small as
        can be, and as much less as what rows count more than there is."""
        problem, places = (restricted or solved.assembly).problem, {**self.crowded, **self.seen}
        return max((problem.least(self.row(solved, at)) / excess for at, excess in places.items()), default=0.0)

    def excess(self, solved: Solved, choice: Sequence[int], point: Point) -> float:
        """The factor, at least 1, by which the row at the peak of an answer counts more than there is."""
        return max(1.0, solved.assembly.problem.usage(self.row(solved, point.at), choice) / max(point.nbytes, 1.0))

    def peak(self, solved: Solved, choice: Sequence[int]) -> Point:
        """The place where the plan of an answer needs most memory, and the bytes."""
        key = solved.assembly.mesh, solved.regather, tuple(choice)
        if key not in self._points:
            self._points[key] = self._peak(solved, choice)
        point = self._points[key]
        if self.lowest is None or point.nbytes < self.lowest[0]:
            self.lowest = point.nbytes, solved, tuple(choice)
        return point

    def _peak(self, solved: Solved, choice: Sequence[int]) -> Point:
        graph, grouping, mesh = self.graph, self.grouping, solved.assembly.mesh
        layout = solved.assembly.layout(choice)
        if offloaded := solved.assembly.offloaded(choice):
            point = self.peak(solved, solved.assembly.placements_of(choice))
            return replace(point, nbytes=point.nbytes - away(offloaded_nbytes(graph, layout, offloaded, mesh)))
        reshardings = resharding_plan(graph, layout, self._resharder(mesh), regather=solved.regather)
        donated = self.donated or (False,) * len(graph.inputs)
        memory = peak(graph, grouping, mesh, layout, reshardings, self.state_pairs, donated)
        return Point(at=peak_node(graph, grouping, mesh, layout, reshardings), nbytes=memory.peak_nbytes)

    def look(self, solved: Solved, limit: float) -> None:
        """Notes the peak node of an answer that needs more than the limit, if none was looked at yet."""
        if not self.seen and (point := self.peak(solved, solved.answer.choice)).nbytes > limit:
            self.seen[point.at] = self.excess(solved, solved.answer.choice, point)
            used = solved.assembly.problem.usage(self.row(solved, point.at), solved.answer.choice)
            self.scale = max(1.0, point.nbytes / max(used, 1.0))

    @property
    def lowest_nbytes(self) -> float:
        """Bytes of the answer that needs the least, of those that were looked at."""
        return self.lowest[0] if self.lowest else math.inf

    def least_memory(self) -> tuple[Solved, Answer] | None:
        """The answer that needs the least bytes, of those that were looked at."""
        if self.lowest is None:
            return None
        _, solved, choice = self.lowest
        return solved, replace(solved.answer, choice=choice, objective=solved.assembly.problem.evaluate(choice))

    def plan(self, name: str, solved: Solved, answer: Answer) -> Plan:
        """The plan of an answer, its state offloaded where that is asked for."""
        resharder = self._resharder(solved.assembly.mesh)
        plan = extract_plan(
            name, solved.assembly, answer, resharder, self.state_pairs, self.donated, self.phases, solved.regather
        )
        offloaded = solved.assembly.offloaded(answer.choice)
        if not offloaded:
            return plan
        host_nbytes = offloaded_nbytes(self.graph, plan.layout, offloaded, plan.mesh)
        # What rests with the host is state that the apply phase alone reads: its bytes are of no other cause.
        state = plan.nbytes["optimizer state"] - away(host_nbytes)
        return replace(
            plan,
            offloaded=offloaded,
            seconds={**plan.seconds, "offload": transfer_seconds(host_nbytes, plan.mesh)},
            nbytes={**plan.nbytes, "optimizer state": state},
            memory=plan.memory and plan.memory.less(away(host_nbytes)),
        )

    def _resharder(self, mesh: Mesh) -> Resharder:
        return self.resharders.setdefault(mesh, Resharder(mesh))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMemory:
    """The memory of a device of one mesh, of which `limit` bytes are for a program, and the needs of answers there."""

    problems: MeshProblems
    solved: Solved
    limit: float

    def peak(self, choice: Sequence[int]) -> Point:
        """The place where an answer needs most memory, and the bytes."""
        return self.problems.peak(self.solved, choice)

    def row(self, at: NodePath) -> Budget:
        """The row of all that is live at a node, under every strategy; without a limit."""
        return self.problems.row(self.solved, at)

    def room(self, choice: Sequence[int]) -> float:
        """The bytes of the peak of what rows put in the place of an answer: what offloads needs buffers as well.

        An answer that offloads has shown its own; those of others are no smaller than what they hold cut furthest.
        """
        assembly = self.solved.assembly
        if not assembly.idle or assembly.offloaded(choice):
            return self.limit
        graph, sites = assembly.root.graph, assembly.root.sites
        largest = max(
            min(spec.local_nbytes(graph.types[value], assembly.mesh) for spec in sites[value].specs)
            for value in (graph.inputs[position] for inputs in assembly.idle.values() for position in inputs)
        )
        return self.limit - buffers([largest])

    def settled(self, answer: Answer) -> Answer:
        """The same placements with as little state offloaded as keeps the limit, all that may be if nothing does."""
        assembly, choice = self.solved.assembly, answer.choice
        if not assembly.idle:
            return answer
        spared, layout = self.peak(assembly.placements_of(choice)).nbytes - self.limit, assembly.layout(choice)
        nbytes_of = {
            node: offloaded_nbytes(assembly.root.graph, layout, inputs, assembly.mesh)
            for node, inputs in assembly.idle.items()
        }
        hosted = dict(sorted(nbytes_of.items(), key=lambda each: (-sum(each[1]), each[0]))) if spared > 0 else {}
        for node in list(hosted):
            others = [nbytes for other, of_inputs in hosted.items() if other != node for nbytes in of_inputs]
            if away(others) >= spared:
                del hosted[node]
        choice = assembly.offloading(choice, hosted)
        return replace(answer, choice=choice, objective=assembly.problem.evaluate(choice))
