"""The moments of a program: its kernels one after another, with those of a body in place of the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from passes.ir import Node
from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.liveness import Lifetimes
from passes.memory.operations import Operation

LOOP_RUNS = 5
"""The times that a body is taken to run, however often it does: XLA's option
`xla_tpu_memory_space_assignment_while_execution_count`, as libtpu 0.0.42 writes it with `xla_dump_to`."""


class Cost(NamedTuple):
    """The seconds for which a kernel computes, and those in which it moves what it reads and writes."""

    computing: float = 0.0
    moving: float = 0.0


CostOf = Callable[[Sequence[Kernel], Sequence[Operation]], Cost]
"""The cost of kernels of a program that run as one."""


def nothing(_kernels: Sequence[Kernel], _operations: Sequence[Operation]) -> Cost:
    """No cost: for a compiler that does not ask for it."""
    return Cost()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The `sources` are the lines that run and the `costs` what that takes, [moments]. Kernel k `begins` in moment
    `begins[k]`, and all end in the last one. The `loops` are first and last moments of their bodies.
    """

    sources: tuple[str, ...]
    costs: tuple[Cost, ...]
    begins: tuple[int, ...]
    loops: frozenset[tuple[int, int]] = frozenset()

    def of(self, position: int) -> tuple[int, int]:
        """The first and the last moment of a kernel."""
        return self.begins[position], self.begins[position + 1] - 1


def moments(
    program: DeviceProgram,
    kernels: Sequence[Kernel],
    order: Sequence[int],
    nodes: Sequence[Node],
    bodies: Mapping[int, Moments],
    cost_of: CostOf,
    joined: Mapping[int, int] = MappingProxyType({}),
) -> Moments:
    """The moments of a program whose kernels run in an order, given those of the bodies of its loops, by node.

    Kernels that are `joined` with others cost what those do more.
    """
    sources, costs, begins, loops = list[str](), list[Cost](), list[int](), set[tuple[int, int]]()
    described = {kernel.operation: kernel for kernel in kernels}
    others: dict[int, list[Kernel]] = {}
    for operation, first in joined.items():
        others.setdefault(first, []).append(described[operation])
    for o in order:
        begins.append(begin := len(sources))
        running = program.operations[o]
        source = nodes[running.node].source if 0 <= running.node < len(nodes) else ""
        body = bodies[running.node] if running.kind == "loop" else None
        if body is None or not body.sources:
            sources.append(source)
            costs.append(Cost() if o in joined else cost_of((described[o], *others.get(o, ())), program.operations))
            continue
        loops.add((begin, begin + len(body.sources) - 1))
        loops.update((first + begin, last + begin) for first, last in body.loops)
        sources.extend(inside or source for inside in body.sources)
        costs.extend(Cost(LOOP_RUNS * cost.computing, LOOP_RUNS * cost.moving) for cost in body.costs)
    return Moments(sources=tuple(sources), costs=tuple(costs), begins=(*begins, len(sources)), loops=frozenset(loops))


def read_at(
    lifetimes: Lifetimes, made: Moments, joined: Mapping[int, int] = MappingProxyType({})
) -> Callable[[int], Iterator[int]]:
    """The moments in which the readers of an operation begin and end, as a function of it; those that are `joined` with
    what another kernel writes read what that does.
    """
    at = {operation: position for position, operation in enumerate(lifetimes.order)}

    def moments_of(o: int) -> Iterator[int]:
        first = joined.get(o, o)
        for reader in dict.fromkeys(joined.get(reader, reader) for reader in lifetimes.readers.get(o, ())):
            if reader != first:
                yield from made.of(at[reader])

    return moments_of
