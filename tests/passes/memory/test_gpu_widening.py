"""Arithmetic on bfloat16 where a GPU has none: what is computed in float32, and what is rounded."""

from __future__ import annotations

import pytest

from passes.cluster import parse_cluster
from passes.memory import xla_gpu
from passes.memory.gpu_schedules import ordered
from passes.memory.gpu_tasks import Role, tasks_of
from passes.memory.gpu_widening import widened
from passes.memory.operations import Operation
from passes.memory.overlap import schedule
from passes.memory.split_products import weights_of
from tests.passes.memory.device_programs import TABLE, drawn, narrow, operation
from tests.passes.memory.gpu_kernels import MATRIX, kernels_of


def test_additions_and_products_stay_wide_in_between() -> None:
    every = [
        narrow("input", tag=0),
        narrow("elementwise", 0, 0, name="add"),
        narrow("elementwise", 1, 0, name="multiply"),
        narrow("dot", 2, 2, tag=MATRIX),
    ]
    operations, place = widened(every)
    product = operations[place[3]]
    assert (product.kind, product.dtype) == ("dot", "bfloat16")
    (rounded,) = {operations[o].name for o in product.operands}
    assert rounded == "convert float32"
    multiplied = operations[operations[place[2]].operands[0]]
    assert [operations[o].name for o in multiplied.operands] == ["add", "convert bfloat16"]
    assert multiplied.dtype == "float32"


def test_a_rounded_value_is_read_as_it_was_before() -> None:
    """A normalisation in float32, rounded for a product and added to a residual stream."""
    every = [
        operation("input", shape=TABLE, tag=0),
        narrow("input", tag=1),
        operation("elementwise", 0, shape=TABLE, name="tanh"),
        narrow("expensive", 2, name="convert float32"),
        narrow("elementwise", 3, 1, name="add"),
        narrow("dot", 3, 3, tag=MATRIX),
    ]
    operations, place = widened(every)
    added = operations[operations[place[4]].operands[0]]
    assert [operations[o].name for o in added.operands] == ["tanh", "convert bfloat16"]
    assert operations[place[5]].operands == (place[3], place[3])


@pytest.mark.parametrize(("axes", "name"), [((0,), "add"), ((0, 1), "convert bfloat16")])
def test_a_sum_along_several_dimensions_reads_what_was_rounded(axes: tuple[int, ...], name: str) -> None:
    every = [
        narrow("input", tag=0),
        narrow("elementwise", 0, 0, name="add"),
        narrow("reduce", 1, tag=("reduce-sum", axes)),
    ]
    operations, place = widened(every)
    summed = operations[operations[place[2]].operands[0]]
    assert (summed.kind, summed.dtype) == ("reduce", "float32")
    assert operations[summed.operands[0]].name == name


@pytest.mark.parametrize("name", ["maximum", "negate", "select", "exponential"])
def test_comparisons_and_moves_stay_narrow(name: str) -> None:
    every = [narrow("input", tag=0), narrow("elementwise", 0, name=name)]
    assert widened(every) == (every, [0, 1])


def test_rounding_and_widening_again_is_left_out() -> None:
    again = Operation("elementwise", (1,), TABLE, "float32", -1, tag=("convert bfloat16",))
    operations, place = widened([narrow("input", tag=0), narrow("elementwise", 0, 0, name="add"), again])
    assert (operations[place[2]].name, operations[place[2]].dtype) == ("add", "float32")


@pytest.mark.parametrize("seed", range(40))
def test_every_operation_is_behind_what_it_reads_and_as_large_as_it_was(seed: int) -> None:
    every = [o._replace(dtype="bfloat16") if o.kind != "literal" else o for o in drawn(seed).operations]
    operations, place = widened(every)
    assert all(o < index for index, held in enumerate(operations) for o in held.operands)
    assert [operations[p].shape for p in place] == [o.shape for o in every]


@pytest.mark.parametrize("seed", range(10))
def test_latencies_are_not_hidden_before_hopper(seed: int) -> None:
    program = drawn(seed)
    kernels = list(kernels_of(program).values())
    tasks = tasks_of(program, kernels)
    order = [t for t in ordered(program, kernels, tasks) if tasks.roles[t] != Role.END and t not in tasks.joint]
    made = [o for o in (tasks.operations[t] for t in order) for o in (o, *tasks.beside.get(o, ()))]
    is_input = [o >= 0 and program.operations[o].kind == "input" for o in made]
    listed = [o for o, source in zip(made, is_input, strict=True) if o >= 0 and not source]
    assert schedule(program, kernels, hides=False)[sum(is_input) :] == listed


def test_generations_differ() -> None:
    ampere, hopper = (weights_of(parse_cluster(f"8:{kind}").group().device.name) for kind in ("a100-80g", "h100"))
    assert ampere is not None
    assert hopper is not None
    assert (ampere.from_hopper, hopper.from_hopper) == (False, True)
    assert ampere.arithmetic.step_nbytes("tanh") == pytest.approx(504 * 2.04 / 19.5)
    assert hopper.arithmetic.step_nbytes("tanh") == pytest.approx(467 * 3.35 / 66.9)
    assert ampere.arithmetic.step_nbytes("exponential") == ampere.arithmetic.step_nbytes("add")
    assert ampere.arithmetic.launch_nbytes == pytest.approx(2.04e6)
    assert xla_gpu.model(ampere) is not xla_gpu.model(hopper)
