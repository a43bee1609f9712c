"""XLA's TPU compiler: arrays in tiles, products fused with their readers, and arrays kept on chip."""

from __future__ import annotations

import math
import random

import pytest

from passes.cluster import parse_cluster
from passes.ir import Node, TensorType
from passes.memory.accounting import model_of, nbytes_in
from passes.memory.all_reduces import combined
from passes.memory.liveness import lifetimes
from passes.memory.operations import Operation, Operations
from passes.memory.overlap import schedule
from passes.memory.tpu_fusion import fuse
from passes.memory.tpu_layouts import nbytes, stored
from passes.memory.windows import selected
from passes.memory.xla_tpu import SPLIT_ALIGNMENT
from passes.placement import resharding_plan
from tests.passes.intra_op.small_step import GRAPH, GROUPING, MESH, RESHARDER, whole
from tests.passes.memory.device_programs import TABLE, drawn, narrow, operation, program

SEEDS = range(50)
V5E = parse_cluster("8:tpu-v5e").group().device
V5P = parse_cluster("8:tpu-v5p").group().device

STORED = {
    ((1024,), "float32"): 4096,
    ((4096,), "bfloat16"): 8192,
    ((1024, 4096), "bfloat16"): 2 * 1024 * 4096,
    ((64,), "float32"): 512,
    ((1,), "float32"): 512,
    ((3, 16, 64), "float32"): 4 * 3 * 16 * 128,
    ((1024, 3, 16, 64), "float32"): 4 * 1024 * 3 * 16 * 64,
    ((8, 512, 3, 16, 64), "bfloat16"): 2 * 8 * 512 * 3 * 16 * 64,
}
"""Shapes and dtypes -> bytes in the memory of a TPU, by the layouts that libtpu 0.0.42 chooses."""


@pytest.mark.parametrize(("shape", "dtype"), STORED)
def test_arrays_lie_in_tiles_as_the_compiler_lays_them_out(shape: tuple[int, ...], dtype: str) -> None:
    assert nbytes_in(V5E, shape, dtype) == nbytes(shape, dtype) == STORED[shape, dtype]
    assert stored(operation("input", shape=shape)) == nbytes(shape, "float32")


def test_no_array_takes_less_than_its_elements_and_other_devices_pad_nothing() -> None:
    r = random.Random(0)
    gpu = parse_cluster("8:h100").group().device
    for _ in range(200):
        shape = tuple(r.choice((1, 2, 3, 5, 8, 64, 100, 128, 1000)) for _ in range(r.randrange(4)))
        assert nbytes_in(gpu, shape, "float32") == 4 * math.prod(shape)
        assert nbytes_in(V5E, shape, "float32") >= 4 * math.prod(shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_read_what_is_in_memory_and_run_after_it(seed: int) -> None:
    program = drawn(seed)
    kernels = {kernel.operation: kernel for kernel in fuse(program.operations, program.outputs)}
    assert set(program.outputs) <= kernels.keys()
    order = schedule(program, list(kernels.values()), hides=False)
    at = {operation: position for position, operation in enumerate(order)}
    for kernel in kernels.values():
        assert set(kernel.over) <= set(kernel.reads)
        assert all(at[read] < at[kernel.operation] for read in kernel.reads)


def test_a_product_goes_on_to_the_first_array_of_several_readers() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("elementwise", 1, 0, shape=TABLE, name="add"),
        operation("expensive", 2, shape=TABLE, name="tanh"),
        operation("dot", 3, 0, shape=TABLE, name="next"),
        operation("elementwise", 2, 4, shape=TABLE, name="multiply"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (5,))}
    assert kernels == {0: (), 2: (0,), 5: (0, 2)}


