"""Batches that are fetched ahead: the same elements, where they are read, from where a run has left off."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import autopar
from autopar import DataParallel
from autopar.training import Batches
from autopar.training.batches import by_process
from tests.autopar.distributed.launching import HERE, SECONDS, environment, launch, lines

BATCHES = [{"x": np.full((8, 2), float(n), np.float32), "weight": np.float32(n)} for n in range(6)]


class Stateful:
    """An iterator with a state of its own, as Grain has them."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> Any:
        if self.at == len(BATCHES):
            raise StopIteration
        self.at += 1
        return BATCHES[self.at - 1]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def step(total: jax.Array, batch: Any) -> jax.Array:
    return total + jnp.sum(batch["x"]) * batch["weight"]


def grain_loader() -> Any:
    """An iterator of Grain's, from a data set that is read in a random order and mapped."""
    import grain

    places = grain.MapDataset.range(len(BATCHES)).seed(3).shuffle()
    return iter(places.map(lambda at: BATCHES[at]).to_iter_dataset())


@pytest.mark.parametrize("source", [lambda: iter(BATCHES), Stateful, grain_loader])
def test_every_element_once_where_it_is_read_and_on_from_a_position(source: Any):
    parallel = autopar.parallelize(step, planner=DataParallel())
    total, plain = jnp.float32(0), jnp.float32(0)
    batches = parallel.batches(source(), prefetch=3)
    taken = [next(batches), next(batches)]
    position = batches.position  # three more have been fetched by now, perhaps
    assert position in (2, {"at": 2}, {"next_index": 2})
    rest = list(parallel.batches(source(), position=position))
    for batch in [*taken, *rest]:
        total = parallel(total, batch)
    for batch in BATCHES:
        plain = step(plain, batch)
    assert total == plain
    placed = list(parallel.batches(source(), prefetch=1))
    assert len(placed) == len(BATCHES)
    (_, where), _ = parallel.placement(total, BATCHES[0])
    assert placed[-1]["x"].sharding == where["x"].sharding
    assert len(placed[-1]["x"].sharding.device_set) == 8
    own = list(parallel.batches(source(), own_rows=True))
    assert len(own) == len(BATCHES)
    assert all(isinstance(b["x"], jax.Array) and b["x"].shape == (8, 2) for b in own)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "whole"])
def test_processes_go_on_at_the_element_where_others_have_stopped(tmp_path: Path, kind: str):
    """Two processes read Grain's data sets, their own rows or whole batches, and stop with batches fetched ahead."""
    at_once = launch(HERE / "feeding.py", str(tmp_path / "a"), kind, "12")
    for until in ("5", "6", "12"):
        done = launch(HERE / "feeding.py", str(tmp_path / "b"), kind, until)
        assert done.returncode == 0, done.stdout + done.stderr
    expected = [line for line in lines(at_once, 0) if line.startswith("total")]
    assert len(expected) == 1
    assert [line for line in lines(done, 0) if line.startswith("total")] == expected
    assert [line for line in lines(done, 1) if line.startswith("total")] == expected
    assert "from 6" in lines(done, 1)


def test_an_error_of_the_source_is_raised_where_its_element_is_due():
    def source() -> Any:
        yield BATCHES[0]
        raise OSError("the disk is gone")

    batches = autopar.parallelize(step).batches(source())
    assert next(batches)["weight"] == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": "2"}, {"position": -1}, {"position": {"at": 3}}, {"position": 1.5}]
)
def test_an_option_that_is_no_count_is_named(options: dict[str, Any]):
    with pytest.raises(autopar.ArgumentError, match=rf"batches\({next(iter(options))}=.*whole number"):
        autopar.parallelize(step).batches(BATCHES, **options)


@dataclass
class Chip:
    """A device as JAX numbers it on a TPU's torus: two rows of four chips, of which each host has a square."""

    id: int
    process_index: int


