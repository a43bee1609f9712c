"""The axis of time: microbatches as a mesh of one axis, on which values are cut as they are on devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.ir import Graph, Node, control_of
from passes.placement import Layout, Placement
from passes.rules import ShardingRule, rules_of
from passes.sharding import ShardingSpec, Step, replicated

AXIS = "microbatch"
"""The name of the axis."""

Coupling = Literal["exact", "independent"]
"""The meaning of a sum over the batch: that of all microbatches, or each microbatch's own in its place."""


@dataclass(frozen=True, slots=True)
class Time:
    """The mesh of one axis of time with `count` microbatches: a value's `local_shape` on it is its shape in one of
    them.

    If the batch is a `single` row, that dimension is cut like any other, into one piece.
    """

    count: int
    single: bool = False

    def rules(self, graph: Graph) -> dict[int, ShardingRule]:
        """The rule of each node, by number."""
        rules = rules_of(graph)
        return dict(enumerate(rule.with_single() if self.single else rule for rule in rules))

    @property
    def axes(self) -> tuple[str, ...]:
        return (AXIS,)

    def axis_size(self, axis: str) -> int:
        return self.count

    def steps(self, type: object, before: ShardingSpec, after: ShardingSpec) -> tuple[Step, ...]:
        """The one step from a placement in time to another, of those that `BatchWalk.fits` allows.

        With one microbatch the array is the same in all of them.
        """
        if self.count == 1:
            return ()
        if before.partial:
            return (Step(kind="all_reduce", axes=(AXIS,)),)
        if after.partial:
            return (Step(kind="keep", axes=(AXIS,)),)
        (cut,) = (d for d, axes in enumerate(after.dims) if axes)
        return (Step(kind="slice", axes=(AXIS,), to_dim=cut),)

    hides_gathers = False

    def is_packed(self, type: object, after: ShardingSpec, steps: Sequence[Step]) -> bool:
        """Whether a sum is packed with others into one collective: False, as nothing is sent in time."""
        return False


def whole_layout(graph: Graph) -> Layout:
    """The layout in which everything is whole, bodies of loops and branches included."""
    return Layout(
        inputs=_whole_specs(graph, graph.inputs),
        placements=tuple(whole(node, graph) for node in graph.nodes),
        outputs=_whole_specs(graph, graph.outputs),
    )


def whole(node: Node, graph: Graph) -> Placement:
    """The placement of a node whose operands and results are whole."""
    return Placement(
        operands=_whole_specs(graph, node.inputs),
        results=_whole_specs(graph, node.outputs),
        bodies=tuple(map(whole_layout, node.subgraphs)) if control_of(node, graph) else (),
    )


def _whole_specs(graph: Graph, values: Iterable[int]) -> tuple[ShardingSpec, ...]:
    return tuple(replicated(graph.types[value].rank) for value in values)