def test_a_product_goes_on_through_what_comes_together_again() -> None:
    """As the gradient of an activation, which reads its own three times, and of which products alone read the last."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("elementwise", 1, 0, shape=TABLE, name="multiply"),
        operation("elementwise", 2, 1, shape=TABLE, name="subtract"),
        operation("elementwise", 3, 1, shape=TABLE, name="add"),
        narrow("elementwise", 4, name="convert float32"),
        operation("dot", 5, 5, shape=TABLE, name="next"),
        operation("dot", 5, 5, shape=TABLE, name="another"),
    )
    assert {kernel.operation: kernel.reads for kernel in fuse(every, (6, 7))} == {0: (), 5: (0,), 6: (5,), 7: (5,)}
    read_elsewhere = (*every, operation("reduce", 2, name="reduce-sum"))
    assert 1 in {kernel.operation for kernel in fuse(read_elsewhere, (6, 7, 8))}


def test_zeros_between_elements_are_written() -> None:
    """As halves of an associative scan that are interleaved, and not zeros around an image."""
    for added, is_written in ((((0, 1, 1), (0, 0, 0)), True), (((0, 32, 0), (0, 0, 0)), False)):
        every = (
            operation("input", shape=(32, 96), tag=0),
            operation("rearrange", 0, shape=TABLE, tag=("loop pad", added)),
            operation("elementwise", 1, shape=TABLE, name="add"),
        )
        assert (1 in {kernel.operation for kernel in fuse(every, (2,))}) == is_written


def test_a_normalisation_is_computed_again_in_every_product_that_reads_it() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("reduce", 0, name="reduce-sum"),
        operation("broadcast", 1, shape=TABLE, tag=(0,)),
        operation("elementwise", 0, 2, shape=TABLE, name="subtract"),
        operation("dot", 3, 0, shape=TABLE),
        operation("dot", 0, 3, shape=TABLE),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (4, 5))}
    assert kernels == {0: (), 1: (0,), 4: (0, 1), 5: (0, 1)}


def test_a_product_ends_before_it_is_transposed() -> None:
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("transpose", 1, shape=TABLE[::-1]),
        operation("elementwise", 2, shape=TABLE[::-1], name="select"),
        operation("reduce", 3, name="reduce-max"),
        operation("reduce", 3, name="reduce-sum"),
    )
    assert {kernel.operation for kernel in fuse(every, (4, 5))} == {0, 1, 4, 5}


def test_a_product_of_several_readers_is_kept_in_its_own_dtype() -> None:
    """As scores of which the maximum is taken: each reader widens them for itself."""
    every = (
        narrow("input"),
        narrow("dot", 0, 0),
        operation("elementwise", 1, shape=TABLE, name="convert bfloat16"),
        operation("reduce", 2, name="reduce-max"),
        operation("reduce", 2, name="reduce-sum"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (3, 4))}
    assert kernels == {0: (), 1: (0,), 3: (1,), 4: (1,)}


def test_a_gather_for_products_alone_is_rounded_as_it_is_looked_up() -> None:
    """As features of neighbours in a graph network of float32."""
    rounded = operation("elementwise", 2, shape=TABLE, name="convert float32")._replace(dtype="bfloat16")
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("gather", 0, 0, shape=TABLE),
        operation("elementwise", 1, 0, shape=TABLE, name="select"),
        rounded,
        operation("dot", 3, 3, shape=TABLE),
        operation("dot", 3, 4, shape=TABLE),
    )
    assert {kernel.operation for kernel in fuse(every, (4, 5))} == {0, 3, 4, 5}
    wide = (*every[:3], rounded._replace(dtype="float32"), *every[4:])
    assert {kernel.operation for kernel in fuse(wide, (4, 5))} == {0, 1, 4, 5}


def test_an_array_gathered_from_is_written_and_read_by_nothing_else() -> None:
    """As logits of which each token's label is taken: softmax reads them as the product made them."""
    every = (
        narrow("input"),
        narrow("dot", 0, 0),
        operation("elementwise", 1, shape=TABLE, name="convert bfloat16"),
        operation("input", shape=(*TABLE[:1], 1), tag=1),
        operation("gather", 2, 3, shape=(*TABLE[:1], 1)),
        operation("expensive", 2, shape=TABLE, name="exponential"),
        operation("reduce", 5, name="reduce-sum"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (4, 6))}
    assert kernels == {0: (), 1: (0,), 2: (1,), 3: (), 4: (2, 3), 6: (1,)}


