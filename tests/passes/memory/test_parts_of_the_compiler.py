"""Collectives and products as XLA's CPU compiler lays them out, and the peak of a program's memory."""

import math

import pytest

from passes.ir import Node, TensorType
from passes.memory.collectives import stepped
from passes.memory.device_lowering import Bodies, Context, lower
from passes.memory.hoisting import hoisted
from passes.memory.operations import Operations
from passes.memory.products import contraction
from passes.memory.xla_cpu import temporaries
from passes.placement import resharding_plan
from passes.sharding import Step
from tests.passes.intra_op.small_step import GRAPH, GROUPING, MESH, RESHARDER, whole


@pytest.mark.parametrize(
    ("step", "after"),
    [
        (Step(kind="all_gather", axes=("x",), dim=1), (4, 24)),
        (Step(kind="all_gather", axes=("x",), dim=0), (16, 6)),
        (Step(kind="reduce_scatter", axes=("x",), to_dim=1), (4, 2)),
        (Step(kind="all_reduce", axes=("x",)), (4, 6)),
        (Step(kind="all_to_all", axes=("x",), dim=0, to_dim=1), (12, 2)),
        (Step(kind="slice", axes=("x",), to_dim=0), (2, 6)),
    ],
    ids=lambda x: str(x),
)
def test_a_step_leaves_its_local_shape_and_sends_the_cut_dimension_first(step: Step, after: tuple[int, ...]) -> None:
    operations = Operations()
    given = operations.add("input", (), (4, 6), "float32", 0)
    made = stepped(operations, given, step, after, "add")
    assert operations[made].shape == after
    sent = [held for held in operations.every if held.kind == "collective"]
    assert len(sent) == (step.kind != "slice")
    along = {"all_gather": step.dim, "reduce_scatter": step.to_dim}.get(step.kind)
    if along is not None:
        assert sent[0].shape == (after[along], after[1 - along])


def test_operations_alike_in_every_iteration_leave_the_loop() -> None:
    """A weight is scaled alike in all iterations, and multiplies what changes; a view of it stays in place."""
    operations = Operations()
    weight, x = (operations.add("input", (), (4, 4), "float32", i) for i in range(2))
    scaled = operations.add("elementwise", (weight,), (4, 4), "float32", "neg")
    view = operations.add("transpose", (scaled,), (4, 4), "float32", "transpose")
    product = operations.add("elementwise", (view, x), (4, 4), "float32", "mul")
    inside, outside = hoisted(operations, {weight}, [product])
    assert outside == [scaled]
    assert (inside[scaled].kind, inside[scaled].operands) == ("input", ())
    assert inside[view] == operations[view]


def test_a_program_of_one_device_has_its_inputs_and_outputs_on_local_shapes() -> None:
    layout = whole()
    context = Context(rules=GROUPING.rules, controls={}, mesh=MESH, inside=lambda *_: Bodies({}))
    program = lower(GRAPH, context, layout, resharding_plan(GRAPH, layout, RESHARDER))
    given = [program.operations[o].shape for o in program.inputs]
    assert given == [GRAPH.types[v].shape for v in GRAPH.inputs]
    assert [program.operations[o].shape for o in program.outputs] == [GRAPH.types[v].shape for v in GRAPH.outputs]
    assert not program.hoisted


@pytest.mark.parametrize(
    ("left", "right", "numbers", "shape"),
    [
        ((4, 6), (6, 8), (((1,), (0,)), ((), ())), (4, 8)),
        ((6, 4), (6, 8), (((0,), (0,)), ((), ())), (4, 8)),
        ((2, 4, 6), (2, 6, 8), (((2,), (1,)), ((0,), (0,))), (2, 4, 8)),
        ((2, 3, 4, 6), (6, 5, 8), (((3,), (0,)), ((), ())), (2, 3, 4, 5, 8)),
        ((3, 4, 6), (4, 6, 8), (((1, 2), (0, 1)), ((), ())), (3, 8)),
    ],
)
def test_a_product_is_one_kernel_of_as_many_elements(
    left: tuple[int, ...], right: tuple[int, ...], numbers: object, shape: tuple[int, ...]
) -> None:
    operations = Operations()
    operands = [operations.add("input", (), s, "float32", i) for i, s in enumerate((left, right))]
    node = Node(primitive="dot_general", inputs=(0, 1), outputs=(2,), params={"dimension_numbers": numbers})
    (made,) = contraction(operations, node, operands, [TensorType(shape=shape, dtype="float32")])
    assert operations[made].shape == shape
    (kernel,) = (held for held in operations.every if held.kind == "dot")
    assert math.prod(kernel.shape) == math.prod(shape)
    assert len(kernel.shape) <= max(len(shape), 3)
    assert [math.prod(operations[o].shape) for o in kernel.operands] == [math.prod(left), math.prod(right)]


def test_a_step_holds_the_product_that_its_gradient_reads() -> None:
    layout = whole()
    memory = temporaries(GRAPH, GROUPING, MESH, layout, resharding_plan(GRAPH, layout, RESHARDER), {0: 0})
    product = GRAPH.types[3].nbytes
    assert sum(holder.nbytes for holder in memory.holders) == max(memory.over_time)
    assert max(memory.over_time) >= product
    saved = [holder for holder in memory.holders if holder.cause == "saved for backward"]
    assert [holder.nbytes for holder in saved] == [product]
