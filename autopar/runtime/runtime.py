"""The loop that runs a pipeline's program: every instruction issued in order, none waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.jax_compat import PyTreeDef
from autopar.runtime.program import Free, Instruction, Program, Run, Send
from autopar.runtime.transfer import Transfer, compile_transfer
from autopar.runtime.transfer_plan import TransferPlan, plan_transfer

Slots = list[Any]
Step = Callable[[Slots], None]
"""An instruction as a function of the slots that it reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The microbatches of an argument that one stage reads: they arrive as one array, which `cut` takes apart."""

    argument: int
    sharding: Sharding
    cut: Callable[[jax.Array], tuple[jax.Array, ...]]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step: of the feed, of each instruction on the host, and until its results are ready.

    `done` differs from `host` only where results were waited for.
    """

    feed: float
    host: tuple[float, ...]
    done: tuple[float, ...]


@dataclass(slots=True)
class Pipeline:
    """A program with its executables, ready to run step after step.

    `steps` are the program's instructions as functions, `executables` its segments'; `weak` are the outputs of weak
    type.
    """

    program: Program
    steps: tuple[Step, ...]
    constants: tuple[tuple[int, jax.Array], ...]
    rows: dict[int, int]
    out_tree: PyTreeDef
    executables: tuple[Any, ...] = ()
    slices: tuple[Slices, ...] = ()
    weak: tuple[int, ...] = ()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if not jax_compat.has_ambient_mesh():
            return self._call(leaves)
        with jax_compat.no_mesh():
            return self._call(leaves)

    def _call(self, leaves: Sequence[Any]) -> Any:
        self.program.donation.check(leaves)
        slots = self._fed(leaves)
        for step in self.steps:
            step(slots)
        self.program.donation.delete(leaves)
        return self._results(slots)

    def timed(self, leaves: Sequence[Any], *, wait: bool = False) -> tuple[Any, Times]:
        """The results of a step and its times; with `wait`, each instruction waits for its results."""
        with jax_compat.no_mesh():
            self.program.donation.check(leaves)
            start = time.perf_counter()
            slots = self._fed(leaves)
            feed = time.perf_counter() - start
            if wait:
                jax.block_until_ready(slots)
            host: list[float] = []
            done: list[float] = []
            for instruction, step in zip(self.program.instructions, self.steps, strict=True):
                start = time.perf_counter()
                step(slots)
                host.append(time.perf_counter() - start)
                if wait:
                    jax.block_until_ready([slots[slot] for slot in _written(instruction)])
                done.append(time.perf_counter() - start)
        self.program.donation.delete(leaves)
        return self._results(slots), Times(feed=feed, host=tuple(host), done=tuple(done))

    def transfer_seconds(self, times: Times) -> float:
        """The part of a step's times that arrays took from stage to stage."""
        sends = (isinstance(instruction, Send) for instruction in self.program.instructions)
        return sum(done for is_send, done in zip(sends, times.done, strict=True) if is_send)

    def _results(self, slots: Slots) -> Any:
        results = [slots[slot] for slot in self.program.results]
        for position in self.weak:  # else the next step has arguments of another type, and is planned again
            results[position] = jax_compat.with_weakness(results[position], True)
        return jax.tree.unflatten(self.out_tree, results)

    def _fed(self, leaves: Sequence[Any]) -> Slots:
        """The slots with every argument where it is read; arrays that are there already stay."""
        slots: Slots = [None] * self.program.n_slots
        for slot, array in self.constants:
            slots[slot] = array
        arrays: list[Any] = []
        shardings: list[Sharding] = []
        targets: list[int] = []
        for feed in self.program.feeds:
            if feed.slice is not None:
                continue
            leaf = leaves[feed.argument]
            if size := self.rows.get(feed.argument):
                leaf = leaf.reshape(-1, size, *leaf.shape[1:])
            if getattr(leaf, "sharding", None) == feed.sharding:
                slots[feed.slot] = leaf
            else:
                arrays.append(leaf)
                shardings.append(feed.sharding)
                targets.append(feed.slot)
        for slices in self.slices:
            leaf = leaves[slices.argument]
            arrays.append(leaf.reshape(-1, self.rows[slices.argument], *leaf.shape[1:]))
            shardings.append(slices.sharding)
        if not arrays:
            return slots
        moved = jax.device_put(arrays, shardings)
        for slot, array in zip(targets, moved, strict=False):
            slots[slot] = array
        for slices, array in zip(self.slices, moved[len(targets) :], strict=True):
            for slot, part in zip(slices.slots, slices.cut(array), strict=True):
                slots[slot] = part
        return slots


