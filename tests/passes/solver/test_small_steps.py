"""Parts of the solver by themselves: small steps, edges made up of others, budgets as rows, its clock, PuLP."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from passes.errors import PlanningError
from passes.solver import Budget, clock, solve
from passes.solver.budget_rows import BudgetRows
from passes.solver.coordinate_descent import coordinate_descent
from passes.solver.edge_flows import direct
from passes.solver.formulation import StrategyProgram
from passes.solver.linear_program import LinearProgram
from passes.solver.pulp_solver import minimise, solver_named
from passes.solver.starting_prices import starting_prices
from tests.passes.solver.problems import answers, brute_force, problem_of, random_problem


@pytest.mark.parametrize("seed", range(20))
def test_no_single_step_betters_the_end_of_a_descent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    start = tuple(int(rng.integers(s.size)) for s in problem.seconds)
    found = coordinate_descent(problem, start)
    assert problem.evaluate(found) <= problem.evaluate(start)
    for node, seconds in enumerate(problem.seconds):
        for other in range(seconds.size):
            step = (*found[:node], other, *found[node + 1 :])
            assert problem.evaluate(found) <= problem.evaluate(step) + 1e-15


@pytest.mark.parametrize("seed", range(20))
def test_no_single_step_within_the_budgets_betters_the_end_of_a_descent(seed: int) -> None:
    problem, _ = problem_of(seed)
    start = [int(np.argmin(seconds)) for seconds in problem.seconds]
    found = coordinate_descent(problem, start)
    if problem.fits(start):
        assert problem.fits(found)
        assert problem.evaluate(found) <= problem.evaluate(start)
    for node, seconds in enumerate(problem.seconds):
        for other in range(seconds.size):
            step = (*found[:node], other, *found[node + 1 :])
            if problem.fits(step) and np.isfinite(problem.evaluate(step)):
                assert problem.fits(found)
                assert problem.evaluate(found) <= problem.evaluate(step) + 1e-15


@pytest.mark.parametrize("seed", range(10))
def test_starting_prices_bound_every_answer_and_the_longer_they_are_looked_for_the_better(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    program = StrategyProgram(problem)
    costs, groups = program.start.costs, list(program.groups.values())
    first, longer = (
        starting_prices(costs, groups, program.one_rows, program.arrays.rows, cutoff) for cutoff in (np.inf, 1e9)
    )
    assert first.least_seconds <= longer.least_seconds * (1 + 1e-9) + 1e-9
    assert longer.least_seconds <= brute_force(problem) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_pairs_that_are_left_out_are_made_up_of_pairs_that_are_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 5
    cost = rng.integers(1, 9, (n, n)).astype(float)
    cost[rng.random((n, n)) < 0.2] = np.inf
    np.fill_diagonal(cost, 0.0)
    names = np.arange(n)
    kept = set(zip(*map(np.ndarray.tolist, direct(cost, names, names, np.ones(n, bool))), strict=True))
    shortest = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
    for a, b in kept:
        shortest[a, b] = cost[a, b]
    for via, a, b in itertools.product(range(n), repeat=3):
        shortest[a, b] = min(shortest[a, b], shortest[a, via] + shortest[via, b])
    assert (shortest <= cost * (1 + 1e-9)).all()
    assert all(np.isfinite(cost[a, b]) and a != b for a, b in kept)


def test_a_program_through_pulp_has_the_optimum_of_a_knapsack() -> None:
    worth, weight, room = np.array([6.0, 10.0, 12.0, 7.0]), np.array([1.0, 2.0, 3.0, 2.0]), 5.0
    program = LinearProgram()
    columns = program.add_columns(4, upper=1.0)
    rows = program.add_rows(1, -np.inf, room)
    program.enter(np.repeat(rows, 4), columns, weight)
    solved = minimise(program, -worth, np.asarray(columns), solver_named("cbc", seconds=None, gap=0.0))
    subsets = itertools.product((0, 1), repeat=4)
    best = max(float(np.dot(s, worth)) for s in subsets if np.dot(s, weight) <= room)
    assert solved.status == "optimal"
    assert solved.objective == pytest.approx(-best)
    assert np.dot(solved.values, weight) <= room + 1e-9


def test_a_solver_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(PlanningError, match=r"(?s)PuLP knows no solver of this name.*PULP_CBC_CMD"):
        solver_named("abacus", seconds=None, gap=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_as_a_row_is_its_share_of_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    sizes = {node: rng.uniform(1, 9, s.size) for node, s in enumerate(problem.seconds) if node % 2}
    problem = replace(problem, budgets=(Budget(nbytes=sizes, copies={}, limit=7.0),))
    program = LinearProgram()
    columns = [program.add_columns(s.size) for s in problem.seconds]
    made = BudgetRows(problem, program, [np.arange(s.size) for s in problem.seconds], columns, None)
    rows, places, values = program.triplets()
    (row,) = made.rows
    shares = np.zeros(program.columns)
    np.add.at(shares, places[rows == row], values[rows == row])
    for choice in answers(problem):
        share = sum(shares[own[c]] for own, c in zip(columns, choice, strict=True))
        assert share == pytest.approx(problem.usage(problem.budgets[0], choice) / 7.0)
    assert program.bounds()[2][row] == 1.0


def test_a_clock_counts_what_it_is_told_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    search = clock.Clock(10.0)
    search.go_on()
    now = 3.0
    search.built()
    now = 7.0
    search.stop()
    assert (search.build_seconds, search.solve_seconds, search.remaining) == (3.0, 4.0, 3.0)
    now = 100.0
    assert search.is_late
    search.go_on()
    now = 102.0
    search.stop()
    assert (search.build_seconds, search.solve_seconds) == (3.0, 6.0)
    assert not search.is_late
    now = 104.0
    assert search.is_late
    assert search.remaining == 0.1
    assert clock.Clock(None).remaining is None


LEGAL = [seed for seed in range(20) if seed not in (11, 16, 19)]
"""Seeds of random problems that have an answer."""


@pytest.mark.parametrize("seed", LEGAL)
def test_a_cutoff_that_nothing_meets_leaves_an_answer(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    best = solve(problem)
    answer = solve(problem, cutoff=best.objective / 2)
    assert answer.objective >= best.objective
    assert np.isfinite(answer.objective)


@pytest.mark.parametrize("seed", LEGAL)
def test_a_problem_without_costs_has_an_answer(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    free = replace(
        problem,
        seconds=tuple(np.where(np.isfinite(s), 0.0, s) for s in problem.seconds),
        edges=tuple(replace(e, seconds=np.where(np.isfinite(e.seconds), 0.0, e.seconds)) for e in problem.edges),
    )
    assert solve(free, cutoff=0.0).objective == 0.0


@pytest.mark.parametrize("most", [0, 1_000_000])
@pytest.mark.parametrize("seed", range(8))
def test_descents_of_one_problem_end_where_those_of_new_ones_do(
    seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("passes.solver.coordinate_descent._MOST_ENTRIES", most)
    problem, _ = problem_of(seed)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        start = [int(rng.integers(seconds.size)) for seconds in problem.seconds]
        assert coordinate_descent(problem, start) == coordinate_descent(replace(problem), start)
