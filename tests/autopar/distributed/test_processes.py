"""Programs on several processes, which are real ones: every step is that of `jax.jit`."""

from __future__ import annotations

import pytest

from tests.autopar.distributed.launching import HERE, launch, lines
from tests.sample import slow

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1")


def pipelines(model: str, stages: int) -> list[str]:
    return [f"{model}=Pipeline(stages={stages}, microbatches=4, schedule='{schedule}')" for schedule in SCHEDULES]


MIXED = ["gpt=Pipeline(stages=2, microbatches=4)", "moe=Pipeline(stages=2, microbatches=4)", "gpt=Auto()", "moe=Auto()"]

# Processes, devices of each, and what runs on them one after the other.
SAMPLE = ["moe=Megatron(data=1, tensor=2, pipeline=2, microbatches=2)", "gpt=Pipeline(stages=4, microbatches=4)"]
CASES = [
    pytest.param(2, 2, SAMPLE, marks=pytest.mark.slow, id="sample"),  # `make processes` runs it
    slow(3, 1, ["gpt=Pipeline(stages=2, microbatches=2, submeshes=(2, 1), schedule='zero-bubble-h1')"]),
    slow(2, 2, ["gpt=Megatron(data=2, tensor=2)", *pipelines("gpt", 4)]),
    slow(2, 4, ["gpt=DataParallel()", "gpt=Zero(3)", "moe=Auto()", "moe=Megatron(data=4, tensor=2)"]),
    slow(2, 1, [*pipelines("gpt", 2), *pipelines("moe", 2)]),
    slow(4, 1, [*pipelines("gpt", 4), *pipelines("moe", 2)]),
    slow(4, 2, [*pipelines("gpt", 2), "gpt=Megatron(data=2, tensor=2, pipeline=2, microbatches=2)"]),
    slow(2, 4, [*pipelines("moe", 4), "gpt=Pipeline(stages=3, microbatches=4, submeshes=(1, 5, 2))"]),
    slow(2, 2, ["gpt=Megatron(data=1, tensor=2, pipeline=2, interleave=2, microbatches=2)", "gpt=Auto(pipeline=True)"]),
    slow(4, 1, ["gpt-scan=Pipeline(stages=4, microbatches=2)", "gpt-scan=Pipeline(stages=2, microbatches=2)"]),
    slow(2, 2, ["gpt-scan=Pipeline(stages=2, microbatches=2, submeshes=(3, 1))", "wide-resnet=DataParallel()"]),
    *[slow(processes, devices, MIXED) for processes, devices in ((2, 3), (4, 3), (4, 4))],
]


@pytest.mark.parametrize(("processes", "devices", "cases"), CASES)
def test_every_process_sees_the_step_of_jit(processes: int, devices: int, cases: list[str]):
    done = launch(HERE / "equals_jit.py", *cases, processes=processes, devices=devices)
    assert done.returncode == 0, done.stdout + done.stderr
    first = [line for line in lines(done, 0) if line.startswith("equal: ")]
    assert [line.rpartition(": ")[0] for line in first] == [f"equal: {case}" for case in cases]
    for rank in range(1, processes):
        assert [line for line in lines(done, rank) if line.startswith("equal: ")] == first


def test_two_processes_compute_what_jit_does_and_name_what_differs():
    done = launch(HERE / "agreements.py", devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    by_rank = [[line.partition("said: ")[2] for line in lines(done, rank) if "said: " in line] for rank in (0, 1)]
    assert by_rank[0].pop(0) == "hosts 1"
    for findings in by_rank:
        said = [line.split(" ", 1) for line in findings]
        assert [topic for topic, _ in said] == [topic for topic, _ in EXPECTED], findings
        for (topic, text), (_, words) in zip(said, EXPECTED, strict=True):
            assert all(word in text for word in words), (topic, text)
    assert by_rank[0][-1] == by_rank[1][-1]  # the plan that both go on with


EXPECTED = [
    ("arguments", ["DisagreementError: batch on process 1", "make_array_from_process_local_data"]),
    ("constants", ["DisagreementError: the program on process 1", "2.0", "1.0", "agreements.py"]),
    ("programs", ["DisagreementError: the program on process 1", "line", "add", "mul", "run the same script"]),
    ("planner", ["OverBudgetError: ", "nothing fits"]),
    ("arrays", ["DisagreementError: params[0] on process 1"]),
    ("init", ["128 256"]),  # a stage's half of the model is all that a process ever has
    ("equal", ["True 1.0"]),
    ("checks", ["not refused", "DisagreementError: state[2] of step 2 on device", "of process 1 on host"]),
    *[("keys", ["True"])] * 2,
    ("compared", ["its own", "zero"]),
]


@pytest.mark.slow
def test_arrays_go_from_anywhere_to_anywhere():
    done = launch(HERE / "transfers.py", "30", "1", processes=2, devices=2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 1), (3, 2)])
def test_more_arrays_go_from_anywhere_to_anywhere(processes: int, devices: int, fresh_seed: int):
    done = launch(HERE / "transfers.py", "300", str(fresh_seed), processes=processes, devices=devices)
    assert done.returncode == 0, f"seed {fresh_seed}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_random_programs_end_with_what_they_compute(processes: int, devices: int, fresh_seed: int):
    done = launch(HERE / "programs.py", "50", str(fresh_seed), processes=processes, devices=devices)
    assert done.returncode == 0, f"seed {fresh_seed}\n{done.stdout}{done.stderr}"
    assert all(lines(done, rank)[-1] == "ran 50" for rank in range(processes))
