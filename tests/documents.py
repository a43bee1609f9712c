"""The code blocks of README and docs, and what they print when they run.

A block says what it is by its language:

    python                    runs behind the page's other blocks, in one namespace; with a title it is that file, too
    console                   commands behind `$ `, each followed by the beginning of what it prints
    text, behind python       the beginning of what that block printed
    json, yaml, toml, bash    read by its own parser
    text, mermaid             shown and not run

Output that ends with `...` goes on. `python -m tests.documents` runs all pages and writes down what they print today.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from autopar.tools.cli import main, parser
from tests.preludes import names_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
TUTORIAL = DOCS / "tutorial.md"

FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)
TITLE = re.compile(r'title="([^"]+)"')
CLOCK = re.compile(r"^(planning|planned|tracing)\b.*\b(ms|s)\b|^ {10}[\w., ]*\b(ms|s)\)\s*$")
"""Lines that say how long something took here, and what went over to the next one; they are not compared."""

WORK = "work"
"""The folder in which pages run, whose name plans show with source lines."""

EXTERNAL = {
    "pip": "needs a network",
    "make": "tests/test_wheel.py and the tests themselves run what it does",
}
"""Commands that are read and not run, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block of a page, the line that it begins in, and where its text is in the page."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    span: tuple[int, int]
    indent: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in order."""
    source = page.read_text()
    return [
        Block(
            page=page,
            line=source.count("\n", 0, match.start()) + 1,
            language=match["language"],
            title=title[1] if (title := TITLE.search(match["options"])) else "",
            text=re.sub(f"(?m)^{match['indent']}", "", match["text"]),
            span=match.span("text"),
            indent=match["indent"],
        )
        for match in FENCED.finditer(source)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """What a block should print and what it printed; `block` is where the former stands."""

    block: Block
    expected: str
    printed: str
    command: str = ""

    @property
    def agrees(self) -> bool:
        return self.today == self.expected

    @property
    def today(self) -> str:
        """As much of what was printed as the page shows."""
        lines = [line.rstrip() for line in self.printed.splitlines() if not CLOCK.match(line)]
        shown = self.expected.splitlines()
        if shown and shown[-1] == "...":
            lines = [*lines[: len(shown) - 1], "..."]
        return "".join(f"{line}\n" for line in lines)


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, the output that stands below it) of a console block; lines that end with a backslash go on."""
    joined = re.sub(r"(?m)^(\$ .*)\\\n\s*", r"\1", block.text)
    parts = re.split(r"(?m)^\$ ", joined)
    if parts[0].strip():
        raise AssertionError(f"{block.name}: a console block begins with `$ `")
    pairs = (part.partition("\n") for part in parts[1:])
    return [(command, output) for command, _, output in pairs]


