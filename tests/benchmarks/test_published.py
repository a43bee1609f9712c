"""Published rows: read, expressed as their sources configured them, planned, and scored."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks.published.__main__ import arguments, main
from benchmarks.published.alike import DeepMegatron
from benchmarks.published.flops import megatron_flops, model_flops
from benchmarks.published.machines import machine
from benchmarks.published.maxtext import OF_DEVICES
from benchmarks.published.megatron import gpt_job, work_of
from benchmarks.published.nanotron import OF_MATMULS
from benchmarks.published.planned import Configuration, Job, shapes, step
from benchmarks.published.rows import Answer, Result, Row, number, whole
from benchmarks.published.running import predict
from benchmarks.published.scores import bias, mape, regret, score, sweeps, tau
from benchmarks.published.sources import DATA, NAMES, SOURCES, read, source_of, spread
from models import gpt
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.ir import phase
from passes.pipeline import body_of
from passes.plan import PipelinePlan, Plan
from passes.planners import Megatron, PlanOptions
from tests.sample import slow

ROWS, UNREAD = read((DATA,))
COUNTS = {
    "collectives": 356,
    "gpipe": 34,
    "llm-foundry": 191,
    "matmul": 19,
    "maxtext": 6,
    "megatron-sc21": 48,
    "megatron-v100": 34,
    "nanotron": 834,
    "zero": 84,  # 74 lines, of which 10 say two things
    "zero-bubble": 48,
    "zero-bubble-rates": 72,
    "zero-bubble-tasks": 36,  # 12 lines of three tasks
    "zero-bubble-times": 48,
    "zero-bubble-times-blocking": 48,
}


def lines(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(**fields: object) -> Row:
    given: dict[str, object] = {"source": "made", "sweep": "one", "name": "a"}
    return Row(**(given | fields))  # pyright: ignore[reportArgumentType]


def result(predicted: float, measured: float, **fields: object) -> Result:
    return Result(row=row(seconds=measured, **fields), answer=Answer(seconds=predicted))


# Rows


def test_every_line_of_every_file_becomes_a_row():
    assert UNREAD == []
    assert {name: sum(r.source == name for r in ROWS) for name in sorted(NAMES)} == COUNTS


def test_rows_have_names_of_their_own_and_a_question_or_a_reason():
    assert len({(r.source, r.name) for r in ROWS}) == len(ROWS)
    assert all((r.question is None) == bool(r.why) for r in ROWS)
    named = {(r.source, r.name) for r in ROWS}
    assert all(not r.base or (r.source, r.base) in named for r in ROWS)


def test_only_what_set_a_number_of_the_library_or_of_a_machine_is_fitted():
    library = {"collectives", "matmul", "zero-bubble-tasks", "nanotron", "maxtext"}
    assert {r.name for r in ROWS if r.fitted and r.source == "nanotron"} == set(OF_MATMULS)
    assert all(r.fitted for r in ROWS if r.source == "zero-bubble-tasks")
    assert library <= {r.source for r in ROWS if r.fitted}
    assert {r.name for r in ROWS if r.fitted and r.source == "maxtext"} == set(OF_DEVICES)
    assert not any(r.fitted for r in ROWS if r.source == "llm-foundry")
    assert [r.name for r in ROWS if r.fitted and r.source not in library] == [
        "fig11_pipeline_weak_scaling 16.2B tp8 pp1 dp1 micro1 batch8",
        "fig11_pipeline_weak_scaling 16.2B tp8 pp1 dp1 micro1 batch128",
        "weak scaling, model parallel: GPT-2 1.2B 16 heads, 1 V100-SXM3-32GB",
    ]


def test_a_file_is_known_by_its_columns_whatever_its_name(tmp_path: Path):
    text = (DATA / "megatron_sc21.csv").read_text().splitlines()
    (tmp_path / "more.csv").write_text("\n".join(text[:3]))
    (tmp_path / "else.csv").write_text("a,b\n1,2\n")
    rows, unread = read((tmp_path,))
    assert [r.source for r in rows] == ["megatron-sc21"] * 2
    assert unread == [tmp_path / "else.csv"]


def test_every_source_reads_its_own_file_alone():
    columns = [list(lines(path.stem)[0]) for path in sorted(DATA.glob("*.csv"))]
    found = [[source for source in SOURCES if source.columns <= set(names)] for names in columns]
    assert all(len(of) == 1 for of in found)
    assert source_of(["experiment"]) is None


def test_a_number_that_is_none_names_its_column(tmp_path: Path):
    text = (DATA / "megatron_sc21.csv").read_text().splitlines()
    (tmp_path / "bad.csv").write_text("\n".join([text[0], text[1].replace(",20480,", ",many,")]))
    with pytest.raises(ValueError, match=r"bad\.csv"):
        read((tmp_path,))
    with pytest.raises(ValueError, match=r"column 'layers': '2\.5' is no whole number"):
        whole({"layers": "2.5"}, "layers")
    assert (whole({"vocab": ""}, "vocab", 7), number({"a": "", "b": "1.5"}, "a", "b"), number({}, "a")) == (
        7,
        1.5,
        None,
    )


def test_rows_of_no_configuration_are_kept_and_said():
    why = {r.name: r.why for r in ROWS if r.source == "nanotron" and r.question is None}
    assert "8B tp1 pp2 dp4 zero1 micro1 accumulated64" not in why
    assert sum("make 4096 sequences, not 256" in reason for reason in why.values()) == 3
    schedules = {r.name.split()[-1] for r in ROWS if "no schedule" in r.why}
    assert schedules == {"ZB-2p", "ZB-H2"}


def test_a_limit_takes_rows_evenly_with_their_bases():
    rows = [row(name=f"r{i}", question=Configuration(job=TINY, cluster=CLUSTER), base="r1") for i in range(10)]
    assert [r.name for r in spread(rows, 2)] == ["r0", "r1", "r5"]
    assert spread(rows, 0) == rows
    lost = row(name="lost", why="because")
    assert lost in spread([*rows, lost], 1)


# What the sources divide by seconds


def test_flops_are_those_that_the_file_derives():
    for fields in lines("megatron_sc21"):
        if fields["derived_flops_per_iter"]:
            batch = whole(fields, "global_batch_seqs")
            assert work_of(fields, batch) == pytest.approx(float(fields["derived_flops_per_iter"]), rel=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_flops_are_those_of_the_model(remat: bool):
    config = gpt.Config(vocab_size=512, sequence_length=64, hidden=32, layers=3, heads=4, remat=remat)
    flops = (megatron_flops if remat else model_flops)(5, 64, 3, 32, 512)
    assert flops == pytest.approx(gpt.flops(config, 5), rel=1e-12)


def test_seconds_follow_from_the_throughput():
    rows = {r.name: r for r in ROWS if r.source == "megatron-sc21"}
    for fields, found in zip(lines("megatron_sc21"), rows.values(), strict=True):
        assert found.seconds
        assert found.work / found.seconds == pytest.approx(float(fields["tflops_per_gpu"]), rel=1e-4)


def test_machines_are_the_sources_own():
    found = machine("V100-SXM3-32GB (DGX-2H, 100 Gb/s x8 InfiniBand a node)", 512)
    assert found is not None
    assert (found.group().hosts, found.group().devices_per_host) == (32, 16)
    assert found.group().device.flops_per_second["float16"] == pytest.approx(130e12)
    dgx = machine("A100-40GB (DGX A100)", 1024)
    assert dgx is not None
    assert dgx.group().inter == machine("A100-SXM4-80GB (DGX A100)", 16).group().inter  # pyright: ignore[reportOptionalMemberAccess]
    assert dgx.group().device.memory_nbytes == 40 * 2**30
    assert machine("Abacus", 8) is None


# Questions


TINY = Job(
    module=gpt,
    config=gpt.Config(
        vocab_size=64,
        sequence_length=8,
        hidden=16,
        layers=4,
        heads=4,
        dtype="float16",
        param_dtype="float16",
        remat=True,
        scan_layers=True,
    ),
    batch=8,
    precision="master copy",
)
CLUSTER = parse_cluster("4:a100-80g")


@pytest.mark.slow
def test_a_row_is_planned_as_its_source_configured_it():
    asked = Configuration(job=TINY, cluster=CLUSTER, microbatches=4, data=2, pipeline=2)
    plan = asked.plan()
    assert isinstance(plan, PipelinePlan)
    assert (plan.microbatches, plan.schedule_name, len(plan.stages)) == (4, "1f1b", 2)
    assert [dict(zip(s.mesh.axes, s.mesh.sizes, strict=True))["data"] for s in plan.stages] == [2, 2]
    answer = asked.answer()
    assert (answer.seconds, answer.nbytes) == (plan.step_seconds, plan.peak_nbytes)
    assert answer.is_out_of_memory is False
    assert replace(asked, total=True).answer().nbytes == sum(plan.timeline.peak_nbytes)


@pytest.mark.parametrize(("by_layer", "pieces"), [slow(False, 2), (True, 4)])
def test_a_loop_over_layers_comes_in_stages_or_in_layers(by_layer: bool, pieces: int):
    body = body_of(step(TINY, 2, 2, by_layer=by_layer).graph)
    loops = [node for node in body.nodes if node.primitive == "scan" and phase(node) == "forward"]
    assert [node.params["length"] for node in loops] == [4 // pieces] * pieces


@pytest.mark.slow
def test_equal_stages_are_planned_once_and_as_by_themselves():
    whole = step(TINY, 2, 4, by_layer=False)
    planners = (of(data=1, tensor=1, pipeline=4, microbatches=2) for of in (DeepMegatron, Megatron))
    ours, theirs = (planner.plan(whole, CLUSTER, PlanOptions()).plan for planner in planners)
    assert isinstance(ours, PipelinePlan)
    assert isinstance(theirs, PipelinePlan)
    assert (ours.costs, ours.firsts, ours.transfers) == (theirs.costs, theirs.firsts, theirs.transfers)
    assert [s.layout for s in ours.stages] == [s.layout for s in theirs.stages]
    assert ours.planner == theirs.planner


@pytest.mark.slow
def test_schedules_share_the_plans_of_stages():
    asked = Configuration(job=TINY, cluster=CLUSTER, microbatches=4, data=2, pipeline=2)
    one, split = asked.plan(), replace(asked, schedule="zero-bubble-h1").plan()
    assert isinstance(one, PipelinePlan)
    assert isinstance(split, PipelinePlan)
    assert (split.schedule.name, split.costs) == ("zero-bubble-h1", one.costs)
    assert split.step_seconds != one.step_seconds


@pytest.mark.slow
def test_without_stages_there_are_tensors_data_and_zero():
    plan = Configuration(job=TINY, cluster=CLUSTER, microbatches=2, data=2, tensor=2).plan()
    assert isinstance(plan, Plan)
    assert dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)) == {"data": 2, "tensor": 2}
    cut = Configuration(job=TINY, cluster=CLUSTER, data=4, zero=1)
    held = [asked.answer().nbytes or 0 for asked in (cut, replace(cut, zero=0))]
    assert held[0] < held[1]
    for sizes in ({"data": 2, "tensor": 2}, {"data": 2, "tensor": 1, "pipeline": 2, "microbatches": 2}):
        nbytes = [replace(cut, zero=zero, **sizes).answer().nbytes or 0 for zero in (1, 0)]
        assert nbytes[0] < nbytes[1]


def test_the_state_is_that_of_the_source():
    """14 bytes a parameter: 2, and a copy and two moments of 4 each; or, in one precision, 2 and two moments."""

    def held(precision: str) -> float:
        job = replace(TINY, precision=precision, config=replace(TINY.config, param_dtype=PARAMS[precision]))
        state, _ = shapes(job)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim) / gpt.parameters(TINY.config)

    assert held("master copy") == 14
    assert held("float32 gradients") == 14
    assert held("single") == 6


PARAMS = {"master copy": "float16", "float32 gradients": "float16", "single": "float16"}


def test_a_row_of_a_figure_end_to_end():
    """The smallest row of Fig. 11: one stage of 3 layers on 8 A100, within a factor of two of what was measured."""
    name = "fig11_pipeline_weak_scaling 16.2B tp8 pp1 dp1 micro1 batch8"
    (found,) = predict([r for r in ROWS if r.name == name])
    assert found.seconds_ratio is not None
    assert 0.5 < found.seconds_ratio < 2
    assert found.row.work / found.row.seconds == pytest.approx(164.65, rel=1e-4)  # pyright: ignore[reportOperatorIssue]
    config = gpt_job(lines("megatron_sc21")[0], 8, remat=True).config
    assert (config.layers, config.hidden, config.heads, config.vocab_size) == (3, 20480, 128, 51200)


def test_a_refused_row_says_why():
    class Refusing:
        def answer(self) -> Answer:
            raise PlanningError("it is\n  too much")

    (found,) = predict([row(question=Refusing())])
    assert (found.answer, found.why) == (None, "it is too much")


def test_relative_rows_count_steps_of_their_base():
    class Taking:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def answer(self) -> Answer:
            return Answer(seconds=self.seconds)

    rows = [
        row(name="one", question=Taking(8.0), seconds=1.0, base="one"),
        row(name="two", question=Taking(5.0), seconds=0.5, base="one"),
        row(name="none", question=Taking(5.0), seconds=0.5, base="gone"),
    ]
    one, two, none = predict(rows)
    assert (one.seconds_ratio, two.seconds_ratio, none.seconds_ratio) == (1.0, 1.25, None)
    assert none.why == "its base, gone, was not predicted"
    assert score([one, two, none]).mape == pytest.approx(0.25)  # the base is right by definition


# Scores


def test_errors_on_numbers_by_hand():
    assert mape([1.5, 0.5, 1.0]) == pytest.approx(1 / 3)
    assert bias([1.5, 0.7]) == pytest.approx(0.1)


def test_tau_on_numbers_by_hand():
    assert tau([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert tau([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)  # two pairs right, one wrong
    assert tau([(1, 1)]) is None
    assert tau([(1, 1), (1, 2)]) is None


def test_regret_on_numbers_by_hand():
    assert regret([(1.0, 5.0), (2.0, 4.0), (3.0, 8.0)]) == pytest.approx(0.25)
    assert regret([(1.0, 4.0), (2.0, 5.0)]) == 0
    assert regret([(1.0, 4.0), (1.0, 6.0), (2.0, 5.0)]) == pytest.approx(0.5)  # of equals, the slowest


def test_a_sweep_is_ordered_by_rate_and_only_a_choice_has_regret():
    found = [result(1.0, 1.0, work=2.0), result(3.0, 4.0, work=9.0)]  # rates 2 and 3, 2 and 2.25
    (sweep,) = sweeps(found)
    assert (sweep.tau, sweep.regret) == (pytest.approx(1), None)
    (sweep,) = sweeps([result(1.0, 3.0, is_choice=True), result(2.0, 2.0, is_choice=True)])
    assert (sweep.tau, sweep.regret) == (pytest.approx(-1), pytest.approx(0.5))


def test_precision_and_recall_on_numbers_by_hand():
    def fate(predicted: bool, measured: bool) -> Result:
        answer = Answer(nbytes=2.0 if predicted else 1.0, limit_nbytes=1.5)
        return Result(row=row(out_of_memory=measured), answer=answer)

    pairs = [(True, True)] * 3 + [(True, False)] + [(False, True)] * 2 + [(False, False)] * 4
    found = score([fate(*pair) for pair in pairs])
    assert (found.warned, found.positives, found.caught) == (4, 5, 3)
    assert (found.precision, found.recall) == (0.75, 0.6)
    assert score([fate(False, False)]).precision is None


def test_printed_figures_are_met_within_their_rounding():
    found = score([result(1.01, 1.0, rounding=0.01), result(1.02, 1.0, rounding=0.01), result(1.5, 1.0)])
    assert (found.printed, found.met, found.timed) == (2, 1, 3)


# The command line


def test_the_command_line_prints_json(capsys: pytest.CaptureFixture[str]):
    assert main(["--source", "zero-bubble-rates,matmul", "--limit", "3", "--json"]) == 0
    data: Mapping[str, object] = json.loads(capsys.readouterr().out)
    assert data["left_out_by_limit"] == 48 - 3 + 5 - 3
    assert set(data["scores"]) == {"judged", "fitted"}  # pyright: ignore[reportArgumentType]


def test_the_command_line_prints_tables_and_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "errors.svg"
    assert main(["--source", "zero-bubble-times", "--row", "1.5B p8 m24", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "autopar has no schedule ZB-2p (1.5B p8 m24 ZB-2p)" in printed
    assert "tau" in printed
    assert picture.stat().st_size > 0


def test_a_source_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        arguments(["--source", "megatron"])
    assert "no source is called 'megatron'" in capsys.readouterr().err
