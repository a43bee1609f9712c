"""Nothing that was saved is lost where the next save does not come to its end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import autopar
from autopar.checkpoint.folder import Folder
from tests.sample import each

STATE = {"w": jnp.arange(4.0)}


def ends(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def number_of(saved: Any) -> tuple[int, int]:
    assert saved is not None
    assert saved.state["w"].tolist() == [0, 1, 2, 3]
    return saved.step, saved.position


@pytest.mark.parametrize(
    ("at", "steps"), each(("arrays.Arrays.save", "manifest.Manifest.write", "folder._empty"), ((5,), (4, 5)))
)
def test_a_step_that_is_saved_again_stays_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, steps: tuple[int, ...]
):
    """The state at a run's end is often saved a second time, under the number of the last save in its loop."""
    checkpoints = autopar.Checkpoints(tmp_path, keep=1)
    for step in steps:
        checkpoints.save(step, STATE, position=1)
    checkpoints.wait()
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(f"autopar.checkpoint.{at}", ends)
            checkpoints.save(5, STATE, position=2)
            with pytest.raises(autopar.CheckpointError, match=r"step-00000005: .*No space left"):
                checkpoints.wait()
        assert checkpoints.steps() == [5]
        assert number_of(checkpoints.restore(STATE)) == (5, 1)
    checkpoints.save(5, STATE, position=3)
    assert number_of(checkpoints.restore(STATE)) == (5, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_an_unfinished_checkpoint_is_deleted_before_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half of a checkpoint may be what fills the disk."""
    checkpoints = autopar.Checkpoints(tmp_path)
    seen: list[list[int]] = []
    for step in (1, 2, 3):
        with monkeypatch.context() as patched:
            patched.setattr("autopar.checkpoint.arrays.Arrays.save", lambda *_: seen.append(checkpoints.steps()))
            patched.setattr("autopar.checkpoint.manifest.Manifest.write", ends)
            checkpoints.save(step, STATE)
            with pytest.raises(autopar.CheckpointError, match="disk is not full"):
                checkpoints.wait()
    assert seen == [[1], [2], [3]]


def test_a_checkpoint_from_before_goes_with_its_step(tmp_path: Path):
    checkpoints = autopar.Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    checkpoints.wait()
    folder = Folder(tmp_path)
    folder.begin(1)
    assert (folder.place(1).name, folder.steps()) == ("step-00000001.before", [1])
    folder.delete(1)
    assert (folder.steps(), list(tmp_path.iterdir())) == ([], [])