def _written(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Run():
            return instruction.outputs
        case Send():
            return (instruction.target,)
        case Free():
            return ()


def _run(executable: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    # An `itemgetter` of one item gives the item, not a tuple of it, and there is none of no items.
    read = itemgetter(*inputs) if len(inputs) > 1 else lambda slots: tuple(slots[i] for i in inputs)

    def step(slots: Slots) -> None:
        for slot, array in zip(outputs, executable(*read(slots)), strict=True):
            slots[slot] = array

    return step


def _send(move: Callable[[jax.Array], jax.Array], source: int, target: int) -> Step:
    def step(slots: Slots) -> None:
        slots[target] = move(slots[source])

    return step


def _free(freed: tuple[int, ...]) -> Step:
    def step(slots: Slots) -> None:
        for slot in freed:
            slots[slot] = None

    return step


def load(
    program: Program,
    rows: dict[int, int],
    out_tree: PyTreeDef,
    weak: Sequence[bool] = (),
    executables: tuple[Any, ...] | None = None,
) -> Pipeline:
    """The program with its `executables`, compiled here if they are not given.

    `rows` are the rows of a microbatch for each argument that is a batch, and `weak` says of each output whether it is
    of weak type.
    """
    constants = tuple((slot, jax.device_put(value, sharding)) for slot, value, sharding in program.constants)
    if executables is None:
        executables = tuple(segment.lower().compile() for segment in program.segments)
    return Pipeline(
        program=program,
        executables=executables,
        steps=_steps(program, executables),
        constants=constants,
        rows=rows,
        out_tree=out_tree,
        slices=_slices(program),
        weak=tuple(i for i, is_weak in enumerate(weak) if is_weak),
    )


def _steps(program: Program, executables: Sequence[Any]) -> tuple[Step, ...]:
    """The instructions as functions, transfers compiled once each."""
    transfers: dict[TransferPlan, Transfer] = {}

    def step(instruction: Instruction) -> Step:
        match instruction:
            case Run():
                return _run(executables[instruction.segment], instruction.inputs, instruction.outputs)
            case Send(struct=struct):
                plan = plan_transfer(struct.shape, struct.dtype, struct.sharding, instruction.sharding)
                if plan not in transfers:
                    transfers[plan] = compile_transfer(plan)
                return _send(transfers[plan].run, instruction.source, instruction.target)
            case Free():
                return _free(instruction.slots)

    return tuple(map(step, program.instructions))


def _slices(program: Program) -> tuple[Slices, ...]:
    """The slices that the feeds take of batches, by argument and place."""
    groups: dict[tuple[int, Sharding], list[tuple[int, int]]] = {}
    for feed in program.feeds:
        if feed.slice is not None:
            groups.setdefault((feed.argument, feed.sharding), []).append((feed.slice, feed.slot))
    return tuple(
        Slices(
            argument=argument,
            sharding=_stacked(sharding),
            cut=_cut(tuple(number for number, _ in taken), sharding),
            slots=tuple(slot for _, slot in taken),
        )
        for (argument, sharding), taken in groups.items()
    )


def _cut(numbers: tuple[int, ...], sharding: Sharding) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(lambda batch: tuple(batch[m] for m in numbers), out_shardings=(sharding,) * len(numbers))


def _stacked(sharding: Sharding) -> Sharding:
    """The sharding of microbatches side by side, each of which is in `sharding`."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return sharding
