"""The gathers of ZeRO-3 that no product hides in XLA:GPU's schedules: `python -m benchmarks.exposed_gathers`.

XLA starts a gather for the backward pass where the program lets it, and autopar's lets it start at the product before
(`passes.placement.reshardings.early_gathers`). Here models are compiled with and without that. A gather is exposed if
it ends before another kernel begins.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import jax
from rich.table import Table

import autopar
from benchmarks import compilers
from benchmarks.console import stdout
from passes.cluster import parse_cluster
from passes.sharding import Resharder
from passes.text import quantities

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(%?([\w.\-]+)?", re.MULTILINE)
"""(name, type, opcode, first operand) of an instruction."""

_ARRAY = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")
"""(kind, bits, sizes) of an array in a type."""

_KERNELS = ("fusion", "custom-call", "while", "conditional")
"""Opcodes of what computes for long enough to hide something."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exposed_gathers",
        description="Compile models under ZeRO-3 for GPUs, and print the share of gathered bytes that nothing hides.",
        epilog="example: python -m benchmarks.exposed_gathers --target a100 --models gpt-large,llama-large",
    )
    shown = "(default: %(default)s)"
    parser.add_argument("--target", default="h100", choices=("h100", "a100"), help=f"the GPUs {shown}")
    parser.add_argument("--models", default="gpt-large,llama-large,bert-large", metavar="A,B", help=shown)
    return parser.parse_args(argv)


def compiled(model: str, target: str) -> str:
    """The optimized program of a model under ZeRO-3, in the order of its schedule."""
    step, given = compilers.program(model)
    cluster = compilers.TARGETS[target]
    planned = step.replan(cluster=cluster, planner=autopar.Zero(3), memory_limit=compilers.ANY_NBYTES)
    there = planned.replan(devices=autopar.topology(parse_cluster(cluster)))
    return str(there.lower(*given).unlimited().compile().as_text())


def gathers(program: str) -> Iterator[tuple[int, bool]]:
    """(Bytes of the whole arrays, whether no kernel runs meanwhile) of each gather of a program's entry."""
    begun, kernels = dict[str, int](), 0
    for name, type, opcode, operand in _INSTRUCTION.findall(program[program.index("ENTRY") :]):
        if opcode == "all-gather-start":
            begun[name] = kernels
        elif opcode == "all-gather-done":
            yield _nbytes(type), begun[operand] == kernels
        else:
            kernels += opcode in _KERNELS


def _nbytes(type: str) -> int:
    total = 0
    for _, bits, sizes in _ARRAY.findall(type):
        elements = 1
        for size in filter(None, sizes.split(",")):
            elements *= int(size)
        total += elements * int(bits) // 8
    return total


def share(program: str) -> tuple[float, float]:
    """(Bytes gathered, share of them that is exposed)."""
    each = list(gathers(program))
    total = sum(nbytes for nbytes, _ in each)
    return total, sum(nbytes for nbytes, is_exposed in each if is_exposed) / max(total, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where starting early exposes more."""
    args = arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    table = Table(
        "model", "gathered", "exposed", "exposed, early", title=f"ZeRO-3 on 8 {args.target}", title_justify="left"
    )
    worse = False
    for model in args.models.split(","):
        nbytes, early = share(compiled(model, args.target))
        with patch.object(Resharder, "hides_gathers", False):
            _, late = share(compiled(model, args.target))
        worse |= early > late
        table.add_row(model, quantities.nbytes(int(nbytes)), f"{late:.1%}", f"{early:.1%}")
    stdout().print(table)
    return int(worse)


if __name__ == "__main__":
    raise SystemExit(main())
