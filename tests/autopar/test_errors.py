"""Error messages of wrong calls, every one in full, as golden text.

`python -m tests.autopar.test_errors`, run from the checkout, writes tests/golden/errors.txt again.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import autopar
import passes.errors
from autopar import errors
from autopar.tools.cli import main
from tests.autopar.wrong_calls import CALLS, COMMANDS, call, fill
from tests.conftest import TRACED_ALIKE

GOLDEN = Path(__file__).parents[1] / "golden" / "errors.txt"
CHECKOUT = Path(__file__).parents[2]


def of_call(source: str) -> str:
    """`Error: message` of a call, without what differs from machine to machine; JAX's own words are its own to test."""
    try:
        call(source)
    except Exception as error:
        is_jax = source in CALLS["what jax.jit refuses"]
        return plain(f"{type(error).__name__}: {'(what jax.jit says)' if is_jax else error}")
    return "(nothing)"


def of_command(command: str) -> str:
    """What a command writes to stderr, with its exit status."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(shlex.split(command)[1:])
        except SystemExit as stopped:
            status = stopped.code
    return plain(f"exit status {status}\n{stderr.getvalue()}")


def plain(message: str) -> str:
    for found, name in (
        (re.escape(str(CHECKOUT)), "CHECKOUT"),
        (re.escape(str(Path.cwd())), "FOLDER"),
        (r"(?<=\.py:)\d+", "LINE"),
        (r"errors_\d+", "PRIMITIVE"),
        (r"\n  see https?:\S+", ""),  # where the documentation is, an installed package alone knows
        (r"\b[0-9a-f]{16}\b", "FINGERPRINT"),
        (r"0x[0-9a-f]+", "ADDRESS"),
        (r"(?<=this is autopar )\S+(?=,)", "VERSION"),
        (r"(?m)(?<=^  known )(devices: |kinds: ).*|(?<=^  known: ).*", r"\1(THE TABLE)"),
    ):
        message = re.sub(found, name, message)
    return message.strip()


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the files that the calls read, as the current one."""
    before, path = Path.cwd(), [*sys.path]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        fill(folder)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = path
            sys.modules.pop("train", None)


ALL = tuple(itertools.chain(*CALLS.values()))


def answer(source: str) -> str:
    return of_command(source) if source.startswith("autopar ") else of_call(source)


def entry(source: str, told: str) -> str:
    """A call and its message as the golden text has them."""
    return f">>> {source}\n{textwrap.indent(told, '    ')}\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[None]:
    with workplace():
        yield


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def golden() -> dict[str, str]:
    """Each call's entry in the golden text."""
    entries = GOLDEN.read_text().split("\n\n>>> ")
    found = [f">>> {text.removeprefix('>>> ').rstrip()}\n" for text in entries]
    return {text.splitlines()[0].removeprefix(">>> "): text for text in found}


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("source", [*ALL, *COMMANDS])
def test_a_wrong_call_is_told_what_is_wrong(source: str, golden: dict[str, str]) -> None:
    texts = entry(source, answer(source)), golden.get(source, "")
    if not TRACED_ALIKE:
        texts = tuple(re.sub(r"(?<= of )\d+(?= operators and)", "COUNT", text) for text in texts)
    assert texts[0] == texts[1]


def test_the_golden_text_has_these_calls_alone(golden: dict[str, str]) -> None:
    assert list(golden) == [*ALL, *COMMANDS]


@pytest.mark.parametrize("source", ALL)
def test_no_internal_error_is_a_users_to_read(source: str, golden: dict[str, str]) -> None:
    """A wrong call meets an error of autopar's own, or what `jax.jit` says to the same call."""
    told = golden[source].splitlines()[1].strip()
    kind = getattr(errors, told.partition(":")[0], getattr(passes.errors, told.partition(":")[0], Exception))
    is_ours = issubclass(kind, autopar.PlanningError)
    assert is_ours or told.endswith("(what jax.jit says)")


def refresh() -> None:
    os.environ["COLUMNS"] = "80"
    with workplace():
        os.environ["XDG_CACHE_HOME"] = os.getcwd()
        texts = [entry(source, answer(source)) for source in (*ALL, *COMMANDS)]
    GOLDEN.write_text("\n".join(texts))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    refresh()
