"""The collectives of a compiled executable, read from its optimized HLO text.

They are compared with those of a plan: `collectives(compiled.as_text(), axes, sizes)` lists each tensor that crosses
devices with its kind, mesh axes, local shape and how often it runs. Compile with `UNCOMBINED`, or XLA's CPU backend
merges unrelated all-reduces; it also widens what its transport cannot carry (bfloat16 becomes float32, float8 float16,
int4 int8), and `dtype` and `nbytes` are those of the HLO.

Device ids in HLO are positions in the executable's device assignment, so a mesh is a row-major grid over them whatever
the physical order. Checked on the text of jaxlib 0.10.2 and 0.11.2, which between them write replica groups in three
syntaxes.

Reference: XLA, `ToString` in `xla/hlo/ir/mesh_and_axis.cc` and `replica_group.cc`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from autopar.checks.hlo_groups import participants, spanned_axes
from autopar.checks.hlo_loops import HEADER, Loops
from passes.errors import InternalError
from passes.ir import TensorType

UNCOMBINED: Mapping[str, str] = MappingProxyType({"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
"""Compiler options that keep one all-reduce per tensor on CPU, whose backend has no other collective combiner.

XLA accepts unknown pass names in silence: `test_uncombined_keeps_all_reduces_apart` guards this one.
"""

BARRIERS_KEPT: Mapping[str, str] = MappingProxyType({"xla_disable_hlo_passes": "cse_barrier_expander"})
"""Compiler options that keep optimization barriers on CPU until the program is scheduled.

Without them XLA's CPU backend, as of jaxlib 0.10, drops barriers and runs what is recomputed as soon as it can, or not
again at all. Jaxlib 0.11 keeps them by itself. `test_recomputation_survives_compilation` guards the name.
"""


def compiler_options(platform: str, user_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """XLA's options for a planned program on a platform, with the user's own (`user_options`) added."""
    options = dict(user_options or {})
    if platform == "cpu":
        passes = (options.get("xla_disable_hlo_passes"), BARRIERS_KEPT["xla_disable_hlo_passes"])
        options["xla_disable_hlo_passes"] = ",".join(filter(None, passes))
    return options


_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
    "ragged-all-to-all": "ragged_all_to_all",
}

# Wider than `_KINDS`, so that an opcode XLA adds later raises instead of vanishing from the count.
_MENTION = re.compile(r" (?:ragged-)?(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-)[\w-]*\(")
_ASSIGNMENT = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = ")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_CALLEES = re.compile(r"(?:body|condition|to_apply|calls|_computations?)=(?:\{([^}]*)\}|%?([\w.\-]+))")

_CHAIN = re.compile(r'frontend_attributes=\{[^}]*chain_id="(\d+)"')
"""The number of a collective that XLA:TPU runs in pieces, which each piece has."""

_SCATTER = re.compile(r"%?all-reduce-scatter[\w.]* \(.*\) -> (\w+\[[\d,]*\]\S*) \{")
"""The header of a computation that XLA:TPU made of a reduce-scatter."""

_TYPE_TOKEN = re.compile(r"\(|\)|(\w+)\[([^\]]*)\](?:\{[^}]*\})?")
_FLOAT = re.compile(r"f(\d+)(e\w+)?")
_PREFIXES = {"s": "int", "u": "uint", "c": "complex"}


_BRACKET = re.compile(r"[()]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_LOCATION = re.compile(r"file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")

_Tree = TensorType | list["_Tree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One tensor that a compiled program moves between devices.

    `kind` is `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `permute` (or, where XLA invents them,
    `broadcast` or `ragged_all_to_all`). `axes` are the mesh axes that the tensor travels along, in the mesh's order,
    or `UNKNOWN`. `shape` and `nbytes` are the result's on one device; an all-to-all that HLO spells as n pieces has
    the pieces' shape with n in front. `count` is how often it runs: the product of the trip counts of the loops
    around it, an unknown trip count being 1, and each branch of a conditional being taken. `source` is the user's
    `file:line (function)` where XLA knows it. `is_padded`: the result has room for what does not divide evenly.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    count: int
    op_name: str
    source: str
    is_padded: bool = False

    def __str__(self) -> str:
        repeated = f" x{self.count}" if self.count != 1 else ""
        tensor = TensorType(shape=self.shape, dtype=self.dtype)
        return f"{self.kind}@{','.join(self.axes)} {tensor}{repeated} {self.op_name}".rstrip()


def collectives(hlo_text: str, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[HloCollective, ...]:
    """Every tensor that `hlo_text` sends between the devices of a mesh, in the order of the text.

    Collectives among groups of one device move nothing and are left out. XLA:TPU names one that runs in pieces, beside
    other work, in the computation of every piece: it is one. A sum of a padded array of which each device keeps its
    part, which is how it spells some reduce-scatters, is a reduce-scatter. Raises InternalError for a collective that
    cannot be read.
    """
    lines = hlo_text.split("\n")
    sources = _sources(lines)
    mentions, callers = _scan(lines)
    executions = _executions(callers)
    chains: set[str] = set()
    read: list[HloCollective] = []
    for computation, line in mentions:
        if chain := _CHAIN.search(line):
            if chain[1] in chains:
                continue
            chains.add(chain[1])
        tensors = _read(line, axes, sizes, executions(computation[0]), sources)
        read += [_scattered(tensor, computation[1]) for tensor in tensors]
    return tuple(read)


def _scattered(tensor: HloCollective, header: str) -> HloCollective:
    """The tensor; as a reduce-scatter's where the computation with this header sums it and keeps a part."""
    scatter = _SCATTER.match(header)
    if not scatter or tensor.kind != "all_reduce":
        return tensor
    (part,) = _leaves(_parse_type(scatter[1]))
    return replace(tensor, kind="reduce_scatter", shape=part.shape, nbytes=part.nbytes, is_padded=True)