def test_a_number_for_every_row_is_selected_and_rows_are_scattered() -> None:
    """As the gradient of each token's label is, and as that of an embedding is."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("input", shape=(*TABLE[:1], 1), tag=1),
        operation("input", shape=TABLE, tag=2),
        operation("update", 0, 1, 1, shape=TABLE, name="scatter-add"),
        operation("dot", 3, 3, shape=TABLE),
        operation("update", 0, 1, 2, shape=TABLE, name="scatter-add"),
        operation("dot", 5, 5, shape=TABLE, name="another"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (4, 6))}
    assert kernels[4] == (0, 1)
    assert kernels[6] == (5,)


@pytest.mark.parametrize(("number", "is_there"), [(0.0, False), (None, True)])
def test_an_array_of_one_number_is_written_by_its_scatter(number: float | None, is_there: bool) -> None:
    """As the gradient of an embedding; what is added to an array of other values needs that."""
    every = (
        operation("input", shape=TABLE, tag=0),
        operation("input", shape=(64, 1), tag=1),
        operation("input", tag=2) if number is None else operation("literal", shape=(), tag=("float", number)),
        operation("broadcast", 2, shape=TABLE, tag=(0,) if number is None else ()),
        operation("update", 3, 1, 0, shape=TABLE, name="scatter-add"),
        operation("elementwise", 0, 4, shape=TABLE, name="add"),
    )
    kernels = {kernel.operation: kernel.reads for kernel in fuse(every, (5,))}
    assert (3 in kernels) == is_there
    assert (3 in kernels[4]) == is_there


@pytest.mark.parametrize("padding", [0, 1])
def test_one_kernel_scatters_to_the_choice_of_each_window(padding: int) -> None:
    operations = Operations()
    source = operations.add("input", (), (4, 4), "float32", 0)
    image = operations.add("input", (), (8, 8), "float32", 1)
    params = {"padding": ((padding, 0), (padding, 0))}
    node = Node(primitive="select_and_scatter_add", inputs=(0, 1), outputs=(2,), params=params)
    (result,) = selected(operations, node, (source, image), [TensorType(shape=(8, 8), dtype="float32")])
    kernels = [kernel.reads for kernel in fuse(operations.every, (result,)) if kernel.reads]
    assert kernels[0] == (source, image)
    assert len(kernels) == 1 + padding  # what was padded is cut off


def test_small_arrays_have_no_place_beside_the_chip() -> None:
    layout = whole()
    step = GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER), {0: 0}
    assert model_of(V5E)(*step).holders == ()


def test_two_cores_read_what_one_wrote_in_the_narrower_dtype() -> None:
    """As softmax's weights, of which the exponentials are in memory: the products of both passes read them."""
    every = (
        narrow("input"),
        operation("dot", 0, 0, shape=TABLE),
        operation("reduce", 1, name="reduce-sum"),
        operation("broadcast", 2, shape=TABLE, tag=(0,)),
        operation("elementwise", 1, 3, shape=TABLE, name="divide"),
        narrow("elementwise", 4, name="convert float32"),
        narrow("dot", 5, 0),
        narrow("dot", 0, 5, name="backward"),
    )
    assert [kernel.operation for kernel in fuse(every, (6, 7))] == [0, 1, 2, 6, 7]
    assert [kernel.operation for kernel in fuse(every, (6, 7), narrowed=True)] == [0, 1, 2, 5, 6, 7]
    read_once = (*every[:7], narrow("dot", 0, 6, name="backward"))
    assert [kernel.operation for kernel in fuse(read_once, (7,), narrowed=True)] == [0, 1, 2, 6, 7]
    an_input = (operation("input", shape=TABLE, tag=0), narrow("elementwise", 0, name="convert float32"))
    products = (narrow("dot", 1, 1), narrow("dot", 1, 1, name="backward"))
    assert [kernel.operation for kernel in fuse((*an_input, *products), (2, 3), narrowed=True)] == [0, 2, 3]


