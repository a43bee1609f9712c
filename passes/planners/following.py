"""The plan of a function that takes arrays which another step's plan has placed, such as an evaluation after training.

On one mesh these inputs are pinned to their placements, and any planner plans the rest. In stages, the function is cut
where the weights of the next stage are first read, and each part is planned around the weights on its submesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from passes.cluster import Cluster
from passes.errors import PlanMismatchError, explain
from passes.intra_op import MeshProblems, cheapest_plan, pins
from passes.ir import Graph, TensorType
from passes.layers import forward
from passes.pipeline import PipelineOptions, body_of, pipelined
from passes.plan import PipelinePlan, Plan
from passes.planners.planner import PLAIN, Planned, PlanOptions, takes_graphs
from passes.sharding import ShardingSpec
from passes.solver import SolverOptions
from passes.step import Step, Variant
from passes.transforms import loop_of

Arrays = Sequence[tuple[str, TensorType]]
"""Names and types of arrays."""


def counterparts(arrays: Arrays, known: Arrays) -> list[int | None]:
    """The position in `known` of the counterpart of each array: of its type, with the longest common end of the path.

    Of equals the first; None where no array of the type ends in the same name.
    """
    by_type: dict[TensorType, list[tuple[int, list[str]]]] = {}
    for position, (name, type) in enumerate(known):
        by_type.setdefault(type, []).append((position, _path(name)))
    return [_counterpart(_path(name), by_type.get(type, ())) for name, type in arrays]


def _counterpart(path: Sequence[str], candidates: Sequence[tuple[int, list[str]]]) -> int | None:
    lengths = [(_common_end(path, other), position) for position, other in candidates]
    longest = max((length for length, _ in lengths), default=0)
    return next(position for length, position in lengths if length == longest) if longest else None


def _common_end(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(reversed(path), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(path), len(other)))


def _path(name: str) -> list[str]:
    return pins.path_of(name).split("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingStages:
    """The planner of a function of the weights of another step that is planned in stages: a forward pass
    through these.
    """

    followed: PipelinePlan
    solver: SolverOptions = field(default_factory=SolverOptions)

    @takes_graphs
    def plan(self, step: Step, cluster: Cluster, options: PlanOptions = PLAIN) -> Planned:
        """The plan in the followed stages.

        Raises PlanMismatchError where the function reads their weights in another order, or its batch cannot be cut as
        they need it.
        """
        followed = self.followed
        step = step.variant(Variant(microbatches=self._microbatches(step), stages=len(followed.stages)))
        owner = {value: stage for value, (stage, _) in self._weights(step.graph).items()}
        firsts = self._firsts(step.graph, owner)

        def plan_stage(part: Step, number: int) -> Plan:
            graph, mesh = part.graph, followed.stages[number].mesh
            here = {value: spec for value, (stage, spec) in self._weights(graph).items() if stage == number}
            chosen = {i: here[value] for i, value in enumerate(graph.inputs) if value in here}
            restrict = partial(pins.pinned, chosen=chosen)
            return cheapest_plan(f"stage {number}", MeshProblems(step=part, restrict=restrict), [mesh], self.solver)

        of_pipeline = PipelineOptions(
            planner=f"following {followed.planner}",
            cluster=cluster,
            schedule="interleaved" if followed.chunks > 1 else "gpipe",
            chunks=followed.chunks,
        )
        return Planned.of(pipelined(step, firsts, plan_stage, of_pipeline), step)

    def _microbatches(self, step: Step) -> int:
        """The most microbatches, up to those of the followed plan, that the stages can take.

        Interleaved stages take them in rounds of as many as there are submeshes. Raises PlanMismatchError where no such
        number is possible.
        """
        followed = self.followed
        rounds = followed.groups if followed.chunks > 1 else 1
        possible = step.counts or (1,)
        counts = [count for count in possible if count % rounds == 0]
        if not counts:
            rule = f"the plan has {followed.chunks} stages in turn on each of {rounds} submeshes, which take "
            rule += f"microbatches in multiples of {rounds}, and there can be {', '.join(map(str, possible))}"
            remedy = f"pass a multiple of {rounds} rows with microbatches= left out, or give it a planner of its own"
            raise PlanMismatchError(explain("follow=", rule, "", remedy))
        return max((count for count in counts if count <= followed.microbatches), default=min(counts))

    def _weights(self, graph: Graph) -> dict[int, tuple[int, ShardingSpec]]:
        """The stage and the placement of each input that the followed plan has placed."""
        there = [
            (stage, spec, (name, type))
            for stage, plan in enumerate(self.followed.stages)
            for name, type, spec in zip(plan.input_names, plan.input_types, plan.inputs, strict=True)
        ]
        arrays = [(name, graph.types[v]) for name, v in zip(graph.input_names, graph.inputs, strict=True)]
        places = counterparts(arrays, [array for _, _, array in there])
        pairs = zip(graph.inputs, places, strict=True)
        return {value: there[place][:2] for value, place in pairs if place is not None}

    def _firsts(self, graph: Graph, owner: Mapping[int, int]) -> tuple[int, ...]:
        """The body's node at which each stage begins: the first that reads a weight of it, or of a later one."""
        body, loop = body_of(graph), graph.nodes[loop_of(graph) or 0]
        stage_of = dict(owner)
        for node in graph.nodes:  # casts of weights, before the loop
            stages = [stage_of[v] for v in node.inputs if v in stage_of]
            stage_of |= dict.fromkeys(node.outputs, max(stages)) if stages else {}
        inside = {v: stage_of[w] for v, w in zip(body.inputs, loop.inputs, strict=True) if w in stage_of}
        firsts = [0]
        for index in forward.forward_nodes(body):
            last = max((inside[v] for v in body.nodes[index].inputs if v in inside), default=0)
            firsts += [index] * (last + 1 - len(firsts))
        count = len(self.followed.stages)
        if len(firsts) != count or len(set(firsts)) != count:
            rule = f"the plan has weights of {count} stages, and it reads those of {len(set(firsts))} in order"
            remedy = "give it a planner of its own, or the stages that it reads all of"
            raise PlanMismatchError(explain("follow=", rule, "", remedy))
        return tuple(firsts)