def instructions(hlo_text: str) -> Iterator[tuple[str, int]]:
    """(line, number of times it runs in one call) of every instruction of a computation."""
    lines = hlo_text.split("\n")
    executions = _executions(_scan(lines)[1])
    computation = ""
    for line in lines:
        if line.endswith("{") and (header := HEADER.match(line)):
            computation = header[1]
        elif computation:
            yield line, executions(computation)


def _scan(
    lines: Sequence[str],
) -> tuple[list[tuple[tuple[str, str], str]], Mapping[str, list[tuple[str, int]]]]:
    """(line, computation, header) of each line with a collective, and the (caller, trip count) pairs of each
    computation.
    """
    mentions: list[tuple[tuple[str, str], str]] = []
    callers: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    computation = heading = ""
    loops = Loops(lines)
    for line in lines:
        if line.endswith("{") and (header := HEADER.match(line)):
            computation, heading = header[1], line
            continue
        called = line.partition(", metadata=")[0]
        if _MENTION.search(called):
            mentions.append(((computation, heading), line))
        trips = loops.trips(line, computation) if " while(" in called else 1
        for several, single in _CALLEES.findall(called):
            for callee in several.split(",") if several else (single,):
                callers[callee.strip().removeprefix("%")].append((computation, trips))
    return mentions, callers


def _executions(callers: Mapping[str, list[tuple[str, int]]]) -> Callable[[str], int]:
    """A function from a computation to the number of times that one call of the entry runs it, over all its callers."""

    @cache
    def executions(computation: str) -> int:
        calls = callers.get(computation)
        return sum(trips * executions(caller) for caller, trips in calls) if calls else 1

    return executions


def _read(
    line: str, axes: tuple[str, ...], sizes: tuple[int, ...], count: int, sources: Mapping[str, str]
) -> list[HloCollective]:
    """The tensors that the collective on `line` sends; none if the line only names or ends one, or if nothing leaves a
    device.
    """
    try:
        result, opcode, attributes, metadata = _split(line)
        if not _MENTION.match(f" {opcode}(") or opcode.endswith(("-done", "-update")):
            return []
        kind = _KINDS[opcode.removesuffix("-start")]
        spanned = spanned_axes(participants(kind, attributes), axes, sizes)
        if not spanned:
            return []
        tensors = _tensors(kind, opcode.endswith("-start"), result, pieces="dimensions=" not in attributes)
    except (KeyError, ValueError, IndexError) as error:
        raise InternalError(f"a compiled collective cannot be read, {error!r}: {line.strip()}") from error
    op_name, source = _metadata(metadata, sources)
    return [
        HloCollective(
            kind=kind,
            axes=spanned,
            dtype=tensor.dtype,
            shape=tensor.shape,
            nbytes=tensor.nbytes,
            count=count,
            op_name=op_name,
            source=source,
        )
        for tensor in tensors
    ]


