"""The parts of a plan: how it was found, its operators, the costs of layers, and its report of memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from passes.ir import Graph, Node
from passes.memory import Holder, Memory
from passes.placement import Placement

INTERRUPTED = "interrupted"
"""The status of the best plan of a search that its user interrupted."""

LATE = "time limit"
"""The status of the best plan of a search that ran into its time limit."""

STAGE = "stage"
"""The mesh axis over which an array lies whose rows are on several stages; meshes of stages have no axis of
this name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was met and not taken, with the seconds of its step and the reason `why`.

    `peak_nbytes` is None where the peak was not computed.
    """

    name: str
    seconds: float
    why: str
    peak_nbytes: int | None = None


MOST_ALTERNATIVES = 12
"""The most alternatives that a plan keeps, the cheapest ones."""


def merged(*several: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The cheapest of several lists of alternatives, one of each name."""
    by_name: dict[str, Alternative] = {}
    alternatives = itertools.chain.from_iterable(several)
    for alternative in sorted(alternatives, key=lambda alternative: alternative.seconds):
        by_name.setdefault(alternative.name, alternative)
    return tuple(by_name.values())[:MOST_ALTERNATIVES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The record of how placements were found: `objective` and `bound` in seconds, `status` in words, the seconds of
    each phase, and the `alternatives` that were met.
    """

    planner: str
    status: str
    objective: float
    bound: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    alternatives: tuple[Alternative, ...] = ()

    def took(self, seconds: float) -> Self:
        """The same record with the seconds that the search took in all.

        Seconds that belong to none of its phases went into predicting peaks, and into variants of the step that were
        not chosen.
        """
        rest = max(0.0, seconds - sum(self.phase_seconds.values()))
        return replace(self, phase_seconds={**self.phase_seconds, "peaks and variants": rest})

    def unproven(self) -> Self:
        """The same record of a plan that was edited, or taken to more devices, of which nothing is proven."""
        return replace(self, status="edited", bound=0.0)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: 0 is proven optimal."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0

    @property
    def is_interrupted(self) -> bool:
        """Whether the plan is the best of a search that its user interrupted."""
        return self.status == INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of a layer of the model in one step, on one device: seconds of computing and of moving arrays, and
    bytes.

    `state_nbytes` are arguments named after the layer; `live_nbytes` are the temporaries that it computes and that are
    live at the step's peak. Operators of no layer belong to the update.
    """

    name: str
    compute_seconds: float
    moving_seconds: float
    state_nbytes: int
    live_nbytes: int

    @property
    def seconds(self) -> float:
        """All seconds of the layer."""
        return self.compute_seconds + self.moving_seconds

    @property
    def nbytes(self) -> int:
        """All bytes of the layer at the peak."""
        return self.state_nbytes + self.live_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node as the plan's reader sees it: its primitive, its place in the user's code, and its placement.

    `bodies` are the operators inside a loop or branch, placed as `placement.bodies` says.
    """

    primitive: str
    source: str
    scope: str
    placement: Placement
    bodies: tuple[tuple[Operator, ...], ...] = ()


def operators(graph: Graph, placements: Sequence[Placement]) -> tuple[Operator, ...]:
    """The nodes of a graph with their placements."""
    return tuple([_operator(node, placement) for node, placement in zip(graph.nodes, placements, strict=True)])


def _operator(node: Node, placement: Placement) -> Operator:
    inner = zip(node.subgraphs, placement.bodies, strict=False)
    bodies = tuple([operators(body, inside.placements) for body, inside in inner]) if placement.bodies else ()
    return Operator(primitive=node.primitive, source=node.source, scope=node.scope, placement=placement, bodies=bodies)


POINTS = 60
"""The number of points of a step at which a report has its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """A plan's report of one device's memory: `where` the peak is, its largest `holders`, and bytes `over_time`.

    `over_time` [parts] has the most bytes of each of at most `POINTS` equal parts of the step; `layers` are the bytes
    of temporaries at the peak by the layer of the model that computes them.
    """

    where: str
    holders: tuple[Holder, ...]
    over_time: tuple[int, ...]
    layers: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """The report of a whole step."""
        holders = tuple(replace(holder, layer="") for holder in memory.holders)  # `layers` say it
        over_time = busiest_of(memory.over_time)
        return cls(where=memory.where, holders=holders, over_time=over_time, layers=dict(memory.layers))

    def renamed(self, names: Mapping[str, str]) -> MemoryReport:
        """The report with other names of arrays and layers, of the same step."""
        holders = tuple(replace(holder, name=names.get(holder.name, holder.name)) for holder in self.holders)
        layers: dict[str, int] = {}
        for layer, nbytes in self.layers.items():
            layers[names.get(layer, layer)] = layers.get(names.get(layer, layer), 0) + nbytes
        return replace(self, holders=holders, layers=layers)

    def less(self, nbytes: int) -> MemoryReport:
        """The report with `nbytes` fewer all the time."""
        return replace(self, over_time=tuple(size - nbytes for size in self.over_time))


def busiest_of(values: Sequence[int]) -> tuple[int, ...]:
    """The largest value of each of at most `POINTS` equal parts of `values`."""
    points = min(POINTS, len(values))
    ends = [len(values) * part // points for part in range(points + 1)] if points else []
    return tuple(max(values[first:end]) for first, end in itertools.pairwise(ends))
