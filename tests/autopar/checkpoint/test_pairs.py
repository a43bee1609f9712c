"""A state that was saved under one plan is restored under any other, bit for bit."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import autopar
from autopar import DataParallel, Megatron, Pipeline, Zero
from benchmarks.trainings import MODELS
from tests.autopar.distributed.launching import HERE, launch, lines
from tests.closeness import assert_same_bits

PLANNERS = [
    DataParallel(),
    Zero(1),
    Zero(3),
    Megatron(data=4, tensor=2),
    Megatron(data=1, tensor=8),
    Pipeline(stages=2, microbatches=2),
    Pipeline(stages=4, microbatches=2, schedule="zero-bubble-h1"),
    Pipeline(stages=3, microbatches=2, submeshes=(1, 5, 2)),
    Megatron(data=2, tensor=2, pipeline=2, microbatches=2),
    Megatron(data=2, tensor=2, pipeline=2, interleave=2, microbatches=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "gpt-scan"])
def test_every_pair_of_ten_plans(tmp_path: Path, model: str):
    training = MODELS[model].training("float32", least=True)
    steps = [autopar.parallelize(training.step, planner=planner) for planner in PLANNERS]
    likes = [step.placement(training.state, training.batch)[0][0] for step in steps]
    placed = {str([leaf.sharding for leaf in jax.tree.leaves(like)]) for like in likes}
    assert len(placed) >= 7  # of ten plans
    for number, like in enumerate(likes):
        state = jax.tree.map(lambda leaf, at: jax.device_put(leaf, at.sharding), training.state, like)
        checkpoints = autopar.Checkpoints(tmp_path / f"{number}")
        checkpoints.save(1, state, plan=steps[number].plan(training.state, training.batch))
        for other in likes:
            saved = checkpoints.restore(other)
            assert saved is not None
            assert_same_bits(saved.state, training.state)
            assert [leaf.sharding for leaf in jax.tree.leaves(saved.state)] == [
                leaf.sharding for leaf in jax.tree.leaves(other)
            ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "gpt-scan"])
def test_processes_go_on_with_what_others_saved(tmp_path: Path, model: str):
    runs = [
        (2, 1, "Pipeline(stages=2, microbatches=2)"),
        (2, 2, "Pipeline(stages=2, microbatches=2, submeshes=(3, 1))"),
        (1, 4, "DataParallel()"),
        (4, 1, "Zero(3)"),
        (2, 1, "DataParallel()"),
    ]
    last: list[str] = []
    for number, (processes, devices, planner) in enumerate(runs, 1):
        done = launch(
            HERE / "saving.py", str(tmp_path), model, planner, str(number), processes=processes, devices=devices
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = [line for line in lines(done, 0) if line.startswith(("restored", "saved"))]
        assert told[:-1] == [line.replace("saved", "restored") + f" {number - 1}" for line in last]
        last = told[-1:]
