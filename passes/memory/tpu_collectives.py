"""The reduce-scatters that XLA's TPU compiler makes of an all-reduce, of which every reader takes the device's part.

So the whole sum is in memory as long as its part is read. That is done where the devices are a whole torus of three
dimensions, and where a device's part of an array of 16 bits ends in the middle of a tile: two tiles of 128 columns are
packed into one of words.

Reference: 60 reduce-scatters of two to sixteen devices that libtpu 0.0.42 compiled for v5e, v5p and v6e; of those along
two dimensions of a torus, and of others along all, it keeps each.
"""

from __future__ import annotations

from passes.cluster import Mesh
from passes.ir import item_nbytes
from passes.memory.operations import Shape
from passes.memory.tpu_layouts import LANES
from passes.sharding import Step

PLANE = 4
"""The devices of a host, which lie in a plane: a torus of more has a third dimension (v5p:2x2x2 and larger)."""

PACKED_NBYTES = 2
"""Bytes of an element of which two are packed into a word, in tiles side by side."""


def is_summed(mesh: Mesh, step: Step, part: Shape, dtype: str) -> bool:
    """Whether a reduce-scatter that leaves each device this part of an array is an all-reduce."""
    if mesh.cluster.group().wiring == "3d torus of 4" and mesh.group(step.axes).ranks == mesh.size > PLANE:
        return True
    columns = part[-1] if step.to_dim == len(part) - 1 else 0
    return item_nbytes(dtype) == PACKED_NBYTES and columns % (2 * LANES) == LANES
