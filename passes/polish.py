"""An answer to a sharding problem made better by small steps: one node at a time, the others staying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from passes.sharding_problem import Edge, Floats, ShardingProblem

_ROUNDS = 8
_PENALTY = 1e3
"""What bytes beyond a budget cost, as a multiple of the whole answer's seconds for the whole budget."""


def polish(problem: ShardingProblem, choice: Sequence[int]) -> tuple[int, ...]:
    """An answer at most as costly: each node in turn takes its best strategy, until none moves.

    Where budgets are exceeded, bytes come first.
    """
    current = list(choice)
    around: list[list[Sequence[Edge]]] = [[] for _ in problem.seconds]
    for edges in problem.groups.values():
        for node in {n for edge in edges for n in (edge.source, edge.target)}:
            around[node].append(edges)
    usage = _Usage(problem, current)
    for _ in range(_ROUNDS):
        before = tuple(current)
        for node, seconds in enumerate(problem.seconds):
            costs = seconds.copy()
            for s in np.flatnonzero(np.isfinite(seconds)):
                current[node] = int(s)
                costs[s] += sum(_group_seconds(edges, current) for edges in around[node])
            current[node] = keep = before[node]
            if problem.budgets:
                costs += usage.penalties(node, current, around[node])
            current[node] = keep if costs[keep] <= costs.min() else int(np.argmin(costs))
            if problem.budgets and current[node] != keep:
                usage.change(node, keep, current, around[node])
        if tuple(current) == before:
            break
    return tuple(current)


class _Usage:
    """What an answer takes of every budget, kept up to date while its nodes change."""

    def __init__(self, problem: ShardingProblem, choice: Sequence[int]) -> None:
        self.problem = problem
        self.held = [problem.usage(budget, choice) for budget in problem.budgets]
        seconds = problem.evaluate(choice)
        self.price = _PENALTY * (seconds if np.isfinite(seconds) and seconds > 0 else 1.0)

    def penalties(self, node: int, choice: list[int], groups: Sequence[Sequence[Edge]]) -> Floats:
        """Seconds for the bytes beyond the budgets under each strategy of a node."""
        size = self.problem.seconds[node].size
        total, own = np.zeros(size), choice[node]
        for budget, held in zip(self.problem.budgets, self.held, strict=True):
            nbytes = budget.nbytes.get(node)
            copied = [edges for edges in groups if edges[0].group in budget.copies]
            if nbytes is None and not copied:
                continue
            after = np.full(size, held) if nbytes is None else held - nbytes[own] + nbytes
            if copied:
                made = np.zeros(size)
                for s in range(size):
                    choice[node] = s
                    made[s] = sum(_copied_nbytes(budget.copies[edges[0].group], edges, choice) for edges in copied)
                choice[node] = own
                after += made - made[own]
            total += self.price * np.maximum(after / budget.limit - 1.0, 0.0)
        return total

    def change(self, node: int, old: int, choice: list[int], groups: Sequence[Sequence[Edge]]) -> None:
        """Takes over that a node has left its `old` strategy."""
        new = choice[node]
        for index, budget in enumerate(self.problem.budgets):
            if (nbytes := budget.nbytes.get(node)) is not None:
                self.held[index] += float(nbytes[new] - nbytes[old])
            for edges in groups:
                copies = budget.copies.get(edges[0].group)
                if copies is not None:
                    self.held[index] += _copied_nbytes(copies, edges, choice)
                    choice[node] = old
                    self.held[index] -= _copied_nbytes(copies, edges, choice)
                    choice[node] = new


def _copied_nbytes(copies: Mapping[object, float], edges: Sequence[Edge], choice: Sequence[int]) -> float:
    made = {edge.copies(choice) for edge in edges}
    return sum(copies.get(label, 0.0) for label in made if label is not None)


def _group_seconds(edges: Sequence[Edge], choice: Sequence[int]) -> float:
    paid: dict[tuple[int, object], float] = {}
    for edge in edges:
        i, j = int(edge.before[choice[edge.source]]), int(edge.after[choice[edge.target]])
        paid[(i, edge.labels[j])] = edge.weight * float(edge.seconds[i, j])
    return sum(paid.values())
