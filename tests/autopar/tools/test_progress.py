"""The progress that a search reports while it runs, and the plan that it returns after Ctrl-C."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autopar
from autopar import Progress
from autopar.errors import ArgumentError
from autopar.tools.cli import main
from passes.errors import OverBudgetError
from passes.intra_op import VariantTrials, cheapest_variant
from passes.ir import Graph
from passes.limits import Limits
from passes.pipeline.drafts import DraftSearch
from passes.pipeline.shapes import Draft
from passes.plan import Plan
from passes.progress import Deadline, Report, SearchContext
from passes.step import Step, Variant
from tests.autopar.rewrite.deep_steps import arguments
from tests.autopar.rewrite.deep_steps import train_step as deep_step
from tests.autopar.tools.train_module import TRAIN

CLUSTER = "2x4:a100-80g"


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


GIVEN = {"up": struct(64, 256), "down": struct(256, 64)}, struct(128, 64)
DEEP = jax.tree.map(lambda x: struct(*x.shape), arguments("float32"))


def plan(progress: Any, fun: Any = train_step, given: Any = GIVEN, **options: Any) -> Any:
    options = {"cluster": CLUSTER, "planner": autopar.Auto(interruptible=True), **options}
    return autopar.parallelize(fun, progress=progress, **options).plan(*given)


def heard(fun: Any = train_step, given: Any = GIVEN, **options: Any) -> list[Progress]:
    """All that a search tells."""
    told: list[Progress] = []
    plan(told.append, fun, given, **options)
    return told


def stopping(where: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    """A callback that presses Ctrl-C as soon as `where` holds, and is not called again after that."""
    pressed: list[Progress] = []

    def report(progress: Progress) -> None:
        assert not pressed, "the search went on"
        if where(progress):
            pressed.append(progress)
            raise KeyboardInterrupt

    return report


GOLDEN = Plan.load(Path(__file__).parents[2] / "golden" / "plan.json")
GRAPH = Graph(types=(), nodes=(), inputs=(), outputs=())


class Empty(Step):
    """An empty step with two layers, in one, two or four microbatches."""

    layers, counts = 2, (1, 2, 4)

    def variant(self, variant: Variant) -> Step:
        return self


@dataclass
class Searched:
    """A search of one variant as `VariantTrials` sees it: a plan of `seconds`, where `cheapest_within` has it fit."""

    context: SearchContext
    seconds: float
    can_fit: bool
    is_pressed: bool = False
    least_seconds: float = 0.1
    operators: int = 1
    lowest_nbytes: int = 15
    expected_nbytes: float = 15.0
    infeasible: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        with self.context.ending_early():
            if self.is_pressed:
                raise KeyboardInterrupt

    @property
    def hand_made(self) -> SimpleNamespace:
        """The hand-made plans, none of which was left out."""
        return SimpleNamespace(left_out=False)

    def fits(self, limit: float) -> bool:
        """Whether the cheapest plan fits: it does not."""
        return False

    @property
    def problems(self) -> Searched:
        """What knows the least bytes that were met."""
        return self

    @property
    def cheapest(self) -> Plan:
        self.context.report(Progress(phase="solve", done=0, total=1, best_seconds=0.5))
        return self.plan(20)

    def cheapest_within(self, limits: Limits, worth: float) -> Plan:
        self.context.report(Progress(phase="fit", done=0, total=1))
        if not self.can_fit:
            raise OverBudgetError("none fits", least_memory_plan=self.plan(15))
        return self.plan(10)

    def closer(self, *given: object) -> Plan:
        """The plan that fits is the best there is."""
        return self.plan(10)

    def plan(self, nbytes: int) -> Plan:
        solution = replace(GOLDEN.solution, objective=self.seconds)
        return replace(GOLDEN, seconds={"compute": self.seconds}, nbytes={"all": nbytes}, solution=solution)


def varied(
    report: Report,
    fitting: dict[int, float],
    interruptible: bool = True,
    seconds: float | None = None,
    most: int = 99,
    least: Callable[[int], float] = lambda place: 0.1,
) -> VariantTrials:
    """A search of variants: those planned at places of `fitting` fit in so many seconds, none in less than `least`."""
    places = itertools.count()

    def search(step: Step, offload: bool, most_nbytes: float, context: SearchContext) -> Any:
        at = next(places)
        return Searched(context=context, seconds=fitting.get(at, 1.0), can_fit=at in fitting, least_seconds=least(at))

    return VariantTrials(
        step=Empty(graph=GRAPH),
        limits=Limits.equal(12),
        most=most,
        search=search,
        context=SearchContext(report=report, deadline=Deadline(seconds), interruptible=interruptible),
    )


# What is told.


def test_every_mesh_is_tabulated_and_solved():
    told = heard()
    meshes = len(told) // 2
    assert meshes > 1
    assert [p.phase.split()[0] for p in told] == ["tabulate", "solve"] * meshes
    assert [(p.done, p.total) for p in told] == [(i // 2, meshes) for i in range(2 * meshes)]
    assert [p.best_seconds is None for p in told] == [True, True, *[False] * (2 * meshes - 2)]
    bests = [p.best_seconds for p in told if p.best_seconds is not None]
    assert bests == sorted(bests, reverse=True)
    assert all(p.seconds_left is None for p in told)


def test_variants_are_named_and_may_have_a_time_budget():
    told: list[Progress] = []
    found = cheapest_variant(varied(told.append, {2: 0.9, 4: 0.8, 5: 0.7}, seconds=60.0))
    assert (found.step_seconds, found.microbatches) == (0.7, 2)
    assert [p.phase for p in told if p.phase.endswith("fit")] == [
        "fit",
        "layers keep inputs: fit",
        "2 microbatches, layers keep inputs: fit",
        "layers keep matmuls: fit",
        "2 microbatches, layers keep matmuls: fit",
        "2 microbatches: fit",
        "4 microbatches: fit",
        "4 microbatches, layers keep matmuls: fit",
        "2 microbatches, layers keep different things: fit",
    ]
    assert told[0].best_seconds == 0.5
    bests = [p.best_seconds for p in told if "fit" in p.phase]
    assert bests == [None, None, None, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7]
    left = [p.seconds_left for p in told if p.seconds_left is not None]
    assert left == sorted(left, reverse=True)
    assert 0 < left[-1] <= left[0] <= 60.0


def test_variants_that_compute_more_than_one_too_dear_are_not_planned():
    """As it is in two microbatches the step takes longer than what fits: no less in four, whatever it keeps."""
    search = varied(lambda _: None, {2: 0.9, 4: 0.8}, least=lambda place: 0.85 if place >= 5 else 0.1)
    assert cheapest_variant(search).step_seconds == 0.8
    assert {variant.count for variant in search.planned if not variant.kept} == {1, 2}


def test_no_time_is_left_where_none_was_given():
    told: list[Progress] = []
    cheapest_variant(varied(told.append, {2: 0.9}))
    assert told
    assert all(p.seconds_left is None for p in told)


@pytest.mark.parametrize(("most", "planned", "seconds"), [(3, 4, 0.9), (4, 4, 0.9), (99, 10, 0.7)])
def test_a_search_among_variants_ends_after_so_much_work(most: int, planned: int, seconds: float):
    """The step as it is and the variant of least memory in each number of microbatches are planned in any case."""
    search = varied(lambda _: None, {2: 0.9, 4: 0.8, 5: 0.7}, most=most)
    found = cheapest_variant(search)
    assert (search.operators, found.step_seconds) == (planned, seconds)
    assert found.solution.status == GOLDEN.solution.status


def test_a_search_that_seconds_end_says_so():
    search = varied(lambda _: None, {2: 0.9, 4: 0.8}, seconds=0.0)
    found = cheapest_variant(search)
    assert (search.operators, found.step_seconds, found.solution.status) == (4, 0.9, "time limit")
    whole = cheapest_variant(varied(lambda _: None, {2: 0.9, 4: 0.8}, seconds=60.0))
    assert (whole.step_seconds, whole.solution.status) == (0.8, GOLDEN.solution.status)


def test_a_plan_that_is_good_enough_is_not_ended_by_seconds():
    found = cheapest_variant(varied(lambda _: None, {0: 0.1}, seconds=0.0))
    assert found.solution.status == GOLDEN.solution.status


def test_stages_are_told():
    """Of weights so large that stages pay: bounds leave none to be priced of smaller ones."""
    given = [(struct(4096, 8192), struct(8192, 4096))] * 2, struct(16384, 4096)
    planner = autopar.Auto(pipeline=True, layers=2)
    told = heard(deep_step, given, cluster="2x1:v100-16g", planner=planner)
    priced = [p for p in told if p.phase.startswith("stages: price a layer on ")]
    done = [p.done for p in priced]
    assert done == sorted(done)
    assert 0 == done[0] < done[-1] < len(done)
    assert all(p.total is None and p.best_seconds for p in priced)


def test_hand_made_planners_tell_nothing():
    assert heard(planner=autopar.DataParallel()) == []


def test_a_progress_option_that_cannot_be_called_is_refused():
    with pytest.raises(ArgumentError, match="progress="):
        autopar.parallelize(train_step, progress=3)


# Ctrl-C.


def test_the_best_mesh_so_far_is_returned():
    report = stopping(lambda p: p.done == 2)
    found = plan(report)
    assert found.solution.status == "interrupted"
    assert "interrupted" in str(found)
    whole = plan(None)
    assert whole.solution.status == "optimal"
    assert found.step_seconds >= whole.step_seconds
    assert plan(None, planner=autopar.Manual(found)).diff(found).is_empty


def test_without_a_plan_so_far_there_is_none():
    with pytest.raises(KeyboardInterrupt):
        plan(stopping(lambda p: p.phase.startswith("solve")))


def test_a_planner_that_was_not_asked_to_is_stopped():
    with pytest.raises(KeyboardInterrupt):
        plan(stopping(lambda p: p.done == 2), planner=autopar.Auto())


def test_a_search_among_variants_returns_the_best_that_fits():
    report = stopping(lambda p: p.phase.startswith("2 microbatches: fit"))
    found = cheapest_variant(varied(report, {2: 0.9, 4: 0.8}))
    assert (found.step_seconds, found.microbatches, found.solution.status) == (0.8, 1, "interrupted")


def test_a_search_among_variants_without_one_that_fits_has_none():
    with pytest.raises(KeyboardInterrupt):
        cheapest_variant(varied(stopping(lambda p: p.phase.startswith("2 microbatches")), {5: 0.7}))
    report = stopping(lambda p: p.phase.startswith("4 microbatches"))
    with pytest.raises(KeyboardInterrupt):
        cheapest_variant(varied(report, {2: 0.8}, interruptible=False))


@pytest.mark.parametrize("fits", [False, True])
def test_a_variant_whose_own_search_was_interrupted_is_the_last(fits: bool):
    searches = [{"can_fit": True}, {"can_fit": fits, "is_pressed": True}]

    def search(step: Step, offload: bool, most_nbytes: float, context: SearchContext) -> Any:
        return Searched(context=context, seconds=1.0 - 0.1 * len(searches), **searches.pop(0))

    context, limits = SearchContext(interruptible=True), Limits.equal(12)
    found = cheapest_variant(VariantTrials(step=Empty(graph=GRAPH), limits=limits, search=search, context=context))
    assert found.solution.status == "interrupted"
    assert not searches
    assert not found.remat  # an answer that needs more than the limit is not fitted any more


def test_an_answer_that_does_not_fit_is_none():
    with pytest.raises(KeyboardInterrupt):
        plan(stopping(lambda p: p.done == 2), planner=autopar.Auto(interruptible=True, memory_limit=1000))


def test_a_search_for_stages_returns_the_plan_without():
    planner = autopar.Auto(pipeline=True, layers=2, interruptible=True)
    report = stopping(lambda p: p.phase.startswith("stages"))
    found = plan(report, deep_step, DEEP, cluster="1x2:a100-80g", planner=planner)
    assert isinstance(found, autopar.Plan)
    assert found.solution.status == "interrupted"


def residual(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def deep_in_stages(report: Any) -> Any:
    """A step so deep that stages are searched first, by a sample of its blocks."""

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(residual)(weights, x))

    planner = autopar.Auto(pipeline=True, interruptible=True)
    given = [struct(128, 128)] * 12, struct(64, 128)
    return plan(report, step, given, cluster="2x1:v100-16g", planner=planner)


def test_stages_that_are_drafted_when_the_search_is_interrupted_are_planned(monkeypatch: pytest.MonkeyPatch):
    take, drafts = DraftSearch.take, list[Draft]()

    def pressed(self: DraftSearch, draft: Draft) -> None:
        take(self, draft)
        drafts.append(draft)
        if len(drafts) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(DraftSearch, "take", pressed)
    found = deep_in_stages(None)
    assert isinstance(found, autopar.PipelinePlan)
    assert {stage.solution.status for stage in found.stages} == {"interrupted"}
    fastest = min(drafts, key=lambda draft: draft.seconds)
    assert (found.microbatches, len(found.stages)) == (fastest.microbatches, len(fastest.shape.begins))
    assert len(drafts) == 2


def test_a_search_for_stages_that_is_interrupted_before_there_are_any_raises():
    with pytest.raises(KeyboardInterrupt):
        deep_in_stages(stopping(lambda p: p.phase.startswith("stages")))


def test_an_interrupted_plan_is_searched_for_again(tmp_path: Path):
    found = plan(stopping(lambda p: p.done == 2), cache=tmp_path)
    assert found.solution.status == "interrupted"
    again = plan(None, cache=tmp_path)
    assert again.solution.status == "optimal"


# The command line.


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    sys.modules.pop("train", None)


@pytest.mark.usefixtures("train")
@pytest.mark.parametrize(("done", "status", "word"), [(2, 0, "the best plan until then"), (0, 130, "before there was")])
def test_a_command_that_is_interrupted_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: int, status: int, word: str
):
    @contextmanager
    def pressed(_: Console):
        yield SimpleNamespace(report=stopping(lambda p: p.done == done))

    monkeypatch.setattr("autopar.tools.plan_command.shown", pressed)
    assert main(["plan", "train:example", "--cluster", CLUSTER]) == status
    told = capsys.readouterr()
    assert word in told.err
    assert ("interrupted" in told.out) == (status == 0)
