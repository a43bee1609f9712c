"""The order in which XLA's TPU compiler runs kernels: little is live, and what waits for most gathers runs last.

The scheduler goes from the last task to the first. Of those that nothing waits for any more it takes the one with most
time of asynchronous collectives before it, of equal ones the later in the order that it starts from. So what waits for
no gather runs first, and the loss as soon as the forward pass is through, though nothing waits for it: the logits do
not stay for it until the end.

Only gathers are asynchronous there: libtpu 0.0.42 sums and scatters at once (`xla_enable_async_reduce_scatter_fusion`
is off). Which products fill a gather's time is not followed, so their operands are taken to be freed too early
(docs/limits.md).

Reference: `kAsyncDepth` of XLA's LatencyHidingScheduler, as of jaxlib 0.10; places in the schedules that libtpu writes
with `xla_dump_to` of a T5 under ZeRO-3 and of a linear attention under Megatron.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_schedules import ordered
from passes.memory.gpu_tasks import Role, Tasks, tasks_of
from passes.memory.overlap import listed

ASYNCHRONOUS = frozenset({"all_gather"})
"""The collectives that run beside kernels."""


def schedule(program: DeviceProgram, kernels: Sequence[Kernel], *, hides: bool = True) -> list[int]:
    """The operations that kernels write, in the order in which they run; inputs come first. Where the compiler `hides`
    no latency, that is the order in which least is live.
    """
    tasks = tasks_of(program, kernels)
    order = ordered(program, kernels, tasks)
    return listed(program, tasks, deepest_last(program, tasks, order) if hides else order)


def deepest_last(program: DeviceProgram, tasks: Tasks, order: Sequence[int]) -> list[int]:
    """The tasks, placed from the last: of those that nothing waits for the deepest, then the later in the order."""
    position = [0] * len(tasks)
    for at, task in enumerate(order):
        position[task] = at
    depth = depths(program, tasks)
    waiting = [len(readers) for readers in tasks.readers]
    ready = [(-depth[task], -position[task], task) for task, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    backwards: list[int] = []
    while ready:
        _, _, task = heapq.heappop(ready)
        backwards.append(task)
        for read in tasks.reads[task]:
            waiting[read] -= 1
            if not waiting[read]:
                heapq.heappush(ready, (-depth[read], -position[read], read))
    return backwards[::-1]


def depths(program: DeviceProgram, tasks: Tasks) -> list[int]:
    """The bytes that asynchronous collectives make before each task ends, along the path that has most: the longer they
    take, the more they make.
    """
    depth = [0] * len(tasks)
    for task, reads in enumerate(tasks.reads):
        depth[task] = max((depth[read] for read in reads), default=0)
        made = program.operations[tasks.operations[task]]
        if tasks.roles[task] == Role.END and made.name in ASYNCHRONOUS:
            depth[task] += made.nbytes
    return depth
