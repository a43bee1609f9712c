"""Orders in memory on GPUs: what follows from a product lies as it does, and what reads it otherwise reads a copy."""

from __future__ import annotations

import pytest

from passes.memory.gpu_blocks import COLUMN
from passes.memory.gpu_fusion import fuse
from passes.memory.gpu_orders import TURNED, copied, in_order
from passes.memory.gpu_times import COPY
from passes.memory.hoisting import HOISTED
from passes.memory.operations import Operation, Operations, Shape
from tests.passes.memory.device_programs import operation

HEADS, GROUP, TOKENS, FEATURES = 4, 2, 64, 8
MERGED = ("merged",)


def attention(group: int) -> list[Operation]:
    """Scores [heads, keys, queries x group], which are brought to [heads, group, queries, keys] for a softmax; its
    weights are multiplied with values, and by a gradient.
    """
    wide = group * TOKENS
    scores: Shape = (HEADS, group, TOKENS, TOKENS)
    return [
        operation("input", shape=(HEADS, TOKENS, FEATURES), tag=0),
        operation("input", shape=(HEADS, FEATURES, wide), tag=1),
        operation("dot", 0, 1, shape=(HEADS, TOKENS, wide), tag=MERGED),
        operation("bitcast", 2, shape=(HEADS, TOKENS, TOKENS, group)),
        operation("transpose", 3, shape=scores, tag=(0, 3, 2, 1)),
        operation("elementwise", 4, shape=scores, name="exponential"),
        operation("transpose", 5, shape=(HEADS, TOKENS, group, TOKENS), tag=(0, 3, 1, 2)),
        operation("bitcast", 6, shape=(HEADS, TOKENS, wide)),
        operation("dot", 1, 7, shape=(HEADS, FEATURES, wide), tag=MERGED),
        operation("bitcast", 5, shape=(HEADS, wide, TOKENS)),
        operation("dot", 1, 9, shape=(HEADS, FEATURES, TOKENS), tag=MERGED),
    ]


def test_each_product_reads_its_own_copy_of_what_it_cannot_read_as_it_lies():
    changed, place = copied(attention(GROUP))
    made = [index for index, held in enumerate(changed) if held.name == COPY]
    assert [changed[index].operands for index in made] == [(place[5],), (place[5],)]
    assert made[0] == place[6]
    assert changed[place[9]].operands == (made[1],)
    written = {kernel.operation for kernel in fuse(changed, (place[8], place[10]))}
    assert written >= {place[2], *made}
    assert place[5] not in written


def shared(*, is_plain: bool) -> list[Operation]:
    """The weights of attention for a batch of one, multiplied with values as [keys, queries x group], and plainly."""
    wide, scores = GROUP * TOKENS, (1, HEADS, GROUP, TOKENS, TOKENS)
    every = [
        operation("input", shape=(HEADS, TOKENS, FEATURES), tag=0),
        operation("input", shape=(HEADS, FEATURES, wide), tag=1),
        operation("dot", 0, 1, shape=(HEADS, TOKENS, wide), tag=MERGED),
        operation("bitcast", 2, shape=(1, HEADS, TOKENS, TOKENS, GROUP)),
        operation("transpose", 3, shape=scores, tag=(0, 1, 4, 3, 2)),
        operation("elementwise", 4, shape=scores, name="exponential"),
        operation("transpose", 5, shape=(1, HEADS, TOKENS, GROUP, TOKENS), tag=(0, 1, 4, 2, 3)),
        operation("bitcast", 6, shape=(HEADS, TOKENS, wide)),
        operation("dot", 1, 7, shape=(HEADS, FEATURES, wide), tag=MERGED),
    ]
    if is_plain:
        every.append(operation("bitcast", 5, shape=(HEADS, wide, TOKENS)))
        every.append(operation("dot", 1, 9, shape=(HEADS, FEATURES, TOKENS), tag=MERGED))
    return every


def test_products_share_a_copy_in_order_where_a_batch_of_one_is_left_out_of_them():
    changed, place = copied(shared(is_plain=True))
    (made,) = (index for index, moved in enumerate(changed) if moved.name == COPY)
    assert changed[made].operands == (place[5],)
    assert changed[made].shape == (1, HEADS, GROUP, TOKENS, TOKENS)
    assert changed[place[6]].kind == "bitcast"
    assert changed[place[6]].operands == changed[place[9]].operands == (made,)


def test_the_only_product_reads_its_own_copy_of_a_batch_of_one():
    changed, place = copied(shared(is_plain=False))
    assert changed[place[6]].name == COPY
    assert changed[place[6]].operands == (place[5],)


def test_nothing_is_copied_where_a_product_reads_rows_or_columns():
    before = attention(1)
    changed, place = copied(before)
    assert not any(held.name == COPY for held in changed)
    assert place == list(range(len(before)))


