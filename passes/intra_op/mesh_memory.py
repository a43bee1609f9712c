"""The memory of a device of one mesh under a limit, and the bytes that answers to the mesh's problem need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.intra_op.mesh_problems import MeshProblems, Peak, Solved
from passes.intra_op.offloading import away, buffers, offloaded_nbytes
from passes.intra_op.peak_node import NodePath
from passes.solver import Answer, Budget, ShardingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMemory:
    """The memory of a device of one mesh, of which a program may have `limit` bytes, and the needs of answers."""

    problems: MeshProblems
    solved: Solved
    limit: float

    @property
    def program(self) -> ShardingProblem:
        """The mesh's problem, without budgets."""
        return self.solved.assembly.problem

    def budgets(self) -> dict[NodePath, Budget]:
        """The budgets at the peak nodes known, each raised by the factor by which rows there overestimate."""
        excesses = self.problems.peak_nodes.items()
        return {at: replace(self.row(at), limit=excess * self.limit) for at, excess in excesses}

    def peak(self, choice: Sequence[int]) -> Peak:
        """The node where an answer needs most memory, and the bytes."""
        return self.problems.peak(self.solved, choice)

    def row(self, at: NodePath) -> Budget:
        """The row of all values live at a node, under every strategy, without a limit."""
        return self.problems.row(self.solved, at)

    def room(self, choice: Sequence[int]) -> float:
        """The bytes that a row may have in place of those of an answer's peak: offloading needs buffers as well.

        An answer that offloads has its buffers in its peak. Those of others are at least the buffers of state cut as
        far as can be.
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
        """The answer with the same placements, and as little state offloaded as keeps the limit; all if
        nothing does.
        """
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
