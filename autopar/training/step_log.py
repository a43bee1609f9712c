"""Log records of each step and process, for people or machines."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.errors import ArgumentError, DeviceError, explain

Record = Mapping[str, Any]
"""A step as plain data: `step`, `process`, `host`, `seconds` since the one before, and the values that were given."""


def as_text(record: Record) -> None:
    """Writes a record to standard output as a line of text."""
    values = "".join(f"  {name} {_short(value)}" for name, value in record.items() if name not in _HEAD)
    seconds = "first" if record["seconds"] is None else f"{record['seconds']:.3f} s"
    sys.stdout.write(f"step {record['step']}  process {record['process']} on {record['host']}  {seconds}{values}\n")
    sys.stdout.flush()


def as_json(record: Record) -> None:
    """Writes a record to standard output as a line of JSON; numbers that are not finite become text."""
    plain = {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
    sys.stdout.write(json.dumps(plain) + "\n")
    sys.stdout.flush()


_HEAD = ("step", "process", "host", "seconds")


@dataclass(slots=True, kw_only=True)
class StepLog:
    """A log that is called with each step's number and values; every process writes its own.

    `write` is called with each record: `StepLog.as_text`, `StepLog.as_json`, or a function that passes it to
    TensorBoard or any other writer. With `finite` a value that is not a finite number is an error.
    """

    write: Callable[[Record], None] = as_text
    finite: bool = False
    _last: float | None = field(default=None, init=False)

    as_text = staticmethod(as_text)
    as_json = staticmethod(as_json)

    def __call__(self, step: int, **values: Any) -> None:
        """Writes the record of a step, once its values, numbers or arrays of one, are computed.

        Raises DeviceError with `finite` for NaN and infinity, ArgumentError for arrays of several elements and for
        names that a record has already.
        """
        for name in values:
            if name in _HEAD:
                rule = "each record has its own value of that name, which this would replace"
                raise ArgumentError(explain(f"log({name}=)", rule, "", f"write, say, my_{name}="))
        numbers = {name: _number(name, value) for name, value in values.items()}
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        self._last = now
        process, host = jax.process_index(), socket.gethostname()
        self.write({"step": step, "process": process, "host": host, "seconds": seconds, **numbers})
        for name, value in numbers.items() if self.finite else ():
            if isinstance(value, float) and not math.isfinite(value):
                remedy = "restore a checkpoint from before, with a smaller learning rate or other data"
                what = f"{name} of step {step} on process {process}, host {host}"
                raise DeviceError(explain(what, f"it is {value}, and should be finite", "", remedy))


def _number(name: str, value: Any) -> Any:
    """A value as plain data; for an array its one element. Raises ArgumentError for an array of another size."""
    if not hasattr(value, "item"):
        return value
    if value.size != 1:
        rule = f"it is an array of {value.size} elements, and a record has one"
        raise ArgumentError(explain(f"log({name}=)", rule, "", f"write, say, {name}={name}.mean()"))
    return value.item()


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
