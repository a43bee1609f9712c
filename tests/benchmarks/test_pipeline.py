"""The pieces of `benchmarks.pipeline`, and which options the training scripts take together."""

from __future__ import annotations

import argparse

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.program import Free, Run, Send
from benchmarks import dispatch, gpt_options, loop, overlap, pipeline
from benchmarks.loaded_pipeline import Loaded, live_activations, load, mlp
from benchmarks.one_device import Pairs


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    planner = autopar.Pipeline(stages=2, microbatches=4, submeshes=(1, 1))
    return load(mlp(layers=4, width=8, rows=16), planner)


def test_a_row_of_the_grid(loaded: Loaded):
    row = pipeline.measure(loaded, rounds=2)
    assert (row.schedule, row.n_stages, row.microbatches) == ("1f1b", 2, 4)
    assert row.live == row.bound == (2, 1)
    assert row.measured_bubble < 1
    assert 0 < row.predicted_bubble < 1
    assert min(row.measured_seconds, row.run_seconds, row.send_seconds, row.peak_nbytes) > 0
    assert pipeline.grid_table([row], "mlp").row_count == 1


def test_gpipe_keeps_every_microbatch():
    planner = autopar.Pipeline(stages=2, microbatches=4, submeshes=(1, 1), schedule="gpipe")
    found = load(mlp(layers=4, width=8, rows=16), planner)
    assert live_activations(found.program, 2) == (4, 4)


def test_a_timed_step_is_the_step(loaded: Loaded):
    plain = loaded.pipeline(loaded.leaves)
    for wait in (False, True):
        results, times = loaded.pipeline.timed(loaded.leaves, wait=wait)
        jax.tree.map(np.testing.assert_array_equal, results, plain)
        assert len(times.host) == len(times.done) == len(loaded.program.instructions)
        assert all(0 < host <= done for host, done in zip(times.host, times.done, strict=True))


def test_a_step_leaves_its_arguments_as_they_are(loaded: Loaded):
    before = loaded.pipeline(loaded.leaves)
    again = loaded.pipeline(loaded.leaves)
    jax.tree.map(np.testing.assert_array_equal, again, before)


def test_host_seconds_are_of_every_instruction(loaded: Loaded):
    found = loaded.host_seconds(alone=True)
    for kind in (Run, Send, Free):
        assert len(found[kind.__name__]) == sum(isinstance(i, kind) for i in loaded.program.instructions)
    assert len(found["feed"]) == 1


def test_dispatch_says_what_it_misses():
    seconds = {"Run": 61e-6, "Send": 119e-6, "Free": 1e-6, "feed": 1e-3}
    counts = dict.fromkeys(seconds, 1)
    row = dispatch.Dispatch(submeshes=(1, 1, 1, 1), counts=counts, steps=seconds, alone=seconds)
    assert row.misses == ["Run on stages of 1+1+1+1 devices: 61 us of the host, bound 60 us"]
    assert dispatch.dispatch_table([row]).row_count == 4


def test_the_share_of_the_allowed_speed_up():
    pairs = Pairs(ours=(3.5, 3.5), plain=(6.0, 6.0))
    row = overlap.Overlap(microbatches=6, n_stages=2, seconds=pairs, control=2.0, threads=1.0)
    assert row.allowed == pytest.approx(12 / 7)
    assert row.share == pytest.approx(1.0)
    assert overlap.overlap_table([row]).row_count == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stages", "9"], "there are 8"),
        (["--microbatches", "0"], "1 or more"),
        (["--schedule", "2f2b"], "invalid choice"),
    ],
)
def test_refused_options_of_the_grid(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        pipeline.arguments(argv)
    assert words in capsys.readouterr().err


def parsed(argv: list[str]) -> argparse.Namespace:
    return loop.options(loop.parser("moe", "", batch=16, learning_rate=1e-3), argv)


def test_pipelines_of_the_training_scripts():
    args = parsed(["--planner", "gpipe", "--stages", "2", "--microbatches", "4"])
    assert args.planner == autopar.Pipeline(stages=2, microbatches=4, schedule="gpipe")
    assert parsed(["--planner", "1f1b"]).planner == autopar.Pipeline(stages=4, microbatches=8)
    assert parsed(["--microbatches", "2"]).microbatches == 2
    assert parsed(["--planner", "zero3"]).microbatches == 1
    assert gpt_options.arguments(["--planner", "gpipe", "--stages", "2"]).pipeline == autopar.Pipeline(
        stages=2, microbatches=8, schedule="gpipe"
    )
    assert gpt_options.arguments([]).pipeline is None


@pytest.mark.parametrize("parse", [parsed, gpt_options.arguments])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stages", "2"], "needs a pipeline"),
        (["--planner", "1f1b", "--microbatches", "3"], "does not divide --batch 16"),
        (["--planner", "1f1b", "--stages", "0"], "invalid positive value"),
        (["--planner", "2f2b"], "2f2b"),
    ],
)
def test_refused_options_of_the_training_scripts(
    parse: object, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert callable(parse)
    with pytest.raises(SystemExit):
        parse(argv)
    assert words in capsys.readouterr().err


def test_jit_has_no_microbatches(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpt_options.arguments(["--planner", "jit", "--microbatches", "2"])
    assert "needs a planner" in capsys.readouterr().err
