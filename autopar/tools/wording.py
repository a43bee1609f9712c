"""Messages of the Python interface in the words of the command line: `microbatches=3` is `--microbatches 3`.

Planning does not know who asks, and names options as Python programs write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_SIZE = re.compile(r"""['"](.*?)['"]: (\d+)""")
_QUOTED = re.compile(r"""['"](.*?)['"]""")
"""An axis with its size, and a kind of collective, as Python writes them."""


def on_command_line(message: str) -> str:
    """The message with options as the command line has them; those that only Python has stay as they are."""
    for pattern, words in _WORDS.items():
        message = pattern.sub(words, message)
    return message


def _mesh(match: re.Match[str]) -> str:
    """The option for `mesh={'data': 4}`."""
    return f"--mesh {','.join(f'{axis}={size}' for axis, size in _SIZE.findall(match[1]))}"


def _kinds(match: re.Match[str]) -> str:
    """The option for `forbid=['all_to_all']`."""
    return f"--forbid {','.join(_QUOTED.findall(match[1]))}"


def _pin(match: re.Match[str]) -> str:
    """The option for `pins['up']='[x, -]'`."""
    return f"--pin {'='.join(filter(None, match.groups()))!r}"


def _nbytes(match: re.Match[str]) -> str:
    """The option for `memory_limit=1,024 bytes`."""
    return f"--memory-limit {match[1].replace(',', '')}"


_WORDS: Mapping[re.Pattern[str], str | Callable[[re.Match[str]], str]] = MappingProxyType(
    {
        re.compile(r"planner=autopar\.Auto\(\)"): "--planner auto",
        re.compile(r"Auto\(pipeline=True, mesh=\)"): "--planner stages with --mesh",
        re.compile(r"leave out mesh=, or .*"): "leave out --mesh, or take --planner auto",
        re.compile(r"Megatron\(data=(\d+), tensor=(\d+)\)"): r"--planner megatron:\1x\2",
        re.compile(r"Pipeline\(stages=(\d+)\)"): r"\1 stages",
        re.compile(r"say how many each stage has: submeshes=.*"): "choose a number of stages that divides them",
        re.compile(r"\bmicrobatches=(\d+)"): r"\1 microbatches",
        re.compile(r"\bmicrobatches=(?!\w)"): "--microbatches",
        re.compile(r"\bmemory_limit=([\d,]*\d)(?: bytes| \(bytes\))?"): _nbytes,
        re.compile(r"\bmesh=(\{[^}]*\})"): _mesh,
        re.compile(r"a mesh is a dict from (.*) to numbers"): r"a mesh is \1, each with its number",
        re.compile(r"(?:Auto\()?\bforbid=[\[{]([^\]}]*)[\]}]\)?"): _kinds,
        re.compile(r"\bpins\['([^']*)'\](?:='([^']*)')?"): _pin,
    }
)
"""Patterns in messages, in the order in which they are replaced, and what they are on the command line."""
