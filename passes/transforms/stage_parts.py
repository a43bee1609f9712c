"""The stages of a step as values, each a program of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from passes.errors import InternalError
from passes.ir import Graph, Scan, scan_of
from passes.transforms.microbatch import loop_of

Origin = tuple[Literal["step", "loop"], int]
"""The node that a stage's node comes from: of the step itself or of its loop's body."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage as a program of its own with a loop over microbatches, values numbered as in the step.

    Values that pass between stages are numbered after the step's values, stacked over microbatches:
    `boundary_values[v]` is the value of the loop's body whose slices v stacks, and `rows[v]` the dimension of v along
    which each microbatch has its rows, where that is known. `origins` are parallel to `graph.nodes` (the loop's own is
    the loop), `inside` to the nodes of its body; `forward` are the body's nodes that run before the backward pass.
    """

    graph: Graph
    origins: tuple[Origin, ...]
    inside: tuple[Origin, ...]
    forward: frozenset[int]
    boundary_values: Mapping[int, int]
    rows: Mapping[int, int] = field(default_factory=dict[int, int])

    @cached_property
    def loop(self) -> int:
        """The node that is the loop over microbatches."""
        index = loop_of(self.graph)
        if index is None:
            raise InternalError("a stage without a loop over microbatches")
        return index

    @cached_property
    def scan(self) -> Scan:
        """The loop's operands in their order, and how often it runs."""
        scan = scan_of(self.graph.nodes[self.loop])
        if scan is None:
            raise InternalError("a stage's loop over microbatches has no slices")
        return scan

    @property
    def body(self) -> Graph:
        return self.graph.nodes[self.loop].subgraphs[0]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a step, which begin at the nodes `firsts` of the loop body, each a program (`parts`).

    Input i of the step belongs to stage `input_stages[i]`, and output o is made by `output_stages[o]`.
    """

    firsts: tuple[int, ...]
    parts: tuple[Part, ...]
    input_stages: tuple[int, ...]
    output_stages: tuple[int, ...]
    microbatches: int
