"""The page of benchmarks names every module, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = (FOLDER / "README.md").read_text()
MODULES = {path.stem for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__main__.py").exists()} - {
    "__init__"
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_page_says_what_a_module_is_for(module: str) -> None:
    assert re.search(rf"\bbenchmarks\.{module}\b|`(?:\S+ )*(?:benchmarks/)?{module}\.py`", PAGE)


def test_the_page_names_what_there_is() -> None:
    commands = set(re.findall(r"python -m benchmarks\.(\w+)", PAGE)) | set(re.findall(r"`(\w+)\.py`", PAGE))
    assert commands - {"NAME"} <= MODULES
