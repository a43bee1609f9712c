"""Instruction lists that end, and those that would not: the check against a simulation that knows no graph."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import DisagreementError
from autopar.runtime import waiting
from autopar.runtime.program import Run, Send
from autopar.runtime.waiting import IN_FLIGHT, Action, wait_cycle
from tests.sample import slow

Lists = Mapping[int, Sequence[Action]]


def program_of(draw: random.Random) -> dict[int, list[Action]]:
    """A random program of a few processes with two devices each, as the lists of one total order."""
    lists: dict[int, list[Action]] = {rank: [] for rank in range(draw.randint(2, 4))}
    for number in range(draw.randint(4, 40)):
        ranks = sorted(draw.sample(sorted(lists), draw.choice([1, 1, 1, 2, 2, len(lists)])))
        is_task = len(ranks) == 1 or draw.random() < 0.5
        awaits = tuple(sorted({draw.randrange(number) for _ in range(draw.randint(0, 2))})) if number else ()
        arrivals = tuple(other for other in awaits if draw.random() < 0.5)
        for rank in ranks:
            devices = tuple(2 * rank + i for i in range(2) if draw.random() < 0.7) if is_task else ()
            alone = is_task and len(ranks) > 1
            action = Action(number=number, name=f"{number}", ranks=tuple(ranks), devices=devices, awaits=awaits)
            lists[rank].append(replace(action, arrivals=arrivals, is_task=is_task, alone=alone))
    return lists


def disturbed(lists: Lists, draw: random.Random) -> dict[int, list[Action]]:
    """The same lists with some actions of one process in another order."""
    changed = {rank: list(actions) for rank, actions in lists.items()}
    for _ in range(draw.randint(1, 3)):
        actions = changed[draw.choice(sorted(changed))]
        if len(actions) > 1:
            actions.insert(draw.randrange(len(actions)), actions.pop(draw.randrange(len(actions))))
    return changed


def ends(lists: Lists, draw: random.Random) -> bool:
    """Whether the processes, each at a speed of its own, come to the end of their lists."""
    at, queues = dict.fromkeys(lists, 0), {d: [] for actions in lists.values() for a in actions for d in a.devices}
    issued: dict[int, set[int]] = {a.number: set() for actions in lists.values() for a in actions}
    pending: list[Action] = []
    done: set[int] = set()

    def may_issue(rank: int) -> bool:
        if at[rank] == len(lists[rank]):
            return False
        action, mine = lists[rank][at[rank]], lists[rank][: at[rank]]
        unfinished = [a for a in mine if a.is_task and a.number not in done]
        # The oldest is waited for, as results are: one that is done behind it makes no room.
        tasks = [a for a in mine if a.is_task]
        closed = action.is_task and len(tasks) >= IN_FLIGHT and tasks[-IN_FLIGHT] in unfinished
        absent = not done.issuperset(action.arrivals)
        return not closed and not absent and not (action.alone and any(a.alone for a in unfinished))

    def may_end(action: Action) -> bool:
        parts = [a for rank in action.ranks for a in lists[rank] if a.number == action.number]
        heads = all(queues[d][0] == action.number for a in parts for d in a.devices if queues[d])
        return issued[action.number] == set(action.ranks) and done.issuperset(action.awaits) and heads

    while True:
        events: list[Any] = [rank for rank in lists if may_issue(rank)]
        events += [action for action in pending if may_end(action)]
        if not events:
            return all(at[rank] == len(lists[rank]) for rank in lists) and not pending
        event = draw.choice(events)
        if isinstance(event, Action):
            done.add(event.number)
            pending = [a for a in pending if a.number != event.number]
            for queue in queues.values():
                if event.number in queue:
                    queue.remove(event.number)
            continue
        action = lists[event][at[event]]
        at[event] += 1
        issued[action.number].add(event)
        for device in action.devices:
            queues[device].append(action.number)
        if issued[action.number] == set(action.ranks):
            pending.append(action)


@pytest.mark.parametrize(("count", "seed"), [(30, 0), slow(10_000, None)])
def test_lists_of_one_order_end_and_of_others_as_a_simulation_says(count: int, seed: int | None, fresh_seed: int):
    draw, hangs = random.Random(fresh_seed if seed is None else seed), 0
    for number in range(count):
        lists = program_of(draw)
        assert wait_cycle(lists) == [], f"seed {fresh_seed}, program {number}"
        assert ends(lists, draw)
        other = disturbed(lists, draw)
        cycle = wait_cycle(other)
        assert ends(other, draw) == (not cycle), f"seed {fresh_seed}, program {number}: {cycle}"
        hangs += bool(cycle)
    assert count / 10 < hangs < count  # both kinds are met


def test_the_waits_of_a_cycle_are_in_words():
    a, b = (Action(number=n, name=f"{n} (sum)", ranks=(0, 1), devices=(0,)) for n in (0, 1))
    assert wait_cycle({0: [a, b], 1: [a, b]}) == []
    cycle = wait_cycle({0: [replace(a, alone=True), replace(b, alone=True)], 1: [replace(b, alone=True), a]})
    assert cycle
    assert {"instruction 0 (sum) ends", "process 1 issues 0 (sum)"} & set(cycle)
    assert wait_cycle({0: [a], 1: []}) == ["process 0 waits in 0 (sum) for process 1, which never issues it"]


@dataclass(frozen=True)
class Core:
    process_index: int
    id: int
    platform: str = "cpu"


def on(*ranks: int) -> Any:
    return SimpleNamespace(device_set=frozenset(Core(rank, 10 * rank) for rank in ranks))


def test_a_program_that_would_hang_is_refused():
    def send(source: int, giver: int, target: int, taker: int) -> Send:
        struct: Any = SimpleNamespace(sharding=on(giver))
        return Send(source=source, target=target, struct=struct, sharding=on(taker))

    first, last = (Run(segment=n, inputs=(3 * n,), outputs=(3 * n + 1,)) for n in (0, 1))
    program: Any = SimpleNamespace(
        segments=[SimpleNamespace(name=f"stage {rank}", out_shardings=(on(rank),)) for rank in (0, 1)],
        instructions=(first, send(1, 0, 3, 1), last, send(4, 1, 5, 0)),
    )
    assert [[a.number for a in actions] for actions in waiting.shares(program, (0, 1)).values()] == [
        [0, 1, 3],
        [1, 2, 3],
    ]
    waiting.check(program, (0, 1))
    early = Run(segment=0, inputs=(5,), outputs=(6,))  # what it reads comes of what is behind it on its device
    program.instructions = (early, *program.instructions)
    with pytest.raises(DisagreementError, match=r"wait for each other for ever: .*\(stage 1\) ends"):
        waiting.check(program, (0, 1))
