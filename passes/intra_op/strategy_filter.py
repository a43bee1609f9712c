"""A sharding problem restricted by a filter: strategies that it refuses cost infinitely much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.intra_op.assembly import Assembly, ControlJoin, Floats, Subproblem
from passes.intra_op.roles import Value
from passes.intra_op.strategies import Strategy
from passes.sharding import ShardingSpec

_ROUNDING = 1e-9
"""The share by which equal sums of bytes may differ: they are sums over shares, which are not whole."""


class StrategyFilter:
    """The strategies that a problem keeps: all of them, unless a subclass overrides a method.

    Of the kept strategies of a node, only those stay under which its values take the fewest bytes, as `nbytes` counts
    them. A node that would lose all its strategies keeps all.
    """

    def keeps(self, subproblem: Subproblem, group: int, strategy: Strategy) -> bool:
        """Whether an operator group of a subproblem keeps a strategy."""
        return True

    def keeps_input(self, value: int, spec: ShardingSpec) -> bool:
        """Whether an input of the program may be in a placement."""
        return True

    def keeps_port(self, value: Value, spec: ShardingSpec) -> bool:
        """Whether an input of the body of a loop or branch may be in a placement."""
        return True

    def keeps_stacked(self, value: Value, spec: ShardingSpec) -> bool:
        """Whether the stack that a loop makes of a value of its body may be in a placement."""
        return True

    def nbytes(self, value: Value, spec: ShardingSpec) -> float:
        """Bytes of a value in a placement if they should be as few as possible; 0 for other values."""
        return 0.0


def restricted(assembly: Assembly, strategies: StrategyFilter) -> Assembly:
    """The assembly with only the strategies that the filter keeps."""
    restriction = _Restriction(strategies, list(assembly.problem.seconds))
    for subproblem in assembly.root.all():
        restriction.of_operator_groups(subproblem)
        restriction.of_ports(subproblem)
    root = assembly.root
    for value in root.grouping.loose:
        site = root.sites[value]
        kept = [strategies.keeps_input(value, spec) for spec in site.specs]
        restriction.keep(site.node, kept, [strategies.nbytes((root.number, value), spec) for spec in site.specs])
    return replace(assembly, problem=replace(assembly.problem, seconds=tuple(restriction.seconds)))


@dataclass(frozen=True, slots=True)
class _Restriction:
    """The `seconds` of each node's strategies, infinite for those that the filter refuses."""

    strategies: StrategyFilter
    seconds: list[Floats]

    def keep(self, node: int, is_kept: Sequence[bool], nbytes: Sequence[float]) -> None:
        """Rules out all strategies of a node but for those that are kept and of the fewest bytes."""
        if any(is_kept):
            smallest = min(n for stays, n in zip(is_kept, nbytes, strict=True) if stays)
            few = np.array(is_kept) & (np.array(nbytes) <= smallest * (1 + _ROUNDING))
            self.seconds[node] = np.where(few, self.seconds[node], np.inf)

    def of_operator_groups(self, subproblem: Subproblem) -> None:
        """Rules out strategies of the operator groups of a subproblem."""
        values_at: dict[int, list[tuple[Value, Sequence[ShardingSpec]]]] = defaultdict(list)
        for value, site in subproblem.sites.items():
            values_at[site.node].append(((subproblem.number, value), site.specs))
        for group, table in enumerate(subproblem.tables):
            node = subproblem.first + group
            absorbed = {v: subproblem.sites[v].specs for v in subproblem.grouping.operator_groups[group].inputs}
            legal = [self.strategies.keeps(subproblem, group, strategy) for strategy in table.strategies]
            fitting = [
                is_legal and all(self.strategies.keeps_input(v, specs[s]) for v, specs in absorbed.items())
                for s, is_legal in enumerate(legal)
            ]
            nbytes = [
                sum(self.strategies.nbytes(value, specs[s]) for value, specs in values_at[node])
                for s in range(len(legal))
            ]
            # Where an input cannot lie as it should beside what reads it, as running statistics of a batch that is cut,
            # it gives way.
            self.keep(node, fitting if any(fitting) else legal, nbytes)

    def of_ports(self, subproblem: Subproblem) -> None:
        """Rules out placements of the ports of its loops and branches."""
        for join in subproblem.control_joins.values():
            for body, inner in zip(join.control.bodies, join.bodies, strict=True):
                for value, port in zip(body.graph.inputs, body.inputs, strict=True):
                    where = inner.number, value
                    kept = [self.strategies.keeps_port(where, spec) for spec in join.ports[port].specs]
                    self._keep_port(join, port, where, kept)
                for value, port in zip(body.graph.outputs, body.outputs, strict=True):
                    if join.control.ports[port].stacked:
                        where = inner.number, inner.grouping.roots.get(value, value)
                        kept = [self.strategies.keeps_stacked(where, spec) for spec in join.ports[port].specs]
                        self._keep_port(join, port, where, kept)

    def _keep_port(self, join: ControlJoin, port: int, where: Value, kept: Sequence[bool]) -> None:
        site = join.ports[port]
        self.keep(site.node, kept, [self.strategies.nbytes(where, spec) for spec in site.specs])
