"""The strategies of one operator group on a mesh: every legal placement of it, with its seconds and its interface.

A strategy fixes the assignment of every member. Reshardings inside the operator group (the mean of a cut dimension,
say) are part of its seconds; reshardings between operator groups belong to the edges of the integer program.

Which strategies there may be does not depend on sizes, so it is found once for all operator groups of one signature, on
whatever mesh (`passes.intra_op.strategy_space`); here those whose axes divide are priced, all of an operator group at
once. Equal operator groups of one program or of several share a table if they are planned with one resharder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Mesh
from passes.errors import NoLegalPlanError, explain
from passes.intra_op.axis_choices import PARTIAL, AxisChoice
from passes.intra_op.group_signatures import GroupSignature
from passes.intra_op.group_walks import Signature, SizelessRule
from passes.intra_op.rearranging import is_ordered, rearranging_seconds
from passes.intra_op.roofline import (
    computed_flops,
    computing_dtype,
    group_seconds,
    has_own_rate,
    is_no_kernel,
    local_flops,
    times_made,
)
from passes.intra_op.strategy_space import StrategySpace, strategy_space, subsets
from passes.ir import Graph, TensorType
from passes.placement import Grouping
from passes.rules import Assignment, ShardingRule
from passes.sharding import Resharder, ShardingSpec
from passes.solver import Floats, Indices

Types = tuple[TensorType, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One legal placement of an operator group: the choice of axes, the members' assignments, and seconds of
    computing.
    """

    axis_choice: AxisChoice
    assignments: tuple[Assignment, ...]
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All strategies of an operator group, with the placements of the values that it reads (`inputs`) and writes
    (`makes`).

    Values are numbered as in the group's signature: an input is (its number, its placement under each strategy).
    `seconds` [strategies] are those of computing and of reshardings inside the group, run once.
    """

    strategies: tuple[Strategy, ...]
    inputs: tuple[tuple[int, tuple[ShardingSpec, ...]], ...]
    makes: dict[int, tuple[ShardingSpec, ...]]
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A primitive by name, with its sharding rule and the types of its operands (`reads`) and results (`writes`)."""

    primitive: str
    rule: ShardingRule
    reads: Types
    writes: Types


class Tabulator:
    """The tables of operator groups on one mesh; groups of equal signature share one, in whatever program they are."""

    def __init__(self, resharder: Resharder) -> None:
        self.resharder, self.mesh = resharder, resharder.mesh
        self._numbers: dict[Operator, int] = {}
        self._operators: list[Operator] = []
        self._sizeless: list[SizelessRule] = []
        self._known: dict[GroupSignature, Table] = {}
        parts = [math.prod(map(self.mesh.axis_size, axes)) for axes in subsets(self.mesh.axes)]
        self._parts: Indices = np.array(parts, dtype=np.intp)

    def operators(self, graph: Graph, grouping: Grouping) -> list[int]:
        """The number of every node's operator; nodes that share a rule have one operator."""
        numbers: dict[int, int] = {}
        for node, rule in zip(graph.nodes, grouping.rules, strict=True):
            if id(rule) not in numbers:
                reads, writes = (tuple([graph.types[v] for v in values]) for values in (node.inputs, node.outputs))
                operator = Operator(primitive=node.primitive, rule=rule, reads=reads, writes=writes)
                numbers[id(rule)] = self._number(operator)
        return [numbers[id(rule)] for rule in grouping.rules]

    def table(self, signature: GroupSignature, source: str) -> Table:
        """The table of an operator group of this signature. Raises NoLegalPlanError, which names its `source`, if it is
        empty.
        """
        if signature not in self._known:
            table = _Pricing(self, signature).run()
            if table is None:
                raise NoLegalPlanError(self._unmet(signature, source))
            self._known[signature] = table
        return self._known[signature]

    def members(self, signature: GroupSignature) -> list[Operator]:
        """The operators of a signature."""
        return [self._operators[number] for number in signature.operators]

    def space(self, signature: GroupSignature) -> StrategySpace:
        """The strategy space of a signature: all strategies, whether legal on this mesh or not."""
        may_be_partial = signature.light or signature.summed is not None
        return strategy_space(
            Signature(
                axes=self.mesh.axes,
                options=(*signature.options, PARTIAL) if may_be_partial else signature.options,
                summed=signature.summed,
                factors=signature.factors,
                rules=tuple([self._sizeless[number] for number in signature.operators]),
                operands=signature.operands,
                makes=signature.makes,
                visible=signature.visible,
                absorbed=signature.absorbed,
                classes=signature.classes,
                inside=signature.inside,
            )
        )

    def pieces(self, masks: Indices) -> Indices:
        """The number of devices along each of these sets of axes, of the shape of `masks`."""
        return self._parts[masks]

    def divided(self, nbytes: Floats, axes: Indices) -> Floats:
        """Bytes [..., 1] divided by one axis after the other, `axes` [..., depth]; -1 is no axis."""
        sizes = np.array((*self.mesh.sizes, 1), dtype=np.float64)
        for depth in range(axes.shape[-1]):
            nbytes = nbytes / sizes[axes[..., depth]]
        return nbytes

    def _number(self, operator: Operator) -> int:
        if operator not in self._numbers:
            self._numbers[operator] = len(self._operators)
            self._operators.append(operator)
            self._sizeless.append(SizelessRule.of(operator.rule, operator.reads, operator.writes))
        return self._numbers[operator]

    def _unmet(self, signature: GroupSignature, source: str) -> str:
        """The reason why no strategy is legal: the first constraint of the user's that this mesh cannot meet."""
        member = next(member for member in self.members(signature) if member.rule.is_bound)
        if member.rule.cut_by is not None:
            return _uncuttable(member.writes[0], member.rule.cut_by, self.mesh, source)
        rule = f"no axes of the mesh cut it so; the last one tried is {self.mesh}"
        remedy = "place it as some axes of the planner's mesh can, drop the constraint, or plan with Auto()"
        if (devices := getattr(member.rule.constrained, "devices", 0)) != self.mesh.size:
            rule = f"a program runs on all devices of its constraints, and the mesh {self.mesh} has {self.mesh.size}"
            remedy = f"plan for {devices} devices, without stages, or drop the constraint"
        what = f"a sharding constraint of {member.writes[0]} to {member.rule.constrained}"
        return explain(what, rule, f"at {source}", remedy)


