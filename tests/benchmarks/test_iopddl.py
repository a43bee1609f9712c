"""The solver of large graphs against brute force: its reductions, bounds, sweeps and mixtures one by one, and whole."""

import itertools
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.iopddl import large
from benchmarks.iopddl.elimination import Elimination
from benchmarks.iopddl.graph_problem import GraphProblem, Pair, Usage
from benchmarks.iopddl.large import Options, solve
from benchmarks.iopddl.message_passing import Messages
from benchmarks.iopddl.mini_buckets import MiniBuckets
from benchmarks.iopddl.recombination import Landscape, combine
from benchmarks.iopddl.reductions import reduce
from passes.errors import PlanningError

TIMES = 8


def random_problem(rng, nodes: int = 7, edges: int = 8, forbidden: float = 0.15, room: float = 0.6) -> GraphProblem:
    """A small problem with parallel edges, forbidden strategies and pairs, and limits at `room` of the way from the
    least to the most that can be in use."""
    costs = [rng.integers(0, 20, size=rng.integers(1, 5)).astype(float) for _ in range(nodes)]
    for own in costs:
        own[rng.random(own.size) < forbidden / 3] = np.inf
    pairs = []
    for _ in range(edges):
        u, v = rng.choice(nodes, size=2, replace=False).tolist()
        between = rng.integers(0, 30, size=(costs[u].size, costs[v].size)).astype(float)
        between[rng.random(between.shape) < forbidden] = np.inf
        pairs.append(Pair(source=u, target=v, costs=between))
    usages = []
    for node in range(nodes):
        start, end = sorted(rng.integers(0, TIMES + 1, size=2).tolist())
        nbytes = rng.integers(0, 10, size=costs[node].size).astype(float)
        usages.append(Usage(node=node, start=start, end=end, nbytes=nbytes))
    least, most = (profile_of(usages, pick) for pick in (np.min, np.max))
    limits = np.full(TIMES, np.floor((least + room * (most - least)).max()))
    return GraphProblem(costs=tuple(costs), edges=tuple(pairs), usages=tuple(usages), limits=limits)


def profile_of(usages, pick):
    total = np.zeros(TIMES)
    for usage in usages:
        total[usage.start : usage.end] += pick(usage.nbytes)
    return total


def choices(problem: GraphProblem):
    return itertools.product(*(range(own.size) for own in problem.costs))


def brute_force(problem: GraphProblem) -> float:
    return min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=np.inf)


def without_limits(problem: GraphProblem) -> GraphProblem:
    return replace(problem, usages=(), limits=np.zeros(0))


def without_forbidden(rng, **sizes) -> GraphProblem:
    return random_problem(rng, forbidden=0.0, **sizes)


QUICK = Options(seconds=2.0)


@pytest.mark.parametrize("seed", range(60))
def test_answer_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, room=float(rng.choice([0.2, 0.5, 0.8, 1.0])))
    best = brute_force(problem)
    if not np.isfinite(best):
        with pytest.raises(PlanningError):
            solve(problem, QUICK)
        return
    answer = solve(problem, QUICK)
    assert problem.fits(answer.choice)
    assert problem.cost(answer.choice) == answer.cost == best
    assert answer.bound <= best + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_without_limits_the_bound_meets_the_optimum(seed):
    problem = without_limits(random_problem(np.random.default_rng(seed), nodes=8, edges=12))
    best = brute_force(problem)
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    answer = solve(problem, QUICK)
    assert answer.cost == best
    assert answer.bound == pytest.approx(best, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(100))
def test_reducing_keeps_the_optimum(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, nodes=6, edges=int(rng.integers(3, 9)), forbidden=float(rng.choice([0.0, 0.2, 0.5])))
    best = brute_force(problem)
    try:
        reduction = reduce(problem)
    except PlanningError:
        assert not np.isfinite(best)
        return
    assert brute_force(reduction.problem) + reduction.constant == pytest.approx(best)
    for choice in itertools.islice(choices(reduction.problem), 200):
        full = reduction.expand(choice)
        assert problem.cost(full) == pytest.approx(reduction.problem.cost(choice) + reduction.constant)
        # Usages of dominated and dropped times only ever shrink the profile: fitting below means fitting above.
        assert problem.fits(full) or not reduction.problem.fits(choice)


def path(costs, *matrices, usages=(), limits=()) -> GraphProblem:
    edges = tuple(Pair(source=n, target=n + 1, costs=np.array(m, dtype=float)) for n, m in enumerate(matrices))
    own = tuple(np.array(c, dtype=float) for c in costs)
    return GraphProblem(costs=own, edges=edges, usages=tuple(usages), limits=np.array(limits, dtype=float))


