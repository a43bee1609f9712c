"""`Auto(pipeline=True)` is never worse than a hand-made pipeline or a plan without stages, and never without a plan."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Auto, DataParallel, Megatron, Pipeline
from autopar.rewrite import step_of
from passes.cluster import parse_cluster
from passes.errors import OverBudgetError
from passes.inter_op import SCHEDULES, is_chunked
from passes.intra_op import layouts
from passes.limits import Limits
from passes.pipeline import SearchOptions, StagedSearch, layers_of, samples_of
from passes.pipeline.draft_space import MOST_PLANNED_NODES
from passes.pipeline.drafting import MOST_UNFIT
from passes.pipeline.drafts import DraftSearch
from passes.pipeline.samples import anchors, near
from passes.pipeline.shapes import Draft, Shape
from passes.pipeline.stage_bytes import least_bytes, partly_priced
from passes.pipeline.stage_plans import StagePlans
from passes.plan import PipelinePlan
from passes.solver import SolverOptions
from tests.sample import slow


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def plain(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def residual(weights: Any, x: Any) -> Any:
    for up, down in weights:
        x = x + jnp.tanh(x @ up) @ down
    return (x**2).mean()


CASES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "plain": (plain, ([f(1024, 1024)] * 4, f(6, 64, 1024)), "2x1:v100-16g"),
}
SLOW_CASES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "on four": (plain, ([f(2048, 2048)] * 6, f(24, 32, 2048)), "4x1:v100-16g"),
    "uneven": (
        plain,
        ([f(1024, 4096), f(4096, 1024), f(1024, 1024), f(1024, 512), f(512, 2048)], f(36, 64, 1024)),
        "2x2:v100-16g",
    ),
    "residual": (residual, ([(f(1024, 4096), f(4096, 1024))] * 4, f(16, 64, 1024)), "2x2:v100-16g"),
}


def hand_made(plan: Callable[[Any], Any], n_devices: int, rows: int) -> Iterator[tuple[str, Any]]:
    """Every even pipeline under every schedule, pipelines of Megatron, and plans without stages."""
    counts = [m for m in range(1, rows + 1) if rows % m == 0]
    for groups in (n for n in range(2, n_devices + 1) if n_devices % n == 0):
        for m in counts:
            made = plan(Pipeline(stages=groups, microbatches=m))
            yield from ((f"{groups} {m} {s}", replace(made, schedule_name=s)) for s in SCHEDULES if not is_chunked(s))
            for planner in (
                *([Pipeline(stages=groups, microbatches=m, interleave=2)] if m % groups == 0 else []),
                Megatron(data=1, tensor=n_devices // groups, pipeline=groups, microbatches=m),
            ):
                yield str(planner), plan(planner)
    yield "data parallel", plan(DataParallel())
    yield "auto", plan(Auto())


def assert_never_worse(case: tuple[Callable[..., Any], Any, str], shares: tuple[float, ...]) -> None:
    """Without a limit, and where the limit is a little more than what some hand-made plan needs."""
    loss, args, cluster = case
    step, n_devices = sgd(loss), parse_cluster(cluster).n_devices

    def plan(planner: Any, limit: int | None = None) -> Any:
        return autopar.parallelize(step, cluster=cluster, planner=planner, donate_argnums=0, memory_limit=limit).plan(
            *args
        )

    made = dict(hand_made(plan, n_devices, args[1].shape[0]))
    peaks = sorted(one.peak_nbytes for one in made.values())
    for most in (None, *(peaks[int(share * (len(peaks) - 1))] for share in shares)):
        limit = None if most is None else int(1.02 * most)
        found = plan(Auto(pipeline=True), limit)
        fitting = {name: one.step_seconds for name, one in made.items() if most is None or one.peak_nbytes <= most}
        fastest = min(fitting, key=fitting.__getitem__)
        assert found.step_seconds <= fitting[fastest] * (1 + 1e-9), (limit, fastest)
        assert not limit or found.peak_nbytes <= limit


@pytest.mark.slow
def test_stages_are_never_worse_than_hand_made_ones() -> None:
    assert_never_worse(CASES["plain"], (0.2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_stages_are_never_worse_than_hand_made_ones_on_more_devices(name: str) -> None:
    assert_never_worse(SLOW_CASES[name], (0.0, 0.25, 0.5))


def coupled(w: Any, x: Any) -> Any:
    """Every row needs the mean of all."""
    h = x @ w
    return (((h - h.mean(0)) / h.std(0)) ** 2).mean()


WITHOUT_STAGES: dict[str, tuple[Callable[..., Any], Any]] = {
    "a sum": (lambda x, y: x + y, (f(8, 8), f(8, 8))),
    "a scalar": (lambda x: 2 * x, (f(),)),
    "constants": (lambda: jnp.ones((4, 4)), ()),
    "its input": (lambda x: x, (f(4, 4),)),
    "nothing of a batch": (sgd(lambda w: ((w @ w) ** 2).mean()), (f(64, 64),)),
    "one layer": (sgd(lambda w, x: ((x @ w) ** 2).mean()), (f(64, 64), f(16, 64))),
    "no gradient": (lambda w, x: jnp.tanh(x @ w), (f(64, 64), f(16, 64))),
    "microbatches that cannot be": (sgd(coupled), (f(64, 64), f(16, 64))),
    "one row": (sgd(plain), ([f(64, 64)] * 2, f(1, 64))),
}


@pytest.mark.parametrize("name", WITHOUT_STAGES)
def test_a_step_that_has_no_stages_is_planned_without_them(name: str) -> None:
    step, args = WITHOUT_STAGES[name]
    found, whole = (
        autopar.parallelize(step, cluster="2x2:v100-16g", planner=planner).plan(*args)
        for planner in (Auto(pipeline=True), Auto())
    )
    assert found.step_seconds <= whole.step_seconds


def searched(loss: Callable[..., Any], args: Any, devices: str, limit: float = 1e12) -> StagedSearch:
    """The search over stages of a step by itself."""
    cluster = parse_cluster(devices)
    traced = autopar.parallelize(sgd(loss), cluster=cluster).trace(*args)
    step = step_of(traced, jax.tree.leaves(args))
    samples = samples_of(step, 8)
    options = SearchOptions(
        cluster=cluster,
        stages=8,
        schedules=tuple(SCHEDULES),
        limits=Limits.equal(limit),
        solver=SolverOptions(),
        meshes=lambda n: layouts(cluster, n, 2),
    )
    return StagedSearch(step=step, samples=samples, layers=layers_of(samples, 8, 8), options=options)


@pytest.mark.parametrize(("name", "limit"), [("plain", 1e12), slow("residual", 1e12), slow("uneven", 4e7)])
def test_no_draft_takes_less_than_it_was_bound_to(name: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bounds before its step was written in so many microbatches, and of those before and after its prices.

    Nor does one need less memory than it is seen to need.
    """
    bounds, took, nbytes = list[tuple[Any, float]](), dict[Any, float](), list[tuple[float, int]]()
    bound, take = DraftSearch._bound, DraftSearch.take

    def bounded(self: DraftSearch, shape: Shape, count: int, names: tuple[str, ...]) -> float:
        bounds.extend(((shape, count, one), bound(self, shape, count, names)) for one in names)
        return bounds[-1][1]

    def taken(self: DraftSearch, draft: Draft) -> None:
        key = draft.shape, draft.microbatches, draft.schedule
        took[key] = min(draft.seconds, took.get(key, math.inf))
        bounded(self, draft.shape, draft.microbatches, (draft.schedule,))
        nbytes.append((self.least_nbytes(draft.shape, draft.microbatches, draft.schedule), draft.peak_nbytes))
        first = draft.table, 0, draft.shape.begins[1], draft.shape.devices[0], draft.microbatches
        nbytes.extend((least_bytes(*first).needed_nbytes(1), stage.needed_nbytes(1)) for stage in partly_priced(*first))
        take(self, draft)

    monkeypatch.setattr(DraftSearch, "_bound", bounded)
    monkeypatch.setattr(DraftSearch, "take", taken)
    searched(*(CASES | SLOW_CASES)[name], limit).run()
    compared = [(least, took[key]) for key, least in bounds if key in took]
    assert len(compared) > 3
    assert all(0 < least <= seconds * (1 + 1e-9) for least, seconds in compared)
    assert all(0 < least <= peak for least, peak in nbytes)


