"""The solver of sharding problems: one strategy for each node at the least total seconds, within memory budgets, with a
lower bound.

It knows neither graphs nor meshes.
"""

from passes.solver.options import SolverOptions
from passes.solver.problem import Budget, Cache, Edge, Floats, Indices, ShardingProblem, Sums
from passes.solver.search import Answer, NotCheaperError, Search, least_memory_choice, solve

__all__ = [
    "Answer",
    "Budget",
    "Cache",
    "Edge",
    "Floats",
    "Indices",
    "NotCheaperError",
    "Search",
    "ShardingProblem",
    "SolverOptions",
    "Sums",
    "least_memory_choice",
    "solve",
]
