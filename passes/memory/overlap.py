"""The order in which XLA's GPU compiler runs kernels: as late as what waits for them allows, behind collectives.

The scheduler goes from the last kernel to the first. One collective is under way at a time. While it is, whatever is
not needed to start it runs: so what only later collectives need, as the products that make gradients of weights do,
waits for the first of them to start, and all that those products read is in memory until then.

A kernel that makes little of a large array runs beside the first of the array's other readers, with which it is one: so
the loss of each token is there when the gradient of the logits is, and nothing keeps the logits longer.

Reference: XLA's LatencyHidingScheduler with GpuLatencyEstimator, and sibling fusion in its MultiOutputFusion, as of
jaxlib 0.10.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from passes.memory.device_program import DeviceProgram
from passes.memory.fusion import Kernel
from passes.memory.operations import Operation

LATENCY, LOOP_COST, COST = 5000, 1000, 1
"""The scheduler's time of a collective, of a kernel of elementwise operations, and of any other kernel."""

LITTLE = 16
"""The times that an array has the elements of what a kernel makes of it, from which that is little. A ratio: a row of
classes or scores has more elements than this, a group of heads has fewer."""

LOOPS = frozenset({"elementwise", "expensive", "rearrange", "broadcast", "gather"})


def schedule(program: DeviceProgram, kernels: Sequence[Kernel]) -> list[int]:
    """The operations that kernels write, in the order in which they run; inputs and constants come first."""
    return _Backwards(program.operations, kernels).run()


class _Backwards:
    """The kernels not yet placed, from the end; `waiting` are the numbers of their readers among those, and of those
    that they run beside.

    `ready` are kernels that nothing waits for, the last of the program first; `arrived` are collectives of which that
    is true, the earliest of the program first.
    """

    def __init__(self, operations: Sequence[Operation], kernels: Sequence[Kernel]) -> None:
        self.operations = operations
        self.kernels = {kernel.operation: kernel for kernel in kernels}
        self.waiting = dict.fromkeys(self.kernels, 0)
        for kernel in kernels:
            for read in kernel.reads:
                self.waiting[read] += 1
        self.beside = self._beside(kernels)
        for others in self.beside.values():
            for other in others:
                self.waiting[other] += 1
        self.first = [k.operation for k in kernels if not k.reads and operations[k.operation].kind == "input"]
        self.ready: list[int] = []
        self.arrived: list[int] = []
        self.order: list[int] = []
        self.now = 0
        self.behind = self._behind(kernels)

    def run(self) -> list[int]:
        for operation in self.waiting:
            if not self.waiting[operation]:
                self._release(operation)
        under_way, until = -1, 0
        while self.ready or self.arrived or under_way >= 0:
            if under_way < 0 and self.arrived:
                under_way, until = heapq.heappop(self.arrived), self.now + LATENCY
                continue
            if under_way >= 0 and (not self.ready or (self.now >= until and self.behind[under_way])):
                self._place(under_way)
                under_way, self.now = -1, max(self.now, until)
                continue
            self._place(operation := -heapq.heappop(self.ready))
            self.now += LOOP_COST if self.operations[operation].kind in LOOPS else COST
        return [*self.first, *reversed(self.order)]

    def _behind(self, kernels: Sequence[Kernel]) -> dict[int, bool]:
        """Whether each kernel waits for some collective; one that does not is started as early as can be."""
        behind: dict[int, bool] = {}
        for kernel in kernels:
            behind[kernel.operation] = any(
                behind[read] or self.operations[read].kind == "collective" for read in kernel.reads
            )
        return behind

    def _beside(self, kernels: Sequence[Kernel]) -> dict[int, list[int]]:
        """The kernels that make little of an array, by the first of its other readers, which comes later."""
        readers: dict[int, list[int]] = {}
        for kernel in kernels:
            for read in kernel.reads:
                readers.setdefault(read, []).append(kernel.operation)
        beside: dict[int, list[int]] = {}
        for array, siblings in readers.items():
            little = [o for o in siblings if self._makes_little(o, array)]
            others = [o for o in siblings if o not in little and self.operations[o].kind != "loop"]
            if others and (before := [o for o in little if o < min(others)]):
                beside.setdefault(min(others), []).extend(before)
        return beside

    def _makes_little(self, operation: int, array: int) -> bool:
        made, read = self.operations[operation], self.operations[array]
        return made.kind in (*LOOPS, "reduce") and LITTLE * made.size <= read.size

    def _place(self, operation: int) -> None:
        self.order.append(operation)
        for read in (*self.kernels[operation].reads, *self.beside.get(operation, ())):
            self.waiting[read] -= 1
            if not self.waiting[read]:
                self._release(read)

    def _release(self, operation: int) -> None:
        """Adds a kernel that nothing waits for any more; inputs are there from the start."""
        kind = self.operations[operation].kind
        if kind == "input":
            return
        if kind == "collective":
            heapq.heappush(self.arrived, operation)
        else:
            heapq.heappush(self.ready, -operation)
