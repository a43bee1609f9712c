"""The blocks of a plan as people know them: modules of the model, each with its operators by phase.

Operators are told apart by JAX's name stack, `jvp(GPT)/Block_3/mlp/up`: the numbered module counts, else the first one.
A function without named modules is told apart by the functions of its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from passes.plan import Operator, Plan

Phase = str

APPLY = "update"
"""The block of what belongs to no module: the optimizer, for most."""

_NOT_MODULES = re.compile(
    r"^(?:checkpoint|rematted_computation|while|body|cond|branch_\d+_fun|closed_call|microbatches|accumulate|scan|pjit"
    r"|stages|custom_jvp_call|custom_vjp_call|vmap\(.*\)|jit\(.*\)|.*,.*->.*|)$"
)
_NUMBERED = re.compile(r"[A-Za-z_.]*?[_.]?\d+$")
_DIFFERENTIATED = re.compile(r"^(?:transpose\()?(?:jvp\()")


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
            phase = _phase(operator.scope)
            name = block_name(operator)
            block = blocks.setdefault((stage, name), Block(name=name, stage=stage))
            _append(block.rows.setdefault(phase, []), _row(operator, depth, name))
    # What is computed once before or after the model stands behind it.
    return sorted(blocks.values(), key=lambda block: (block.stage, block.name == APPLY))


def _flat(operators: Sequence[Operator], depth: int) -> Iterator[tuple[Operator, int]]:
    """The operators, each loop or branch followed by those inside it, with the number of loops around them."""
    for operator in operators:
        yield operator, depth
        for body in operator.bodies:
            yield from _flat(body, depth + 1)


def _phase(scope: str) -> Phase:
    """The phase of what has this name stack, as `passes.ir.phase` has it of a node."""
    if "transpose(" in scope or "rematted_computation" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else "apply"


def modules(scope: str) -> list[str]:
    """The names of modules in a name stack, outermost first, without what JAX puts around them."""
    parts = scope.split("/")
    if parts and _DIFFERENTIATED.match(parts[0]):
        parts = parts[1:]
    return [part for part in parts if not _NOT_MODULES.match(part) and "(" not in part]


def block_name(operator: Operator) -> str:
    """The name of the block that an operator belongs to."""
    names = modules(operator.scope)
    numbered = next((name for name in names if _NUMBERED.match(name)), None)
    if numbered or names:
        return numbered or names[0]
    if _phase(operator.scope) == "apply":
        return APPLY
    model = re.search(r"jvp\(([^()]+)\)", operator.scope)
    return model[1] if model else _function(operator.source) or "step"


def _function(source: str) -> str:
    """The name of the function that a source line is in: `attend` of `layers.py:158 (attend)`."""
    match = re.search(r"\(([^()]*)\)$", source)
    return match[1].replace(".<locals>", "") if match else ""


def _row(operator: Operator, depth: int, block: str) -> Row:
    operands, results = (" ".join(map(str, s)) for s in (operator.placement.operands, operator.placement.results))
    names = modules(operator.scope)
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
