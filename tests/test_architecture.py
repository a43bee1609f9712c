"""The picture in docs/architecture.md is the code's, and what the documents point to is there.

`python -m tests.test_architecture` draws the picture again.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.source_tree import imports as imported
from tests.source_tree import owner, read_tree
from tests.test_layering import ORDER, room

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)
PATH = re.compile(r"`((?:autopar|passes|models|benchmarks|tests|docs)/[\w./]*)`")
FILES = {
    "passes": {"__init__", "errors", "files", "limits", "progress", "gc_pause", "step", "device_placement"},
    "autopar": {
        "__init__",
        "__main__",
        "errors",
        "jax_compat",
        "jax_cudnn",
        "plan",
        "cache",
        "following",
        "module_stages",
        "options",
        "phases",
        "planning",
        "programs",
        "recurring",
        "unplanned",
        "compilation",
        "reporting",
        "comparing",
    },
}
"""The files beside the rooms, which the picture leaves out."""


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports, of those that the picture shows."""
    sources, found = read_tree(), defaultdict[str, set[str]](set)
    for module, source in sources.items():
        if (package := module.split(".")[0]) not in ORDER or room(module) in FILES[package]:
            continue
        here = f"{package}.{room(module)}"
        found[here] |= set()
        for _, name in imported(module, source):
            target = owner(name, sources)
            if target and (other := target.split(".")[0]) in ORDER and room(target) not in FILES[other]:
                found[here] |= {f"{other}.{room(target)}"} - {here}
    return dict(found)


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others."""

    def reachable(start: str) -> set[str]:
        found, left = set[str](), list(arrows[start])
        while left:
            if (room := left.pop()) not in found:
                found.add(room)
                left += arrows[room]
        return found

    return {
        room: {other for other in own if not any(other in reachable(via) for via in own - {other})}
        for room, own in arrows.items()
    }


def picture() -> str:
    """The rooms as a mermaid chart: an arrow from a room to one that it imports, unless others imply it."""
    own = reduced(arrows())
    lines = ["```mermaid", "flowchart BT"]
    for package, order in ORDER.items():
        lines.append(f"  subgraph {package}")
        lines += [f"    {package}.{name}[{name}]" for name in order if f"{package}.{name}" in own]
        lines.append("  end")
    lines += [f"  {room} --> {other}" for room in own for other in sorted(own[room])]
    return "\n".join([*lines, "```", ""])


def test_the_picture_is_that_of_the_code():
    drawn = PICTURE.findall(PAGE.read_text())
    assert drawn == [picture()], "draw it again: python -m tests.test_architecture"


def test_an_arrow_that_others_imply_is_left_out():
    assert reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_every_room_has_its_paragraph():
    text = PAGE.read_text()
    rooms = {f"`{package}/{name}`" for package, name in (each.split(".") for each in arrows())} - {
        "`autopar/api`",
        "`autopar/extensions`",
    }
    assert not [each for each in sorted(rooms) if f"**{each}**" not in text]


@pytest.mark.parametrize("package", ["autopar", "passes"])
def test_every_file_beside_the_rooms_is_named(package):
    text = PAGE.read_text().partition(f"## The rooms of `{package}/`")[2].partition("\n## ")[0]
    files = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert {name for name in files if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_that_a_document_names_are_there(page):
    paths = PATH.findall((ROOT / page).read_text())
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


if __name__ == "__main__":
    PAGE.write_text(PICTURE.sub(lambda _: picture(), PAGE.read_text()))
