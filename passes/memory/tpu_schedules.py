"""The order in which XLA's TPU compiler runs kernels: little is live, and gathers run while kernels do.

The scheduler goes from the last task to the first. A gather ends right before what reads it, and begins as soon as the
kernels between take as long as it does. Of the kernels that nothing waits for any more the scheduler takes the one with
most time of asynchronous collectives before it, of equal ones the later in the order that it starts from. So what waits
for no gather runs first, and the loss as soon as the forward pass is through, though nothing waits for it: the logits
do not stay for it until the end. And the gradients of weights run while what comes after them is gathered.

Only gathers are asynchronous there: libtpu 0.0.42 sums and scatters at once (`xla_enable_async_reduce_scatter_fusion`
is off). Two of its rules are not followed here: one gather runs at a time (`xla_max_concurrent_async_all_gathers`), and
one that waits for none before it begins only when nothing else is left to run. With both, at the rate that it reckons
with (`HIDING`), BERT under ZeRO-3 is 5 % too low, not 17, GPT under Megatron 3, not 11, and searched LLaMA exact, not
11 too low; but a mixture of experts under ZeRO-3 and a Wide-ResNet under Megatron come 20 and 23 % too high, from
within bounds. What is missing is how long kernels take by the compiler's own account (docs/limits.md).

Reference: XLA's LatencyHidingScheduler (`kScheduleDone`, `kAsyncDepth`), as of jaxlib 0.10; places in the schedules
that libtpu writes with `xla_dump_to` of a T5 and a Wide-ResNet under ZeRO-3, and of a linear attention under Megatron.
With `xla_dump_hlo_pass_re=.*latency-hid.*` it writes the program before and after this scheduler, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.gpu_schedules import ordered
from passes.memory.gpu_tasks import Role, Tasks, tasks_of
from passes.memory.moments import CostOf
from passes.memory.overlap import listed

ASYNCHRONOUS = frozenset({"all_gather"})
"""The collectives that run beside kernels."""


class Hiding(NamedTuple):
    """The cost of kernels, and the bytes that a gather makes in a second while they run."""

    cost_of: CostOf
    bytes_per_second: float


def schedule(program: DeviceProgram, kernels: Sequence[Kernel], *, hiding: Hiding | None = None) -> list[int]:
    """The operations that kernels write, in the order in which they run; inputs come first. Where the compiler hides
    no latency, that is the order in which least is live.
    """
    tasks = tasks_of(program, kernels)
    order = ordered(program, kernels, tasks)
    if hiding:
        order = deepest_last(program, tasks, order, seconds(program, tasks, kernels, hiding))
    return listed(program, tasks, order)


def seconds(program: DeviceProgram, tasks: Tasks, kernels: Sequence[Kernel], hiding: Hiding) -> list[float]:
    """The seconds that each task takes: a kernel, and from its end a gather; the others none."""
    kernel_of = {kernel.operation: kernel for kernel in kernels}
    spent = [0.0] * len(tasks)
    for task, operation in enumerate(tasks.operations):
        if _ends(program, tasks, task):
            spent[task] = program.operations[operation].nbytes / hiding.bytes_per_second
        elif tasks.roles[task] == Role.RUN and operation in kernel_of:
            spent[task] = max(hiding.cost_of([kernel_of[operation]], program.operations))
    return spent


def deepest_last(program: DeviceProgram, tasks: Tasks, order: Sequence[int], spent: Sequence[float]) -> list[int]:
    """The tasks, placed from the last: ends of gathers, their starts where kernels have run for so long, and of the
    others that nothing waits for the deepest, then the later in the order.
    """
    position = [0] * len(tasks)
    for at, task in enumerate(order):
        position[task] = at
    depth, waiting = depths(program, tasks), [len(readers) for readers in tasks.readers]
    ready: list[tuple[bool, int, int, int]] = []
    flying: list[tuple[float, int]] = []
    due: dict[int, float] = {}

    def release(task: int) -> None:
        if task in due:
            heapq.heappush(flying, (due[task], task))
        else:
            heapq.heappush(ready, (not _ends(program, tasks, task), -depth[task], -position[task], task))

    for task, count in enumerate(waiting):
        if not count:
            release(task)
    backwards, now = list[int](), 0.0
    while ready or flying:
        if flying and (flying[0][0] <= now or not ready):
            begun, task = heapq.heappop(flying)
            now = max(now, begun)
        else:
            task = heapq.heappop(ready)[-1]
            is_end = _ends(program, tasks, task)
            due |= {read: now + spent[task] for read in tasks.reads[task] if is_end}
            now += 0.0 if is_end else spent[task]
        backwards.append(task)
        for read in tasks.reads[task]:
            waiting[read] -= 1
            if not waiting[read]:
                release(read)
    return backwards[::-1]


def _ends(program: DeviceProgram, tasks: Tasks, task: int) -> bool:
    """Whether a task is the end of an asynchronous collective."""
    return tasks.roles[task] == Role.END and program.operations[tasks.operations[task]].name in ASYNCHRONOUS


def depths(program: DeviceProgram, tasks: Tasks) -> list[int]:
    """The bytes that asynchronous collectives make before each task ends, along the path that has most: the longer they
    take, the more they make.
    """
    depth = [0] * len(tasks)
    for task, reads in enumerate(tasks.reads):
        depth[task] = max((depth[read] for read in reads), default=0)
        if _ends(program, tasks, task):
            depth[task] += program.operations[tasks.operations[task]].nbytes
    return depth
