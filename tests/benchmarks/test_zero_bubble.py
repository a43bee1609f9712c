"""Zero Bubble's tables: bubble rates, throughput from given times, and what its software does without."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from benchmarks.published.running import predict
from benchmarks.published.schedules import Simulated
from benchmarks.published.scores import score
from benchmarks.published.sources import DATA, read
from benchmarks.published.zero_bubble import OnZeroBubble, with_shorter_gradients
from models import gpt
from passes.inter_op import StageCost

ROWS, _ = read((DATA,))


def test_bubble_rates_are_met_as_printed():
    rates = [r for r in ROWS if r.source == "zero-bubble-rates"]
    found = predict([r for r in rates if r.sweep in ("1F1B", "1F1B-I", "ZB-H1", "ZB-1p")])
    assert (score(found).printed, score(found).met) == (48, 48)


def test_throughput_of_given_times_is_predicted_closely_where_senders_wait():
    """And better than where they do not, as is the order of schedules."""
    blocking, overlapped = (
        score(predict([r for r in ROWS if r.source == source and "28.3B" not in r.name]))
        for source in ("zero-bubble-times-blocking", "zero-bubble-times")
    )
    assert blocking.mape is not None
    assert overlapped.mape is not None
    assert blocking.mape < min(0.05, overlapped.mape)
    assert blocking.tau is not None
    assert overlapped.tau is not None
    assert blocking.tau > max(0.85, overlapped.tau)


def test_zero_bubble_sums_no_gradients_by_passes_of_their_own_and_its_models_are_as_large_as_printed():
    with (DATA / "zero_bubble.csv").open(newline="", encoding="utf-8") as file:
        fields = next(f for f in csv.DictReader(file) if f["table"].startswith("Table 4") and f["schedule"] == "1F1B")
    question = next(r.question for r in ROWS if r.source == "zero-bubble" and r.name.endswith("1F1B"))
    assert isinstance(question, OnZeroBubble)
    config = question.job.config
    assert 1e-9 * gpt.parameters(config) == pytest.approx(float(fields["params_billion"]), abs=0.05)
    cost = StageCost.split(1.0, 2.0, 3.0)
    assert with_shorter_gradients(cost, 0.5) == StageCost.split(1.0, 2.0, 2.5)


def test_a_group_ends_its_step_once_whatever_its_chunks():
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        plain = Simulated(
            schedule=name,
            pipeline=2,
            microbatches=4,
            forward_seconds=1.0,
            input_seconds=1.0,
            weight_seconds=1.0,
            transfer_seconds=0.0,
            chunks=chunks,
        )
        ended = replace(plain, finish_seconds=0.5)
        assert ended.timeline().seconds == pytest.approx(plain.timeline().seconds + 0.5)
