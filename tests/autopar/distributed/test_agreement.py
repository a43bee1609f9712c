"""Texts that processes, which are threads here, exchange: the service keeps no more of them than are yet to be read."""

from __future__ import annotations

import pytest

from autopar.distributed import Processes
from tests.autopar.distributed.fake_service import FakeService, processes_of, together

LONG = "".join(map(chr, range(0x4E00, 0x9000)))
"""A text that is hard to compress."""


@pytest.mark.parametrize("count", [2, 3])
def test_what_all_have_read_is_taken_out_of_the_service(count: int, monkeypatch: pytest.MonkeyPatch):
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
