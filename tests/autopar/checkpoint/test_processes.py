"""Checkpoints of several processes, which are threads here: they agree, whatever each one of them meets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar.checkpoint import checkpoints as module
from autopar.checkpoint import digests
from autopar.checkpoint.arrays import Arrays
from autopar.checkpoint.manifest import RefusedError
from autopar.checkpoint.survey import Survey
from autopar.distributed import Processes
from tests.autopar.distributed.fake_service import FakeService, processes_of, together

STATE = {"w": jnp.arange(4.0)}


def checkpoints_of(folder: Path, processes: Processes) -> autopar.Checkpoints:
    """The checkpoints of one of several processes, each of which reads all files."""
    checkpoints = autopar.Checkpoints(folder)
    checkpoints._processes, checkpoints._survey = processes, Survey(processes)
    checkpoints._arrays = Arrays.of(None)
    return checkpoints


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.filterwarnings("ignore:a checkpoint is not used")
def test_a_checkpoint_that_one_process_cannot_read_is_used_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, STATE)
    of_rank = [checkpoints_of(tmp_path, processes) for processes in processes_of(FakeService(), 2)]
    restored = module._restored

    def read(arrays: Any, folder: Path, like: Any) -> Any:
        if arrays is of_rank[rank]._arrays and folder.name == "step-00000002":
            raise RefusedError("a file that this process alone reads is corrupted")
        return restored(arrays, folder, like)

    def pieces_of(leaf: Any, *, is_global: bool) -> Any:
        return digests.pieces_of(leaf, is_global=is_global) if threading.current_thread().name == "0" else []

    monkeypatch.setattr(module, "_restored", read)
    monkeypatch.setattr(module, "pieces_of", pieces_of)
    saved = together([partial(checkpoints.restore, STATE) for checkpoints in of_rank])
    assert [getattr(each, "step", each) for each in saved] == [1, 1]


def test_the_service_holds_the_texts_of_few_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    service = FakeService()
    of_rank = [checkpoints_of(tmp_path, processes) for processes in processes_of(service, 2)]

    def begun(work: Any, *args: Any) -> Any:
        return ThreadPoolExecutor(1).submit(work, *args)  # a program has one such thread, which would wait for itself

    monkeypatch.setattr(module, "begun", begun)
    monkeypatch.setattr(Arrays, "save", lambda *_: None)  # of Orbax's savers a program has one, too
    counts = list[int]()
    for number in range(1, 6):
        ends = together([partial(checkpoints.save, number, STATE) for checkpoints in of_rank])
        ends += together([checkpoints.wait for checkpoints in of_rank])
        assert ends == [None] * 4
        counts.append(len(service.texts))
    assert of_rank[0].steps() == [5, 4, 3]
    assert counts[1:] == [counts[1]] * 4