def _uncuttable(type: TensorType, cut_by: Sequence[tuple[str, ...] | None], mesh: Mesh, source: str) -> str:
    """The reason why a value cannot be cut by the axes that the user names."""
    written = ", ".join("any" if axes is None else "+".join(axes) or "-" for axes in cut_by)
    unknown = sorted({axis for axes in cut_by for axis in axes or ()} - set(mesh.axes))
    rule = f"the mesh {mesh} has no axis {', '.join(unknown)}" if unknown else f"axes of {mesh} do not divide it so"
    remedy = "name axes by Auto(mesh={...}) whose sizes divide it, or leave the constraint out"
    return explain(f"autopar.constrain of {type} to [{written}]", rule, f"at {source}", remedy)


class _Pricing:
    """The pricing of one signature on one mesh: seconds of all strategies, and the cheapest of those with equal
    interfaces.
    """

    def __init__(self, tabulator: Tabulator, signature: GroupSignature) -> None:
        self.tabulator, self.signature = tabulator, signature
        self.members = tabulator.members(signature)
        self.space = tabulator.space(signature)
        self.types = dict[int, TensorType]()
        for member, operands, written in zip(self.members, signature.operands, signature.makes, strict=True):
            read = ((w, type) for w, type in zip(operands, member.reads, strict=True) if w and w[0] == "in")
            self.types |= {where[1]: type for where, type in read} | dict(zip(written, member.writes, strict=True))

    def run(self) -> Table | None:
        """The table; None if no strategy is legal."""
        space = self.space
        if not space.axis_choices:
            return None
        compute = self._compute_seconds()
        seconds = np.where(self._legal(), compute + self._reshard_seconds(), np.inf)
        best: dict[int, int] = {}
        for number, (interface, spent) in enumerate(zip(space.kinds, seconds.tolist(), strict=True)):
            if spent < np.inf and (interface not in best or spent < seconds[best[interface]]):
                best[interface] = number
        if not best:
            return None
        chosen = list(best.values())
        codes: list[list[int]] = space.interface[:, chosen].tolist()
        rows = [tuple([space.specs[code] for code in row]) for row in codes]
        count = len(space.inputs)
        return Table(
            strategies=tuple(
                Strategy(
                    axis_choice=space.axis_choices[number],
                    assignments=space.assignments[number],
                    compute_seconds=float(compute[number]),
                )
                for number in chosen
            ),
            inputs=tuple(dict.fromkeys(zip(space.inputs, rows[:count], strict=True))),
            makes=dict(zip((*self.signature.visible, *self.signature.absorbed), rows[count:], strict=True)),
            seconds=seconds[chosen],
        )

    def _legal(self) -> NDArray[np.bool_]:
        """Whether each strategy [strategies] is legal: its axes divide what they cut, and meet the user's
        constraints.
        """
        space, mesh = self.space, self.tabulator.mesh
        sizes = [self.members[position].rule.factors[factor].size for position, factor in space.factors]
        factor_sizes = np.array(sizes, dtype=np.intp)[:, None]
        legal = (factor_sizes % self.tabulator.pieces(space.masks) == 0).all(axis=0)
        for position, member in enumerate(self.members):
            if member.rule.is_bound:
                legal &= [member.rule.fulfils(assignments[position], mesh) for assignments in space.assignments]
        return legal

    def _compute_seconds(self) -> Floats:
        """Seconds of every strategy by the roofline [strategies]."""
        rearranging = self._rearranging_seconds()
        device, first = self.tabulator.mesh.cluster.group().device, self.members[0]
        if is_no_kernel([member.rule for member in self.members], device):
            return rearranging
        dtype = computing_dtype(first.reads, first.writes)
        return group_seconds(device, dtype, self._flops(), self._nbytes(), rearranging)

    def _rearranging_seconds(self) -> Floats:
        mesh, total = self.tabulator.mesh, np.zeros(len(self.space.axis_choices))
        device = mesh.cluster.group().device
        for position, member in enumerate(self.members):
            if is_ordered(member.rule, device):
                total += self._of_assignments(
                    position, partial(rearranging_seconds, member.rule, member.reads, mesh=mesh)
                )
        return total

    def _of_assignments(self, position: int, number_of: Callable[[Assignment], float]) -> list[float]:
        """A number for one member's assignment under every strategy [strategies]; many share an assignment."""
        assignments = [assignments[position] for assignments in self.space.assignments]
        numbers = {assignment: number_of(assignment) for assignment in set(assignments)}
        return [numbers[assignment] for assignment in assignments]

    def _flops(self) -> Floats:
        mesh = self.tabulator.mesh
        again = np.array([times_made(member.writes) if member.rule.is_product else 1 for member in self.members])
        device = mesh.cluster.group().device
        member_flops = np.array([computed_flops(member.rule, device) for member in self.members])
        rows = member_flops[:, None] / self.tabulator.pieces(self.space.cuts)
        for position, member in enumerate(self.members):
            if has_own_rate(member.rule, mesh):
                rows[position] = self._of_assignments(position, partial(local_flops, member.rule, mesh=mesh))
        return _added(rows * again[:, None])

    def _nbytes(self) -> Floats:
        """Bytes that a device reads of operands and writes of visible values [strategies]."""
        space, rows = self.space, list[Floats]()
        read = [self._read_nbytes(position, operand) for position, operand in space.reads]
        unwritten = self.signature.unwritten
        written = [0 if value in unwritten else self.types[value].nbytes for value in self.signature.visible]
        sizes = np.array([*read, *written], dtype=np.float64)[:, None]
        rows = self.tabulator.divided(sizes, space.depths[space.pieces])
        return _added(rows[: len(read)]) + _added(rows[len(read) :])

    def _read_nbytes(self, position: int, operand: int) -> int:
        member = self.members[position]
        nbytes = 0 if (position, operand) in self.signature.unread else member.reads[operand].nbytes
        return min(nbytes, member.writes[0].nbytes) if operand in member.rule.read_in_part else nbytes

    def _reshard_seconds(self) -> Floats:
        total = np.zeros(len(self.space.axis_choices))
        for moved in self.space.moves:
            type, behind = self.types[moved.value], dict(self.signature.behind).get(moved.value)
            cost = partial(self.tabulator.resharder.cost, type, behind=behind)
            total += np.array([0.0, *(cost(before, after) for before, after in moved.pairs)])[moved.which]
        return total


def _added(rows: Floats) -> Floats:
    """The sum over rows, added in order: equal costs stay equal, unlike in a pairwise sum."""
    return sum(rows, np.zeros(rows.shape[1]))
