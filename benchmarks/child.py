"""Calls of functions in another process, so that a call that kills its process is an exception here and no more."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self


class CrashError(Exception):
    """A call that raised, took too long, or took its process with it."""


class Child:
    """A process that calls one function after another; one that dies is replaced."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """The result of `function(*arguments)`, called in the process, which is started if none is running.

        Raises CrashError, with the reason, if the call raises, ends its process or takes longer than `seconds`.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
        self._pipe.send((function, arguments))
        try:
            if not self._pipe.poll(seconds):
                self.end()
                raise CrashError(f"no answer within {seconds:.0f} s")
            returned, result = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join()
            code = self._process.exitcode
            self.end()
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise CrashError(f"the process ended: {how}") from error
        if not returned:
            raise CrashError(result)
        return result


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            reply = True, function(*arguments)
        except Exception:  # whatever it is, the caller raises it as a crash
            reply = False, traceback.format_exc()
        pipe.send(reply)
