"""A user's module in the current folder, for tests of commands."""

from __future__ import annotations

import sys

import pytest

from tests.autopar.tools.train_module import TRAIN


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A folder with train.py, as the current one."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Bytecode is told from its source by size and second: of a file written twice in one, the first would be run.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("train", "broken"):
        sys.modules.pop(name, None)
