"""Seconds of the parts that a step is cut into, by which stages are made even."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Cluster, Mesh
from passes.intra_op import computing
from passes.ir import Graph
from passes.layers import Weigh, part_flops
from passes.rules import pinned_mesh, remembered
from passes.transforms import stages, whole_layout


def weigh_on(cluster: Cluster) -> Weigh:
    """The function that weighs the parts of a microbatch by their seconds on a device of the cluster."""
    return partial(part_seconds, cluster=cluster)


def part_seconds(body: Graph, firsts: Sequence[int], cluster: Cluster) -> NDArray[np.float64]:
    """Seconds [parts] of a microbatch on one device, forward and backward, of the parts that begin at nodes `firsts`.

    A lookup takes none of the flops, and a scan or an activation few, so that flops say little of their time. What
    every part computes for itself counts nowhere. Parts of a step that names its own devices are weighed by flops.
    """
    return _part_seconds(body, tuple(firsts), cluster)


@remembered
def _part_seconds(body: Graph, firsts: tuple[int, ...], cluster: Cluster) -> NDArray[np.float64]:
    if pinned_mesh(body) is not None:
        return part_flops(body, firsts)
    spent = _node_seconds(body, cluster)
    parts = stages.stage_of(body, firsts)
    seconds = np.zeros(len(firsts))
    np.add.at(seconds, list(parts.values()), spent[list(parts)])
    return seconds


@remembered
def _node_seconds(body: Graph, cluster: Cluster) -> NDArray[np.float64]:
    """Seconds of each node of a microbatch on one device."""
    return computing.node_seconds(body, Mesh(axes=("x",), sizes=(1,), cluster=cluster), whole_layout(body))