def _split(line: str) -> tuple[str, str, str, str]:
    """An instruction's result type, opcode, operands with attributes, and metadata."""
    assignment = _ASSIGNMENT.match(line)
    if not assignment:
        raise ValueError("not an instruction")
    start = assignment.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise ValueError("no opcode after the result type")
    attributes, _, metadata = line[opcode.end() :].partition("metadata={")
    return line[start:end], opcode[1], attributes, metadata


def _closing(line: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`; layouts hold balanced ones of their own."""
    depth = 0
    for bracket in _BRACKET.finditer(line, start):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    raise ValueError("unbalanced result type")


def _tensors(kind: str, started: bool, result: str, *, pieces: bool) -> list[TensorType]:
    """The tensors in a collective's result type.

    Async starts of all-gathers and permutes, and of anything in XLA's generic async form, return (operands, results,
    ...). An all-to-all is one tensor: without a split dimension its result is a tuple of `pieces`, one per device.
    """
    tree = _parse_type(result)
    if started and isinstance(tree, list) and (kind in ("all_gather", "permute") or isinstance(tree[0], list)):
        tree = tree[1]
    leaves = _leaves(tree)
    if not leaves:
        raise ValueError("no tensor in the result type")
    if kind != "all_to_all" or not isinstance(tree, list) or not pieces:
        return leaves
    if len(set(leaves)) != 1:
        raise ValueError("all-to-all pieces of different types")
    return [TensorType(shape=(len(leaves), *leaves[0].shape), dtype=leaves[0].dtype)]


def _parse_type(text: str) -> _Tree:
    nested: list[list[_Tree]] = [[]]
    for token in _TYPE_TOKEN.finditer(text):
        if token[0] == "(":
            nested.append([])
        elif token[0] == ")":
            closed = nested.pop()
            nested[-1].append(closed)
        elif token[1] != "token":
            shape = tuple(int(size.removeprefix("<=")) for size in token[2].split(",") if size)
            nested[-1].append(TensorType(shape=shape, dtype=_dtype(token[1])))
    ((tree,),) = nested
    return tree


def _leaves(tree: _Tree) -> list[TensorType]:
    return [tree] if isinstance(tree, TensorType) else [leaf for branch in tree for leaf in _leaves(branch)]


def _dtype(primitive_type: str) -> str:
    """XLA's `f32`, `bf16`, `s8`, `pred`, `f8e4m3fn` by its NumPy or ml_dtypes name."""
    if primitive_type in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[primitive_type]
    if float_type := _FLOAT.fullmatch(primitive_type):
        width, format_name = float_type.groups()
        return f"float{width}_{format_name}" if format_name else f"float{width}"
    return f"{_PREFIXES[primitive_type[0]]}{int(primitive_type[1:])}"


def _metadata(text: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """An instruction's op_name and source, each empty where XLA dropped it."""
    op_name, frame, source = _OP_NAME.search(text), _FRAME_ID.search(text), _SOURCE.search(text)
    name = op_name[1].replace('\\"', '"') if op_name else ""
    if source:
        return name, f"{source[1]}:{source[2]}" if source[2] else source[1]
    return name, sources.get(frame[1], "") if frame else ""


def _sources(lines: Iterable[str]) -> dict[str, str]:
    """`file:line (function)` of the innermost frame of each stack frame id, from the tables before the program."""
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    table: dict[str, str] = {}
    for line in lines:
        if line.endswith("{"):
            break
        if line in tables:
            table = tables[line]
        elif line[:1].isdigit():
            number, _, row = line.partition(" ")
            table[number] = row
    files, functions, locations, frames = (tables[name] for name in _TABLES)
    sources: dict[str, str] = {}
    for frame, row in frames.items():
        location = _LOCATION.search(locations.get(row.partition("file_location_id=")[2].partition(" ")[0], ""))
        if location:
            file, function = files.get(location[1], "").strip('"'), functions.get(location[2], "").strip('"')
            sources[frame] = f"{file}:{location[3]} ({function})"
    return sources
