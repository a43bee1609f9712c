"""The number of times that the loops of a compiled program run, read from its optimized HLO text.

XLA's CPU and GPU compilers write it beside a loop. For the TPU compiler it follows from the loop's condition, which
compares a counter with a number, and from the counter's start and step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) [({]")
"""The line that begins a computation, which ends with an opening brace."""

_KNOWN = re.compile(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_CALLED = re.compile(r"(condition|body)=%?([\w.\-]+)")
_DEFINED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_APPLIED = re.compile(r" ([a-z][\w-]*)\(([^()]*)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_INDEX = re.compile(r"index=(\d+)")
_COPIES = frozenset({"copy", "bitcast", "convert", "copy-start", "copy-done"})
"""Operations that do not change the value of a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    opcode: str
    operands: tuple[str, ...]
    text: str


class Loops:
    """The computations of a program, by name, in which the counters of loops are looked up."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._bounds: dict[str, tuple[int, int]] = {}
        self._instructions: dict[str, dict[str, _Instruction]] = {}
        computation, first = "", 0
        for number, line in enumerate(lines):
            if line.endswith("{") and (header := HEADER.match(line)):
                computation, first = header[1], number + 1
            elif line.startswith("}") and computation:
                self._bounds[computation], computation = (first, number), ""

    def trips(self, line: str, computation: str) -> int:
        """The number of times that the loop on a line of a computation runs; 1 where it is unknown."""
        if known := _KNOWN.search(line):
            return int(known[1])
        called = dict(_CALLED.findall(line))
        loop, condition = _read(line), self._root(called.get("condition", ""))
        if loop is None or condition is None or condition.opcode != "compare" or "direction=LT" not in condition.text:
            return 1
        initial = self._operands_of(computation, loop.operands[0])
        counter = self._element(called["condition"], condition.operands[0])
        end = self._value(called["condition"], condition.operands[1])
        if end is None:
            end = self._carried(called["condition"], condition.operands[1], computation, initial)
        if counter is None or end is None or counter >= len(initial):
            return 1
        start, step = self._value(computation, initial[counter]), self._step(called["body"], counter)
        return 1 if start is None or not step else max(0, -(-(end - start) // step))

    def _step(self, body: str, counter: int) -> int | None:
        """The number that a loop's body adds to its counter; None if it is not a constant."""
        root = self._root(body)
        raised = self._in(body).get(root.operands[counter]) if root is not None and root.opcode == "tuple" else None
        if raised is None or raised.opcode != "add":
            return None
        steps = [o for o in raised.operands if self._element(body, o) != counter]
        return self._value(body, steps[0]) if len(steps) == 1 else None

    def _carried(self, computation: str, name: str, caller: str, initial: Sequence[str]) -> int | None:
        """The value that a loop starts with, where a name inside it is one of its carried values."""
        element = self._element(computation, name)
        return self._value(caller, initial[element]) if element is not None and element < len(initial) else None

    def _element(self, computation: str, name: str) -> int | None:
        """The place, among what a loop carries, of a value of a computation."""
        instruction = self._in(computation).get(name)
        while instruction is not None and instruction.opcode in _COPIES:
            instruction = self._in(computation).get(instruction.operands[0])
        index = _INDEX.search(instruction.text) if instruction and instruction.opcode == "get-tuple-element" else None
        return int(index[1]) if index else None

    def _value(self, computation: str, name: str) -> int | None:
        """The number that a name stands for; None if it is not a constant."""
        instruction = self._in(computation).get(name)
        while instruction is not None and instruction.opcode in _COPIES:
            instruction = self._in(computation).get(instruction.operands[0])
        if instruction is None or instruction.opcode != "constant":
            return None
        (number,) = instruction.operands
        return int(number) if number.lstrip("-").isdigit() else None

    def _operands_of(self, computation: str, name: str) -> tuple[str, ...]:
        """The elements of a tuple; empty if it is not made there."""
        instruction = self._in(computation).get(name)
        return instruction.operands if instruction is not None and instruction.opcode == "tuple" else ()

    def _root(self, computation: str) -> _Instruction | None:
        first, end = self._bounds.get(computation, (0, 0))
        return next((_read(line) for line in self._lines[first:end] if line.lstrip().startswith("ROOT ")), None)

    def _in(self, computation: str) -> dict[str, _Instruction]:
        """The instructions of a computation, by name."""
        if computation not in self._instructions:
            first, end = self._bounds.get(computation, (0, 0))
            named = ((_DEFINED.match(line), _read(line)) for line in self._lines[first:end])
            self._instructions[computation] = {name[1]: read for name, read in named if name and read}
        return self._instructions[computation]


def _read(line: str) -> _Instruction | None:
    """The instruction on a line; None if it applies nothing."""
    text = line.partition(", metadata=")[0]
    applied = _APPLIED.search(_COMMENT.sub("", text))
    if applied is None:
        return None
    operands = (operand.split()[-1].removeprefix("%") for operand in applied[2].split(",") if operand.strip())
    return _Instruction(opcode=applied[1], operands=tuple(operands), text=text)
