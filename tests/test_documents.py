"""README and docs: every code block runs and prints what stands there, links lead somewhere, pictures are of today."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from email.message import Message
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.tools.cli import COMMANDS
from passes import errors
from passes.errors import PlanningError
from tests.documents import DOCS, PAGES, ROOT, Runner, blocks, check_unread, in_folder
from tests.preludes import LAUNCHED, names_of

LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_can_be_read_and_their_commands_parsed(page: Path) -> None:
    assert [complaint for block in blocks(page) if (complaint := check_unread(block))] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target.partition("#") for target in LINK.findall(page.read_text()) if "://" not in target]
    assert not [path for path, _, _ in targets if path and not (page.parent / path).exists()]
    anchors = [(page.parent / path if path else page, anchor) for path, _, anchor in targets if anchor]
    assert not [anchor for target, anchor in anchors if anchor not in headings(target)]


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in LAUNCHED], ids=name_of)
def test_blocks_run_and_print_what_stands_there(page: Path, tmp_path: Path) -> None:
    with in_folder(tmp_path / "work") as runner:
        runner.names |= names_of(name_of(page))
        for result in runner.run(page):
            assert result.today == result.expected, f"{result.block.name}: python -m tests.documents {name_of(page)}"


@pytest.mark.slow
@pytest.mark.parametrize("page", LAUNCHED)
def test_blocks_run_on_several_processes(page: str, tmp_path: Path) -> None:
    blocks_of_page = [block.text for block in blocks(ROOT / page) if block.language == "python"]
    with in_folder(tmp_path / "work") as runner:
        (runner.folder / "script.py").write_text("\n".join([blocks_of_page[0], LAUNCHED[page], *blocks_of_page[1:]]))
        assert "loss" in runner.command("autopar launch --processes 2 --devices-per-process 2 script.py")


def test_a_block_that_shows_nothing_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```text\n\n...\n```\n")
    (block,) = blocks(page)
    assert check_unread(replace(block, page=ROOT / "page.md")).endswith("it shows nothing")


def test_a_block_that_fails_or_prints_otherwise_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n...\n```\n\n```console\n$ autopar --version\nno\n```\n"
    )
    first, second = Runner(tmp_path).run(page)
    assert first.agrees
    assert not second.agrees
    page.write_text("```python\nraise ZeroDivisionError\n```\n")
    with pytest.raises(ZeroDivisionError):
        list(Runner(tmp_path).run(page))


def test_the_reference_names_all_that_is_public() -> None:
    text = (DOCS / "reference" / "python.md").read_text()
    named = set(re.findall(r"(?m)^::: autopar\.([A-Za-z_]+)", text))
    public = set(autopar.__all__) - {"distributed", "SCHEDULES"}
    assert public - named == set()
    members = re.search(r"::: autopar\.ParallelFunction\n.*\n +members: \[(.*)\]", text)
    assert members is not None
    methods = {name for name, value in vars(autopar.ParallelFunction).items() if callable(value) and name[0] != "_"}
    assert set(members[1].split(", ")) == methods
    commands = (DOCS / "reference" / "command-line.md").read_text()
    assert [command.name for command in COMMANDS if f"$ autopar {command.name} --help" not in commands] == []


@pytest.mark.slow
def test_pictures_are_those_of_todays_plans() -> None:
    from benchmarks import pictures

    drawn: dict[str, Any] = dict(pictures.pictures(pictures.pipeline()))
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept, "draw them again: python -m benchmarks.pictures"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if not all(map(find_spec, ("mkdocs", "mkdocstrings"))):
        pytest.skip("needs mkdocs and mkdocstrings, which autopar[docs] brings")
    runner = Runner(ROOT)
    runner.command(f"python -m mkdocs build --quiet --strict --site-dir {tmp_path / 'site'}")
    built = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("index.html")}
    assert {Path("tutorial/index.html"), Path("reference/python/index.html")} <= built
    assert "ParallelFunction" in (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert "mkdocs" not in sys.modules


def test_every_error_links_to_a_page_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "documentation", lambda: "https://example.org/docs")
    kinds = [kind for kind in vars(autopar).values() if isinstance(kind, type) and issubclass(kind, PlanningError)]
    assert len(kinds) > 8
    assert [kind for kind in kinds if not (DOCS / f"{kind.page}.md").exists()] == []
    for kind in kinds:
        (line,) = kind("made up").__notes__
        assert line == f"  see https://example.org/docs/{kind.page}"
        assert "see https" not in str(kind("made up"))


def test_the_address_of_the_documentation_is_that_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = Message()
    for name, url in project["urls"].items():
        written.add_header("Project-URL", f"{name}, {url}")
    monkeypatch.setattr(errors.metadata, "metadata", lambda name: written)
    assert errors.documentation.__wrapped__() == project["urls"]["Documentation"]
