"""prototype"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation

RUN, NOP, START, DONE = range(4)


@dataclass(slots=True)
class Tasks:
    """Nodes of the scheduler."""

    operations: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)

    def add(self, operation: int, role: int, reads: Sequence[int]) -> int:
        node = len(self.operations)
        self.operations.append(operation)
        self.roles.append(role)
        self.reads.append(list(reads))
        self.readers.append([])
        for read in reads:
            self.readers[read].append(node)
        return node


LITTLE = 16
LOOPS = frozenset({"elementwise", "expensive", "rearrange", "broadcast", "gather"})


def beside(operations: Sequence[Operation], kernels: Sequence[Kernel]) -> dict[int, list[int]]:
    """The kernels that make little of an array, by the first of its other readers, which comes later."""
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        for read in kernel.reads:
            readers.setdefault(read, []).append(kernel.operation)
    found: dict[int, list[int]] = {}
    for array, siblings in readers.items():
        little = [o for o in siblings if _makes_little(operations[o], operations[array])]
        others = [o for o in siblings if o not in little and operations[o].kind != "loop"]
        if others and (before := [o for o in little if o < min(others)]):
            found.setdefault(min(others), []).extend(before)
    return found


def _makes_little(made: Operation, read: Operation) -> bool:
    return made.kind in (*LOOPS, "reduce") and LITTLE * made.size <= read.size


@dataclass(slots=True)
class Buffers:
    values: list[tuple[int, ...]]
    defined: list[int]
    size: list[int]


def tasks_of(program: DeviceProgram, kernels: Sequence[Kernel]) -> Tasks:
    operations = program.operations
    tasks = Tasks()
    node: dict[int, int] = {}
    before = beside(operations, kernels)
    several = {o for kernel in kernels if operations[kernel.operation].kind == "reduce" for o in kernel.reads if operations[o].kind in LOOPS}
    several |= {kernel.operation for kernel in kernels if operations[kernel.operation].kind == "reduce" and several.intersection(kernel.reads)}
    for kernel in kernels:
        operation = operations[kernel.operation]
        reads = [node[r] for r in dict.fromkeys((*before.get(kernel.operation, ()), *kernel.reads))]
        if operation.kind == "dot":
            reads = [r if tasks.roles[r] == NOP else tasks.add(-1, NOP, [r]) for r in reads]
        if operation.kind == "collective":
            start = tasks.add(kernel.operation, START, reads)
            node[kernel.operation] = tasks.add(kernel.operation, DONE, [start])
        else:
            renamed = operation.kind == "bitcast" and kernel.reads == operation.operands
            is_barrier = operation.kind == "opaque" and operation.shape == (0,)
            is_nop = operation.kind in ("input", "literal", "part", "result") or renamed or is_barrier
            made = tasks.add(kernel.operation, NOP if is_nop else RUN, reads)
            if not is_nop and kernel.operation in several:
                made = tasks.add(-1, NOP, [made])
            node[kernel.operation] = made
    tasks.add(-1, NOP, list(dict.fromkeys(node[o] for o in program.outputs if o in node)))
    return tasks


def buffers(program: DeviceProgram, tasks: Tasks) -> Buffers:
    """The values that tasks define and use."""
    operations = program.operations
    count = len(tasks.operations)
    defined = [0] * count
    values: list[tuple[int, ...]] = [()] * count  # the nodes whose buffers a node's result is
    for n in range(count):
        o = tasks.operations[n]
        role = tasks.roles[n]
        if o < 0:
            values[n] = tuple(dict.fromkeys(v for r in tasks.reads[n][:1] for v in values[r])) if n + 1 < count else ()
            continue
        operation = operations[o]
        if operation.kind in ("input", "literal"):
            continue
        if role == DONE:
            values[n] = values[tasks.reads[n][0]]
            continue
        if operation.kind == "result":
            values[n] = (n,)
            defined[n] = 0
            continue
        if role == NOP:
            values[n] = tuple(dict.fromkeys(v for r in tasks.reads[n][:1] for v in values[r]))
            continue
        values[n] = (n,)
        defined[n] = operation.nbytes
    size = list(defined)
    for n in range(count):
        o = tasks.operations[n]
        if o >= 0 and operations[o].kind == "result":
            size[n] = operations[o].nbytes
            source = tasks.reads[n][0]
            while tasks.roles[source] == DONE:
                source = tasks.reads[source][0]
            defined[source] += operations[o].nbytes
    return Buffers(values=values, defined=defined, size=size)


def ordered(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks) -> list[int]:
    made = buffers(program, tasks)
    orders = [_async(tasks, order) for order in (listed(program, tasks, made), depth_first(tasks, made), post_order(tasks))]
    peaks = [live(program, kernels, tasks, made, order) for order in orders]
    if DEBUG: print([round(p / 2**20, 1) for p in peaks])
    return orders[peaks.index(min(peaks))]


DEBUG = False


def live(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks, made: Buffers, order: list[int]) -> int:
    over = {k.operation: k.over for k in kernels}
    count = len(order)
    last = [0] * count
    at = [0] * count
    node = {o: n for n, o in enumerate(tasks.operations) if o >= 0}
    for p, n in enumerate(order):
        at[n] = p
        for r in tasks.reads[n]:
            for v in made.values[r]:
                last[v] = p
    returned = {v for r in tasks.reads[-1] for v in made.values[r]}
    change = [0] * (count + 1)
    for n in range(count):
        if made.size[n] and n not in returned:
            first = n
            if program.operations[tasks.operations[n]].kind == "result":
                first = tasks.reads[n][0]
                while tasks.roles[first] == DONE:
                    first = tasks.reads[first][0]
            reused = 0
            if tasks.roles[n] == RUN:
                kind = program.operations[tasks.operations[n]].kind
                for o in over[tasks.operations[n]] if kind != "update" else program.operations[tasks.operations[n]].operands[:1]:
                    v = node.get(o, -1)
                    if v >= 0 and made.size[v] == made.size[n] and last[v] == at[n]:
                        reused = made.size[n]
                        break
            change[at[first]] += made.size[n]
            if reused:
                change[at[first]] -= reused
                change[at[n] + 1] += reused
            change[max(last[n], at[n]) + 1] -= made.size[n]
    most = now = 0
    for c in change:
        now += c
        most = max(most, now)
    return most


def post_order(tasks: Tasks, key: Callable[[int], tuple[float, ...]] | None = None) -> list[int]:
    count = len(tasks.operations)
    state = bytearray(count)
    order: list[int] = []
    stack = [count - 1]
    while stack:
        n = stack[-1]
        if state[n]:
            stack.pop()
            if state[n] == 1:
                state[n] = 2
                order.append(n)
            continue
        state[n] = 1
        reads = [r for r in tasks.reads[n] if not state[r]]
        if key:
            reads.sort(key=key)
        stack.extend(reversed(reads))
    if len(order) < count:
        order[:0] = [n for n in range(count) if not state[n]]
    return order


def depth_first(tasks: Tasks, made: Buffers) -> list[int]:
    count = len(tasks.operations)
    extra, sizes = [0] * count, [0] * count
    total = 0
    for n in post_order(tasks):
        if not tasks.reads[n]:
            if tasks.roles[n] == NOP:
                continue
        extra[n] = max(0, len(tasks.readers[n]) - 1) + sum(extra[r] for r in tasks.reads[n])
        total += made.defined[n]
        sizes[n] = min(total, made.defined[n] + sum(sizes[r] for r in tasks.reads[n]))
        extra[n] = min(extra[n], count)
    return post_order(tasks, lambda n: (-extra[n], -sizes[n], n))


def listed(program: DeviceProgram, tasks: Tasks, made: Buffers) -> list[int]:
    """The order of the list scheduler."""
    operations, count = program.operations, len(tasks.operations)
    values, defined, size = made.values, made.defined, made.size
    uses = [0] * count
    used: list[tuple[int, ...]] = []
    for n in range(count):
        u = tuple(dict.fromkeys(v for r in tasks.reads[n] for v in values[r]))
        used.append(u)
        for v in u:
            uses[v] += 1
    users: dict[int, list[int]] = {}
    for n in range(count):
        for v in used[n]:
            users.setdefault(v, []).append(n)
    waiting = [len(r) for r in tasks.reads]

    def priority(n: int) -> tuple[float, float]:
        o = tasks.operations[n]
        if o >= 0 and operations[o].size == 1 and tasks.roles[n] != START:
            return (float("inf"), float("inf"))
        freed = sum(size[v] for v in used[n] if uses[v] == 1)
        return (freed - defined[n], len(tasks.readers[n]))

    heap: list[tuple[float, float, int, int]] = []
    current: dict[int, tuple[float, float]] = {}
    clock = 0

    def push(n: int) -> None:
        nonlocal clock
        clock += 1
        p = priority(n)
        current[n] = p
        heapq.heappush(heap, (-p[0], -p[1], -clock, n))

    for n in range(count):
        if not waiting[n]:
            push(n)
    order: list[int] = []
    placed = bytearray(count)
    while heap:
        a, b, _, n = heapq.heappop(heap)
        if placed[n] or current[n] != (-a, -b):
            continue
        placed[n] = 1
        order.append(n)
        alone: list[int] = []
        for v in used[n]:
            uses[v] -= 1
            if uses[v] == 1:
                alone.extend(u for u in users[v] if not placed[u])
        for reader in tasks.readers[n]:
            waiting[reader] -= 1
            if not waiting[reader]:
                push(reader)
        for reader in alone:
            if reader in current and priority(reader) != current[reader]:
                push(reader)
    return order


def _async(tasks: Tasks, order: list[int]) -> list[int]:
    """Starts as early and dones as late as can be."""
    waiting = [len(r) for r in tasks.reads]
    placed = bytearray(len(order))
    early: list[int] = []

    def place(n: int) -> None:
        placed[n] = 1
        early.append(n)
        for reader in tasks.readers[n]:
            waiting[reader] -= 1

    for n in order:
        if placed[n]:
            continue
        place(n)
        for reader in tasks.readers[n]:
            if not placed[reader] and tasks.roles[reader] == START and not waiting[reader]:
                place(reader)
    remaining = [len(r) for r in tasks.readers]
    placed = bytearray(len(order))
    late: list[int] = []

    def place_late(n: int) -> None:
        placed[n] = 1
        late.append(n)
        for r in tasks.reads[n]:
            remaining[r] -= 1

    for n in reversed(early):
        if placed[n]:
            continue
        place_late(n)
        for r in tasks.reads[n]:
            if not placed[r] and tasks.roles[r] == DONE and not remaining[r]:
                place_late(r)
    return late[::-1]