def test_a_source_without_elements_is_named():
    nothing: Any = None
    with pytest.raises(autopar.ArgumentError, match=r"batches\(None\): its elements are batches"):
        autopar.parallelize(step).batches(nothing)


def test_the_devices_of_a_process_stand_together():
    chips = [Chip(number, number // 2 % 2) for number in range(8)]
    rows = [[chip.id for chip in row] for row in by_process(chips).tolist()]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]


WAITING = """
import queue
import jax.numpy as jnp
from autopar.training import Batches, batches

batches._LEAVE_SECONDS = 0.1
elements = queue.Queue()
for number in range(2):
    elements.put(number)
waiting = Batches(iter(elements.get, None), lambda batch: None, 2)
computing = Batches((jnp.ones((64, 64)) @ jnp.ones((64, 64)) for _ in iter(int, 1)), lambda batch: None, 2)
print(next(waiting), next(computing).sum())
"""


def test_a_program_ends_whose_source_waits_for_ever(tmp_path: Path):
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, str(tmp_path / "waiting.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 262144.0\n"


class Counted:
    """A source that counts what it is asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.asked = threading.Condition()

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        with self.asked:
            self.count += 1
            self.asked.notify_all()
        return self.count

    def await_count(self, count: int) -> None:
        with self.asked:
            assert self.asked.wait_for(lambda: self.count >= count, 20)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_no_more_than_asked_for_is_fetched_ahead_and_none_after_closing(is_dropped: bool):
    source = Counted()
    batches = Batches(source, lambda batch: None, 3)
    source.await_count(3)
    assert [next(batches), next(batches)] == [1, 2]
    source.await_count(5)
    reader = batches._reader
    if is_dropped:
        del batches
    else:
        batches.close()
        assert next(batches, "the end") == "the end"
    reader.join(20)
    assert not reader.is_alive()
    assert source.count == 5


def test_an_error_is_raised_behind_all_that_was_fetched_before_and_again():
    def source() -> Any:
        yield from range(4)
        raise OSError("the disk is gone")

    batches = Batches(source(), lambda batch: None, 6)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
    assert batches.position == 4
    ended = Batches(range(4), lambda batch: None, 6)
    assert [list(ended), list(ended)] == [[0, 1, 2, 3], []]


@pytest.mark.parametrize("is_slow", [False, True])
def test_placed_elements_are_the_same_ones_however_fast_they_are_fetched(is_slow: bool):
    """Of several processes each would else hand another kind of array to the step, which is refused."""
    known, goes_on = list[Any](), threading.Event()

    def source() -> Any:
        yield BATCHES[0]
        if is_slow:
            goes_on.wait()
        yield from BATCHES[1:]

    batches = Batches(source(), lambda batch: known[0] if known else None, 3)
    placed = [next(batches)]
    known.append([SingleDeviceSharding(jax.devices()[1])] * 2)
    goes_on.set()
    placed += batches
    assert [isinstance(batch["x"], jax.Array) for batch in placed] == [False] + [True] * 5


def test_the_last_batch_may_be_smaller():
    cut, whole = (NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec(axes)) for axes in ("x", None))
    sizes = [16, 16, 16, 13, 16, 13, 5]
    source = [{"x": np.full((n, 2), float(n), np.float32)} for n in sizes]
    known = {16: [cut], 13: [whole]}
    batches = Batches(source, lambda batch: known.get(len(batch["x"])), 2)
    for batch, given in zip(batches, source, strict=True):
        np.testing.assert_array_equal(batch["x"], given["x"])
        rows = len(given["x"])
        assert rows == 5 or batch["x"].sharding == known[rows][0]
    assert batches.position == len(sizes)


def test_a_source_that_ends_before_the_position_is_an_error_and_no_end():
    parallel = autopar.parallelize(lambda w, x: w + x.sum())
    assert list(parallel.batches(iter([1, 2]), position=2)) == []
    with pytest.raises(autopar.ArgumentError, match=r"position=5\): the source ends after 2 of the elements"):
        next(parallel.batches(iter([1, 2]), position=5))
