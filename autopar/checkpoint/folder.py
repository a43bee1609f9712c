"""The folder of a run's checkpoints, by step."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from autopar.checkpoint.manifest import DRAFT, NAME, Manifest, RefusedError
from autopar.errors import ArgumentError, explain

_NAME = re.compile(r"step-(\d{8,})")


def check_folder(argument: str, path: Path) -> None:
    """Raises ArgumentError, which names the argument, where a file is in the place of a folder of checkpoints."""
    if path.exists() and not path.is_dir():
        rule = "it is a file, and checkpoints are in a folder"
        raise ArgumentError(explain(argument, rule, "", "name a folder, which need not exist"))


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

    def begin(self, step: int) -> None:
        """Empties the folder of a step, which is unfinished from here on: half of a checkpoint is none."""
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

    def prune(self, keep: int) -> None:
        """Deletes all but the last `keep` checkpoints, with what a run left that ended while it wrote."""
        good = 0
        for step in self.steps():
            is_good = good < keep and not self.reason(step)
            good += is_good
            if good and not is_good:
                self.delete(step)
