"""The wheel: built from the source distribution, installed in a folder of its own, and run from there."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="needs build, which .[dev] brings")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.mark.slow
def test_the_wheel_is_whole_and_runs_where_the_checkout_is_not(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    shipped = {name for name in names if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "autopar", "passes", cwd=ROOT).split()
    assert shipped == set(tracked)
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", "site", str(wheel), cwd=tmp_path)
    there = {"PYTHONPATH": str(tmp_path / "site")}
    python = [sys.executable, "-c"]
    places = run(*python, "import autopar, passes; print(autopar.__file__, passes.__file__)", cwd=tmp_path, **there)
    assert all(place.startswith(str(tmp_path)) for place in places.split())
    command = [sys.executable, "-m", "autopar"]
    assert run(*command, "--version", cwd=tmp_path, **there).startswith("autopar ")
    run(*command, "report", str(ROOT / "tests/golden/plan.json"), "-o", "plan.html", cwd=tmp_path, **there)
    assert "</html>" in (tmp_path / "plan.html").read_text()


@pytest.mark.slow
def test_the_source_distribution_has_what_people_read(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"} <= names
    assert {"autopar/py.typed", "passes/py.typed", "passes/page/assets/page.html"} <= names


def test_the_citation_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
