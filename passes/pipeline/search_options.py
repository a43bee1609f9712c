"""The options of a search over stages, which all of its parts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.cluster import Cluster, Mesh
from passes.intra_op import pins
from passes.limits import Limits
from passes.solver import SolverOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of a search over stages on a `cluster`: the pipelines that may be found, and how stages are planned.

    Samples and plans are of the step's variants for `stages` stages, whose loops over layers are chunked. Pipelines
    have a number of stages that is one of `counts`, or any if that is empty, run by one of the `schedules`, and need no
    more than the `limits`. `meshes(n)` lays out n devices, on which inputs have their `pinned` placements.
    """

    cluster: Cluster
    stages: int
    schedules: Sequence[str]
    limits: Limits
    solver: SolverOptions
    meshes: Callable[[int], Sequence[Mesh]]
    pinned: pins.ByName | None = None
    counts: Sequence[int] = ()
