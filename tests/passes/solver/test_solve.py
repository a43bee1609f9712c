"""Answers of the solver against brute force, those of HiGHS against PuLP's, with equal nodes merged and without."""

from dataclasses import replace

import numpy as np
import pytest

from passes.errors import OverBudgetError, PlanningError
from passes.intra_op.memory_limit import seconds_within
from passes.solver import (
    Budget,
    Edge,
    ShardingProblem,
    SolverOptions,
    least_memory_choice,
    linear_program,
    search,
    solve,
)
from passes.solver import formulation as strategy_program
from passes.solver.dual_ascent import Messages, PricedEdge
from passes.solver.formulation import StrategyProgram
from passes.solver.symmetry import merge_equal_nodes
from tests.passes.solver.problems import answers, brute_force, random_problem, with_budgets
from tests.sample import some


@pytest.mark.parametrize("seed", some(range(60), 30))
def test_optimum_equals_brute_force(seed):
    problem = random_problem(np.random.default_rng(seed))
    best = brute_force(problem)
    if not np.isfinite(best):
        with pytest.raises(PlanningError):
            solve(problem, SolverOptions(tie_radius=None))
        return
    answer = solve(problem, SolverOptions(tie_radius=None))
    assert answer.objective == pytest.approx(best, abs=1e-12)
    assert answer.bound <= answer.objective + 1e-12
    assert problem.evaluate(answer.choice) == pytest.approx(answer.objective)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("solver", ["cbc", "highs", "PULP_CBC_CMD"])
def test_a_solver_of_pulp_gives_the_direct_answer(seed, solver):
    problem = random_problem(np.random.default_rng(100 + seed))
    if not np.isfinite(brute_force(problem)):
        with pytest.raises(PlanningError):
            solve(problem, SolverOptions(solver=solver))
        return
    theirs, ours = solve(problem, SolverOptions(solver=solver)), solve(problem)
    assert theirs.objective == pytest.approx(ours.objective, abs=1e-12)
    assert theirs.status == "optimal"


def test_a_solver_that_is_not_here_is_named_with_those_that_are():
    problem = random_problem(np.random.default_rng(1))
    with pytest.raises(PlanningError, match=r"(?s)knows no solver of this name.*PULP_CBC_CMD"):
        solve(problem, SolverOptions(solver="simplex-of-my-own"))
    with pytest.raises(PlanningError, match=r"(?s)does not find this solver.*install it"):
        solve(problem, SolverOptions(solver="gurobi_cmd"))


def copies(problem: ShardingProblem, count: int) -> ShardingProblem:
    """The same problem several times side by side: merging equal nodes must find the copies and change nothing."""
    nodes, groups = len(problem.seconds), 1 + max((e.group for e in problem.edges), default=0)
    edges = tuple(
        replace(e, source=e.source + c * nodes, target=e.target + c * nodes, group=e.group + c * groups)
        for c in range(count)
        for e in problem.edges
    )
    return ShardingProblem(seconds=problem.seconds * count, edges=edges)


def doubled(budget: Budget, nodes: int) -> Budget:
    """A budget of two copies of a problem, which together may take less than twice as much as one."""
    nbytes = budget.nbytes | {node + nodes: own for node, own in budget.nbytes.items()}
    return replace(budget, nbytes=nbytes, limit=1.8 * budget.limit)


@pytest.mark.parametrize("seed", range(20))
def test_merging_copies_keeps_the_optimum(seed):
    one = random_problem(np.random.default_rng(seed))
    best = brute_force(one)
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    problem = copies(one, 4)
    merged = merge_equal_nodes(problem, 2)
    assert len(merged.problem.seconds) <= len(one.seconds)
    assert len(merged.classes) == len(problem.seconds)
    assert len(merged.edges) == len(problem.edges)
    answer = solve(problem, SolverOptions(tie_radius=2))
    assert answer.objective == pytest.approx(problem.evaluate(answer.choice))
    assert answer.objective == pytest.approx(4 * best, abs=1e-12)
    assert answer.bound <= 4 * best + 1e-12


