"""The kind of every instruction of a compiled program by name, as a profile of its run names them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w-]*)\(")

COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}

AROUND = ("while", "conditional", "call")
"""Opcodes of instructions whose time is that of others, which profiles list beside them."""


def opcodes(hlo_texts: Iterable[str]) -> dict[tuple[str, str], str]:
    """The opcode of each instruction by (module, name)."""
    codes: dict[tuple[str, str], str] = {}
    for text in hlo_texts:
        module = ""
        for line in text.splitlines():
            if header := _MODULE.match(line):
                module = header[1]
            elif instruction := _INSTRUCTION.match(line):
                codes[module, instruction[1]] = instruction[2]
    return codes


def kind_of(opcode: str) -> str:
    """The kind of an opcode, or of an instruction named after one: that of a collective, `around`, or else
    `compute`.
    """
    base = re.sub(r"(-start|-done)?(\.\d+)*$", "", opcode)
    if base in AROUND:
        return "around"
    return COLLECTIVES.get(base, "compute")
