"""A line a step: for people, as JSON, or as the caller's own writer takes it."""

from __future__ import annotations

import json
import socket
from typing import Any

import jax.numpy as jnp
import pytest

from autopar import StepLog
from autopar.errors import ArgumentError, DeviceError


def test_lines_for_people_and_machines(capsys: pytest.CaptureFixture[str]):
    log, kept = StepLog(), list[Any]()
    log(1, loss=jnp.float32(0.5), rows=8)
    log(2, loss=float("nan"))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"step 1  process 0 on {socket.gethostname()}  first  loss 0.5  rows 8"
    assert second.startswith("step 2 ")
    assert second.endswith(" s  loss nan")
    StepLog(write=StepLog.as_json)(3, loss=jnp.float32("inf"), rows=8)
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["process"], record["loss"], record["rows"]) == (3, 0, "inf", 8)
    own = StepLog(write=kept.append)
    own(4, loss=1.0)
    own(5, loss=2.0)
    assert [record["loss"] for record in kept] == [1.0, 2.0]
    assert kept[0]["seconds"] is None
    assert kept[1]["seconds"] > 0


def test_values_that_are_not_finite_are_an_error_with_finite():
    kept: list[Any] = []
    log = StepLog(write=kept.append, finite=True)
    log(1, loss=1.0)
    with pytest.raises(DeviceError, match=r"loss of step 2 on process 0, host .*: it is nan"):
        log(2, loss=jnp.float32("nan"))
    assert len(kept) == 2  # it is written all the same


def test_an_array_of_several_elements_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"log\(loss=\): it is an array of 4 elements"):
        StepLog(write=lambda record: None)(1, loss=jnp.ones(4))


@pytest.mark.parametrize("name", ["seconds", "process", "host"])
def test_a_name_that_each_record_has_is_refused(name: str):
    with pytest.raises(ArgumentError, match=rf"log\({name}=\): each record has its own value of that name"):
        StepLog(write=lambda record: None)(1, **{name: 3})
