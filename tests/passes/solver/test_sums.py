"""Sums that are reduced once for all of their readers: what they cost, and that no bound is above the cheapest."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from passes.solver import ShardingProblem, SolverOptions, factors, search, solve
from passes.solver.coordinate_descent import coordinate_descent
from passes.solver.dominance import without_dominated
from passes.solver.elimination import Factors
from passes.solver.formulation import StrategyProgram
from passes.solver.linear_program import LinearProgram
from passes.solver.lower_bound import loose, priced, raised
from passes.solver.sum_rows import add_sum
from passes.solver.sums import spare
from passes.solver.symmetry import merge_equal_nodes
from tests.passes.solver.problems import ENDS, PLACES, answers, brute_force, moves, random_sums, reading, with_budget
from tests.sample import half, slow, some


def seconds_in_turn(problem: ShardingProblem, choice: tuple[int, ...]) -> float:
    """The seconds of an answer, added up edge by edge in the order of the plan."""
    total = sum(seconds[c] for seconds, c in zip(problem.seconds, choice, strict=True))
    for edges in problem.groups.values():
        at = home = PLACES[edges[0].before[choice[edges[0].source]]]
        have = {home}
        for edge in edges:
            wanted = edge.labels[edge.after[choice[edge.target]]]
            if wanted in have:
                continue
            have.add(wanted)
            column = edge.labels.index(wanted)
            onward = edge.sums is not None and at != home
            total += edge.sums.onward[PLACES.index(at), PLACES.index(wanted)] if onward else 0.0
            total += 0.0 if onward else edge.seconds[PLACES.index(home), column]
            if home.endswith("+") and at == home and not wanted.endswith("+"):
                at = wanted
    return float(total)


def test_a_sum_is_reduced_once_and_goes_on_from_there():
    seconds = np.array(
        [[0, 1, 1, 9, 9], [4, 0, 4, 9, 9], [4, 4, 0, 9, 9], [50, 30, 40, 0, 9], [50, 30, 40, 9, 0]], dtype=float
    )
    reads = {1: np.array([1]), 2: np.array([0]), 3: np.array([0, 1])}
    edges = reading(0, reads, np.array([3]), seconds, 0)
    problem = ShardingProblem(seconds=(np.zeros(1), np.zeros(1), np.zeros(1), np.array([0.0, 1.0])), edges=tuple(edges))
    assert problem.evaluate((0, 0, 0, 0)) == 30 + 4
    assert problem.evaluate((0, 0, 0, 1)) == 30 + 4 + 1
    turned = replace(problem, edges=tuple(edges[::-1]))
    assert turned.evaluate((0, 0, 0, 0)) == 50 + 1
    answer = solve(problem)
    assert (answer.objective, answer.status) == (34, "optimal")
    assert answer.bound <= 34


LATER = [slow(*case) for case in itertools.product(range(24, 50), (None, 2))]


@pytest.mark.parametrize(("seed", "radius"), [*half(range(24), (None, 2)), *LATER])
def test_no_bound_is_above_the_cheapest_answer(seed, radius):
    problem = random_sums(np.random.default_rng(seed))
    for choice in answers(problem)[::7]:
        assert problem.evaluate(choice) == pytest.approx(seconds_in_turn(problem, choice), rel=1e-12)
    best = brute_force(problem)
    answer = solve(problem, SolverOptions(tie_radius=radius))
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.objective == pytest.approx(best, rel=1e-4)
    assert answer.objective == pytest.approx(problem.evaluate(answer.choice))


@pytest.mark.parametrize("seed", some(range(25), 12))
def test_prices_of_any_kind_bound_every_answer(seed):
    """Random prices, and those of the relaxation; raised around what is loose, they bound more."""
    rng = np.random.default_rng(seed)
    problem = random_sums(rng)
    best = brute_force(problem)
    program = StrategyProgram(problem)
    program.run(gap=0.0)
    drawn = {id(e): tuple(rng.normal(0, 2e-5, size=size) for size in e.seconds.shape) for e in problem.edges}
    relaxed = dict(zip(map(id, problem.edges), program.edge_prices(), strict=True))
    for prices in (drawn, relaxed):
        bound = priced(problem, prices, ())
        assert bound.seconds <= best + 1e-15
        for _ in range(3):
            higher = raised(problem, bound, range(len(problem.seconds)), 8)
            assert bound.seconds <= higher.seconds <= best + 1e-15
            bound = higher
            for choice in answers(problem)[::7]:
                gap = problem.evaluate(choice) - bound.seconds
                assert loose(problem, bound, choice, 0) or gap < 1e-12
        told = Factors(problem, bound)
        for choice in answers(problem)[::11]:
            strategies = {node: np.array(c) for node, c in enumerate(choice)}
            seconds = sum(float(factor.at(strategies)) for factor in told.factors)
            assert seconds == pytest.approx(problem.evaluate(choice), rel=1e-9)
            assert seconds >= bound.seconds - 1e-15


@pytest.mark.parametrize("seed", some(range(25), 12))
def test_parts_of_a_group_pay_no_more_than_all_of_it(seed, monkeypatch):
    monkeypatch.setattr(factors, "GROUP_ENTRIES", 6)
    problem = random_sums(np.random.default_rng(seed))
    told = Factors(problem)
    for choice in answers(problem)[::5]:
        strategies = {node: np.array(c) for node, c in enumerate(choice)}
        assert sum(float(factor.at(strategies)) for factor in told.factors) <= problem.evaluate(choice) + 1e-15
    best = brute_force(problem)
    answer = solve(problem, SolverOptions(tie_radius=None))
    assert answer.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(range(50), 25))
def test_strategies_that_are_dominated_are_in_no_better_answer(seed):
    problem = random_sums(np.random.default_rng(seed))
    assert brute_force(without_dominated(problem)) == pytest.approx(brute_force(problem), rel=1e-9)


def test_a_sum_that_is_dearer_to_each_reader_may_be_cheaper_to_both():
    """Two readers pay 30 each for an array, and 50 and 1 for a sum."""
    seconds = np.full((5, 5), 30.0)
    seconds[3], seconds[0, 1], seconds[1, 0] = (50, 40, 50, 0, 9), 1, 1
    np.fill_diagonal(seconds, 0.0)
    edges = reading(0, {1: np.array([0]), 2: np.array([1])}, np.array([3, 2]), seconds, 0)
    problem = ShardingProblem(seconds=(np.zeros(2), np.zeros(1), np.zeros(1)), edges=tuple(edges))
    assert without_dominated(problem).evaluate((0, 0, 0)) == brute_force(problem) == 51


def test_a_sum_that_one_reader_prefers_may_cost_the_next_more():
    """Reduced to b, a sum takes 100 to c; reduced to a, for a reader that then takes 11 more, it takes 1."""
    seconds = np.full((5, 5), 10.0)
    seconds[1, 2], seconds[0, 2] = 100, 1
    np.fill_diagonal(seconds, 0.0)
    edges = reading(0, {1: np.array([0, 1]), 2: np.array([2])}, np.array([3]), seconds, 0)
    problem = ShardingProblem(seconds=(np.zeros(1), np.array([11.0, 0.0]), np.zeros(1)), edges=tuple(edges))
    assert without_dominated(problem).evaluate((0, 0, 0)) == brute_force(problem) == 22


@pytest.mark.parametrize("seed", range(20))
def test_coordinate_descent_ends_where_no_node_is_better_off(seed):
    problem = random_sums(np.random.default_rng(seed))
    found = coordinate_descent(problem, [0] * len(problem.seconds))
    seconds = problem.evaluate(found)
    for node, size in enumerate(s.size for s in problem.seconds):
        for s in range(size):
            assert problem.evaluate((*found[:node], s, *found[node + 1 :])) >= seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_solver_of_pulp_claims_no_more(seed, solver):
    problem = random_sums(np.random.default_rng(seed))
    best = brute_force(problem)
    answer = solve(problem, SolverOptions(solver=solver))
    assert answer.bound <= best * (1 + 1e-6)
    assert answer.objective >= best * (1 - 1e-9)


@pytest.mark.parametrize(("seed", "radius"), half(range(25), (None, 2)))
def test_no_bound_within_budgets_is_above_the_cheapest_answer(seed, radius):
    rng = np.random.default_rng(seed)
    problem = with_budget(random_sums(rng), rng, share=0.4)
    best = brute_force(problem)
    answer = solve(problem, SolverOptions(tie_radius=radius, gap=0.0))
    assert problem.fits(answer.choice)
    assert answer.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_a_problem_with_sums_are_merged(seed):
    one = random_sums(np.random.default_rng(seed))
    nodes = len(one.seconds)
    edges = [
        replace(e, source=e.source + c * nodes, target=e.target + c * nodes, group=e.group + c * nodes)
        for c in range(3)
        for e in one.edges
    ]
    problem = ShardingProblem(seconds=one.seconds * 3, edges=tuple(edges))
    merged = merge_equal_nodes(problem, 2)
    assert len(merged.problem.seconds) <= nodes
    choice = tuple(0 for _ in merged.problem.seconds)
    whole = tuple(choice[cls] for cls in merged.classes)
    assert merged.problem.evaluate(choice) == pytest.approx(problem.evaluate(whole))
    answer = search.solve(problem, SolverOptions(tie_radius=2))
    assert answer.bound <= 3 * brute_force(one) * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(range(30), 15))
def test_no_answer_leaves_less_than_is_spare_beyond_what_readers_are_charged(seed):
    rng = np.random.default_rng(seed)
    reads = {target: rng.integers(len(PLACES), size=3) for target in (1, 2, 3)}
    edges = reading(0, reads, np.array([3, 4]), moves(rng), 0)
    rows = np.flatnonzero(~ENDS)
    charged = [rng.integers(0, 60, size=(rows.size, len(edge.labels))) * 1e-6 for edge in edges]
    found = spare(edges, charged, rows, {})
    problem = ShardingProblem(seconds=(np.zeros(2), *(np.zeros(3),) * 3), edges=tuple(edges))
    for choice in answers(problem):
        row = choice[0]
        wanted = [edge.after[choice[edge.target]] for edge in edges]
        left = problem.evaluate(choice) - sum(c[row, at] for c, at in zip(charged, wanted, strict=True))
        assert left >= found.seconds[row] - 1e-12
        assert all(left >= by[row, at] - 1e-12 for by, at in zip(found.by_reader, wanted, strict=True))


def test_a_program_of_whole_strategies_has_a_column_for_each_reduction_and_each_move_from_there():
    seconds = np.array(
        [[0, 1, 1, 9, 9], [4, 0, 4, 9, 9], [4, 4, 0, 9, 9], [50, 30, 40, 0, 9], [50, 30, 40, 9, 0]], dtype=float
    )
    edges = reading(0, {1: np.array([1]), 2: np.array([0]), 3: np.array([0, 1])}, np.array([3]), seconds, 0)
    problem = ShardingProblem(seconds=(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(2)), edges=tuple(edges))
    program = StrategyProgram(problem, whole=True)
    reduced, moved, kept = add_sum(program.groups[0], edges[0].sums, np.array([3]), np.array([0]), LinearProgram())
    assert sorted(reduced[1].tolist()) == [30, 50]
    assert sorted(moved[1].tolist()) == [1, 4]
    assert not kept[0].size
