"""prototype"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_costs import collective_microseconds, kernel_microseconds
from passes.memory.gpu_order import DONE, NOP, RUN, START, Tasks, ordered, tasks_of


def schedule(program: DeviceProgram, kernels: Sequence[Kernel]) -> list[int]:
    tasks = tasks_of(program, kernels)
    order = ordered(program, kernels, tasks)
    late = hidden(program, kernels, tasks, order)
    seen: dict[int, None] = {}
    inputs = [tasks.operations[n] for n in late if tasks.operations[n] >= 0 and program.operations[tasks.operations[n]].kind == "input"]
    rest: list[int] = []
    return [*dict.fromkeys(inputs), *_placed(program, tasks, late)]


def _placed(program: DeviceProgram, tasks: Tasks, late: list[int]) -> list[int]:
    """A collective runs when it is started."""
    order: list[int] = []
    for n in late:
        o = tasks.operations[n]
        if o < 0 or program.operations[o].kind == "input" or tasks.roles[n] == DONE:
            continue
        order.append(o)
    return order


def hidden(program: DeviceProgram, kernels: Sequence[Kernel], tasks: Tasks, order: list[int]) -> list[int]:
    operations = program.operations
    count = len(order)
    position = [0] * count
    for p, n in enumerate(order):
        position[n] = p
    kernel_of = {k.operation: k for k in kernels}
    cost = [0.0] * count
    latency = [0.0] * count
    moved: dict[int, int] = {}
    for n in range(count):
        o = tasks.operations[n]
        role = tasks.roles[n]
        if role == RUN:
            cost[n] = kernel_microseconds(kernel_of[o], operations)
        elif role == START:
            sent = sum(operations[r].nbytes for r in kernel_of[o].reads)
            made = operations[o].nbytes
            for reader in tasks.readers[n + 1]:
                q = tasks.operations[reader]
                if q >= 0 and operations[q].kind == "result":
                    made += operations[q].nbytes
            cost[n] = 1.0
            latency[n] = collective_microseconds(sent + made)
        elif role == DONE:
            cost[n] = 1.0
    depth = [0.0] * count
    unlock = bytearray(count)
    for n in range(count):
        if tasks.roles[n] == DONE:
            start = tasks.reads[n][0]
            depth[n] = depth[start] + latency[start]
        else:
            for r in tasks.reads[n]:
                depth[n] = max(depth[n], depth[r])
                unlock[n] |= tasks.roles[r] == DONE
    frees = [sum(len(tasks.readers[r]) == 1 for r in reads) for reads in tasks.reads]
    waiting = [len(r) for r in tasks.readers]
    reads = [sorted(r, key=position.__getitem__) for r in tasks.reads]
    ready_time = [0.0] * count
    nops: list[int] = []
    pending: list[tuple[float, int]] = []
    dones: list[int] = []
    starts: list[int] = []
    buckets: dict[float, dict[tuple[float, int, int], list[tuple[int, int]]]] = {}
    stack: list[float] = []
    now = 0.0
    flying = False
    result: list[int] = []

    def put(n: int) -> None:
        if tasks.roles[n] == START:
            starts.append(n)
            return
        at = buckets.setdefault(depth[n], {})
        heapq.heappush(at.setdefault((cost[n], unlock[n], frees[n]), []), (-position[n], n))

    def release(n: int, at: float) -> None:
        ready_time[n] = at
        role = tasks.roles[n]
        if role == NOP:
            nops.append(n)
            return
        if role == DONE:
            dones.append(n)
        else:
            heapq.heappush(pending, (at, n))
        if at > now:
            heapq.heappush(stack, at)

    def pick() -> int:
        if nops:
            return nops.pop()
        if dones and not flying:
            best = min(dones, key=lambda n: (max(ready_time[n] - now, 0), -depth[n], -frees[n], -position[n]))
            dones.remove(best)
            return best
        while pending and pending[0][0] <= now:
            put(heapq.heappop(pending)[1])
        if not buckets and not starts and pending:
            limit = pending[0][0]
            while pending and pending[0][0] <= limit:
                put(heapq.heappop(pending)[1])
        if starts and dones:
            return starts.pop()
        if not buckets:
            return starts.pop()
        deepest = max(buckets)
        if starts and depth[starts[0]] > deepest:
            return starts.pop()
        at = buckets[deepest]
        gap = stack[0] - now if stack else 0.0

        def better(item: tuple[tuple[float, int, int], list[tuple[int, int]]]) -> tuple[float, int, int, int]:
            (c, u, f), heap = item
            return (abs(gap - c) if stack else 0.0, -u, -f, heap[0][0])

        key, heap = min(at.items(), key=better)
        n = heapq.heappop(heap)[1]
        if not heap:
            del at[key]
            if not at:
                del buckets[deepest]
        return n

    for n in range(count):
        if not waiting[n]:
            release(n, 0.0)
    while len(result) < count:
        n = pick()
        result.append(n)
        role = tasks.roles[n]
        at = now
        for reader in tasks.readers[n]:
            at = max(at, ready_time[reader] + (latency[n] if role == START else 1.0))
        ready_time[n] = at
        now = at + cost[n]
        if role == DONE:
            flying = True
        elif role == START:
            flying = False
        while stack and stack[0] < now:
            heapq.heappop(stack)
        for r in reads[n]:
            waiting[r] -= 1
            if not waiting[r]:
                ready = now
                for reader in tasks.readers[r]:
                    ready = max(ready, ready_time[reader] + (latency[r] if tasks.roles[r] == START else 1.0))
                release(r, ready)
    return result[::-1]
