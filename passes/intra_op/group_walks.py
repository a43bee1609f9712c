"""The placements of an operator group's members under each choice of axes, found by walking through its members in
order.

The choice says what each axis cuts in the whole group: a member is cut where it has a factor of the chosen class.
Partial values are passed on by linear members as long as their results are no larger than what came in, and are reduced
before other members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from passes.intra_op.axis_choices import PARTIAL, AxisChoice
from passes.ir import TensorType
from passes.rules import Assignment, ShardingRule, in_order
from passes.sharding import ShardingSpec, placed

Where = tuple[Literal["in", "out"], int]
"""The k-th value that an operator group holds, or the k-th that it reads from elsewhere."""


Role = Literal["input", "first", "again"]
"""The role of an operand: an `input` from outside the group, an absorbed value read for the `first` time, or any value
of the group `again`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizelessRule:
    """A member's sharding rule without sizes: 1 stands for any extent.

    `grows[o]` says whether the result is larger than operand o; it is empty where no operand may come in partial.
    """

    rule: ShardingRule
    grows: tuple[bool, ...]

    @classmethod
    def of(cls, rule: ShardingRule, reads: Sequence[TensorType], writes: Sequence[TensorType]) -> Self:
        """The rule of an operator with operands and results of these types, without the sizes."""
        factors = tuple(replace(factor, size=min(factor.size, 1)) for factor in rule.factors)
        grows = ()
        if any(factor.partial and not factor.size for factor in factors):
            grows = tuple(writes[0].size > type.size for type in reads)
        bare = replace(rule, factors=factors, flops=0.0, light=True, reason="", constrained=None, cut_by=None)
        return cls(rule=bare, grows=grows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The part of an operator group that its strategy space depends on; positions are those of a `GroupSignature`.

    `options` are the classes that an axis may cut. `rules`, `operands`, `makes` and `classes` have, for each member,
    its rule, the place of each operand (None: none is needed), the values that it makes, and the class of each factor.
    Neighbours see the `visible` values; `absorbed` values are inputs that the group places itself; `summed` is the
    operand that may come in partial, `factors` are (member, operand) pairs that may, in place of the first. In a loop
    (`inside`), parts of a gradient would be reduced in every iteration.
    """

    axes: tuple[str, ...]
    options: tuple[int, ...]
    rules: tuple[SizelessRule, ...]
    operands: tuple[tuple[Where | None, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    visible: tuple[int, ...]
    absorbed: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    summed: int | None = None
    factors: frozenset[tuple[int, int]] = frozenset()
    inside: bool = False


@dataclass(slots=True, kw_only=True)
class GroupWalk:
    """One walk through an operator group: placements of its values, inputs and operands, and the reshardings inside.

    `moved` maps (member, operand) to (value of the group, the placement it is needed in); the value has placement
    `home`. Values in `reduced` are partial where they are made, and are reduced once; all members and neighbours read
    the result. Partial values are passed on by members that make more of them only if the walk `widens`.
    """

    axis_choice: AxisChoice
    reduced: dict[int, ShardingSpec]
    widens: bool = False
    assignments: list[Assignment] = field(default_factory=list[Assignment])
    cuts: list[int] = field(default_factory=list[int])
    home: dict[int, ShardingSpec] = field(default_factory=dict[int, ShardingSpec])
    inputs: list[ShardingSpec] = field(default_factory=list[ShardingSpec])
    reads: list[ShardingSpec] = field(default_factory=list[ShardingSpec])
    moved: dict[tuple[int, int], tuple[int, ShardingSpec]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ShardingSpec]]
    )

    def at(self, value: int) -> ShardingSpec:
        """The placement in which a value of the operator group can be read: reduced, if it is reduced at all."""
        spec = self.home[value]
        return self.reduced.get(value, spec) if spec.partial else spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutRule:
    """A rule under one assignment: the placements of operands and results, and the axes that divide its work."""

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A member of an operator group, with all that every walk needs of it: all walks place values in one order.

    `factors` are its factors by class, `operands` are (operand, role, value). `may_be_partial` are the (operand, value)
    pairs that may come in partial; `fresh` is the linear factor that takes values from outside partial.
    """

    sizeless: SizelessRule
    factors: dict[int, int]
    operands: tuple[tuple[int, Role, int], ...]
    makes: tuple[int, ...]
    may_be_partial: tuple[tuple[int, int], ...]
    fresh: int | None


def _members(signature: Signature) -> list[_Member]:
    """The members of a signature, in order."""
    members: list[_Member] = []
    placed_values: set[int] = set()
    factors = dict(signature.factors)
    for position, (sizeless, operands, results, classes) in enumerate(
        zip(signature.rules, signature.operands, signature.makes, signature.classes, strict=True)
    ):
        inner_operands = [(o, where[1]) for o, where in enumerate(operands) if where and where[0] == "in"]
        settled = placed_values.issuperset(value for _, value in inner_operands)
        roles: list[tuple[int, Role, int]] = []
        for operand, where in enumerate(operands):
            if where:
                role = "input" if where[0] == "out" else "again" if where[1] in placed_values else "first"
                roles.append((operand, role, where[1]))
                placed_values.update([where[1]] if role == "first" else [])
        placed_values.update(results)
        members.append(
            _Member(
                sizeless=sizeless,
                factors={cls: classes.index(cls) for cls in classes if cls >= 0},
                operands=tuple(roles),
                makes=results,
                may_be_partial=tuple(inner_operands) if settled and sizeless.grows else (),
                fresh=_fresh(sizeless, operands, factors.get(position, signature.summed)),
            )
        )
    return members


def _fresh(sizeless: SizelessRule, operands: tuple[Where | None, ...], summed: int | None) -> int | None:
    """The first linear factor whose operands all come from outside the group, or that of the operand that may be
    `summed`.
    """
    for factor, properties in enumerate(sizeless.rule.factors):
        if summed is not None and [o for o in properties.partial if operands[o]] != [summed]:
            continue
        sources = {where[0] for o in properties.partial if (where := operands[o]) is not None}
        if not properties.size and sources == {"out"}:
            return factor
    return None


class GroupWalks:
    """All walks through the members of one signature."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.members = _members(signature)
        self.visible = frozenset(signature.visible)
        self._bits = {axis: 1 << i for i, axis in enumerate(signature.axes)}
        self._cuts: dict[tuple[int, Assignment], _CutRule] = {}
        self._extended: dict[tuple[int, Assignment, str, int], Assignment | None] = {}

    @property
    def reads(self) -> list[tuple[int, int]]:
        """The (member, operand) pairs that are read from memory: values from outside at every use, absorbed values
        once.
        """
        roles = ((p, operand, role) for p, member in enumerate(self.members) for operand, role, _ in member.operands)
        return [(position, operand) for position, operand, role in roles if role != "again"]

    def under(self, choice: AxisChoice) -> Iterator[GroupWalk]:
        """The walks of one choice: with partial values reduced as late as they are no larger, at forks where that
        reduces fewer values, before whole values are added to them, and, inside a loop, not at all: parts of a gradient
        that are put together are no more than that.

        A choice has no walk if an axis that it keeps partial is reduced inside the group: without that axis the choice
        does the same.
        """
        late = self._walk(choice, {})
        early = self._walk(choice, forks) if late is not None and (forks := self._forks(late)) else None
        apart = [self._apart(choice, walk) for walk in (late, early) if walk is not None]
        joins = late is not None and self.signature.inside and self._joins(late)
        wide = self._walk(choice, {}, widens=True) if joins else None
        for walk in (late, early, *apart, wide):
            if walk is not None:
                partial_axes = frozenset[str]().union(*(walk.at(v).partial for v in self.signature.visible))
                if all(cls != PARTIAL or axis in partial_axes for axis, cls in choice):
                    yield walk

    def _apart(self, choice: AxisChoice, mixing: GroupWalk) -> GroupWalk | None:
        """The walk in which partial values are reduced before whole values of the group are added to them; None where
        the `mixing` walk adds none.

        The whole value may come from another reduction, as the square of a mean does that is taken from a mean of
        squares. Neither reduction then waits for the other, and both can be sent at once.
        """
        walk: GroupWalk | None = mixing
        while walk is not None and (mixed := self._mixed(walk)):
            walk = self._walk(choice, {**walk.reduced, **mixed})
        return None if walk is mixing else walk

    def _mixed(self, walk: GroupWalk) -> dict[int, ShardingSpec]:
        """The partial values to which members add whole values of the group, with their placements once reduced."""
        kept = {
            position
            for (position, _), (value, spec) in walk.moved.items()
            if spec.partial and not walk.home[value].partial
        }
        summed = (value for position in kept for _, value in self.members[position].may_be_partial)
        return {value: placed(walk.home[value].dims, (), "add") for value in summed if walk.at(value).partial}

    def _joins(self, walk: GroupWalk) -> bool:
        """Whether a walk reduces what a member puts beside other elements, as it does with a part of a gradient."""
        joining = [member for member in self.members if member.sizeless.rule.moves]
        parts = {value for member in joining for o, value in member.may_be_partial if member.sizeless.grows[o]}
        return not parts.isdisjoint(walk.reduced)

    def _walk(self, choice: AxisChoice, reduced: dict[int, ShardingSpec], *, widens: bool = False) -> GroupWalk | None:
        """The walk of one choice that reduces these partial values, and those that some member needs reduced.

        None where a result would be partial in two ways, or an input would be partial.
        """
        while (walk := self._walked(choice, reduced, widens)) is not None:
            reduced_before = len(reduced)
            for value, spec in walk.moved.values():
                if walk.home[value].partial and not spec.partial:
                    reduced.setdefault(value, spec)
            if len(reduced) == reduced_before:
                break
        return walk

    def _forks(self, walk: GroupWalk) -> dict[int, ShardingSpec]:
        """The partial values from which several reduced ones derive, with the placements that they are reduced to.

        Empty unless there are fewer of them than reduced values.
        """
        inside = {value for value, spec in walk.moved.values() if walk.home[value].partial and not spec.partial}
        if not inside:
            return {}
        ends: dict[int, frozenset[int]] = {}
        below: dict[int, list[int]] = {}
        for member, assignment in zip(reversed(self.members), reversed(walk.assignments), strict=True):
            cut = self._cut(member.sizeless, assignment)
            for value in member.makes:
                if walk.home[value].partial:
                    end = [value] if value in inside or value in self.visible else []
                    ends[value] = frozenset(end).union(*(ends[user] for user in below.get(value, ())))
            carried = [result for result in member.makes if walk.home[result].partial]
            for operand, role, value in member.operands:
                if carried and role == "again" and cut.operands[operand].partial and walk.at(value).partial:
                    below.setdefault(value, []).extend(carried)
        forks = {
            value: reached
            for value, reached in ends.items()
            if len(reached) > 1 and reached & inside and all(ends[user] < reached for user in below.get(value, ()))
        }
        widest = [value for value, reached in forks.items() if not any(reached < other for other in forks.values())]
        if len(widest) >= len(frozenset[int]().union(*(forks[value] for value in widest))):
            return {}
        return {value: placed(walk.home[value].dims, (), "add") for value in widest}

    def _walked(self, choice: AxisChoice, reduced: dict[int, ShardingSpec], widens: bool) -> GroupWalk | None:
        """The walk that places the members in order, with these partial values reduced."""
        walk = GroupWalk(axis_choice=choice, reduced=dict(reduced), widens=widens)
        for position, member in enumerate(self.members):
            assignment = self._assign(member, choice, walk)
            if assignment is None or not self._step(position, member, assignment, walk):
                return None
        return walk

    def _step(self, position: int, member: _Member, assignment: Assignment, walk: GroupWalk) -> bool:
        """Whether the member can be placed under this assignment; if so, it has been added to the walk."""
        cut, specs = self._cut(member.sizeless, assignment), walk.home
        walk.assignments.append(assignment)
        walk.cuts.append(cut.mask)
        for operand, role, value in member.operands:
            spec = cut.operands[operand]
            if role == "again":
                if specs[value] != spec and (value, spec) not in walk.moved.values():
                    walk.moved[position, operand] = (value, spec)
                continue
            walk.reads.append(spec)
            if role == "input":
                walk.inputs.append(spec)
            elif spec.partial:
                return False
            else:
                specs[value] = spec
        for value, spec in zip(member.makes, cut.results, strict=True):
            specs[value] = spec
        return True

    def _cut(self, sizeless: SizelessRule, assignment: Assignment) -> _CutRule:
        key = (id(sizeless), assignment)
        if key not in self._cuts:
            rule = sizeless.rule
            self._cuts[key] = _CutRule(
                operands=tuple(rule.operand_spec(o, assignment) for o in range(len(rule.operands))),
                results=tuple(rule.result_spec(r, assignment) for r in range(len(rule.results))),
                mask=sum(self._bits[axis] for axis, factor in assignment if rule.factors[factor].size),
            )
        return self._cuts[key]

    def _assign(self, member: _Member, choice: AxisChoice, walk: GroupWalk) -> Assignment | None:
        """The member's assignment under the group's choice; None where its result would be partial in two ways.

        An axis cuts the factor of the class that it is chosen for; without one, a linear member passes on partial
        operands.
        """
        sizeless, assignment = member.sizeless, ()
        if sizeless.rule.once:
            return tuple((axis, 0) for axis in self.signature.axes)
        for axis, cls in choice:
            factor = member.factors.get(cls)
            if factor is None:
                factor = self._linear(member, axis, cls, walk)
            if factor is None:
                continue
            extended = self._extend(sizeless, assignment, axis, factor)
            if extended is not None:
                assignment = extended
            elif sizeless.rule.factors[factor].size:
                return None
        return assignment

    def _extend(self, sizeless: SizelessRule, assignment: Assignment, axis: str, factor: int) -> Assignment | None:
        """The assignment with one more axis; None where a result would be partial in two ways."""
        key = (id(sizeless), assignment, axis, factor)
        if key not in self._extended:
            candidate = in_order((*assignment, (axis, factor)), self.signature.axes)
            reductions = {sizeless.rule.factors[f].reduction for _, f in candidate} - {""}
            self._extended[key] = candidate if len(reductions) <= 1 else None
        return self._extended[key]

    def _linear(self, member: _Member, axis: str, cls: int, walk: GroupWalk) -> int | None:
        """The linear factor through which a member passes on values partial over `axis`; None if it has none.

        Where the result is larger than the partial operand, reducing first is cheaper.
        """
        incoming = {o: spec for o, value in member.may_be_partial if axis in (spec := walk.at(value)).partial}
        if not incoming:
            return member.fresh if cls == PARTIAL else None
        if not walk.widens and all(member.sizeless.grows[operand] for operand in incoming):
            return None
        reductions = {spec.reduction for spec in incoming.values()}  # a scaled maximum of parts is no sum of them
        for factor, properties in enumerate(member.sizeless.rule.factors):
            passes_on = set(properties.partial).issuperset(incoming) and reductions == {properties.reduction}
            if not properties.size and properties.partial and passes_on:
                return factor
        return None