def test_a_shared_resharding_is_paid_once():
    order = np.arange(2)
    cost = np.array([[0.0, 5e-6], [5e-6, 0.0]])
    edges = tuple(
        Edge(source=0, target=t, before=order, after=order, seconds=cost, labels=("a", "b"), group=0) for t in (1, 2)
    )
    never = np.array([np.inf, 0.0])
    problem = ShardingProblem(seconds=(np.array([0.0, np.inf]), never, never), edges=edges)
    assert solve(problem).objective == pytest.approx(5e-6)


def test_no_legal_strategy_is_an_error():
    problem = ShardingProblem(seconds=(np.array([np.inf]),), edges=())
    with pytest.raises(PlanningError, match="no combination of strategies is legal"):
        solve(problem)


@pytest.mark.parametrize("seed", range(20))
def test_a_placement_on_the_way_saves_variables_and_changes_nothing(seed):
    """With names, pairs that a third placement lies between have no variable; without, every pair has one."""
    rng = np.random.default_rng(seed)
    places = 5
    step = rng.integers(1, 30, size=(places, places)) * 1e-6
    for middle in range(places):
        step = np.minimum(step, step[:, [middle]] + step[[middle], :])
    np.fill_diagonal(step, 0.0)
    names = tuple("abcde")
    seconds = tuple(rng.integers(0, 20, size=places) * 1e-6 for _ in range(4))
    order = np.arange(places)
    edges = tuple(
        Edge(source=s, target=t, before=order, after=order, seconds=step, labels=names, group=s)
        for s, t in ((0, 1), (0, 2), (1, 3), (2, 3))
    )
    apart = ShardingProblem(seconds=seconds, edges=edges)
    named = ShardingProblem(seconds=seconds, edges=tuple(replace(edge, origins=names) for edge in edges))
    options = SolverOptions(tie_radius=None)
    best = brute_force(apart)
    assert solve(named, options).objective == pytest.approx(best, abs=1e-12)
    assert solve(apart, options).objective == pytest.approx(best, abs=1e-12)
    assert StrategyProgram(named).arrays.columns < StrategyProgram(apart).arrays.columns


def test_a_solver_out_of_time_does_not_claim_the_optimum():
    rng = np.random.default_rng(0)
    nodes, places = 60, 12
    order = np.arange(places)
    edges = tuple(
        Edge(
            source=s,
            target=t,
            before=order,
            after=order,
            seconds=rng.integers(1, 30, size=(places, places)) * 1e-6,
            labels=tuple(range(places)),
            group=len(range(nodes)) * s + t,
        )
        for s in range(nodes)
        for t in range(s + 1, nodes)
        if rng.random() < 0.2
    )
    problem = ShardingProblem(seconds=tuple(rng.integers(0, 20, size=places) * 1e-6 for _ in range(nodes)), edges=edges)
    answer = solve(problem, SolverOptions(tie_radius=None, time_limit=1.0))
    assert answer.status == "time limit"
    assert answer.bound < answer.objective