def test_results_of_a_gated_unit_are_written_for_both_passes_by_two_cores() -> None:
    """As of LLaMA on v5p: `up` and its product with `gate` are results of one kernel."""
    every = (
        narrow("input"),
        narrow("dot", 0, 0, name="gate"),
        narrow("dot", 0, 0, name="up"),
        operation("elementwise", 1, shape=TABLE, name="convert bfloat16"),
        operation("elementwise", 2, shape=TABLE, name="convert bfloat16"),
        operation("elementwise", 3, 4, shape=TABLE, name="multiply"),
        narrow("elementwise", 5, name="convert float32"),
        narrow("dot", 6, 0, name="down"),
        narrow("dot", 0, 6, name="backward"),
        narrow("dot", 1, 2, name="others"),
    )
    written = [kernel.operation for kernel in fuse(every, (7, 8, 9), narrowed=True)]
    assert written == [0, 1, 2, 6, 7, 8, 9]
    assert [kernel.operation for kernel in fuse(every, (7, 8, 9))] == [0, 1, 2, 7, 8, 9]
    residual = (*every[:2], narrow("input", name="other"), *every[3:])
    assert 6 not in {kernel.operation for kernel in fuse(residual, (7, 8, 9), narrowed=True)}


def test_a_concatenation_is_computed_by_its_readers() -> None:
    """As the halves of a rotary embedding, of which XLA:CPU copies long rows."""
    half = (64, 48)
    every = (
        operation("input", shape=half),
        operation("opaque", 0, 0, shape=TABLE, tag=("concatenate", 1)),
        narrow("elementwise", 1, name="convert float32"),
        narrow("dot", 2, 2),
    )
    assert {kernel.operation: kernel.reads for kernel in fuse(every, (3,))} == {0: (), 3: (0,)}


@pytest.mark.parametrize("is_joined", [False, True])
def test_all_reduces_write_their_sums_over_what_they_add_up(is_joined: bool) -> None:
    """As libtpu 0.0.42 places them: `aliasing_operands` of each has its operands and results."""
    sent = ("all_reduce", ("x",), "add", -1, -1)
    every: tuple[Operation, ...] = (
        operation("input", shape=TABLE, tag=0),
        operation("dot", 0, 0, shape=TABLE),
        operation("dot", 0, 0, shape=TABLE[::-1], name="other"),
        operation("collective", 1, shape=TABLE, tag=sent),
        operation("collective", 2, shape=TABLE[::-1], tag=sent),
        operation("dot", 3, 4, shape=TABLE, name="last"),
    )
    place = tuple(range(len(every)))
    if is_joined:
        every, place = combined(every)
        assert any(made.name == "combined" for made in every)
    whole_program = program(every, (place[5],))
    kernels = fuse(every, whole_program.outputs)
    alive = lifetimes(whole_program, kernels, {}, schedule(whole_program, kernels, hides=False))
    shared = {buffer.operations for buffer in alive.buffers if len(buffer.operations) > 1}
    assert shared == {(place[1], place[3]), (place[2], place[4])}


def test_results_of_two_cores_lie_beside_the_chip_with_a_table_for_each_copy() -> None:
    layout = whole()
    step = GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER), {0: 0}
    split = model_of(V5P)(*step)
    assert split.holders
    assert all(holder.nbytes % SPLIT_ALIGNMENT == 0 for holder in split.holders)
    assert split.gaps_nbytes >= SPLIT_ALIGNMENT * (len(GRAPH.inputs) + len(GRAPH.outputs))


def test_a_narrowing_above_many_diamonds_is_found_at_once() -> None:
    every = [narrow("input"), operation("dot", 0, 0, shape=TABLE), operation("reduce", 1, name="reduce-sum")]
    for _ in range(60):  # 2^60 ways up
        every.append(operation("elementwise", len(every) - 1 if len(every) > 3 else 1, 1, shape=TABLE, name="add"))
        every.append(operation("elementwise", len(every) - 1, len(every) - 2, shape=TABLE, name="multiply"))
    every.append(narrow("elementwise", len(every) - 1, name="convert float32"))
    narrowed = len(every) - 1
    every += [narrow("dot", narrowed, 0), narrow("dot", 0, narrowed, name="backward")]
    kernels = fuse(every, (2, narrowed + 1, narrowed + 2), narrowed=True)
    assert narrowed in {kernel.operation for kernel in kernels}
