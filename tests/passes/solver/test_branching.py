"""Branch and bound within budgets against brute force: answers, bounds wherever it ends, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.errors import OverBudgetError
from passes.solver import NotCheaperError, SolverOptions, branching, solve
from passes.solver.coordinate_descent import coordinate_descent
from passes.solver.formulation import StrategyProgram
from passes.solver.problem import Cache
from tests.passes.solver.problems import answers, brute_force, problem_of
from tests.sample import half, slow, some

EXACT = SolverOptions(tie_radius=None, gap=0.0)


POSSIBLE = [seed for seed in range(60) if np.isfinite(problem_of(seed)[1])]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bounds of all parts that are looked at; nothing is proven before, and no round is too slow."""
    bounds = list[float]()
    look = branching.Branching._look

    def counted(self: Any, part: Any, clock: Any) -> None:
        bounds.append(part.bound)
        look(self, part, clock)

    monkeypatch.setattr(branching.Branching, "_look", counted)
    monkeypatch.setattr(branching, "_GAIN", 0.0)
    return bounds


@pytest.mark.parametrize("seed", some(POSSIBLE, 20))
def test_the_answer_is_the_optimum_and_so_is_the_bound(seed: int, looked: list[float]) -> None:
    problem, best = problem_of(seed)
    answer = solve(problem, EXACT)
    assert problem.fits(answer.choice)
    assert best * (1 - 1e-9) <= answer.objective <= best * (1 + 1.1e-3)
    assert best * (1 - 1.1e-3) <= answer.bound <= best * (1 + 1e-9)
    assert all(bound <= best * (1 + 1e-9) for bound in looked[:1])


def test_some_problems_are_divided(looked: list[float]) -> None:
    for seed in POSSIBLE[:20]:
        solve(problem_of(seed)[0], EXACT)
    assert len(looked) > 40


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("seed", some(POSSIBLE[::2], 8))
def test_a_search_that_is_cut_short_claims_no_more_than_it_knows(
    seed: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, best = problem_of(seed)
    monkeypatch.setattr(branching, "_PARTS", parts)
    answer = solve(problem, EXACT)
    assert problem.fits(answer.choice)
    assert answer.objective >= best * (1 - 1e-9)
    assert answer.bound <= best * (1 + 1e-9)


SHARES = 0.5, 0.999, 1.001, 1.5
LATER = [slow(*case) for case in itertools.product(POSSIBLE[24:], SHARES)]


@pytest.mark.parametrize(("seed", "share"), [*half(POSSIBLE[:24], SHARES), *LATER])
def test_with_a_cutoff_there_is_a_better_answer_or_it_is_said_that_there_is_none(seed: int, share: float) -> None:
    problem, best = problem_of(seed)
    if best == 0:
        return
    try:
        answer = solve(problem, EXACT, share * best)
    except NotCheaperError:
        assert share < 1
        return
    assert problem.fits(answer.choice)
    assert answer.objective >= best * (1 - 1e-9)
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.bound >= share * best or answer.objective <= best * (1 + 1.1e-3)


@pytest.mark.parametrize("seed", POSSIBLE[::3])
def test_no_answer_is_worse_than_one_that_is_known(seed: int) -> None:
    problem, best = problem_of(seed)
    known = min((choice for choice in answers(problem) if problem.fits(choice)), key=problem.evaluate)
    answer = solve(problem, replace(EXACT, gap=0.5), known=[known])
    assert answer.objective <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", POSSIBLE[::4])
def test_budgets_that_nothing_keeps_are_said_to_be_impossible(seed: int) -> None:
    problem, _ = problem_of(seed)
    below = tuple(replace(budget, limit=problem.least(budget) - 0.5) for budget in problem.budgets)
    impossible = replace(problem, budgets=below)
    assert brute_force(impossible) == np.inf
    with pytest.raises(OverBudgetError, match="memory limit") as caught:
        solve(impossible, EXACT)
    assert not isinstance(caught.value, NotCheaperError)


@pytest.mark.parametrize("seed", POSSIBLE[:6])
def test_a_relaxation_under_other_budgets_begins_where_the_last_one_ended(seed: int) -> None:
    first, _ = problem_of(seed)
    looser = (replace(budget, limit=1.1 * budget.limit) for budget in first.budgets)
    second = replace(first, budgets=(*looser, replace(first.budgets[0], copies={})))
    assert StrategyProgram(first).run(gap=0.0) == "optimal"
    again, alone = StrategyProgram(second), StrategyProgram(replace(second, cache=Cache()))
    assert [program.run(gap=0.0) for program in (again, alone)] == ["optimal", "optimal"]
    assert again.objective == pytest.approx(alone.objective, rel=1e-9)
    assert again.iterations < alone.iterations


@pytest.mark.parametrize("seed", some(range(60), 30))
def test_descent_within_budgets_ends_where_no_node_is_better_off(seed: int):
    """Bytes of nodes and of copies are kept up to date while nodes move: nothing that fits is one move away."""
    problem, _ = problem_of(seed)
    rng = np.random.default_rng(seed)
    choice = coordinate_descent(problem, [int(rng.integers(seconds.size)) for seconds in problem.seconds])
    best = problem.evaluate(choice) if problem.fits(choice) else np.inf
    for node, size in enumerate(seconds.size for seconds in problem.seconds):
        for other in ((*choice[:node], strategy, *choice[node + 1 :]) for strategy in range(size)):
            seconds = problem.evaluate(other) if problem.fits(other) else np.inf
            assert seconds == np.inf or seconds >= best * (1 - 1e-9)
