"""Elimination, bounds and dominance against brute force, on random problems with shared reshardings."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from passes.solver import Edge, ShardingProblem, SolverOptions, elimination, factors, lower_bound, solve
from passes.solver.dominance import without_dominated
from passes.solver.elimination import Beam, Factors, MiniBuckets, eliminate, enclose
from passes.solver.factors import Factor, total
from passes.solver.formulation import StrategyProgram
from passes.solver.linear_program import LinearProgram
from passes.solver.lower_bound import lifted, loose, priced, raised
from passes.solver.symmetry import merge_equal_nodes
from tests.passes.solver.problems import brute_force
from tests.sample import some


def random_problem(seed: int, nodes: int = 5, readers: int = 3) -> ShardingProblem:
    """Nodes of up to four strategies, values that up to `readers` nodes read, some reshardings impossible."""
    rng = np.random.default_rng(seed)
    seconds = [rng.integers(0, 20, size=rng.integers(2, 5)) * 1e-6 for _ in range(nodes)]
    edges = []
    for group in range(nodes):
        source = int(rng.integers(nodes))
        before = rng.integers(0, 3, size=seconds[source].size)
        cost = rng.integers(0, 30, size=(3, 3)) * 1e-6
        cost[rng.random((3, 3)) < 0.1] = np.inf
        edges += [
            Edge(
                source=source,
                target=target,
                before=before,
                after=rng.integers(0, 3, size=seconds[target].size),
                seconds=cost,
                labels=("a", "b", "c"),
                group=group,
            )
            for target in sorted(set(rng.integers(nodes, size=readers).tolist()) - {source})
        ]
    return ShardingProblem(seconds=tuple(seconds), edges=tuple(edges))


def chain(seed: int, copies: int) -> ShardingProblem:
    """Equal layers in a row, each a random problem whose first node reads what the last node of the one before made."""
    one, rng = random_problem(seed, nodes=3), np.random.default_rng(seed)
    first, last = one.seconds[0].size, one.seconds[-1].size
    link = {
        "before": rng.integers(0, 3, size=last),
        "after": rng.integers(0, 3, size=first),
        "seconds": rng.integers(0, 30, size=(3, 3)) * 1e-6,
        "labels": ("a", "b", "c"),
    }
    edges = []
    for copy in range(copies):
        moved = 3 * copy
        edges += [
            replace(e, source=e.source + moved, target=e.target + moved, group=e.group + 10 * copy) for e in one.edges
        ]
        if copy:
            edges.append(Edge(source=moved - 1, target=moved, group=10 * copy + 9, **link))
    return ShardingProblem(seconds=one.seconds * copies, edges=tuple(edges))


FEASIBLE = [seed for seed in range(24) if np.isfinite(brute_force(random_problem(seed)))]


def test_a_sum_has_the_nodes_that_it_tells_apart():
    """It had dimensions of one entry for the rest, of which NumPy has 64: a graph network ended the search."""
    rng, own = np.random.default_rng(0), np.arange(2)
    tables = [rng.normal(size=(1, 2)) for _ in range(70)]
    among = [Factor(nodes=(at, 70), classes=(np.zeros(3, int), own), table=t) for at, t in enumerate(tables)]
    pair = Factor(nodes=(72, 70, 71), classes=(own, own, np.zeros(3, int)), table=rng.normal(size=(2, 2, 1)))
    result = total([*among, pair], 70)
    assert result.nodes == (70, 72)
    np.testing.assert_allclose(result.table, sum(tables).T + pair.table[:, :, 0].T)


@pytest.mark.parametrize("seed", FEASIBLE)
def test_elimination_finds_the_optimum(seed):
    problem = random_problem(seed)
    result = eliminate(Factors(problem))
    assert problem.evaluate(result.choice) == pytest.approx(brute_force(problem), abs=1e-12)
    assert result.bound == pytest.approx(brute_force(problem), abs=1e-12)


@pytest.mark.parametrize("seed", FEASIBLE)
@pytest.mark.parametrize("limit", [4, 12, 40])
def test_mini_buckets_bound_the_optimum_and_the_beam_finds_it(seed, limit):
    problem = random_problem(seed)
    made = Factors(problem)
    tables = MiniBuckets(made.factors, made.order.nodes, limit)
    assert tables.bound <= brute_force(problem) + 1e-12
    result = Beam(made, tables, made.beyond, width=10_000).run()
    assert problem.evaluate(result.choice) == pytest.approx(brute_force(problem), abs=1e-12)
    assert result.bound == pytest.approx(brute_force(problem), abs=1e-12)


@pytest.mark.parametrize("seed", FEASIBLE)
def test_a_narrow_beam_says_what_it_may_have_missed(seed):
    problem, best = random_problem(seed), brute_force(random_problem(seed))
    made = Factors(problem)
    result = Beam(made, MiniBuckets(made.factors, made.order.nodes, 4), made.beyond, width=2).run()
    assert result.bound <= best + 1e-12
    if result.choice is not None:
        assert problem.evaluate(result.choice) >= best - 1e-12


@pytest.mark.parametrize("seed", FEASIBLE)
def test_groups_in_parts_pay_no_more_than_they_do_and_are_paid_in_full_at_the_end(seed):
    problem, best = random_problem(seed, readers=5), brute_force(random_problem(seed, readers=5))
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    with mock.patch.object(factors, "GROUP_ENTRIES", 10):
        made = Factors(problem)
    assert any(not group.is_exact for group in made.groups) or max(len(g.nodes) for g in made.groups) <= 3
    tables = MiniBuckets(made.factors, made.order.nodes, np.inf)
    assert tables.bound <= best + 1e-12
    result = Beam(made, tables, made.beyond, width=10_000).run()
    assert problem.evaluate(result.choice) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", FEASIBLE[::3])
def test_groups_in_parts_do_not_keep_a_small_problem_from_its_optimum(seed):
    problem, best = random_problem(seed, readers=5), brute_force(random_problem(seed, readers=5))
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    with mock.patch.object(factors, "GROUP_ENTRIES", 10):
        answer = solve(problem)
    assert answer.objective == pytest.approx(best, rel=2e-4)
    assert best * (1 - 2e-4) <= answer.bound <= best + 1e-12


@pytest.mark.parametrize("seed", FEASIBLE)
def test_rounds_of_a_search_enclose_the_optimum(seed, monkeypatch):
    monkeypatch.setattr(elimination, "_AFFORDABLE_ENTRIES", 0)
    monkeypatch.setattr(elimination, "_LIMITS", (4, 8, 16))
    monkeypatch.setattr(elimination, "_KEPT", (6, 18, 54))
    problem, best = random_problem(seed, nodes=6), brute_force(random_problem(seed, nodes=6))
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    result = enclose(Factors(problem), np.inf, 1e-9)
    assert result.bound <= best + 1e-12
    if result.choice is not None:
        assert problem.evaluate(result.choice) >= best - 1e-12


@pytest.mark.parametrize("seed", FEASIBLE)
def test_a_gap_of_small_tables_is_closed_where_exact_ones_can_be_afforded(seed, monkeypatch):
    monkeypatch.setattr(elimination, "_LIMITS", (4,))
    monkeypatch.setattr(elimination, "_KEPT", (1,))
    problem, best = random_problem(seed), brute_force(random_problem(seed))
    result = enclose(Factors(problem), np.inf, 1e-9)
    assert problem.evaluate(result.choice) == pytest.approx(best, abs=1e-12)
    assert result.bound == pytest.approx(best, abs=1e-12)
    assert enclose(Factors(problem), best * (1 - 1e-6), 1e-9).choice is None


@pytest.mark.parametrize("seed", FEASIBLE)
def test_dominated_strategies_are_not_needed(seed):
    problem = random_problem(seed)
    assert brute_force(without_dominated(problem)) == pytest.approx(brute_force(problem), abs=1e-12)


def test_something_is_dominated():
    left = sum(np.isfinite(s).sum() for p in map(random_problem, FEASIBLE) for s in without_dominated(p).seconds)
    assert left < sum(s.size for p in map(random_problem, FEASIBLE) for s in p.seconds)


@pytest.mark.parametrize("seed", FEASIBLE)
def test_any_prices_give_a_bound_and_fixing_by_it_keeps_the_optimum(seed):
    problem, best = random_problem(seed), brute_force(random_problem(seed))
    rng = np.random.default_rng(seed)
    prices = {id(e): (rng.normal(size=3) * 1e-5, rng.normal(size=3) * 1e-5) for e in problem.edges}
    bound = priced(problem, prices, [])
    assert bound.seconds <= best + 1e-12
    assert brute_force(bound.fix_strategies(problem, best + 1e-12)) == pytest.approx(best, abs=1e-12)
    better = raised(problem, bound, range(len(problem.seconds)), 8)
    assert bound.seconds <= better.seconds <= best + 1e-12
    again = priced(problem, better.prices, [])
    assert again.seconds == pytest.approx(better.seconds, abs=1e-12)
    assert all(np.allclose(own, other) for own, other in zip(again.reduced, better.reduced, strict=True))
    moved = Factors(problem, better)
    assert problem.evaluate(eliminate(moved).choice) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", some([seed for seed in range(24) if np.isfinite(brute_force(chain(seed, 1)))], 1))
def test_prices_of_equal_layers_bound_layers_that_are_better_off_different(seed):
    problem = chain(seed, 3)
    best = brute_force(problem)
    if not np.isfinite(best):
        pytest.skip("infeasible instance")
    merged = merge_equal_nodes(problem, 1)
    program = StrategyProgram(merged.problem)
    if program.run(gap=1e-9) != "optimal":
        pytest.skip("no answer gives equal layers equal strategies")
    bound = lifted(problem, merged, program.edge_prices(), [])
    assert bound.seconds <= best + 1e-12
    choice = [int(np.argmin(own)) for own in problem.seconds]
    better = raised(problem, bound, loose(problem, bound, choice, 3), 8)
    assert bound.seconds <= better.seconds <= best + 1e-12
    answer = solve(problem, SolverOptions(tie_radius=1))
    assert answer.objective == pytest.approx(best, abs=1e-12)
    assert answer.bound <= best + 1e-12


@pytest.mark.parametrize("seed", FEASIBLE[:20])
def test_a_gap_is_due_to_the_nodes_and_groups_that_are_loose(seed, monkeypatch):
    problem = random_problem(seed)
    program = StrategyProgram(problem)
    assert program.run(gap=1e-9) == "optimal"
    bound = priced(problem, {id(e): p for e, p in zip(problem.edges, program.edge_prices(), strict=True)}, [])
    choice = solve(problem).choice
    monkeypatch.setattr(lower_bound, "_NEGLIGIBLE", 1e-9)
    loose_nodes = loose(problem, bound, choice, 0)
    assert loose_nodes or problem.evaluate(choice) - bound.seconds < 1e-12
    assert loose(problem, bound, choice, 1) >= loose_nodes


@pytest.mark.parametrize("seed", FEASIBLE[:20])
def test_prices_of_a_relaxation_without_merged_nodes_are_as_good_as_it(seed):
    problem = random_problem(seed, readers=1)
    merged = merge_equal_nodes(problem, None)
    program = StrategyProgram(merged.problem)
    if program.run(gap=1e-9) != "optimal":
        pytest.skip("infeasible instance")
    assert lifted(problem, merged, program.edge_prices(), []).seconds == pytest.approx(program.objective, abs=1e-10)


def test_entries_of_one_place_add_up_before_a_solver_sees_them():
    program = LinearProgram()
    columns = program.add_columns(2)
    row = program.add_rows(1, 2.0, 2.0)
    program.enter(np.repeat(row, 4), columns[[0, 1, 0, 1]], np.array([1.0, 3.0, 1.0, -2.0]))
    rows, entries, values = program.triplets()
    assert sorted(zip(rows.tolist(), entries.tolist(), values.tolist(), strict=True)) == [(0, 0, 2.0), (0, 1, 1.0)]
    outcome = program.minimise(np.array([1.0, 3.0]), np.zeros(0, dtype=np.intp), gap=1e-9)
    assert outcome.objective == pytest.approx(1.0)


def test_neighbours_that_are_merged_reach_the_solver_without_doubled_entries(monkeypatch):
    """A self-edge of a merged node stands twice in one row; HiGHS crashed on it while branching."""
    seen = []
    real = LinearProgram.triplets

    def looked_at(self):
        found = real(self)
        seen.append(len(set(zip(found[0].tolist(), found[1].tolist(), strict=True))) == found[0].size)
        return found

    monkeypatch.setattr(LinearProgram, "triplets", looked_at)
    order, cost = np.arange(3), np.array([[0.0, 5.0, 2.0], [4.0, 0.0, 3.0], [1.0, 6.0, 0.0]]) * 1e-6
    ends = {"before": order, "after": order, "seconds": cost, "labels": ("a", "b", "c"), "origins": ("a", "b", "c")}
    edges = tuple(Edge(source=at, target=at + 1, group=at, **ends) for at in range(5))
    merged = merge_equal_nodes(ShardingProblem(seconds=(np.array([1.0, 2.0, 3.0]) * 1e-6,) * 6, edges=edges), 0)
    assert any(edge.source == edge.target for edge in merged.problem.edges)
    program = StrategyProgram(merged.problem, whole=True)
    program.run(gap=1e-6)
    assert seen
    assert all(seen)