@dataclass(slots=True)
class Runner:
    """The blocks of one page, run in order in a folder, with the names that its readers have."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self, page: Path) -> Iterator[Printed]:
        """What each block that shows its output printed."""
        last = ""
        for block in blocks(page):
            if block.language == "python":
                last = self._python(block)
            elif block.language == "console":
                for command, expected in commands(block):
                    printed = self.command(command)
                    if expected:
                        yield Printed(block=block, expected=expected, printed=printed, command=command)
            elif block.language == "text" and last:
                yield Printed(block=block, expected=block.text, printed=last)
            last = last if block.language == "python" else ""

    def _python(self, block: Block) -> str:
        """What a block prints."""
        if block.title:
            (self.folder / block.title).write_text(block.text)
        printed = io.StringIO()
        lines = "\n" * block.line + block.text  # so that errors name the page's own lines
        with contextlib.redirect_stdout(printed):
            exec(compile(lines, str(block.page), "exec"), self.names)
        return printed.getvalue()

    def command(self, command: str) -> str:
        """What a command prints. Raises AssertionError where it fails."""
        program, *words = shlex.split(command)
        if program in EXTERNAL:
            return ""
        if program == "autopar" and words[0] not in ("launch", "run"):
            printed, errors = io.StringIO(), io.StringIO()
            sys.modules.pop("train", None)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                status = status_of(words)
            assert status in (0, 1), f"{command!r} ends with {status}: {errors.getvalue()}"
            return printed.getvalue()
        where = [sys.executable, "-m", "autopar"] if program == "autopar" else [sys.executable]
        assert program in ("autopar", "python"), f"{command!r} is run by nobody: say why in EXTERNAL"
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}
        done = subprocess.run([*where, *words], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command!r}: {done.stderr}"
        return done.stdout


def status_of(words: list[str]) -> int:
    """The exit status of a command of autopar, on a terminal of 80 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        return main(words)
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def check_unrun(command: str) -> str:
    """What is wrong with a command that is read and not run, or with the words of one that is; else nothing."""
    program, *words = shlex.split(command)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        extras_named = [
            name for word in words for each in re.findall(r"autopar\[([\w,-]+)\]", word) for name in each.split(",")
        ]
        return "" if set(extras_named) <= set(extras) else f"no such extra: {command}"
    if program == "make":
        targets = re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text())
        return "" if words[0] in targets else f"no such target: {command}"
    if program == "python":
        module = words[words.index("-m") + 1] if "-m" in words else ""
        return "" if not module or find_spec(module) else f"no such module: {command}"
    if program == "autopar":
        try:
            with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
                parser().parse_args(words)
        except SystemExit as end:
            return f"{command}: {errors.getvalue()}" if end.code else ""
        return ""
    return f"what is {program}? {command}"


def check_unread(block: Block) -> str:
    """What is wrong with a block's syntax; nothing where it can be read."""
    try:
        match block.language:
            case "python":
                compile(block.text, block.name, "exec")
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "yaml":
                list(yaml.safe_load_all(block.text))
            case "bash":
                done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
                return f"{block.name}: {done.stderr}" if done.returncode else ""
            case "console":
                return "\n".join(filter(None, (check_unrun(command) for command, _ in commands(block))))
            case "text" if not block.text.strip(" .\n"):
                return f"{block.name}: it shows nothing"
            case "text" | "mermaid":
                pass
            case _:
                return f"{block.name}: blocks in {block.language or 'no language'} are of no kind"
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return f"{block.name}: {error}"
    return ""


def train_module() -> str:
    """The train.py of the tutorial, with which the other pages go on."""
    (block,) = [block for block in blocks(TUTORIAL) if block.title == "train.py"]
    return block.text


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[Runner]:
    """A runner in a folder that has the tutorial's train.py."""
    folder.mkdir()
    (folder / "train.py").write_text(train_module())
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(ROOT)]
    try:
        yield Runner(folder)
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop("train", None)


def rewritten(page: Path, results: list[Printed]) -> str:
    """The page with what its blocks print today."""
    source = page.read_text()
    for result in reversed(results):
        begin, end = result.block.span
        text = source[begin:end]
        today, before = (re.sub("(?m)^(?=.)", result.block.indent, each) for each in (result.today, result.expected))
        if result.command:
            head = text.index(f"$ {result.command}") if f"$ {result.command}" in text else 0
            at = text.index(before, head)
            text = text[:at] + today + text[at + len(before) :]
        else:
            text = today
        source = source[:begin] + text + source[end:]
    return source


if __name__ == "__main__":
    import tempfile

    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    alone = DOCS / "processes.md"  # whose test launches processes for it, and which prints nothing
    for page in () if sys.argv[1:] else [page for page in PAGES if page != alone]:
        subprocess.run([sys.executable, "-m", "tests.documents", str(page)], cwd=ROOT, check=True)
    for page in [Path(name).resolve() for name in sys.argv[1:]]:
        print(page.relative_to(ROOT), flush=True)
        with tempfile.TemporaryDirectory() as folder, in_folder(Path(folder) / WORK) as runner:
            runner.names |= names_of(str(page.relative_to(ROOT)))
            page.write_text(rewritten(page, list(runner.run(page))))
