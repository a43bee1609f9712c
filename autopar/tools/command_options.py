"""Options of the command line as values: planners, sizes, numbers; errors say what to write."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar import extensions
from autopar.tools.targets import UsageError
from passes.cluster import known
from passes.errors import explain
from passes.planners import Auto, DataParallel, Manual, Megatron, Pipeline, Planner, Zero
from passes.text import quantities

PLANNERS = """\
planners:
  auto                  the cheapest placements that the solver finds (default)
  stages                the same, in stages of a pipeline where that is cheaper
  dp                    data parallel: the batch over all devices
  zero3                 ZeRO stage 3: cuts parameters and optimizer state too;
                        zero1 and zero2 cut the optimizer state alone
  megatron:DATAxTENSOR  the batch over DATA devices, weights over TENSOR
  pipeline:STAGESxN     STAGES on submeshes, N microbatches one forward, one
                        backward (1F1B); gpipe:STAGESxN all forwards first
  manual:PATH           the saved plan in PATH, checked against the function"""

CLUSTERS = f"""\
clusters:
  8:h100                one host of 8 devices
  2x8:a100-80g          two hosts of 8
  PATH                  a JSON file
  kinds: {textwrap.fill(", ".join(known()), 70, subsequent_indent=" " * 9)}"""


MOST = 2**31 - 1
"""The most that rows, parts and devices are counted to: beyond, sizes are no int32, in which JAX counts."""


def whole_number(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """A reader for argparse of an option that is a whole number from `least` to `most`."""

    def read(written: str) -> int:
        if written.isdecimal() and least <= int(written) <= most:
            return int(written)
        to = "" if most == math.inf else f" to {most}"
        raise argparse.ArgumentTypeError(f"{written!r} should be a whole number from {least}{to}")

    return read


def real_number(*, may_be_zero: bool = False) -> Callable[[str], float]:
    """A reader for argparse of an option that is a number above 0, or from 0."""

    def read(written: str) -> float:
        try:
            value = float(written)
        except ValueError:
            value = math.nan
        if 0 < value < math.inf or (may_be_zero and value == 0):
            return value
        raise argparse.ArgumentTypeError(f"{written!r} should be a number {'from' if may_be_zero else 'above'} 0")

    return read


def planner_of(written: str) -> Planner:
    """The planner that `--planner` names. Raises UsageError for a name of none, and for one that fails."""
    name, _, option = written.partition(":")
    match name, option:
        case "auto", "":
            return Auto(interruptible=True)
        case "stages", "":
            return Auto(pipeline=True, interruptible=True)
        case "dp", "":
            return DataParallel()
        case "zero1" | "zero2" | "zero3", "":
            return Zero(int(name[-1]))
        case "megatron", sizes:
            if numbers := _sizes(written, sizes):
                return Megatron(data=numbers[0], tensor=numbers[1])
        case "pipeline" | "gpipe", sizes:
            if numbers := _sizes(written, sizes):
                schedule = "gpipe" if name == "gpipe" else "1f1b"
                return Pipeline(stages=numbers[0], microbatches=numbers[1], schedule=schedule)
        case "manual", path if path:
            return Manual(path)
    try:
        other = extensions.planner(name, option)
    except Exception as error:  # another package's
        remedy = "write what that package's planner takes, or use one of autopar's"
        raise UsageError(f"--planner {written!r}: another package's, which fails: {error!r}\n  {remedy}") from error
    if other is not None:
        return other
    others = "".join(f"\n  {each:<22}of another package" for each in extensions.planners())
    raise UsageError(f"--planner {written!r} is not a planner\n{PLANNERS}{others}")


def _sizes(planner: str, sizes: str) -> tuple[int, int] | None:
    """The two numbers of `4x2`; None for any other text. Raises UsageError for a planner with a size of 0."""
    first, _, second = sizes.partition("x")
    if not (first.isdecimal() and second.isdecimal()):
        return None
    if not (int(first) and int(second)):
        remedy = f"write, say, --planner {planner.partition(':')[0]}:4x2"
        raise UsageError(explain(f"--planner {planner!r}", "both are whole numbers from 1", "", remedy))
    return int(first), int(second)


def with_choices(planner: Planner, pins: Sequence[str], mesh: str | None, forbid: str | None = None) -> Planner:
    """The planner with the pins, the mesh and the forbidden kinds of collectives that a user chose.

    Raises UsageError for another planner than `auto`.
    """
    if not pins and mesh is None and forbid is None:
        return planner
    if not isinstance(planner, Auto):
        raise UsageError("--pin, --mesh and --forbid are of --planner auto; the others are hand-made planners")
    if forbid is not None:
        planner = replace(planner, forbid=[kind.strip() for kind in forbid.split(",")])
    placed = _each("--pin", pins, "'params/*/kernel=[-, x]'")
    axes = _each("--mesh", [] if mesh is None else mesh.split(","), "data=4,model=2")
    if not all(size.isdecimal() for size in axes.values()):
        raise UsageError(f"--mesh {mesh!r}: sizes are whole numbers; write, say, data=4,model=2")
    sizes = {name: int(size) for name, size in axes.items()}
    return replace(planner, pins=placed, mesh=sizes or None)


def _each(option: str, written: Sequence[str], example: str) -> dict[str, str]:
    """The value of each name. Raises UsageError if a name is given two values, of which one would be ignored."""
    given: dict[str, str] = {}
    for each in written:
        name, value = _divided(option, each, example)
        if given.setdefault(name, value) != value:
            raise UsageError(f"{option} {name!r} is both {given[name]!r} and {value!r}: choose one")
    return given


def _divided(option: str, written: str, example: str) -> tuple[str, str]:
    """The texts on both sides of an equals sign. Raises UsageError where there is none."""
    name, equals, value = written.rpartition("=")
    if not equals or not name or not value:
        raise UsageError(f"{option} {written!r}: write, say, {option} {example}")
    return name.strip(), value.strip()


def limit_of(written: str | None) -> int | None:
    """The bytes that `--memory-limit` names. Raises UsageError for anything but a size."""
    nbytes = quantities.parse_nbytes(written) if written else None
    if written is not None and not nbytes:
        rule = "a limit is a number of bytes above 0, or words such as '12 GiB'"
        raise UsageError(explain(f"--memory-limit {written!r}", rule, "", "leave it out for the device's own memory"))
    return None if nbytes is None else int(nbytes)


def numbers_of(option: str, lists: Sequence[str], *, whole: bool) -> tuple[float, ...]:
    """The numbers above 0 that an option lists with commas, once or several times. Raises UsageError for others."""
    if not lists:
        return ()
    written = ",".join(lists)
    kind = f"whole numbers from 1 to {MOST:,}" if whole else "numbers above 0"
    remedy = f"write, say, {option} {'8,16,64' if whole else '0.5,1,2'}"
    try:
        numbers: Sequence[float] = [float(part) for part in written.split(",")]
    except ValueError:
        raise UsageError(explain(f"{option} {written!r}", f"these are not {kind}", "", remedy)) from None
    if any(not 0 < number < math.inf or (whole and (number % 1 or number > MOST)) for number in numbers):
        raise UsageError(explain(f"{option} {written!r}", f"these are not all {kind}", "", remedy))
    return tuple(dict.fromkeys(int(number) if whole else number for number in numbers))
