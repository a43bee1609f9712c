"""Batches on their way to the devices before a step asks for them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar.distributed import placed
from autopar.errors import ArgumentError, explain

_END = object()


class Batches(Iterator[Any]):
    """The elements of an iterable as arrays on the devices, of which some are fetched ahead in a thread.

    `position` is where another iteration goes on behind the element that was taken last: a count of elements, or the
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
        if prefetch < 1:
            rule = "should be a whole number from 1"
            raise ArgumentError(explain(f"batches(prefetch={prefetch})", rule, "", "write, say, 2"))
        iterator: Any = iter(source)
        self._has_state = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        if self._has_state and position is not None:
            iterator.set_state(position)
        elif position:
            iterator = itertools.islice(iterator, position, None)
        self.position = iterator.get_state() if self._has_state else position or 0
        self._source, self._count = iterator, self.position
        self._shardings, self._own_rows = shardings, own_rows
        self._targets: list[Sharding] | None = None
        self._thread = ThreadPoolExecutor(1, "autopar batches")
        self._ahead: deque[Future[tuple[Any, Any]]] = deque(self._thread.submit(self._fetch) for _ in range(prefetch))

    def __next__(self) -> Any:
        batch, position = self._ahead[0].result()
        if batch is _END:
            raise StopIteration
        self._ahead.popleft()
        if self._targets is None and not self._own_rows:  # in this thread: processes ask each other where it is read
            self._targets = self._shardings(batch)
        self._ahead.append(self._thread.submit(self._fetch))
        self.position = position
        return batch

    def _fetch(self) -> tuple[Any, Any]:
        """The next element and where to go on behind it."""
        batch = next(self._source, _END)
        if batch is _END:
            return _END, None
        self._count = self._source.get_state() if self._has_state else self._count + 1
        leaves, tree = jax.tree.flatten(batch)
        if self._own_rows:
            leaves = list(map(_joined, leaves))
        elif self._targets is not None:
            leaves = [placed(leaf, target) for leaf, target in zip(leaves, self._targets, strict=True)]
        return jax.tree.unflatten(tree, leaves), self._count


def _joined(rows: Any) -> Any:
    """The global array of which each process has given its rows; a number, which has none, as it is."""
    if not np.ndim(rows):
        return rows
    devices = np.asarray(jax.devices(), dtype=object).reshape(jax.process_count(), -1)
    mesh = Mesh(devices, ("process", "device"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))