@pytest.mark.parametrize("radius", [None, 2])
@pytest.mark.parametrize("seed", some(range(60), 30))
def test_optimum_within_budgets_equals_brute_force(seed, radius):
    """Whether equal nodes may be merged or not: these are too small for it, and what is branched on is the whole."""
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng), rng)
    best = brute_force(problem)
    options = SolverOptions(tie_radius=radius, gap=0.0)
    if not np.isfinite(best):
        with pytest.raises(PlanningError):
            solve(problem, options)
        return
    answer = solve(problem, options)
    assert problem.fits(answer.choice)
    assert best * (1 - 1e-9) <= answer.objective <= best * (1 + 1.1e-3)
    assert best * (1 - 1.1e-3) <= answer.bound <= best * (1 + 1e-9)
    assert answer.status == "optimal"


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_was_cut_short_bounds_the_optimum_all_the_same(seed, monkeypatch):
    """A search that may look at its limits a few times is interrupted, and says how far it came."""
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng), rng)
    best = brute_force(problem)
    monkeypatch.setattr(linear_program, "_LOOKS", seed)
    program = StrategyProgram(problem, whole=True)
    ended = program.run(gap=0.0)
    assert program.bound <= best * (1 + 1e-9)
    assert ended in ("optimal", "work limit") or (ended == "infeasible" and np.isinf(best))


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_whose_equal_nodes_stay_merged_claims_nothing_of_the_whole(seed, monkeypatch):
    """Copies are merged where problems are large, though copies that differ may be cheaper, or fit alone."""
    monkeypatch.setattr(search, "_PARTS", 1)
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng, nodes=3), rng)
    twice = replace(copies(problem, 2), budgets=tuple(doubled(budget, 3) for budget in problem.budgets))
    merged = merge_equal_nodes(twice, 2).problem
    assert len(merged.seconds) == 3
    best, equal = brute_force(twice), brute_force(merged)
    if not np.isfinite(best):
        with pytest.raises(OverBudgetError):
            solve(twice, SolverOptions(untied=0))
        return
    answer = solve(twice, SolverOptions(untied=0))
    assert twice.fits(answer.choice)
    assert answer.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= answer.objective <= equal * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_within_a_limit_goes_below_its_floor(seed):
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng), rng)
    row, *_ = problem.budgets
    limit = row.limit
    fitting = (c for c in answers(problem) if problem.usage(row, c) <= limit)
    best = min((problem.evaluate(c) for c in fitting), default=np.inf)
    bare = replace(problem, budgets=())
    relaxed, floor = (seconds_within(bare, row, limit, SolverOptions(), np.inf, close=close) for close in (False, True))
    assert relaxed <= floor * (1 + 1e-9)
    assert floor <= best * (1 + 1e-9)
    assert floor >= 0.97 * best or np.isinf(best)
    assert seconds_within(bare, row, -1.0, SolverOptions(), np.inf, close=True) == np.inf


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_of_least_memory_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng), rng)
    legal = [c for c in answers(problem) if np.isfinite(problem.evaluate(c))]
    if not legal:
        return

    def worst(choice):
        return max(problem.usage(budget, choice) / budget.limit for budget in problem.budgets)

    found = least_memory_choice(problem, SolverOptions(tie_radius=0))
    assert worst(found) <= min(map(worst, legal)) * 1.011


def test_no_answer_within_the_budget_is_said():
    rng = np.random.default_rng(3)
    problem = with_budgets(random_problem(rng), rng)
    impossible = tuple(replace(budget, limit=1e-9) for budget in problem.budgets)
    with pytest.raises(OverBudgetError, match="memory limit"):
        solve(replace(problem, budgets=impossible), SolverOptions(tie_radius=None))


@pytest.mark.parametrize("seed", [64, 142, 345])
def test_a_limit_that_one_answer_just_keeps_is_kept_in_large_problems_too(seed):
    """Seeds for which nothing was found without branching, which an unlimited bound seemed to make needless."""
    rng, nodes, alike = np.random.default_rng(seed), 8, np.arange(4)
    seconds = tuple(rng.integers(1, 100, 4).astype(float) for _ in range(nodes))
    sizes = [{node: rng.integers(1, 1000, 4).astype(float) for node in range(nodes)} for _ in range(3)]
    kept = rng.integers(0, 4, nodes).tolist()
    budgets = tuple(Budget(nbytes=n, copies={}, limit=sum(n[i][kept[i]] for i in range(nodes))) for n in sizes)
    labels, moves = tuple("abcd"), np.ones((4, 4)) - np.eye(4)
    edges = tuple(
        Edge(source=i, target=i + 1, before=alike, after=alike, seconds=moves, labels=labels, origins=labels, group=i)
        for i in range(nodes - 1)
    )
    problem = ShardingProblem(seconds=seconds, edges=edges, budgets=budgets)
    large, small = (solve(problem, SolverOptions(untied=untied, tie_radius=None)) for untied in (0, 1000))
    assert problem.fits(large.choice)
    assert large.objective == small.objective


def test_a_budget_of_which_an_answer_needs_nothing():
    problem = ShardingProblem(
        seconds=(np.zeros(2), np.zeros(2)),
        edges=(),
        budgets=(Budget(nbytes={0: np.array([1.0, 0.0]), 1: np.array([0.0, 1.0])}, copies={}, limit=1.0),),
    )
    assert least_memory_choice(problem) == (1, 0)


def test_the_least_memory_is_not_found_in_no_time():
    """The error says so, and not that there is none."""
    problem = ShardingProblem(
        seconds=(np.zeros(2),), edges=(), budgets=(Budget(nbytes={0: np.array([1.0, 2.0])}, copies={}, limit=1.0),)
    )
    with pytest.raises(PlanningError, match="within 0 s; give SolverOptions a longer time_limit="):
        least_memory_choice(problem, SolverOptions(time_limit=0.0))


