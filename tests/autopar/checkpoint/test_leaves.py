"""Leaves of a saved state: every kind that is allowed comes back as it was, and others are refused before saving."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import autopar
from autopar import CheckpointError
from autopar.checkpoint import background
from tests.closeness import assert_same_bits


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("text", "a str"),
        (b"bytes", "a bytes"),
        (print, "a builtin_function_or_method"),
        (np.array(["text"]), "a ndarray of dtype <U4"),
        (np.array([None]), "a ndarray of dtype object"),
        (np.ones(3, ">f4"), "a ndarray of dtype >f4"),
        (np.ones(3, np.longdouble), "a ndarray of dtype float128"),
        (np.ones(3, jnp.uint4), "a ndarray of dtype uint4"),
        (10**30, "a int of dtype object"),
        (jax.ShapeDtypeStruct((2,), np.float32), "a ShapeDtypeStruct"),
    ],
)
def test_a_leaf_that_could_not_be_restored_is_refused_by_its_path(tmp_path: Path, leaf: Any, words: str):
    with autopar.Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(autopar.ArgumentError, match=rf"save\(state\['a'\]\[1\]\): it is {words}"):
            checkpoints.save(1, {"a": [jnp.ones(3), leaf], "n": None})
        assert checkpoints.steps() == []


def test_scalars_of_libraries_come_back_as_such(tmp_path: Path):
    state = [
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        np.asarray(1.5, jnp.bfloat16)[()],
        np.complex128(1j),
        np.ones(()),
        3,
        0.5,
    ]
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, position=(1, (2, 3)))
        saved = checkpoints.restore(state)
    assert saved is not None
    assert_same_bits(saved.state, state)
    assert {saved.state[1]: saved.position} == {3: [1, [2, 3]]}


IMPLEMENTATIONS = ("threefry2x32", "rbg")
KEYS = [jax.random.key(3), *(jax.random.split(jax.random.key(0, impl=impl), (2, 3)) for impl in IMPLEMENTATIONS)]


@pytest.mark.parametrize("state", [{}, None, jnp.ones((0, 3)), {"keys": KEYS}], ids=["{}", "None", "empty", "keys"])
def test_empty_states_and_arrays_of_keys_come_back(tmp_path: Path, state: Any):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        saved = checkpoints.restore(state)
    assert saved is not None
    assert_same_bits(saved.state, state)


def test_leaves_that_would_be_written_in_one_place_are_refused(tmp_path: Path):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(autopar.ArgumentError, match=r"state\['a'\]\['b'\]\) and save\(state\['a.b'\]\)"):
            checkpoints.save(1, {"a": {"b": jnp.ones(3)}, "a.b": jnp.zeros(3)})
        assert checkpoints.steps() == []


def test_a_deleted_or_traced_leaf_is_refused_by_its_path(tmp_path: Path):
    donated = jnp.ones(3)
    donated.delete()
    with autopar.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(autopar.ArgumentError, match=r"save\(state\['a'\]\): it was deleted, or donated"):
            checkpoints.save(1, {"a": donated})
        with pytest.raises(autopar.ArgumentError, match=r"save\(state\['a'\]\): it is a traced value"):
            jax.jit(lambda x: checkpoints.save(1, {"a": x}))(1.0)
        assert checkpoints.steps() == []


@pytest.mark.parametrize(
    "beside",
    [{"rng": np.random.default_rng()}, {"rng": [jax.random.key(0)]}, {"rng": "3"}, {"plan": "plan.json"}],
    ids=["generator", "keys in a list", "text", "path of a plan"],
)
def test_a_position_key_or_plan_that_is_none_is_refused_by_its_name(tmp_path: Path, beside: Any):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(autopar.ArgumentError, match=f"{next(iter(beside))}="):
            checkpoints.save(1, {"a": 1}, **beside)
        assert checkpoints.steps() == []


@pytest.mark.parametrize("path", [5, b"run", ["run"]])
def test_a_path_of_no_folder_is_refused(path: Any):
    with pytest.raises(autopar.ArgumentError, match="Checkpoints\\("):
        autopar.Checkpoints(path)


def test_a_state_comes_back_though_its_plan_is_of_another_autopar(tmp_path: Path):
    @dataclass
    class Foreign:
        def to_json(self) -> dict[str, object]:
            return {"schema": 99, "fingerprint": "0"}

    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3)}, position=7, plan=Foreign())  # pyright: ignore[reportArgumentType]
        with pytest.warns(UserWarning, match="step-00000001: the state is restored without the plan beside it: .*99"):
            saved = checkpoints.restore({"a": jnp.zeros(3)})
    assert saved is not None
    assert (saved.position, saved.plan) == (7, None)
    assert_same_bits(saved.state, {"a": jnp.ones(3)})


def test_a_save_goes_on_where_its_thread_may_not_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(background, "_background", functools.cache(background._background.__wrapped__))
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3)})
    assert checkpoints.steps() == [1]


STRUCT = jax.ShapeDtypeStruct((), np.int32, sharding=SingleDeviceSharding(jax.devices()[1]), weak_type=True)


@pytest.mark.parametrize(
    "like", [3, np.int64(3), np.int32(3), np.array(3), jnp.int32(3), jnp.asarray(3), STRUCT], ids=str
)
@pytest.mark.parametrize("saved", [7, np.int64(7), jnp.int32(7)], ids=str)
def test_a_number_is_what_the_program_makes_of_it(tmp_path: Path, saved: Any, like: Any):
    """As the count of Flax's `TrainState`: a Python int before the first step, and an array behind it."""
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"count": saved, "w": jnp.ones(3)})
        restored = checkpoints.restore({"count": like, "w": jnp.ones(3)})
    assert restored is not None
    count = restored.state["count"]
    assert count == 7
    assert type(count) is (type(jnp.ones(3)) if like is STRUCT else type(like))
    for name in ("dtype", "weak_type"):
        assert getattr(count, name, None) == getattr(like, name, None)
    assert like is not STRUCT or count.sharding == STRUCT.sharding


def test_floats_are_narrowed_and_other_numbers_are_another_programs(tmp_path: Path):
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"rate": 0.1, "seen": 2**40})
        restored = checkpoints.restore({"rate": jnp.float32(0), "seen": 0})
        assert restored is not None
        assert restored.state == {"rate": np.float32(0.1), "seen": 2**40}
        with (
            pytest.warns(UserWarning, match=r"the number 1099511627776, which is too large for int32"),
            pytest.raises(CheckpointError),
        ):
            checkpoints.restore({"rate": 0.0, "seen": jnp.int32(0)})
        for like in ({"rate": 1, "seen": 0}, {"rate": np.float16(0), "seen": 0}, {"rate": 0.0, "seen": [0]}):
            with pytest.warns(UserWarning, match="another program"), pytest.raises(CheckpointError):
                checkpoints.restore(like)
