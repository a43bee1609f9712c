"""Batches that are fetched and put on their devices ahead of the steps that take them."""

from __future__ import annotations

import atexit
import functools
import itertools
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar.distributed import placed
from autopar.errors import ArgumentError, explain
from autopar.frontend import types_of
from autopar.jax_compat import Device

_END = object()

_Targets = Mapping[Hashable, Sequence[Sharding]]
"""The shardings in which elements of a tree and types are read."""

_LEAVE_SECONDS = 5.0
"""Seconds that the end of a program waits for elements that are being fetched: a source may block for ever."""


@dataclass(frozen=True, slots=True)
class _Element:
    """An element with the position after it; or the end, or the error, of the source."""

    batch: Any = _END
    position: Any = None
    is_placed: bool = False
    error: BaseException | None = None


class _Reader(threading.Thread):
    """The thread that fetches elements of a source. It has no reference to its `Batches`, which may be dropped.

    It is a daemon, so no program waits for it for ever. But Python's end would tear it out of a call into JAX, which
    aborts the process: so the end waits for it a while.
    """

    def __init__(self, source: Any, position: Any, prefetch: int, *, has_state: bool, own_rows: bool) -> None:
        super().__init__(name="autopar batches", daemon=True)
        self._source, self._position = source, position
        self._has_state, self._own_rows = has_state, own_rows
        self._requests: deque[_Targets] = deque([{}] * prefetch)
        self._ahead: deque[_Element] = deque()
        self._is_closed = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Fetches an element for each one that is asked for, until the end, an error or `close`."""
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._requests)
                if self._is_closed:
                    return
                targets = self._requests.popleft()
            element = self._fetched(targets)
            with self._changed:
                self._ahead.append(element)
                self._changed.notify_all()
            is_last = element.batch is _END
            del element  # it is the consumer's, while this waits

    def first(self) -> _Element:
        """The next element, once it is there; it stays until `take`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ahead or self._is_closed)
            return _Element() if self._is_closed else self._ahead[0]

    def take(self, targets: _Targets) -> None:
        """Removes the next element, and asks for one more, in the shardings for its types.

        So each process has the same elements in these, however fast it fetches.
        """
        with self._changed:
            self._ahead.popleft()
            self._requests.append(targets)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends this thread as soon as the source returns the element that it was asked for."""
        with self._changed:
            self._is_closed = True
            self._ahead.clear()
            self._changed.notify_all()

    def _fetched(self, targets: _Targets) -> _Element:
        """The next element and the position after it."""
        try:
            batch = next(self._source, _END)
            if batch is _END:
                return _Element()
            self._position = self._source.get_state() if self._has_state else self._position + 1
            if self._own_rows:
                return _Element(jax.tree.map(_joined, batch), self._position, is_placed=True)
            known = targets.get(_types_of(batch))
            return _Element(_placed(batch, known), self._position, is_placed=known is not None)
        except BaseException as error:  # of whatever kind: it is raised where the element is due
            return _Element(error=error)


@functools.cache
def _end_in_order() -> None:
    """Makes the end of the program wait a while for its readers."""

    def end() -> None:
        readers = [thread for thread in threading.enumerate() if isinstance(thread, _Reader)]
        for reader in readers:
            reader.close()
        until = time.monotonic() + _LEAVE_SECONDS
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))

    atexit.register(end)


class Batches(Iterator[Any]):
    """The elements of an iterable as arrays on the devices, some of them fetched ahead by a thread.

    `position` is where another iteration continues after the element that was taken last: a count of elements, or the
    state of an iterator that has one (`get_state` and `set_state`, as Grain's). It is what `Checkpoints.save` takes.
    """

    def __init__(
        self,
        source: Iterable[Any],
        shardings: Callable[[Any], list[Sharding] | None],
        prefetch: int,
        position: Any = None,
        *,
        own_rows: bool = False,
    ) -> None:
        prefetch = _count("prefetch", prefetch, 1, "write, say, 2")
        if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            remedy = "pass, say, a list, a generator or a data loader"
            raise ArgumentError(
                explain(f"batches({source!r:.60})", "its elements are batches, and it has none", "", remedy)
            )
        iterator: Any = iter(source)
        has_state = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        if has_state and position is not None:
            iterator.set_state(position)
        elif position is not None:
            remedy = "pass what batches of such a source had: without get_state and set_state they are counted"
            iterator = _from(iterator, _count("position", position, 0, remedy))
        self.position = iterator.get_state() if has_state else position or 0
        self._shardings = shardings
        self._targets: _Targets = {}
        self._reader = _Reader(iterator, self.position, prefetch, has_state=has_state, own_rows=own_rows)
        self._close = weakref.finalize(self, self._reader.close)
        _end_in_order()
        self._reader.start()

    def __next__(self) -> Any:
        element = self._reader.first()
        if element.error is not None:
            raise element.error
        if element.batch is _END:
            raise StopIteration
        batch = element.batch
        if not element.is_placed:  # in this thread: processes ask each other where it is read
            types = _types_of(batch)
            if types not in self._targets and (shardings := self._shardings(batch)) is not None:
                self._targets = {**self._targets, types: shardings}
            batch = _placed(batch, self._targets.get(types))
        self._reader.take(self._targets)
        self.position = element.position
        return batch

    def close(self) -> None:
        """Ends the fetching: no further element is asked for or returned."""
        self._close()


def _count(name: str, value: Any, least: int, remedy: str) -> int:
    """An option as a whole number from `least`. Raises ArgumentError for anything else."""
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if count < least:
        rule = f"should be a whole number from {least}"
        raise ArgumentError(explain(f"batches({name}={value!r:.60})", rule, "", remedy))
    return count


def _from(source: Iterator[Any], position: int) -> Iterator[Any]:
    """The elements from a position on. Raises ArgumentError where there are fewer before it: a run would end there."""
    passed = sum(1 for _ in itertools.islice(source, position))
    if passed < position:
        rule = f"the source ends after {passed:,} of the elements that are to be passed over"
        remedy = "pass a source that goes as far, or position=0 to begin anew"
        raise ArgumentError(explain(f"batches(position={position})", rule, "", remedy))
    yield from source


def _types_of(batch: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(batch)
    return tree, types_of(leaves)


def _placed(batch: Any, targets: Sequence[Sharding] | None) -> Any:
    """An element with its leaves in these shardings; unchanged where they are not known yet."""
    if targets is None:
        return batch
    leaves, tree = jax.tree.flatten(batch)
    return jax.tree.unflatten(tree, [placed(leaf, target) for leaf, target in zip(leaves, targets, strict=True)])


def _joined(rows: Any) -> Any:
    """The global array made of the rows of every process; a number, which has no rows, unchanged."""
    if not np.ndim(rows):
        return rows
    mesh = Mesh(by_process(jax.devices()), ("process", "device"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))


def by_process(devices: Sequence[Device]) -> np.ndarray:
    """The devices of each process in a row [processes, devices of each].

    JAX lists them by number, and on a TPU's torus the numbers of one process do not follow each other.
    """
    processes = {device.process_index for device in devices}
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.asarray(ordered, dtype=object).reshape(len(processes), -1)
