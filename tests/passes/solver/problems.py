"""Random problems of the solver, and all of their answers, for the tests of passes/solver."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from passes.solver import Budget, Edge, ShardingProblem, Sums

PLACES = ("a", "b", "c", "x+", "y+")
"""Three placements without partial axes, and two sums."""

ENDS = np.array([not place.endswith("+") for place in PLACES])


def answers(problem: ShardingProblem) -> list[tuple[int, ...]]:
    """All choices of a strategy for each node."""
    return list(itertools.product(*(range(seconds.size) for seconds in problem.seconds)))


def brute_force(problem: ShardingProblem) -> float:
    """The seconds of the cheapest answer within the budgets, infinite if there is none."""
    return min((problem.evaluate(choice) for choice in answers(problem) if problem.fits(choice)), default=np.inf)


def random_problem(rng: np.random.Generator, nodes: int = 6) -> ShardingProblem:
    """A small random problem with shared groups, forbidden pairs and several strategies at one placement."""
    seconds = [rng.integers(0, 20, size=rng.integers(1, 4)) * 1e-6 for _ in range(nodes)]
    edges: list[Edge] = []
    for group in range(nodes):
        source = int(rng.integers(nodes))
        before = rng.integers(0, 3, size=seconds[source].size)
        for target in set(rng.integers(nodes, size=2).tolist()) - {source}:
            after = rng.integers(0, 3, size=seconds[target].size)
            cost = rng.integers(0, 30, size=(3, 3)) * 1e-6
            cost[rng.random((3, 3)) < 0.1] = np.inf
            edges.append(
                Edge(
                    source=source,
                    target=target,
                    before=before,
                    after=after,
                    seconds=cost,
                    labels=("a", "b", "c"),
                    group=group,
                )
            )
    # One resharding of one value has one price, whoever reads it.
    first: dict[int, np.ndarray] = {}
    edges = [replace(e, seconds=first.setdefault(e.group, e.seconds)) for e in edges]
    return ShardingProblem(seconds=tuple(seconds), edges=tuple(edges))


def with_budgets(problem: ShardingProblem, rng: np.random.Generator) -> ShardingProblem:
    """The problem with two budgets, of nodes and of copies, that rule out about half of the answers."""
    named = tuple(replace(edge, origins=("a", "b", "c")) for edge in problem.edges)
    # A placement that an edge starts from costs nothing to reach, and third placements are no short cut.
    free = {id(e.seconds): np.where(np.eye(3) > 0, 0.0, e.seconds + 40e-6) for e in named}
    problem = replace(problem, edges=tuple(replace(edge, seconds=free[id(edge.seconds)]) for edge in named))
    budgets: list[Budget] = []
    for _ in range(2):
        nodes = rng.permutation(len(problem.seconds))[:4].tolist()
        nbytes = {n: rng.integers(0, 50, size=problem.seconds[n].size).astype(float) for n in nodes}
        copies = {g: {label: float(rng.integers(1, 30)) for label in "ab"} for g in range(2) if g in problem.groups}
        budget = Budget(nbytes=nbytes, copies=copies, limit=1.0)
        used = [problem.usage(budget, c) for c in answers(problem)]
        budgets.append(replace(budget, limit=float(np.quantile(used, 0.4)) + 1.0))
    return replace(problem, budgets=tuple(budgets))


def moves(rng: np.random.Generator) -> np.ndarray:
    """Seconds between all placements: to reduce a sum is dear, to go on from there is not always cheap."""
    seconds = rng.integers(1, 30, size=(len(PLACES), len(PLACES))) * 1e-6
    seconds[~ENDS] += rng.integers(0, 60) * 1e-6
    for middle in range(len(PLACES)):
        seconds = np.minimum(seconds, seconds[:, [middle]] + seconds[[middle], :])
    if rng.random() < 0.3:  # what is hidden behind computing need not obey the triangle inequality
        seconds = seconds * rng.integers(1, 4, size=seconds.shape)
    np.fill_diagonal(seconds, 0.0)
    return seconds


def reading(source: int, targets: dict[int, np.ndarray], before: np.ndarray, seconds: np.ndarray, group: int) -> list:
    """The edges of a group: every target reads what its strategies say, of all placements or of some."""
    numbers = np.arange(len(PLACES))
    return [
        Edge(
            source=source,
            target=target,
            before=before,
            after=np.unique(after, return_inverse=True)[1],
            seconds=seconds[:, np.unique(after)],
            labels=tuple(PLACES[place] for place in np.unique(after)),
            origins=PLACES,
            sums=Sums(rows=~ENDS, names=numbers[np.unique(after)], ends=ENDS, onward=seconds) if many else None,
            group=group,
        )
        for many in [len(targets) > 1]
        for target, after in targets.items()
    ]


def random_sums(rng: np.random.Generator, nodes: int = 6) -> ShardingProblem:
    """A small random problem, most of whose values are sums under some strategy."""
    sizes = rng.integers(1, 4, size=nodes)
    seconds = [rng.integers(0, 20, size=size) * 1e-6 for size in sizes]
    edges: list[Edge] = []
    for group in range(nodes):
        source = int(rng.integers(nodes))
        targets = sorted(set(rng.integers(nodes, size=3).tolist()) - {source})
        reads = {t: rng.choice([0, 0, 1, 1, 2, 3, 4], size=sizes[t]) for t in targets}
        edges += reading(source, reads, rng.choice([0, 1, 3, 3, 4], size=sizes[source]), moves(rng), group)
    return ShardingProblem(seconds=tuple(seconds), edges=tuple(edges))


def with_budget(problem: ShardingProblem, rng: np.random.Generator, share: float) -> ShardingProblem:
    """A problem with one budget of nodes and copies, which this share of its answers keeps."""
    nbytes = {n: rng.integers(0, 50, size=seconds.size).astype(float) for n, seconds in enumerate(problem.seconds)}
    copies = {g: {label: float(rng.integers(1, 30)) for label in "ab"} for g in range(2) if g in problem.groups}
    budget = Budget(nbytes=nbytes, copies=copies, limit=1.0)
    used = [problem.usage(budget, choice) for choice in answers(problem)]
    return replace(problem, budgets=(replace(budget, limit=float(np.quantile(used, share)) + 1.0),))


def problem_of(seed: int) -> tuple[ShardingProblem, float]:
    """A random problem, every third with sums, and what its cheapest answer within the budgets takes."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        problem = with_budget(random_sums(rng), rng, share=0.1)
    else:
        problem = with_budgets(random_problem(rng, nodes=7), rng)
    return problem, brute_force(problem)