def test_a_problem_without_nodes_is_solved_to_its_optimum():
    assert solve(ShardingProblem(seconds=(), edges=())).status == "optimal"


@pytest.mark.parametrize("seed", range(10))
def test_budgets_of_merged_nodes_count_every_node(seed):
    rng = np.random.default_rng(seed)
    problem = with_budgets(random_problem(rng), rng)
    merged = merge_equal_nodes(problem, radius=2)
    choice = [int(rng.integers(s.size)) for s in merged.problem.seconds]
    whole = [choice[cls] for cls in merged.classes]
    for mine, theirs in zip(merged.problem.budgets, problem.budgets, strict=True):
        assert merged.problem.usage(mine, choice) == pytest.approx(problem.usage(theirs, whole))


def test_a_bound_counts_shared_reshardings_once_though_readers_could_go_different_ways():
    """One reader may want what lies between, the other may not: both still pay the whole way together."""
    places, order = ("a", "between", "b"), np.arange(3)
    seconds = 1e-6 * np.array([[0.0, 5.0, 10.0], [5.0, 0.0, 5.0], [10.0, 5.0, 0.0]])
    edges = tuple(
        Edge(source=0, target=t, before=order, after=order, seconds=seconds, labels=places, origins=places, group=0)
        for t in (1, 2)
    )
    source, picky, other = np.array([0.0, 1.0, 1.0]), np.array([np.inf, np.inf, 0.0]), np.array([1.0, 1.0, 0.0])
    program = StrategyProgram(ShardingProblem(seconds=(source, picky, other), edges=edges))
    assert program.run(gap=1e-6) == "optimal"
    assert not program.share_where_readers_disagree()
    assert program.objective == pytest.approx(1e-5)


def test_a_relaxation_whose_readers_disagree_is_nearer_to_the_optimum_once_they_share():
    gained: list[float] = []
    for seed in range(40):
        problem = random_problem(np.random.default_rng(seed))
        program, best = StrategyProgram(problem), brute_force(problem)
        if program.run(gap=1e-9) == "optimal":
            before = program.objective
            while program.share_where_readers_disagree():
                assert program.run(gap=1e-9) == "optimal"
                gained.append(program.objective - before)
            assert before * (1 - 1e-9) <= program.objective <= best * (1 + 1e-9)
    assert len(gained) >= 10
    assert max(gained) > 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_beginning_at_prices_changes_nothing(seed, monkeypatch):
    problem = random_problem(np.random.default_rng(300 + seed))
    best = brute_force(problem)
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    monkeypatch.setattr(strategy_program, "_LARGE", 0)
    answer = solve(problem, SolverOptions(tie_radius=None))
    assert answer.objective == pytest.approx(best, abs=1e-12)
    assert answer.bound <= best * (1 + 1e-9)


def priced_edge_of(edge):
    """An edge between the placements that some strategy has."""
    rows, made = np.unique(edge.before, return_inverse=True)
    columns, read = np.unique(edge.after, return_inverse=True)
    seconds = edge.seconds[np.ix_(rows, columns)]
    return PricedEdge(source=edge.source, target=edge.target, made=made, read=read, seconds=seconds)


@pytest.mark.parametrize("seed", range(20))
def test_prices_are_a_bound(seed):
    """With what placements are worth taken off, nodes at their cheapest cost no more than any answer."""
    problem = random_problem(np.random.default_rng(seed))
    edges = tuple(replace(edge, group=number) for number, edge in enumerate(problem.edges))
    best = brute_force(replace(problem, edges=edges))
    priced_edges = [priced_edge_of(edge) for edge in edges]
    costs = list(problem.seconds)
    messages = Messages(costs, priced_edges)
    messages.run(8)
    for edge, (before, after) in zip(priced_edges, messages.prices(), strict=True):
        assert np.all(before[:, None] - after <= edge.seconds + 1e-9)
        costs[edge.source] = costs[edge.source] + before[edge.made]
        costs[edge.target] = costs[edge.target] - after[edge.read]
    assert sum(own.min() for own in costs) <= best + 1e-9
