"""A second process that searches near the best choice while the first one sets prices."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np

from benchmarks.iopddl.graph_problem import Floats, GraphProblem, Indices
from benchmarks.iopddl.local_search import LocalSearch

_TURN_SECONDS = 1.0
_GOODBYE_SECONDS = 2.0


class Companion:
    """Runs while its `with` block does; `exchange` says what both found.

    The process starts afresh (spawn), so a script that plans at import needs `if __name__ == "__main__"` around it.
    """

    def __init__(self, problem: GraphProblem, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=_work, args=(problem, seed, there), daemon=True)
        self.process.start()
        there.close()
        self.is_waiting = False

    def exchange(self, best: Indices, prices: Floats, patience: float = 0.0) -> Indices | None:
        """The answer to the last exchange if it is there within `patience` seconds, and then the next question.

        Only one of both sides ever sends: a choice and prices can be larger than what a pipe holds.
        """
        received: Indices | None = None
        with suppress(EOFError, OSError):
            if self.is_waiting and not self.here.poll(patience):
                return None
            if self.is_waiting:
                received = self.here.recv()
            self.here.send((best, prices.astype(np.float32)))
            self.is_waiting = True
        return received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.here.close()
        self.process.terminate()
        self.process.join(_GOODBYE_SECONDS)


def _work(problem: GraphProblem, seed: int, there: Connection) -> None:
    search = LocalSearch(problem, seed)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            best, prices = there.recv()
            search.offer(best)
            there.send(search.best)
            while not there.poll():
                if search.fits():
                    search.search(prices, time.monotonic() + _TURN_SECONDS)
                else:
                    search.offer(search.optimum(search.land.priced(prices), search.best))