def experts(view: Shape) -> list[Operation]:
    """What experts compute [experts, hidden, rows], rectified as [1, experts, rows, hidden], and read as a `view`."""
    hidden: Shape = (1, HEADS, TOKENS, 6 * FEATURES)
    return [
        operation("input", shape=(HEADS, 6 * FEATURES, FEATURES), tag=0),
        operation("input", shape=(HEADS, FEATURES, TOKENS), tag=1),
        operation("dot", 0, 1, shape=(HEADS, 6 * FEATURES, TOKENS), tag=MERGED),
        operation("bitcast", 2, shape=(HEADS, 6 * FEATURES, 1, TOKENS)),
        operation("transpose", 3, shape=hidden, tag=(2, 0, 3, 1)),
        operation("elementwise", 4, shape=hidden, name="maximum"),
        operation("bitcast", 5, shape=view),
        operation("dot", 0, 6, shape=(HEADS, FEATURES, view[-1]), tag=MERGED),
    ]


@pytest.mark.parametrize(
    ("view", "copies_made"),
    [
        ((HEADS, TOKENS, 6 * FEATURES), 0),
        pytest.param((HEADS, 6 * FEATURES, TOKENS), 0, id="columns first, which was a StopIteration"),
        pytest.param((HEADS, 4 * FEATURES, 6 * TOKENS // 4), 1, id="no dimensions make up its rows"),
    ],
)
def test_a_view_of_a_matrix_may_name_its_columns_first(view: Shape, copies_made: int):
    changed, _ = copied(experts(view))
    assert sum(held.name == COPY for held in changed) == copies_made


def test_a_product_joins_others_in_their_order_by_one_copy_which_is_written_once_for_all_readers():
    every = attention(GROUP)
    scores = every[5].shape
    more = [
        operation("dot", 0, 1, shape=(HEADS, GROUP * TOKENS, TOKENS), tag=MERGED),
        operation("bitcast", 11, shape=scores),
        operation("elementwise", 12, shape=scores, name="negate"),
        operation("elementwise", 13, 5, shape=scores, name="multiply"),
        operation("elementwise", 13, 4, shape=scores, name="add"),
    ]
    changed, place = copied([*every, *more])
    joined = changed[place[13]].operands[0]
    assert (changed[joined].name, changed[joined].operands) == (COPY, (place[12],))
    kernels = fuse(changed, (place[14], place[15]))
    assert (place[14], place[15]) in {kernel.joint for kernel in kernels}  # what is copied is computed once for both
    assert place[13] not in {kernel.operation for kernel in kernels}


def update(*, reduced: bool) -> tuple[list[Operation], tuple[int, int]]:
    """Weights [experts, in, out] and their momentum, updated by a gradient that is [experts, out, in] as a product, and
    the two results.
    """
    shape: Shape = (HEADS, TOKENS, FEATURES)
    made: Shape = (HEADS, FEATURES, TOKENS)
    every = [
        *(operation("input", shape=shape, tag=i) for i in range(2)),
        operation("input", shape=(HEADS, GROUP, FEATURES), tag=2),
        operation("dot", 2, 2, shape=made, tag=MERGED),
    ]
    if reduced:
        every.append(operation("collective", 3, shape=made, name="all_reduce"))
    gradient = len(every)
    every.append(operation("transpose", gradient - 1, shape=shape, tag=(0, 2, 1)))
    every.append(operation("elementwise", 1, gradient, shape=shape, name="add"))
    every.append(operation("elementwise", 0, gradient + 1, shape=shape, name="subtract"))
    return every, (gradient + 1, gradient + 2)


def test_weights_are_updated_in_the_order_of_a_gradient_that_was_reduced_and_copied_when_all_is_there():
    every, outputs = update(reduced=True)
    changed, place = copied(every, outputs)
    copies_made = [changed[place[output]] for output in outputs]
    assert all((held.kind, held.name) == ("opaque", COPY) for held in copies_made)
    (momentum,), (weights,) = (held.operands for held in copies_made)
    assert (changed[momentum].name, changed[weights].name) == ("add", "subtract")
    assert changed[weights].operands == (place[0], momentum)
    kernels = {kernel.operation: kernel for kernel in fuse(changed, [place[output] for output in outputs])}
    assert kernels.keys() >= {momentum, weights, *(place[output] for output in outputs)}
    assert kernels[momentum].joint == kernels[weights].joint == (momentum, weights), "copied once both are there"


def test_a_products_own_kernel_transposes_the_gradient_that_it_makes():
    every, outputs = update(reduced=False)
    changed, place = copied(every, outputs)
    assert len(changed) == len(every)
    assert place == list(range(len(every)))


@pytest.mark.parametrize(("rows", "columns", "is_written"), [(COLUMN, 2**15, False), (COLUMN, 2**7, True)])
def test_sums_by_columns_take_their_factors_in_unless_few_blocks_do_it(
    rows: int, columns: int, is_written: bool
) -> None:
    """XLA:GPU compiles 2^15 columns without temporaries, for A100 and H100 (jaxlib 0.10.2)."""
    shape = (rows, columns)
    inputs = [Operation("input", (), shape, "bfloat16", -1, tag=tag) for tag in range(2)]
    wide = [Operation("elementwise", (o,), shape, "float32", -1, tag=("convert bfloat16",)) for o in range(2)]
    scaled = operation("elementwise", 4, 5, shape=shape, name="multiply")
    every = [
        *inputs,
        *wide,
        operation("elementwise", 2, 3, shape=shape, name="multiply"),
        operation("input", shape=shape, tag=2),
        scaled,
        operation("reduce", 6, shape=(columns,), tag=("reduce-sum", (0,))),
    ]
    assert (6 in {kernel.operation for kernel in fuse(every, (7,))}) == is_written
    rowwise = [*every[:7], operation("reduce", 6, shape=(rows,), tag=("reduce-sum", (1,)))]
    assert 6 not in {kernel.operation for kernel in fuse(rowwise, (7,))}


@pytest.mark.parametrize("heads", [1, 4])
def test_summands_of_gathered_features_lie_as_they_do(heads: int) -> None:
    """Embeddings gathered along features, which are slowest then, and a residual stream that a product is added to. The
    product's kernel writes columns for rows, but not a product of every head.
    """
    shape: Shape = (4, TOKENS, heads * FEATURES)
    product = (4 * TOKENS, heads * FEATURES) if heads == 1 else (heads, 4 * TOKENS, FEATURES)
    every = [
        operation("input", shape=(heads * FEATURES // 2, 4, TOKENS), tag=0),
        operation("collective", 0, shape=(heads * FEATURES, 4, TOKENS), tag=("all_gather", ("x",), "add", 0, -1)),
        operation("transpose", 1, shape=shape, tag=(1, 2, 0)),
        operation("input", shape=(1, *product[-2:]), tag=1),
        operation("dot", 3, 3, shape=product, tag=MERGED),
        operation("bitcast", 4, shape=shape),
        operation("collective", 5, shape=shape, tag=("all_reduce", ("x",), "add", -1, -1)),
        operation("elementwise", 2, 6, shape=shape, name="add"),
        operation("reduce", 7, shape=shape[:2], tag=("reduce-sum", (2,))),
    ]
    changed, place = copied(every)
    assert any(o.name == COPY for o in changed) == (heads > 1)
    assert changed[place[8]].tag == ("reduce-sum", (0,))
    assert changed[changed[place[8]].operands[0]].shape == (heads * FEATURES, 4, TOKENS)


def test_gathered_features_with_several_readers_lie_in_order() -> None:
    shape: Shape = (4, TOKENS, FEATURES)
    every = [
        operation("input", shape=(FEATURES // 2, 4, TOKENS), tag=0),
        operation("collective", 0, shape=(FEATURES, 4, TOKENS), tag=("all_gather", ("x",), "add", 0, -1)),
        operation("transpose", 1, shape=shape, tag=(1, 2, 0)),
        operation("elementwise", 2, shape=shape, name="negate"),
        operation("elementwise", 1, shape=(FEATURES, 4, TOKENS), name="negate"),
        operation("reduce", 3, shape=shape[:2], tag=("reduce-sum", (2,))),
    ]
    changed, place = copied(every)
    assert changed[place[5]].tag == ("reduce-sum", (2,))


@pytest.mark.parametrize("mask", [HOISTED, "carried"])
def test_a_stack_lies_as_what_a_product_makes_and_what_comes_from_outside_the_loop_with_it(mask: str) -> None:
    """Masked scores lie as scores do if the mask is the same in every iteration, and so may lie in any order."""
    every = attention(GROUP)[:5]
    scores = every[-1].shape
    every += [
        operation("input", shape=scores, tag=(mask, 1)),
        operation("elementwise", 5, 4, shape=scores, name="select"),
        operation("update", 6, shape=(0,), tag=("stack", 0)),
    ]
    changed, place = copied(every)
    assert changed[place[7]].tag == (("stack", 0, TURNED) if mask == HOISTED else ("stack", 0))


def test_a_loop_reads_a_copy_of_a_stack_that_lies_in_another_order() -> None:
    operations = Operations()
    stack = operations.add("input", (), (2, 4, 8), "bfloat16", 0)
    copy = operations[in_order(operations, stack)]
    assert (copy.name, copy.operands, copy.shape, copy.dtype) == (COPY, (stack,), (2, 4, 8), "bfloat16")
