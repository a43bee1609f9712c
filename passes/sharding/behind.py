"""Seconds of collectives that are combined with others, and of those that are hidden behind computing.

XLA's GPU and TPU compilers send the arrays of a combined all-reduce together. Its CPU compiler combines as many, but
its runtime reduces one array after another, and at each of them all devices wait for each other: so there a program
packs small arrays into one itself (`passes/placement/reshardings.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.cluster import CPU, Mesh, collectives

Seconds = NDArray[np.float64]

PACKED_NBYTES = 64 * 2**10
"""Bytes of an array up to which its all-reduce is packed with others: 12 to 200 arrays of 64 KiB take 0.70 to 0.82 of
the time, smaller ones less, of 128 KiB 0.89 to 1.54 (`python -m benchmarks.buckets`, 8 devices on 2 cores)."""

_INSTANT = 1e-12
"""Seconds that count as none."""


def packs(mesh: Mesh) -> bool:
    """Whether a program on a mesh packs small all-reduces into one array."""
    return mesh.cluster.group().device.name == CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The computing that hides a resharding's collectives of some `kinds`: products of `flops`, by dtype, on all
    devices.

    Meanwhile `sent_nbytes` are sent in all, before they are cut. The compiler may send an array in one collective with
    others of `combined_nbytes` together (0: by itself), or the program may pack it with others of up to `PACKED_NBYTES`
    each, of `small_nbytes` together.
    """

    kinds: tuple[collectives.Kind, ...]
    combined_nbytes: int
    sent_nbytes: int
    flops: tuple[tuple[str, float], ...]
    small_nbytes: int = 0

    def together(self, kind: collectives.Kind, nbytes: Seconds, mesh: Mesh, axes: tuple[str, ...]) -> Seconds:
        """The seconds that arrays take in a collective with others; infinite if each is sent by itself."""
        group = mesh.group(axes)
        if kind == "all_reduce" and packs(mesh):
            share = collectives.bucket_share(kind, nbytes, group, self.small_nbytes)
            return np.where(nbytes <= PACKED_NBYTES, share, np.inf)
        bucket_nbytes = min(self.combined_nbytes, mesh.cluster.group().device.bucket_nbytes)
        return collectives.bucket_share(kind, nbytes, group, bucket_nbytes)

    def hidden(self, everything: Seconds, mesh: Mesh) -> Seconds:
        """The hidden part of collectives that take these seconds in all: no more than the products take meanwhile."""
        device = mesh.cluster.group().device
        computing = sum(flops / device.matmul_flops_per_second(dtype) for dtype, flops in self.flops)
        return np.minimum(device.collective_overlap, computing / mesh.size / np.maximum(everything, _INSTANT))
