"""Files are replaced whole: a reader sees the old one or the new one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from passes.files import write_whole


@pytest.mark.parametrize("at", ["write_bytes", "replace"])
def test_an_old_file_stays_if_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def half(part: Path, contents: bytes | Path) -> int:
        with part.open("wb") as file:
            file.write(b"ha")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, at, half)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}
    write_whole(path, b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"new"}


@pytest.mark.parametrize("exists", [True, False])
def test_links_stay_links(tmp_path: Path, exists: bool):
    (tmp_path / "folder").mkdir()
    if exists:
        (tmp_path / "folder" / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(Path("folder") / "file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path):
    """It was replaced by a file, as /dev/null was for who may do so."""
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_whole(path, b"new")
    reader.join()
    assert read == [b"new"]
    assert path.is_fifo()


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"new")
