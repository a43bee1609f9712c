"""A parallel function has the types of the user's own, for editors and checkers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.options import Options

PROGRAM = """
from typing import assert_type
import jax
import autopar

@autopar.parallelize
def bare(x: jax.Array, *, scale: float = 1.0) -> tuple[jax.Array, int]:
    return x * scale, 1

@autopar.parallelize(donate_argnums=0, planner=autopar.DataParallel())
def decorated(state: dict[str, int]) -> str:
    return ""

class Model:
    @autopar.parallelize(static_argnums=0)
    def method(self, x: int) -> bytes:
        return b""

assert_type(bare(jax.numpy.ones(3), scale=2.0), tuple[jax.Array, int])
assert_type(decorated({}), str)
assert_type(decorated.replan(memory_limit=1)({}), str)
assert_type(Model().method(3), bytes)
bare("no array")
decorated(state=3)
autopar.parallelize(decorated, donat_argnums=0)
"""

WANTED = [
    'error: Argument of type "Literal[\'no array\']" cannot be assigned to parameter "x"',
    'error: Argument of type "Literal[3]" cannot be assigned to parameter "state"',
    'error: No overloads for "parallelize"',
]


def test_checkers_know_every_option():
    assert list(Options.__annotations__) == list(inspect.signature(autopar.parallelize).parameters)[1:]


@pytest.mark.slow
def test_a_parallel_function_has_the_user_s_own_signature(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    checker = Path(sys.executable).with_name("basedpyright")
    command = [str(checker), "--level", "error", "--pythonpath", sys.executable, str(program)]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.split(" - ", 1)[1] for line in text.splitlines() if " - " in line]
    assert len(lines) == len(WANTED), text
    for line, wanted in zip(lines, WANTED, strict=True):
        assert line.startswith(wanted), text
