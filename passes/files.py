"""Files written atomically: a full disk or a signal that ends the process never destroys what was there before."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | os.PathLike[str], contents: bytes) -> None:
    """Writes a file whole: a reader sees the old one or all of the new one. Raises OSError where it cannot be written.

    A link stays one, to a file that is new. What is no file, such as a pipe or /dev/stdout, is written as it is.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(contents)
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(contents)
        part.replace(target)
    finally:
        with suppress(OSError):  # what is in the way of the file may be in the way of this
            part.unlink(missing_ok=True)
