"""Options of planners that cannot be: each is refused by name as soon as it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from passes.errors import PlanningError
from passes.inter_op import SCHEDULES
from passes.planners import Auto, DataParallel, GPipe, Megatron, Pipeline, Zero
from passes.planners.checks import checked_schedules, checked_submeshes
from passes.solver import SolverOptions


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Auto, {"max_axes": True}, "Auto(max_axes=True): should be a whole number from 1"),
        (Auto, {"memory_limit": 0.5}, "memory_limit=0.5: a limit is a number of bytes from 1"),
        (Auto, {"memory_limit": "0.3 B"}, "memory_limit='0.3 B': a limit is a number of bytes from 1"),
        (Auto, {"layers": 0}, "Auto(layers=0): should be a whole number from 1"),
        (Auto, {"layers": 2.5}, "Auto(layers=2.5): should be a whole number from 1"),
        (Auto, {"seconds": -1}, "Auto(seconds=-1): a limit is a number of seconds"),
        (Auto, {"seconds": math.nan}, "Auto(seconds=nan): a limit is a number of seconds"),
        (Auto, {"seconds": "3"}, "Auto(seconds='3'): a limit is a number of seconds"),
        (Auto, {"seconds": True}, "Auto(seconds=True): a limit is a number of seconds"),
        (Auto, {"schedules": (["1f1b"],)}, "Auto(schedules=(['1f1b'],)): schedules are a tuple of names"),
        (Auto, {"schedules": {"1f1b", "1f2b"}}, "did you mean '1f1b'"),
        (Auto, {"schedules": ("1f2b",)}, "did you mean '1f1b'"),
        (Auto, {"schedules": "1f1b"}, "write ('1f1b',)"),
        (Auto, {"schedules": 3}, "schedules are a tuple of names"),
        (Auto, {"solver": "cbc"}, "write solver=SolverOptions(solver='cbc')"),
        (DataParallel, {"solver": "cbc"}, "DataParallel(solver='cbc'): these are SolverOptions"),
        (Pipeline, {"stages": 2, "microbatches": 0}, "Pipeline(microbatches=0): should be a whole number from 1"),
        (Pipeline, {"stages": 2, "microbatches": None}, "Pipeline(microbatches=None): should be a whole number"),
        (Pipeline, {"stages": 0, "microbatches": 2}, "Pipeline(stages=0): should be a whole number from 1"),
        (Pipeline, {"stages": 2.0, "microbatches": 2}, "Pipeline(stages=2.0): should be a whole number from 1"),
        (Pipeline, {"stages": 2, "microbatches": 2, "interleave": 0}, "Pipeline(interleave=0): should be"),
        (Pipeline, {"stages": 2, "microbatches": 2, "submeshes": 4}, "Pipeline(submeshes=4): these are the devices"),
        (Pipeline, {"stages": 2, "microbatches": 2, "submeshes": (2.5, 1.5)}, "these are the devices of each submesh"),
        (Pipeline, {"stages": 2, "microbatches": 2, "options": ({"max_axes": 0}, None)}, "Pipeline(max_axes=0)"),
        (Pipeline, {"stages": 2, "microbatches": 2, "meshes": 5}, "Pipeline(meshes=5): these are one for each submesh"),
        (Pipeline, {"stages": 2, "microbatches": 2, "options": {"max_axes": 1}}, "these are one for each submesh"),
        (Pipeline, {"stages": 2, "microbatches": 2, "layers": 3}, "Pipeline(layers=3): this is a pattern of names"),
        (GPipe, {"stages": 2, "microbatches": 2, "layers": None}, "GPipe(layers=None): this is a pattern of names"),
        (GPipe, {"stages": 2, "microbatches": 0}, "GPipe(microbatches=0): should be a whole number from 1"),
        (
            Pipeline,
            {"stages": 2, "microbatches": 2, "meshes": [{"data": 2}, {"stage": 2}]},
            "'stage' is the axis along which the stages themselves lie",
        ),
        (GPipe, {"stages": 2, "microbatches": 2, "submeshes": "22"}, "GPipe(submeshes='22'): these are the devices"),
        (Megatron, {"data": 2, "tensor": 2, "pipeline": 0}, "Megatron(pipeline=0): should be a whole number from 1"),
        (Megatron, {"data": 2, "tensor": 2, "microbatches": 0}, "Megatron(microbatches=0): should be"),
        (Megatron, {"data": 0, "tensor": 2}, "Megatron(data=0): should be a whole number from 1"),
        (Megatron, {"data": 2, "tensor": 2, "zero": 3}, "Megatron(zero=3): beside tensors"),
        (Megatron, {"data": 2, "tensor": 2, "schedule": "1f2b"}, "did you mean '1f1b'?"),
        (Megatron, {"data": 2, "tensor": 2, "interleave": 2}, "Megatron(interleave=2): interleaves the stages of a"),
        (
            Megatron,
            {"data": 1, "tensor": 2, "pipeline": 2, "interleave": 2, "schedule": "zero-bubble-h1"},
            "it gives each submesh one stage, not 2 that take turns; 'interleaved' has turns",
        ),
        (
            Pipeline,
            {"stages": 2, "microbatches": 2, "interleave": 2, "schedule": "gpipe"},
            "Pipeline(schedule='gpipe', interleave=2): it gives each submesh one stage",
        ),
        (Pipeline, {"stages": 2, "microbatches": 2, "schedule": "2f2b"}, "Pipeline(schedule='2f2b'): known are gpipe"),
        (Zero, {"stage": 4}, "Zero(stage=4): ZeRO has stages 1, 2 and 3"),
        (Zero, {"stage": True}, "Zero(stage=True): ZeRO has stages 1, 2 and 3"),
        (Zero, {"stage": 3.0}, "Zero(stage=3.0): ZeRO has stages 1, 2 and 3"),
        (SolverOptions, {"gap": "1%"}, "SolverOptions(gap='1%'): should be a number from 0"),
        (SolverOptions, {"tie_radius": 1.5}, "SolverOptions(tie_radius=1.5): should be a whole number from 0"),
        (SolverOptions, {"untied": None}, "SolverOptions(untied=None): should be a whole number from 0"),
        (SolverOptions, {"solver": 3}, "SolverOptions(solver=3): should be the name of a solver that PuLP finds"),
        (SolverOptions, {"gap": -1}, "SolverOptions(gap=-1): should be a number from 0"),
        (SolverOptions, {"time_limit": math.nan}, "SolverOptions(time_limit=nan): should be a number from 0"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    kind: Callable[..., object], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanningError) as error:
        kind(**options)
    assert message in str(error.value)


def test_options_that_are_allowed_are_kept() -> None:
    assert checked_submeshes("Pipeline", [2, 1, 1]) == (2, 1, 1)
    assert checked_schedules("Auto", ["gpipe", "1f1b"]) == ("gpipe", "1f1b")
    assert checked_schedules("Auto", ("1f1b", "gpipe")) == ("1f1b", "gpipe")
    assert checked_schedules("Auto", iter(["1f1b"])) == ("1f1b",)
    assert Auto(seconds=0, layers=None).schedules == ()


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_schedules_of_a_set_come_in_the_order_of_the_table(kind: Callable[..., Any]) -> None:
    """The planner is the same in every process: the order of a set is not."""
    assert checked_schedules("Auto", kind(SCHEDULES)) == tuple(SCHEDULES)
    assert Auto(schedules=kind(["gpipe", "1f1b", "eager-1f1b"])) == Auto(schedules=("gpipe", "1f1b", "eager-1f1b"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Zero, {"stage": 3}),
        (Megatron, {"data": 2, "tensor": 2, "microbatches": 4, "zero": 1}),
        (Pipeline, {"stages": 2, "microbatches": 4, "max_axes": 1, "submeshes": (2, 2)}),
        (GPipe, {"stages": 2, "microbatches": 4}),
        (Auto, {"max_axes": 1, "layers": 4, "stages": 2, "memory_limit": 10**9}),
        (Auto, {"mesh": {"data": 4, "model": 2}}),
    ],
)
def test_integers_of_numpy_are_those_of_python(kind: Any, options: dict[str, Any]) -> None:
    """A plan's cache keeps planners as JSON, which has no others."""
    planner = kind(**jax.tree.map(np.int64, options))
    assert planner == kind(**options)
    assert repr(planner) == repr(kind(**options))
