"""Texts that processes, which are threads here, exchange: the service keeps no more of them than are yet to be read."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.distributed import Processes
from tests.autopar.distributed.fake_service import FakeService, processes_of, together
from tests.sample import slow

LONG = "".join(map(chr, range(0x4E00, 0x9000)))
"""A text that is hard to compress."""


@pytest.mark.parametrize("count", [2, 3])
def test_texts_that_all_processes_have_read_are_deleted(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.distributed.agreement._CHUNK_NBYTES", 1 << 10)
    service = FakeService()
    program = processes_of(service, count)
    before = len(service.texts)
    sizes = list[int]()

    def run(processes: Processes) -> list[object]:
        ends = list[object]()
        for number in range(20):
            ends.append(processes.broadcast("a text", lambda number=number: f"{number} {LONG}"))
            ends.append(processes.gather("all texts", f"{processes.rank} {number}"))
            if processes.leads:
                sizes.append(len(service.texts))
        return ends

    expected: list[object] = []
    for number in range(20):
        expected += [f"{number} {LONG}", tuple(f"{rank} {number}" for rank in range(count))]
    assert together([lambda processes=processes: run(processes) for processes in program]) == [expected] * count
    # At most: the last gathering, and what the next one or two have begun with.
    assert max(sizes) < before + 2 * (count + len(LONG) * 4 // (1 << 10) + 2), sizes
    assert len(service.texts) == before + count  # the last gathering's


@pytest.mark.parametrize("odd", [0, slow(1), slow(2)])
def test_a_process_that_is_a_step_ahead_of_an_exchange_is_an_error_at_once(odd: int):
    """A batch of another shape on one process is planned anew there, while the others wait in the step they know."""
    service = FakeService()
    program = processes_of(service, 3)
    for processes in program:
        for _ in range(1 if processes.rank == odd else 2):
            processes.begin_step()
        service.key_value_set_bytes(f"autopar/beats/{processes.rank}", f"7 {processes.steps[0]}".encode())

    def plans(processes: Processes) -> object:
        processes.broadcast("the plan", str)
        return processes.gather("the program", "text")

    text = rf"process {odd} on host h{odd}: it is at the p\w+ before step 2, which process {min({0, 1, 2} - {odd})} has"
    with pytest.raises(autopar.DisagreementError, match=text):
        plans(program[odd])


class Late(FakeService):
    """A service in which waiting for a text ends without it so many times."""

    waits = 0

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        self.waits -= 1
        if self.waits >= 0:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return super().blocking_key_value_get_bytes(key, milliseconds)


@pytest.mark.parametrize(("waits", "steps"), [(5, 0), (1, 1)])
def test_a_process_that_comes_late_to_an_exchange_is_waited_for(waits: int, steps: int):
    """The first process may have begun a step since it put its text there, in the second that another one waited."""
    service = Late()
    program = processes_of(service, 2)
    for rank, begun in enumerate([steps, 0]):
        service.key_value_set_bytes(f"autopar/beats/{rank}", f"7 {begun}".encode())
    program[0].broadcast("the plan", lambda: "a plan")
    service.waits = waits
    assert program[1].broadcast("the plan", str) == "a plan"
    assert service.waits == -1
