"""The manifest of a checkpoint: it is written last, and says what the checkpoint must contain."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.distributed import digest_of
from autopar.errors import PlanningError

NAME, DRAFT, STATE = "autopar.json", "autopar.json.draft", "state"
"""The manifest, its draft while a checkpoint is written, and the folder with the arrays."""

FORMAT = "autopar checkpoint 1"


class CheckpointError(PlanningError, RuntimeError):
    """The error of a checkpoint that cannot be written, or where none can be read."""

    page = "how-to/checkpoints"


class RefusedError(Exception):
    """The reason why a checkpoint is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array of the state: its type and digest."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a manifest: arrays by their paths, files with their bytes, and what is saved beside them."""

    step: int
    leaves: Mapping[str, Leaf]
    files: Mapping[str, int]
    position: Any = None
    rng: Any = None
    plan: Any = None

    def write(self, folder: Path) -> None:
        """Makes the folder a checkpoint, atomically."""
        content = json.dumps(asdict(self), sort_keys=True)
        text = json.dumps({"format": FORMAT, "digest": digest_of(content), "checkpoint": json.loads(content)})
        draft = folder / DRAFT
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / NAME)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder whose files are all there. Raises RefusedError, with the reason, if it is no
        checkpoint.
        """
        try:
            text = (folder / NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RefusedError(f"there is no {NAME}: it is unfinished, or another program's") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedError(f"{NAME} cannot be read: {error}") from error
        try:
            page = json.loads(text)
            fields = page["checkpoint"]
            if page["format"] != FORMAT:
                raise RefusedError(f"{NAME} is {page['format']!r:.60}, and this reads {FORMAT!r}")
            if page["digest"] != digest_of(json.dumps(fields, sort_keys=True)):
                raise RefusedError(f"{NAME} is corrupted: its digest is not {page['digest']}")
            leaves = {path: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for path, leaf in fields["leaves"].items()}
            manifest = cls(**{**fields, "leaves": leaves})
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{NAME} is truncated or foreign: {error!r:.100}") from error
        manifest._check_files(folder)
        return manifest

    def _check_files(self, folder: Path) -> None:
        for name, nbytes in self.files.items():
            try:
                present = (folder / STATE / name).stat().st_size
            except OSError:
                raise RefusedError(f"{STATE}/{name} is missing") from None
            if present != nbytes:
                raise RefusedError(f"{STATE}/{name} is truncated or changed: {present} bytes in place of {nbytes}")


def files_of(folder: Path) -> dict[str, int]:
    """The bytes of each file of the arrays, by name."""
    state = folder / STATE
    return {str(path.relative_to(state)): path.stat().st_size for path in sorted(state.rglob("*")) if path.is_file()}
