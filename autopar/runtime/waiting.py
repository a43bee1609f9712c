"""The instruction lists of processes as a graph of waits, and a search for cycles, which would be deadlocks.

A process issues the actions of its list in order: one once fewer than `IN_FLIGHT` of its earlier tasks are unfinished;
one that is `alone` once no earlier one of these is; and one that reads a large array of another process once that is
there. An action is done when all the processes that take part have issued it, its operands are there, and the devices
that it occupies have done what they were given before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from jax.sharding import Sharding

from autopar.errors import DisagreementError, explain
from autopar.jax_compat import Device
from autopar.runtime.program import Free, Program, Run, Send, Slot

IN_FLIGHT = 8
"""Tasks of a process that may be unfinished at once; sixteen were seen to fill XLA's pool of threads on CPUs."""

_Node = tuple[int, int]
"""An action of a process, by rank and place in its list, as it is issued; an action done, as (-1, its number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The share of one process in instruction `number` of a program.

    `ranks` take part in it; `devices`, of this process, do nothing else before it is done. `awaits` are the numbers of
    the instructions that make its operands, `arrivals` those among them that another process sends. A task counts in
    the window; of tasks that are `alone` only one is in flight.
    """

    number: int
    name: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    is_task: bool = True
    alone: bool = False


def check(program: Program, ranks: Sequence[int]) -> None:
    """Raises DisagreementError, which names the cycle, if processes that run a program would wait for each other."""
    if cycle := wait_cycle(shares(program, ranks)):
        rule = f"processes would wait for each other for ever: {'; '.join(cycle)}"
        remedy = "choose another schedule, or report the plan that has this one"
        raise DisagreementError(explain("the pipeline's list of instructions", rule, "", remedy))


def shares(program: Program, ranks: Sequence[int]) -> dict[int, list[Action]]:
    """The actions of each process, in the order of the program."""
    lists: dict[int, list[Action]] = {rank: [] for rank in ranks}
    makers = _makers(program)
    received: dict[int, set[int]] = {rank: set() for rank in ranks}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Run(inputs=inputs):
                segment = program.segments[instruction.segment]
                devices = segment.out_shardings[0].device_set
                taking = {device.process_index for device in devices}
                name, reads, is_task = f"{number} ({segment.name})", inputs, True
            case Send(source=source, struct=struct, sharding=sharding):
                devices, taking = _transferring(struct.sharding, sharding, ranks)
                name, reads, is_task = f"{number} (send)", (source,), bool(devices)
            case Free():
                continue
        awaits = tuple(sorted({makers[slot] for slot in reads if slot in makers}))
        for rank in sorted(taking):
            if isinstance(instruction, Send) and len(taking) > 1:
                received[rank].add(number)
            action = Action(
                number=number,
                name=name,
                ranks=tuple(sorted(taking)),
                devices=tuple(sorted(device.id for device in devices if device.process_index == rank)),
                awaits=awaits,
                arrivals=tuple(other for other in awaits if other in received[rank]),
                is_task=is_task,
                alone=is_task and len(taking) > 1 and all(device.platform == "cpu" for device in devices),
            )
            lists[rank].append(action)
    return lists


def _makers(program: Program) -> dict[Slot, int]:
    """The instruction that makes the array of each slot; none for arguments."""
    makers: dict[Slot, int] = {}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Run(outputs=outputs):
                makers.update(dict.fromkeys(outputs, number))
            case Send(target=target):
                makers[target] = number
            case Free():
                pass
    return makers


def _transferring(source: Sharding, target: Sharding, ranks: Sequence[int]) -> tuple[set[Device], set[int]]:
    """(devices that do nothing else during a transfer, processes that take part).

    Connections between CPUs occupy none; on accelerators all processes issue every transfer between processes.
    """
    devices = set(source.device_set | target.device_set)
    taking = {device.process_index for device in devices}
    exchanges = source.device_set == target.device_set and source != target
    if all(device.platform == "cpu" for device in devices):
        return (devices if exchanges else set()), taking
    return devices, set(ranks) if len(taking) > 1 else taking


def wait_cycle(lists: Mapping[int, Sequence[Action]]) -> list[str]:
    """The waits that close a cycle, each as text; empty if every list comes to its end.

    If a process waits for something that another one never issues, that counts as a cycle of one wait.
    """
    issued = {(rank, action.number) for rank, actions in lists.items() for action in actions}
    for rank, actions in lists.items():
        for action in actions:
            for other in action.ranks:
                if (other, action.number) not in issued:
                    return [f"process {rank} waits in {action.name} for process {other}, which never issues it"]
    sorter: TopologicalSorter[Hashable] = TopologicalSorter()
    for rank, actions in lists.items():
        for node, earlier in _waits(rank, actions):
            sorter.add(node, earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        names = {action.number: action.name for actions in lists.values() for action in actions}
        return [_words(node, lists, names) for node in error.args[1][:0:-1]]
    return []


def _waits(rank: int, actions: Sequence[Action]) -> Iterator[tuple[_Node, _Node]]:
    """(what waits, what it waits for) pairs in one process's list."""
    unfinished: list[int] = []
    alone: int | None = None
    queues: dict[int, int] = {}
    for at, action in enumerate(actions):
        issue, done = (rank, at), (-1, action.number)
        yield done, issue
        if at:
            yield issue, (rank, at - 1)
        if action.is_task:
            if len(unfinished) >= IN_FLIGHT:
                yield issue, (-1, unfinished[-IN_FLIGHT])
            unfinished.append(action.number)
        for number in action.arrivals:
            yield issue, (-1, number)
        if action.alone:
            if alone is not None:
                yield issue, (-1, alone)
            alone = action.number
        for number in action.awaits:
            yield done, (-1, number)
        for device in action.devices:
            if device in queues:
                yield done, (-1, queues[device])
            queues[device] = action.number


def _words(node: _Node, lists: Mapping[int, Sequence[Action]], names: Mapping[int, str]) -> str:
    rank, at = node
    return f"instruction {names[at]} ends" if rank < 0 else f"process {rank} issues {lists[rank][at].name}"
