"""Operations and random programs of one device, and what kernels make of them, for the tests of passes/memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Kind, Operation

ROWS, TABLE = (64,), (64, 96)
"""Shapes: the larger has elements enough for the library of sums."""


def operation(
    kind: Kind, *operands: int, shape: tuple[int, ...] = ROWS, name: str = "", tag: object = None
) -> Operation:
    """An operation of float32; `name` is its opcode. What is reduced is a table, along its last dimension."""
    along: tuple[object, ...] = ((1,),) if kind == "reduce" else ()
    return Operation(kind, operands, shape, "float32", -1, tag=tag if tag is not None else (name or kind, *along))


def narrow(kind: Kind, *operands: int, shape: tuple[int, ...] = TABLE, name: str = "", tag: object = None) -> Operation:
    """An operation of bfloat16."""
    return operation(kind, *operands, shape=shape, name=name, tag=tag)._replace(dtype="bfloat16")


def inside(kernel: Kernel, operations: Sequence[Operation]) -> tuple[set[int], set[int]]:
    """(what a kernel computes, what of its reads that needs), followed from the operation that it writes."""
    computed, met = {kernel.operation}, set[int]()
    pending = [*operations[kernel.operation].operands]
    while pending:
        one = pending.pop()
        if one in kernel.reads:
            met.add(one)
        elif one not in computed and operations[one].kind != "literal":
            computed.add(one)
            pending.extend(operations[one].operands)
    return computed, met


def drawn(seed: int, size: int = 24) -> DeviceProgram:
    """A program of every kind of operation that has one result; operands are mostly late ones."""
    r = random.Random(seed)
    every: list[Operation] = [operation("input", shape=r.choice((ROWS, TABLE)), tag=i) for i in range(3)]
    every.append(operation("literal", shape=(), tag=("float", 2.0)))

    def pick(*shapes: tuple[int, ...]) -> int:
        found = [i for i, held in enumerate(every) if held.shape in shapes]
        return found[-1 - min(int(r.expovariate(0.4)), len(found) - 1)] if found else -1

    while len(every) < size:
        shape = r.choice((ROWS, TABLE))
        first, second = pick(shape), pick(shape)
        match r.choice(
            ("elementwise",) * 4
            + ("expensive", "broadcast", "reduce", "dot", "bitcast", "rearrange", "gather", "update")
        ):
            case "elementwise" if first >= 0:
                every.append(
                    operation("elementwise", first, second, shape=shape, name=r.choice(("add", "multiply", "select")))
                )
            case "expensive" if first >= 0:
                every.append(operation("expensive", first, shape=shape, name="exponential"))
            case "broadcast" if (row := pick(ROWS, ())) >= 0:
                every.append(operation("broadcast", row, shape=TABLE, tag=(0,)))
            case "reduce" if (table := pick(TABLE)) >= 0:
                every.append(operation("reduce", table, name="reduce-sum"))
            case "dot" if first >= 0:
                every.append(operation("dot", first, second, shape=shape, tag=("merged", len(every))))
            case "bitcast" if first >= 0:
                every.append(operation("bitcast", first, shape=shape))
            case "rearrange" if (source := pick(ROWS, TABLE)) >= 0:
                every.append(operation("rearrange", source, shape=shape, name="slice"))
            case "gather" if first >= 0 and (source := pick(ROWS, TABLE)) >= 0:
                every.append(operation("gather", source, first, shape=shape))
            case "update" if first >= 0:
                every.append(operation("update", first, pick(ROWS, TABLE), shape=shape, name="dynamic-update-slice"))
            case _:
                pass
    return program(every, r.sample(range(size // 2, size), 3))


def program(operations: Sequence[Operation], outputs: Sequence[int]) -> DeviceProgram:
    inputs = tuple(i for i, held in enumerate(operations) if held.kind == "input")
    return DeviceProgram(operations=tuple(operations), inputs=inputs, constants=(), outputs=tuple(outputs))
