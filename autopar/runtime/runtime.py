"""The loop that runs a pipeline's program: every instruction is issued in order, and none is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.distributed import Processes, check_here, nowhere, placed
from autopar.jax_compat import PyTreeDef
from autopar.runtime.arrivals import Arrivals
from autopar.runtime.cross_process import takes_part, transport_of
from autopar.runtime.program import Free, Instruction, Program, Run, Segment, Send
from autopar.runtime.sharing import Window, agree, result_types, signs, spans, vulnerable
from autopar.runtime.transfer import Later, Transfer, arrived, compile_transfer
from autopar.runtime.transfer_plan import TransferPlan, plan_transfer
from autopar.runtime.waiting import IN_FLIGHT
from passes.inter_op import Task

Slots = list[Any]
Step = Callable[[Slots], None]
"""An instruction as a function of the slots that it reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """The microbatches of an argument that one stage reads: they arrive as one array, which `cut` divides."""

    argument: int
    sharding: Sharding
    cut: Callable[[jax.Array], tuple[jax.Array, ...]]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step: of the feed, of each instruction on the host, and until its results are ready.

    `done` differs from `host` only if results were waited for.
    """

    feed: float
    host: tuple[float, ...]
    done: tuple[float, ...]


@dataclass(slots=True)
class Pipeline:
    """A program with its executables, ready to run step after step.

    `steps` are the program's instructions as functions, `executables` its segments'; `weak` are the outputs of weak
    type. Each of several processes has the executables, and runs the instructions, of its own devices; `arrivals` bring
    arguments there.
    """

    program: Program
    steps: tuple[Step, ...]
    constants: tuple[tuple[int, jax.Array], ...]
    rows: dict[int, int]
    out_tree: PyTreeDef
    executables: tuple[Any, ...] = ()
    slices: tuple[Slices, ...] = ()
    weak: tuple[int, ...] = ()
    arrivals: Arrivals | None = None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if not jax_compat.has_ambient_mesh():
            return self._call(leaves)
        with jax_compat.no_mesh():
            return self._call(leaves)

    def _call(self, leaves: Sequence[Any]) -> Any:
        self.program.donation.check_there(leaves)
        self.program.donation.check(leaves)
        slots = self._fed(leaves)
        for step in self.steps:
            step(slots)
        self.program.donation.delete(leaves)
        return self._results(slots)

    def timed(self, leaves: Sequence[Any], *, wait: bool = False) -> tuple[Any, Times]:
        """The results of a step and its times; with `wait`, each instruction waits for its results."""
        with jax_compat.no_mesh():
            self.program.donation.check_there(leaves)
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
                    _arrive(slots, _written(instruction))
                    jax.block_until_ready([slots[slot] for slot in _written(instruction)])
                done.append(time.perf_counter() - start)
        self.program.donation.delete(leaves)
        return self._results(slots), Times(feed=feed, host=tuple(host), done=tuple(done))

    @property
    def runs(self) -> tuple[tuple[Segment, Task | None, Any], ...]:
        """The segments that a step runs, in order, each with its task and executable."""
        return tuple(
            (self.program.segments[step.segment], step.task, self.executables[step.segment])
            for step in self.program.instructions
            if isinstance(step, Run)
        )

    def transfer_seconds(self, times: Times) -> float:
        """The part of a step's seconds that transfers between stages took."""
        sends = (isinstance(instruction, Send) for instruction in self.program.instructions)
        return sum(done for is_send, done in zip(sends, times.done, strict=True) if is_send)

    def _results(self, slots: Slots) -> Any:
        results = [slots[slot] for slot in self.program.results]
        if self.arrivals:
            types = result_types(self.program)
            pairs = zip(results, types, strict=True)
            results = [nowhere(*kind) if array is None else arrived(array) for array, kind in pairs]
        for position in self.weak:  # else the next step has arguments of another type, and is planned again
            results[position] = jax_compat.with_weakness(results[position], True)
        return jax.tree.unflatten(self.out_tree, results)

    def _fed(self, leaves: Sequence[Any]) -> Slots:
        """The slots with every argument where it is read; arrays that are there already are not copied."""
        slots: Slots = [None] * self.program.n_slots
        for slot, array in self.constants:
            slots[slot] = array
        if self.arrivals:
            self._fill(slots, leaves, self.arrivals)
            return slots
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

    def _fill(self, slots: Slots, leaves: Sequence[Any], arrivals: Arrivals) -> None:
        """Brings every argument to the slots of this process that read it."""
        is_global = arrivals.survey(leaves)
        arguments = list(leaves)
        for argument, size in self.rows.items():
            shape = leaves[argument].shape
            divided = (shape[0] // size, size, *shape[1:])
            arguments[argument] = arrivals.divided(leaves[argument], divided, is_global=is_global[argument])
        for feed in self.program.feeds:
            if feed.slice is None:
                at = feed.argument
                slots[feed.slot] = arrivals.place(arguments[at], feed.sharding, is_global=is_global[at])
        for slices in self.slices:
            at = slices.argument
            batch = arrivals.place(arguments[at], slices.sharding, is_global=is_global[at])
            if slices.sharding.addressable_devices:
                for slot, part in zip(slices.slots, slices.cut(batch), strict=True):
                    slots[slot] = part


def _written(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Run():
            return instruction.outputs
        case Send():
            return (instruction.target,)
        case Free():
            return ()


def _run(executable: Any, inputs: tuple[int, ...], outputs: tuple[int, ...], name: str) -> Step:
    # An `itemgetter` of one item gives the item, not a tuple of it, and there is none of no items.
    read = itemgetter(*inputs) if len(inputs) > 1 else lambda slots: tuple(slots[i] for i in inputs)

    def step(slots: Slots) -> None:
        try:
            arrays = executable(*read(slots))
        except jax_compat.NanFoundError as error:  # under `jax.debug_nans` or `jax.debug_infs`
            remedy = "a planner without stages, and jax.jit, name the operation"
            raise FloatingPointError(f"invalid value ({error.args[-1]}) encountered in {name}; {remedy}") from None
        for slot, array in zip(outputs, arrays, strict=True):
            slots[slot] = array

    return step


def _within(windows: Sequence[Window], step: Step, sign: int) -> Step:
    """A step that first waits until it may be issued; slot `sign` shows when it is done."""

    def waiting(slots: Slots) -> None:
        for window in windows:
            window.make_room()
        step(slots)
        for window in windows:
            window.add(slots[sign])

    return waiting


def _arrive(slots: Slots, read: tuple[int, ...]) -> None:
    """Waits for arrays of other processes to arrive in these slots."""
    for slot in read:
        if isinstance(slots[slot], Later):
            slots[slot] = slots[slot].make()


def _behind(late: tuple[int, ...], step: Step) -> Step:
    """A step that first waits for arrays of other processes in the slots that it reads."""

    def waiting(slots: Slots) -> None:
        _arrive(slots, late)
        step(slots)

    return waiting if late else step


def _send(move: Callable[[jax.Array], jax.Array | Later], source: int, target: int) -> Step:
    def step(slots: Slots) -> None:
        slots[target] = move(slots[source])

    return step


def _free(freed: tuple[int, ...]) -> Step:
    def step(slots: Slots) -> None:
        for slot in freed:
            slots[slot] = None

    return step


def _skip(slots: Slots) -> None:
    """The step for instructions of other processes, which does nothing."""


def load(
    program: Program,
    rows: dict[int, int],
    out_tree: PyTreeDef,
    weak: Sequence[bool] = (),
    executables: tuple[Any, ...] | None = None,
    processes: Processes | None = None,
) -> Pipeline:
    """The program with its `executables`, compiled here if they are not given.

    `rows` are the rows of a microbatch for each argument that is a batch, and `weak` says of each output whether it is
    of weak type. Of several `processes` each compiles what its devices run, after all have compared that. Raises
    DisagreementError where it differs, and DeviceError for devices that are only described.
    """
    for segment in program.segments:
        check_here(segment.out_shardings[0])
    executables = _executables(program, executables, processes)
    return Pipeline(
        program=program,
        executables=executables,
        steps=_steps(program, executables, processes),
        constants=tuple(
            (slot, placed(value, sharding))
            for slot, value, sharding in program.constants
            if sharding.addressable_devices
        ),
        rows=rows,
        out_tree=out_tree,
        slices=_slices(program),
        weak=tuple(i for i, is_weak in enumerate(weak) if is_weak),
        arrivals=Arrivals(processes, program.donation.names) if processes else None,
    )


def _executables(program: Program, executables: tuple[Any, ...] | None, processes: Processes | None) -> tuple[Any, ...]:
    """The segments' executables, None for those of other processes."""
    if processes is None:
        return executables or tuple(jax_compat.compiled(segment.lower()) for segment in program.segments)
    here = [processes.rank in _ranks(segment) for segment in program.segments]
    lowered = [segment.lower() if is_here else None for segment, is_here in zip(program.segments, here, strict=True)]
    agree(processes, program, lowered)
    compiled = executables or tuple(text and jax_compat.compiled(text) for text in lowered)
    return tuple(executable if is_here else None for executable, is_here in zip(compiled, here, strict=True))


def _ranks(segment: Segment) -> set[int]:
    """The processes that run a segment."""
    return {device.process_index for device in segment.out_shardings[0].device_set}


def _steps(program: Program, executables: Sequence[Any], processes: Processes | None) -> tuple[Step, ...]:
    """The instructions as functions, transfers compiled once each; those of other processes do nothing."""
    transfers: dict[tuple[TransferPlan, bool], Transfer] = {}
    kept = vulnerable(program) if processes else frozenset[int]()
    shown = signs(program) if processes else {}
    tasks, spanning = Window(IN_FLIGHT), Window(1)
    sent = {i.target for i in program.instructions if isinstance(i, Send)} if processes else frozenset[int]()

    def late(*read: int) -> tuple[int, ...]:
        return tuple(slot for slot in dict.fromkeys(read) if slot in sent)

    def windows(*shardings: Sharding) -> list[Window]:
        return [tasks, spanning] if any(map(spans, shardings)) else [tasks]

    def step(at: int, instruction: Instruction) -> Step:
        match instruction:
            case Run():
                executable = executables[instruction.segment]
                if executable is None:
                    return _skip
                segment = program.segments[instruction.segment]
                run = _run(executable, instruction.inputs, instruction.outputs, segment.name)
                run = _behind(late(*instruction.inputs), run)
                return _within(windows(segment.out_shardings[0]), run, shown[at]) if processes else run
            case Send(struct=struct, source=source, target=target):
                plan = plan_transfer(struct.shape, struct.dtype, struct.sharding, instruction.sharding)
                if processes and not takes_part(plan.source, plan.target, processes):
                    return _skip
                key = plan, source in kept
                if key not in transfers:
                    transport = transport_of(plan, processes)
                    transfers[key] = compile_transfer(plan, transport, keeps=key[1])
                send = _behind(late(source), _send(transfers[key].run, source, target))
                collective = processes and plan.kind == "reshard"
                return _within(windows(plan.source), send, target) if collective else send
            case Free():
                return _free(instruction.slots)

    return tuple(step(at, instruction) for at, instruction in enumerate(program.instructions))


def _slices(program: Program) -> tuple[Slices, ...]:
    """The slices that the feeds take of batches, by argument and placement."""
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
    """The sharding of stacked microbatches, each of which is in `sharding`."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return sharding
