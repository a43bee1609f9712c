"""The folder of a run's checkpoints, by step."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from autopar.checkpoint.manifest import DRAFT, NAME, Manifest, RefusedError
from autopar.errors import ArgumentError, explain

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with a folder for each step, some of which may be damaged or unfinished."""

    path: Path

    def of(self, step: int) -> Path:
        """The folder of a step."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps, the last one first."""
        folders = [path for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []
        names = [_NAME.fullmatch(path.name) for path in folders]
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def reason(self, step: int) -> str:
        """The reason why the folder of a step is no checkpoint; empty if it is one, as far as its page says."""
        try:
            Manifest.read(self.of(step))
        except RefusedError as error:
            return str(error)
        return ""

    def is_unfinished(self, step: int) -> bool:
        """Whether a step is one that a run began to write, or to delete, and did not come to the end of."""
        names = {path.name for path in self.of(step).iterdir()}
        return NAME not in names and (DRAFT in names or not names)

    def candidates(self) -> list[tuple[int, str, bool]]:
        """The steps, the last one first, with why each is no checkpoint, if so, and whether it is unfinished."""
        return [(step, self.reason(step), self.is_unfinished(step)) for step in self.steps()]

    def is_foreign(self, step: int) -> bool:
        """Whether what is in the folder of a step was not written as a checkpoint: no page, and no draft of one."""
        folder = self.of(step)
        return folder.is_dir() and not self.is_unfinished(step) and not folder.joinpath(NAME).exists()

    def check_free(self, step: int) -> None:
        """Raises ArgumentError where the folder of a step has other contents than a checkpoint's."""
        if self.is_foreign(step):
            rule = f"{self.of(step)} is not empty, and has neither {NAME} nor {DRAFT}, as checkpoints have"
            remedy = "move it away, or choose another folder for the checkpoints"
            raise ArgumentError(explain(f"save(step={step})", rule, "", remedy))

    def later(self, step: int) -> list[int]:
        """The later steps of which there is a checkpoint, the last one first."""
        return [other for other in self.steps() if other > step and not self.reason(other)]

    def begin(self, step: int) -> None:
        """Empties the folder of a step, which is unfinished from here on: half of a checkpoint is none.

        Raises ArgumentError where it has other contents than a checkpoint's.
        """
        self.check_free(step)
        folder = self.of(step)
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(DRAFT).touch()
        folder.joinpath(NAME).unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != DRAFT:
                path.unlink()

    def delete(self, step: int) -> None:
        """Deletes what there is of a step."""
        self.begin(step)
        shutil.rmtree(self.of(step))

    def prune(self, keep: int, saved: int) -> None:
        """Deletes all but the last `keep` checkpoints and that of step `saved`, with what a run left unfinished.

        What is later than all good ones stays, as do folders that are no checkpoints.
        """
        good = 0
        for step in self.steps():
            is_good = good < keep and not self.reason(step)
            good += is_good
            if good and not is_good and step != saved and not self.is_foreign(step):
                self.delete(step)
