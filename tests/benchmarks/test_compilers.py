"""Predicted peaks and bytes sent against kept results of accelerators' compilers, and how those are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import compilers
from benchmarks.compilers import RESULTS, TARGETS, arguments, clock_of, digest_of, load, program, rows, save
from tests.sample import slow

KEPT = load(RESULTS)


def test_every_kept_program_sends_what_was_planned() -> None:
    assert {entry.target for entry in KEPT.values()} == set(TARGETS)
    for entry in KEPT.values():
        assert entry.unplanned == entry.missing == 0, entry.key
        assert entry.peak_nbytes >= entry.arguments_nbytes
        assert entry.versions.get("jax")


@pytest.mark.parametrize(
    ("target", "model", "planner"),
    [
        ("h100", "dlrm", "dp"),
        slow("h100", "gpt", "dp"),
        slow("h100", "gpt-large", "megatron"),
        slow("h100", "llama-large", "zero3"),
        slow("h100", "gpt-350m", "auto"),
        ("v5e:2x4", "dlrm", "dp"),
        slow("v5p:2x2x2", "gpt", "zero3"),
        slow("v5p:2x2x2", "moe", "dp"),
        slow("v5p:2x2x2", "wide-resnet-large", "megatron"),
    ],
)
def test_a_peak_is_predicted_within_bounds(target: str, model: str, planner: str) -> None:
    args = arguments(["--targets", target, "--models", model, "--planners", planner])
    (row,) = rows(args, Console(quiet=True))
    if row.compiled is None:
        pytest.skip("the plan is another than was compiled: python -m benchmarks.compilers --compile")
    assert not row.misses, f"{100 * row.error:+.1f} %"
    assert row.predicted_nbytes >= row.compiled.arguments_nbytes


def test_a_kept_verdict_is_found_for_the_same_plan_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    step, given = program("dlrm")
    plan: Any = step.replan(cluster=TARGETS["h100"], planner=compilers.PLANNERS["dp"]).plan(*given)
    entry = replace(KEPT["h100", "dlrm", "dp"], digest=digest_of(plan))
    save(path, {entry.key: entry})
    assert load(path) == {entry.key: entry}
    args = arguments(["--targets", "h100", "--models", "dlrm", "--planners", "dp", "--results", str(path)])
    (row,) = rows(args, Console(quiet=True))
    assert row.compiled == entry
    save(path, {entry.key: replace(entry, digest="of another plan")})
    (row,) = rows(args, Console(quiet=True))
    assert row.compiled is None


def test_digests_follow_placements_and_nothing_that_is_predicted() -> None:
    step, given = program("dlrm")
    plans: list[Any] = [
        step.replan(cluster=TARGETS["h100"], planner=compilers.PLANNERS[name]).plan(*given) for name in ("dp", "zero3")
    ]
    assert digest_of(plans[0]) != digest_of(plans[1])
    assert digest_of(replace(plans[0], nbytes={}, seconds={})) == digest_of(plans[0])


def test_every_tpu_has_a_clock() -> None:
    assert all((clock_of(target) > 0) == target.startswith("v") for target in TARGETS)


def test_a_margin_is_what_most_compiled_peaks_are_above_their_predictions() -> None:
    entry = KEPT["h100", "dlrm", "dp"]

    def predicted(compiled_nbytes: int, scale: int = 2_000_000) -> compilers.Row:
        return compilers.Row(
            target="h100",
            model="dlrm",
            planner="dp",
            planned_nbytes=100 * scale,
            predicted_nbytes=100 * scale,
            predicted_compute_seconds=0.0,
            compiled=replace(entry, peak_nbytes=compiled_nbytes * scale),
        )

    most = [predicted(90 + i) for i in range(20)]
    assert compilers.margin(most, "h100") == pytest.approx(0.08)
    assert compilers.margin([predicted(90)], "h100") == 0.0
    few = [predicted(150, scale=1000)]  # no device's memory is its limit
    assert compilers.margin(few, "h100") is compilers.margin(most, "a100") is None
    assert "at most 8.0 % above" in compilers.account(most, "h100")
    assert "no compiled peak has 100 MB" in compilers.account(few, "h100")
