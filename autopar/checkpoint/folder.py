"""The folder of a run's checkpoints, by step."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from autopar.checkpoint.manifest import DRAFT, NAME, Manifest, RefusedError
from autopar.errors import ArgumentError, explain

_BEFORE = ".before"
"""The suffix of a checkpoint's folder while its step is saved anew, which stays if that was not finished."""

_NAME = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_BEFORE)})?")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with a folder for each step, some of which may be damaged or unfinished."""

    path: Path

    def of(self, step: int) -> Path:
        """The folder of a step."""
        return self.path / f"step-{step:08d}"

    def place(self, step: int) -> Path:
        """The folder that has a step's checkpoint: the earlier one until the step has been saved anew."""
        folder, before = self.of(step), self._before(step)
        return before if before.is_dir() and not folder.joinpath(NAME).exists() else folder

    def steps(self) -> list[int]:
        """The steps, the last one first."""
        folders = [path for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []
        names = [_NAME.fullmatch(path.name) for path in folders]
        return sorted({int(name[1]) for name in names if name}, reverse=True)

    def reason(self, step: int) -> str:
        """The reason why the folder of a step is no checkpoint; empty if it is one, as far as its manifest says."""
        try:
            Manifest.read(self.place(step))
        except RefusedError as error:
            return str(error)
        return ""

    def is_unfinished(self, step: int) -> bool:
        """Whether a run began to write or delete a step, and did not finish."""
        names = {path.name for path in self.place(step).iterdir()}
        return NAME not in names and (DRAFT in names or not names)

    def candidates(self) -> list[tuple[int, str, bool]]:
        """(step, reason it is no checkpoint or empty, whether it is unfinished), the last step first."""
        return [(step, self.reason(step), self.is_unfinished(step)) for step in self.steps()]

    def is_foreign(self, step: int) -> bool:
        """Whether the contents of a step's folder were not written as a checkpoint: it has no manifest, nor a draft of
        one.
        """
        folder = self.place(step)
        return folder.is_dir() and not self.is_unfinished(step) and not folder.joinpath(NAME).exists()

    def check_free(self, step: int) -> None:
        """Raises ArgumentError if the folder of a step has other contents than a checkpoint's."""
        if self.is_foreign(step):
            rule = f"{self.of(step)} is not empty, and has neither {NAME} nor {DRAFT}, as checkpoints have"
            remedy = "move it away, or choose another folder for the checkpoints"
            raise ArgumentError(explain(f"save(step={step})", rule, "", remedy))

    def later(self, step: int) -> list[int]:
        """The later steps of which there is a checkpoint, the last one first."""
        return [other for other in self.steps() if other > step and not self.reason(other)]

    def begin(self, step: int) -> None:
        """Empties the folder of a step, which is unfinished until its manifest is written.

        A good checkpoint that is there is put aside, and whatever runs left unfinished is deleted: that may be what
        fills the disk. Raises ArgumentError if the folder has other contents than a checkpoint's.
        """
        self.check_free(step)
        for other in self.steps():
            if other != step and self.is_unfinished(other):
                self.delete(other)
        folder, before = self.of(step), self._before(step)
        if folder.joinpath(NAME).exists() and not self.reason(step):
            _delete(before)
            folder.rename(before)
        folder.mkdir(parents=True, exist_ok=True)
        _empty(folder)

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, whatever state it is in."""
        _delete(self._before(step))
        _delete(self.of(step))

    def prune(self, keep: int, saved: int) -> None:
        """Deletes all but the last `keep` checkpoints and that of step `saved`, and whatever a run left unfinished.

        Folders that are later than all good checkpoints stay, as do those that are no checkpoints.
        """
        _delete(self._before(saved))
        good = 0
        for step in self.steps():
            is_good = good < keep and not self.reason(step)
            good += is_good
            if good and not is_good and step != saved and not self.is_foreign(step):
                self.delete(step)

    def _before(self, step: int) -> Path:
        folder = self.of(step)
        return folder.with_name(f"{folder.name}{_BEFORE}")


def _empty(folder: Path) -> None:
    """Deletes everything in a folder but a draft of the manifest."""
    folder.joinpath(DRAFT).touch()
    folder.joinpath(NAME).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != DRAFT:
            path.unlink()


def _delete(folder: Path) -> None:
    """Deletes a folder, if there is one, which is unfinished meanwhile."""
    if folder.is_dir():
        _empty(folder)
        shutil.rmtree(folder)