NO = np.inf
OCCUPIED = [Usage(node=n, start=0, end=1, nbytes=np.array([0.0, 1.0])) for n in range(3)]

REDUCED = {
    "a forbidden strategy goes": path([[1, NO]]),
    "a strategy without a partner goes": path([[1, 0], [1, 2]], [[1, 2], [NO, NO]]),
    "a node of one strategy goes": path([[3], [1, 2], [4]], [[1, 7]], [[2], [3]]),
    "a sum of node costs is no edge": path([[1, 2], [3, 1]], [[0, 5], [1, 6]]),
    "a leaf folds": path([[0, 9], [1, 2]], [[1, 0], [0, 1]]),
    "a leaf that occupies least where it is best folds": path(
        [[0, 5], [1, 0]], [[0, 2], [3, 0]], usages=OCCUPIED[:1], limits=[0]
    ),
    "equal strategies become one node": path([[0, 1], [1, 0], [0, 1]], [[0, NO], [NO, 0]], [[0, NO], [NO, 0]]),
    "a node between two becomes an edge": path([[0, 1], [5, 0], [0, 1]], [[0, 3], [2, 0]], [[0, 3], [2, 0]]),
    "a limit that cannot bind goes": path([[1, 0]], usages=OCCUPIED[:1], limits=[1]),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_rule_leaves_nothing(name):
    problem = REDUCED[name]
    reduction = reduce(problem)
    assert len(reduction.problem.costs) == 0
    assert reduction.constant == brute_force(problem)
    assert problem.cost(reduction.expand(())) == reduction.constant


def test_a_trade_of_cost_for_memory_is_kept():
    usage = Usage(node=0, start=0, end=1, nbytes=np.array([0.0, 1.0]))
    other = Usage(node=1, start=0, end=1, nbytes=np.array([0.0, 1.0]))
    problem = path([[5, 0], [7, 0]], usages=(usage, other), limits=[1])
    assert len(reduce(problem).problem.costs) == 2
    assert solve(problem, QUICK).choice == (0, 1)


def test_times_that_another_implies_go():
    usages = [Usage(node=0, start=0, end=6, nbytes=np.array([0.0, 3.0]))]
    usages += [Usage(node=1, start=2, end=4, nbytes=np.array([0.0, 3.0]))]
    problem = path([[5, 0], [5, 0]], usages=usages, limits=[5] * 6)
    assert reduce(problem).problem.limits.tolist() == [5.0]


@pytest.mark.parametrize("seed", range(30))
def test_every_pass_of_messages_bounds_from_below(seed):
    rng = np.random.default_rng(seed)
    inner = without_limits(without_forbidden(rng, nodes=6, edges=9))
    costs = list(inner.costs)
    best = brute_force(inner)
    messages = Messages(inner)
    bounds = []
    for turn in range(10):
        bound = messages.run(costs, backward=bool(turn % 2))
        bounds.append(bound)
        assert bound <= best + 1e-9
        nodes, edges = messages.shifted(costs)
        shifted = GraphProblem(
            costs=tuple(nodes),
            edges=tuple(replace(e, costs=c) for e, c in zip(inner.edges, edges, strict=True)),
            limits=np.zeros(0),
        )
        choice = [int(rng.integers(own.size)) for own in costs]
        assert shifted.cost(choice) == pytest.approx(inner.cost(choice))
    assert bounds == pytest.approx(sorted(bounds), abs=1e-6)


@pytest.mark.parametrize("entries", [1, 16, 10_000])
@pytest.mark.parametrize("seed", range(10))
def test_mini_buckets_bound_from_below_and_are_exact_if_large(seed, entries):
    rng = np.random.default_rng(seed)
    problem = without_forbidden(rng, nodes=7, edges=12)
    best = min(problem.cost(c) for c in choices(problem))
    costs, edges = list(problem.costs), [e.costs for e in problem.edges]
    bound, choice = MiniBuckets(problem, entries=entries, rng=rng).run(costs, edges)
    assert bound <= best + 1e-9
    assert problem.cost(choice) >= best
    if entries == 10_000:
        assert bound == pytest.approx(best)
        assert problem.cost(choice) == best


@pytest.mark.parametrize("entries", [1, 16, 10_000])
@pytest.mark.parametrize("seed", range(20))
def test_mini_buckets_with_forbidden_pairs(seed, entries):
    rng = np.random.default_rng(seed)
    problem = without_limits(random_problem(rng, nodes=6, edges=10))
    best = brute_force(problem)
    costs, edges = list(problem.costs), [e.costs for e in problem.edges]
    bound, choice = MiniBuckets(problem, entries=entries, rng=rng).run(costs, edges)
    assert bound <= best + 1e-9
    if entries == 10_000:
        assert problem.cost(choice) == best == pytest.approx(bound)


@pytest.mark.parametrize("entries", [1, 16, 10_000])
@pytest.mark.parametrize("seed", range(10))
def test_elimination_never_loses_and_is_exact_if_large(seed, entries):
    rng = np.random.default_rng(seed)
    problem = without_forbidden(rng, nodes=7, edges=12)
    start = np.zeros(7, dtype=np.intp)
    costs = list(problem.costs)
    choice = Elimination(problem).improve(costs, start, entries=entries, rng=rng)
    assert problem.cost(choice) <= problem.cost(start)
    some = Elimination(problem).improve(costs, start, entries=entries, rng=rng, free=np.array([1, 2, 5]))
    assert problem.cost(some) <= problem.cost(start)
    assert not some[[0, 3, 4, 6]].any()
    if entries == 10_000:
        assert problem.cost(choice) == min(problem.cost(c) for c in choices(problem))


@pytest.mark.parametrize("seed", range(30))
def test_a_mixture_is_at_least_as_good_as_either(seed):
    rng = np.random.default_rng(seed)
    problem = without_forbidden(rng, nodes=9, edges=4, room=0.5)
    land = Landscape(problem)
    one, other = (np.array([rng.integers(own.size) for own in problem.costs], dtype=np.intp) for _ in range(2))
    mixed = combine(land, one, other)
    assert not land.better(one, mixed)
    assert land.cost(mixed) == pytest.approx(problem.cost(mixed))
    assert land.profile(mixed) == pytest.approx(problem.profile(mixed))
    assert set(np.flatnonzero((mixed != one) & (mixed != other))) == set()
    if problem.fits(one):
        assert problem.fits(mixed)
    if problem.fits(other) and problem.fits(one):
        assert not land.better(other, mixed)


def test_priced_costs_charge_usages():
    problem = random_problem(np.random.default_rng(3))
    land = Landscape(problem)
    prices = np.arange(TIMES) / 7
    choice = np.zeros(len(problem.costs), dtype=np.intp)
    priced = sum(float(own[c]) for own, c in zip(land.priced(prices), choice, strict=True))
    own = sum(float(own[c]) for own, c in zip(problem.costs, choice, strict=True))
    assert priced == pytest.approx(own + float(prices @ problem.profile(choice)))


def test_a_problem_that_never_fits_is_an_error():
    usage = Usage(node=0, start=0, end=1, nbytes=np.array([3.0, 4.0]))
    with pytest.raises(PlanningError, match="exceeds the limit by 1 bytes"):
        solve(path([[1, 2]], usages=[usage], limits=[2]), QUICK)


def test_no_legal_pair_is_an_error():
    with pytest.raises(PlanningError, match="legal"):
        solve(path([[1, 2], [1, 2]], [[NO, NO], [NO, NO]]), QUICK)


def test_a_second_process_helps_and_leaves(monkeypatch):
    monkeypatch.setattr(large, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(large, "_TINY_PROGRAM", 0)
    problem = random_problem(np.random.default_rng(0), nodes=30, edges=60, forbidden=0.0)
    alone = solve(problem, Options(seconds=1.0))
    answer = solve(problem, Options(seconds=3.0, workers=2))
    assert problem.fits(answer.choice)
    assert answer.bound <= min(answer.cost, alone.cost) + 1e-6
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("seed", range(10))
def test_without_the_integer_program_answers_are_valid(monkeypatch, seed):
    monkeypatch.setattr(large, "_TINY_PROGRAM", 0)
    monkeypatch.setattr(large, "_SMALL_PROGRAM", 0)
    monkeypatch.setattr(time, "monotonic", time.process_time)  # other programs do not shorten the search
    problem = without_forbidden(np.random.default_rng(seed), nodes=7, edges=12, room=0.4)
    best = brute_force(problem)
    answer = solve(problem, Options(seconds=0.5))
    assert problem.fits(answer.choice)
    assert answer.bound <= best + 1e-6
    assert best <= answer.cost <= 1.1 * best
    assert solve(without_limits(problem), Options(seconds=0.5)).cost == brute_force(without_limits(problem))


def test_an_answer_is_the_same_again():
    problem = random_problem(np.random.default_rng(5), nodes=8, edges=12)
    assert solve(problem, QUICK) == solve(problem, QUICK)
