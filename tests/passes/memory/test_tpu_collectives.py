"""Reduce-scatters of which XLA's TPU compiler makes an all-reduce."""

from __future__ import annotations

import pytest

from passes.cluster import Mesh, parse_cluster
from passes.memory.collectives import stepped
from passes.memory.operations import Operations
from passes.memory.tpu_collectives import is_summed
from passes.sharding import Step

Case = tuple[str, tuple[int, ...], str, tuple[int, ...], int, str]

COMPILED: dict[Case, bool] = {
    ("2x4:tpu-v5p", (2, 4), "b", (4096, 512), 1, "bfloat16"): True,
    ("2x4:tpu-v5p", (2, 4), "b", (1024, 1536), 1, "bfloat16"): True,
    ("2x4:tpu-v5p", (2, 4), "b", (128, 16, 16, 512), 3, "bfloat16"): True,
    ("2x4:tpu-v5p", (2, 4), "b", (4096, 1024), 1, "bfloat16"): False,
    ("2x4:tpu-v5p", (2, 4), "b", (4096, 256), 1, "bfloat16"): False,
    ("2x4:tpu-v5p", (2, 4), "b", (4096, 512), 0, "bfloat16"): False,
    ("2x4:tpu-v5p", (2, 4), "b", (4096, 512), 1, "float32"): False,
    ("2x4:tpu-v5p", (2, 4), "a", (4096, 256), 1, "bfloat16"): True,
    ("2x4:tpu-v5p", (2, 4), "a", (4096, 512), 1, "bfloat16"): False,
    ("2x4:tpu-v5p", (8,), "a", (1024, 1024), 0, "bfloat16"): True,
    ("2x4:tpu-v5p", (8,), "a", (4096, 128), 0, "float32"): True,
    ("4x4:tpu-v5p", (2, 8), "b", (2048, 2048), 0, "bfloat16"): False,
    ("4x4:tpu-v5p", (16,), "a", (2048, 2048), 0, "bfloat16"): True,
    ("16x4:tpu-v5p", (8, 8), "b", (2048, 2048), 0, "bfloat16"): False,
    ("8:tpu-v5e", (8,), "a", (1024, 1024), 0, "bfloat16"): False,
    ("8:tpu-v5e", (8,), "a", (1024, 1024), 1, "bfloat16"): True,
    ("8:tpu-v5e", (2, 4), "b", (4096, 512), 1, "bfloat16"): True,
    ("8:tpu-v6e", (2, 4), "b", (4096, 512), 1, "bfloat16"): True,
    ("8:tpu-v6e", (2, 4), "b", (4096, 512), 1, "float32"): False,
}
"""A cluster, the sizes of its mesh's axes, the axis of a reduce-scatter, the shape of what it adds up, the dimension
that it cuts, and the dtype -> whether libtpu 0.0.42 makes an all-reduce of it."""


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_some_reduce_scatters_are_sums(case: Case) -> None:
    cluster, sizes, axis, shape, dim, dtype = case
    mesh = Mesh(axes=tuple("ab"[: len(sizes)]), sizes=sizes, cluster=parse_cluster(cluster))
    part = (*shape[:dim], shape[dim] // mesh.axis_size(axis), *shape[dim + 1 :])
    step = Step(kind="reduce_scatter", axes=(axis,), to_dim=dim)
    assert is_summed(mesh, step, part, dtype) == COMPILED[case]


def test_of_a_sum_the_devices_part_is_cut_out_and_equal_sums_are_one() -> None:
    operations = Operations()
    given = operations.add("input", (), (4, 6), "float32", 0)
    step = Step(kind="reduce_scatter", axes=("x",), to_dim=1)
    part = operations[stepped(operations, given, step, (4, 2), "add", summed=True)]
    assert (part.kind, part.name, part.shape) == ("rearrange", "dynamic-slice", (4, 2))
    (whole,) = part.operands
    assert (operations[whole].kind, operations[whole].shape) == ("collective", (4, 6))
    assert stepped(operations, given, Step(kind="all_reduce", axes=("x",)), (4, 6), "add") == whole