@pytest.mark.slow
def test_stages_that_need_too_much_are_planned_again_within_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices leave out what is needed for a moment, so a draft that fits by its price may not as it is planned."""
    search = searched(residual, ([(f(256, 1024), f(1024, 256))] * 2, f(16, 64, 256)), "2x2:v100-16g")
    drafts = list[Draft]()
    plan_of = StagePlans.plan

    def noted(self: StagePlans, draft: Draft) -> PipelinePlan:
        drafts.append(draft)
        return plan_of(self, draft)

    monkeypatch.setattr(StagePlans, "plan", noted)
    fastest = search.run()
    assert fastest is not None
    limits = Limits.equal(0.95 * fastest.peak_nbytes)
    search.plans.options = replace(search.plans.options, limits=limits)
    within, over = [
        plan_of(search.plans, drafts[0])
        for tightened in (2, 0)
        if not monkeypatch.setattr("passes.pipeline.stage_plans.TIGHTENED", tightened)
    ]
    assert within.peak_nbytes <= limits.searched < over.peak_nbytes
    assert within.step_seconds <= 1.1 * over.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1.1e8, 1.2e8])
def test_drafts_that_are_not_expected_to_fit_would_not_be_better(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    case, left_out = SLOW_CASES["residual"], list[int]()
    expected_to_fit = DraftSearch._expected_to_fit

    def counted(self: DraftSearch, shape: Shape, table: Any, count: int, names: tuple[str, ...]) -> tuple[str, ...]:
        likely = expected_to_fit(self, shape, table, count, names)
        left_out.append(len(names) - len(likely))
        return likely

    monkeypatch.setattr(DraftSearch, "_expected_to_fit", counted)
    plan = searched(*case, limit).run()
    monkeypatch.setattr(DraftSearch, "_expected_to_fit", lambda self, shape, table, count, names: names)
    with_all_priced = searched(*case, limit).run()
    assert sum(left_out) > 0
    assert plan is not None
    assert with_all_priced is not None
    assert plan.step_seconds <= with_all_priced.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_stages_of_a_deep_step_within_a_limit_are_never_worse_than_megatrons(share: float) -> None:
    """Few drafts of a deep step are planned: the fastest that may fit is among them, though its price is over."""
    step, args = sgd(residual), ([(f(256, 1024), f(1024, 256))] * 12, f(64, 32, 256))

    def plan(planner: Any, limit: int | None = None) -> Any:
        return autopar.parallelize(
            step, cluster="4x1:v100-16g", planner=planner, donate_argnums=0, memory_limit=limit
        ).plan(*args)

    made = [
        replace(plan(Megatron(data=1, tensor=4 // groups, pipeline=groups, microbatches=m)), schedule_name=schedule)
        for groups in (2, 4)
        for m in (4, 16, 64)
        for schedule in ("gpipe", "1f1b", "zero-bubble-h1")
    ]
    most = sorted(one.peak_nbytes for one in made)[int(share * (len(made) - 1))]
    hand_made = min(one.step_seconds for one in made if one.peak_nbytes <= most)
    limit = int(1.02 * most)
    assert plan(Auto(pipeline=True), limit).step_seconds <= hand_made * (1 + 1e-9)


@pytest.mark.parametrize(("layers", "rows"), [(2, 64), slow(4, 15), (3, 7)])
def test_there_are_stages_where_cuts_are_few_and_batches_odd(layers: int, rows: int) -> None:
    """Of eight layers that were asked for there are as many as there can be; microbatches divide the batch."""
    search = searched(plain, ([f(256, 256)] * layers, f(rows, 256)), "2x1:v100-16g")
    assert 2 <= search.layers <= (8 if layers > 3 else 7)
    assert all(rows % count == 0 for count in search.samples)
    found = search.run()
    assert found is not None
    assert len(found.stages) >= 2
    assert rows % found.microbatches == 0


@pytest.mark.slow
def test_without_a_plan_that_fits_the_one_of_least_memory_is_named() -> None:
    step, args = sgd(plain), ([f(256, 256)] * 2, f(8, 256))

    def plan(**options: Any) -> Any:
        return autopar.parallelize(step, cluster="1x2:v100-16g", planner=Auto(**options), memory_limit=10_000).plan(
            *args
        )

    with pytest.raises(OverBudgetError, match="the plan of least memory found needs") as staged:
        plan(pipeline=True)
    with pytest.raises(OverBudgetError) as whole:
        plan()
    least_memory: Any = staged.value.least_memory_plan
    other: Any = whole.value.least_memory_plan
    assert least_memory.peak_nbytes <= other.peak_nbytes


@pytest.mark.parametrize("nodes", [1000, 1200, 1201])
def test_few_drafts_of_a_large_step_are_planned_where_none_fits(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have 6,000 operators in all, however many that are."""
    search, planned = searched(*CASES["plain"], limit=1.0), list[object]()
    shape = Shape(begins=(0, 1), devices=(1, 1))
    drafts = [
        Draft(shape=shape, microbatches=n, schedule="1f1b", seconds=1.0, peak_nbytes=1, table=search.table)
        for n in range(40)
    ]

    def planned_plan(_: StagePlans, draft: Any) -> Any:
        planned.append(draft)
        return SimpleNamespace(peak_nbytes=10**9, step_seconds=1.0)

    monkeypatch.setattr(StagePlans, "written", lambda _, count: SimpleNamespace(graph=None))
    monkeypatch.setattr(StagePlans, "plan", planned_plan)
    monkeypatch.setattr("passes.pipeline.search.size", lambda graph: nodes)
    assert search._best(drafts, math.inf) == (None, 10**9)
    assert len(planned) == max(MOST_UNFIT, MOST_PLANNED_NODES // nodes)


def test_a_number_of_microbatches_that_cannot_be_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one in which the step is cut otherwise: writing a step in microbatches takes long."""
    space = searched(*CASES["plain"]).drafting.space
    other = next(iter(searched(plain, ([f(1024, 1024)] * 2, f(6, 64, 1024)), "2x1:v100-16g").samples.values()))
    for count, sample in ((5, None), (7, other)):
        tried = list[int]()
        monkeypatch.setattr(
            "passes.pipeline.draft_space.sampled", lambda *args, s=sample, t=tried: t.append(args[2]) or s
        )
        assert not any(space.has(count) for _ in range(3))
        assert tried == [count]
    assert not space.samples.keys() & {5, 7}


def test_a_deep_step_whose_stages_do_not_fit_is_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = sgd(plain), ([f(128, 128)] * 12, f(64, 128))
    monkeypatch.setattr(StagedSearch, "run", lambda self: None)
    found = autopar.parallelize(step, cluster="1x4:v100-16g", planner=Auto(pipeline=True)).plan(*args)
    whole = autopar.parallelize(step, cluster="1x4:v100-16g", planner=Auto()).plan(*args)
    assert found.step_seconds == whole.step_seconds


def test_numbers_of_microbatches_are_divisors_near_to_the_anchors() -> None:
    divisors = [m for m in range(1, 241) if 240 % m == 0]
    assert anchors(divisors) == (4, 16, 60)
    assert anchors([1, 2, 3, 6]) == (3, 6)
    assert anchors([1, 7]) == (7,)
    assert anchors([1]) == (1,)
    assert anchors([]) == ()
    assert set(near(divisors, 16)) <= set(divisors)
    assert {12, 15, 16, 20, 24} <= set(near(divisors, 16))
    assert near([1, 2, 4, 8], 4)[0] == 4
