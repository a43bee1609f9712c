"""The operations of a product of rows in groups: what is in memory for it, by compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

import autopar
from passes.cluster import parse_cluster
from passes.memory.compilers import compiler_of
from passes.memory.grouped_products import grouped
from passes.memory.operations import Operations

COUNT, ROWS, INNER, COLUMNS = 4, 16, 8, 12


def made(compiler: Any) -> Operations:
    """Those of `jax.lax.ragged_dot` of arrays that are inputs."""
    shapes = ((ROWS, INNER), "float32"), ((COUNT, INNER, COLUMNS), "float32"), ((COUNT,), "int32")
    graph = autopar.parallelize(jax.lax.ragged_dot).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes)).graph
    (node,) = graph.nodes
    operations = Operations({}, compiler)
    inputs = [operations.add("input", (), shape, dtype, number) for number, (shape, dtype) in enumerate(shapes)]
    grouped(operations, node, inputs, [graph.types[node.outputs[0]]])
    return operations


@pytest.mark.parametrize(("compiler", "copied"), [("cpu", True), ("gpu", False)])
def test_rows_are_masked_for_each_group_and_all_are_one_product(compiler: str, copied: bool) -> None:
    operations = made(compiler).every
    (masked,) = [o for o in operations if o.name == "select"]
    assert masked.shape == (COUNT, ROWS, INNER)
    (product,) = [o for o in operations if o.kind == "dot"]
    assert product.shape == (ROWS, COLUMNS)
    assert [operations[side].size for side in product.operands] == [COUNT * ROWS * INNER, COUNT * INNER * COLUMNS]
    transposed = [o for o in operations if o.kind == "transpose" and o.size == COUNT * INNER * COLUMNS]
    assert bool(transposed) == copied


def test_a_tpu_has_an_operation_of_its_own() -> None:
    operations = made("tpu").every
    assert [o.kind for o in operations] == ["input"] * 3 + ["opaque"]


def test_a_device_that_is_not_known_has_the_compiler_of_cpus() -> None:
    known = {name: parse_cluster(f"1:{name}").group().device for name in ("h100", "tpu-v5e")}
    assert {name: compiler_of(device) for name, device in known.items()} == {"h100": "gpu", "tpu-v5e": "tpu"}
    assert compiler_of(replace(known["h100"], name="of one's own")) == "cpu"
