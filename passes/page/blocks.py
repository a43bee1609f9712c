"""The blocks of a plan: layers by their names (passes/layers/layer_names.py), each with its operators by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from passes.ir import Phase, phase
from passes.layers import layer_names
from passes.plan import Operator, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An operator at a `depth` of loops, and the number of equal ones in a row that it stands for."""

    primitive: str
    placement: str
    source: str
    scope: str
    depth: int
    count: int = 1


@dataclass(slots=True, kw_only=True)
class Block:
    """A module of one stage: its name, and its operators by phase."""

    name: str
    stage: int
    rows: dict[Phase, list[Row]] = field(default_factory=dict[Phase, list[Row]])

    @property
    def operators(self) -> int:
        """The operators of all phases."""
        return sum(row.count for rows in self.rows.values() for row in rows)


def blocks_of(programs: Sequence[Plan]) -> list[Block]:
    """The blocks of the programs of a plan, stage by stage, in the order in which the forward pass comes to them."""
    blocks: dict[tuple[int, str], Block] = {}
    for stage, program in enumerate(programs):
        for operator, depth in _flat(program.operators, 0):
            name = layer_names.layer_of(operator.scope, operator.source)
            block = blocks.setdefault((stage, name), Block(name=name, stage=stage))
            _append(block.rows.setdefault(phase(operator), []), _row(operator, depth, name))
    # What is computed once before or after the model stands behind it.
    return sorted(blocks.values(), key=lambda block: (block.stage, block.name == layer_names.UPDATE))


def _flat(operators: Sequence[Operator], depth: int) -> Iterator[tuple[Operator, int]]:
    """The operators, each loop or branch followed by those inside it, with the number of loops around them."""
    for operator in operators:
        yield operator, depth
        for body in operator.bodies:
            yield from _flat(body, depth + 1)


def _row(operator: Operator, depth: int, block: str) -> Row:
    operands, results = (" ".join(map(str, s)) for s in (operator.placement.operands, operator.placement.results))
    names = layer_names.modules(operator.scope)
    inside = "/".join(names[names.index(block) + 1 :] if block in names else names)
    return Row(
        primitive=operator.primitive,
        placement=f"{operands} -> {results}".strip(),
        source=operator.source,
        scope=inside,
        depth=depth,
    )


def _append(rows: list[Row], row: Row) -> None:
    """Adds a row, or counts it with the equal one before it."""
    if rows and replace(rows[-1], count=1) == row:
        rows[-1] = replace(row, count=rows[-1].count + 1)
    else:
        rows.append(row)
