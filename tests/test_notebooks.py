"""The notebooks of the documentation: each runs as a script of its cells, and shows plans as web pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

SHOWING = """
import ast, sys

def run(cell, names):
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    if hasattr(value, "_repr_html_"):
        print("HTML", "Costs by layer" in value._repr_html_())
    elif value is not None:
        print(repr(value))
"""
"""A cell as a notebook runs it: its last expression is shown, as a page where it has one."""

HTML = """
class HTML(str):
    _repr_html_ = str.__str__
sys.modules["IPython"] = sys.modules["IPython.display"] = sys
sys.HTML = HTML
"""
"""The one thing that notebooks take of IPython."""


def cells(notebook: Path, kind: str = "code") -> list[str]:
    """The sources of the cells of that kind."""
    data = json.loads(notebook.read_text(encoding="utf-8"))
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])
    return ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_can_be_read_and_hold_no_stale_outputs(notebook: Path) -> None:
    for cell in cells(notebook):
        compile(cell, notebook.name, "exec")
    data = json.loads(notebook.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in data["cells"])
    assert cells(notebook, "markdown")[0].startswith("# ")


def test_each_benchmark_model_has_a_notebook() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["gpt", "moe", "wide_resnet"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_plans_as_pages(notebook: Path, tmp_path: Path) -> None:
    ran = "".join(f"run({cell!r}, names)\n" for cell in cells(notebook))
    (tmp_path / "script.py").write_text(f"{SHOWING}{HTML}\nnames = {{'__name__': 'notebook'}}\n{ran}")
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "script.py"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert shown.returncode == 0, shown.stderr
    pages = [line for line in shown.stdout.splitlines() if line.startswith("HTML")]
    assert pages
    assert set(pages) == {"HTML True"}
