"""Walks a pipeline's program: every instruction issued in order, none waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import jax_compat
from autopar.jax_compat import PyTreeDef
from autopar.program import Free, Program, Run, Send


@dataclass(slots=True)
class Pipeline:
    """A program with its executables, ready to run step after step."""

    program: Program
    executables: tuple[Any, ...]
    constants: tuple[tuple[int, jax.Array], ...]
    rows: dict[int, int]
    out_tree: PyTreeDef
    host_seconds: dict[str, list[float]] | None = None

    def __call__(self, leaves: list[Any]) -> Any:
        if not jax_compat.has_ambient_mesh():
            return self._call(leaves)
        with jax_compat.no_mesh():
            return self._call(leaves)

    def _call(self, leaves: list[Any]) -> Any:
        slots: list[Any] = [None] * self.program.n_slots
        for slot, array in self.constants:
            slots[slot] = array
        self._feed(slots, leaves)
        for instruction in self.program.instructions:
            match instruction:
                case Run():
                    run = self.executables[instruction.segment]
                    results = run(*[slots[i] for i in instruction.inputs])
                    for slot, array in zip(instruction.outputs, results, strict=True):
                        slots[slot] = array
                case Send():
                    slots[instruction.target] = jax.device_put(slots[instruction.source], instruction.sharding)
                case Free():
                    for slot in instruction.slots:
                        slots[slot] = None
        return jax.tree.unflatten(self.out_tree, [slots[slot] for slot in self.program.results])

    def _feed(self, slots: list[Any], leaves: Sequence[Any]) -> None:
        """Puts every argument where it is read; what lies there already stays."""
        arrays: list[Any] = []
        wanted: list[Any] = []
        targets: list[int] = []
        for feed in self.program.feeds:
            leaf = leaves[feed.argument]
            size = self.rows.get(feed.argument)
            if size and feed.slice is not None:
                leaf = leaf[feed.slice * size : (feed.slice + 1) * size]
            elif size:
                leaf = leaf.reshape(-1, size, *leaf.shape[1:])
            if getattr(leaf, "sharding", None) == feed.sharding:
                slots[feed.slot] = leaf
            else:
                arrays.append(leaf)
                wanted.append(feed.sharding)
                targets.append(feed.slot)
        for slot, array in zip(targets, jax.device_put(arrays, wanted), strict=True):
            slots[slot] = array


def load(program: Program, rows: dict[int, int], out_tree: PyTreeDef) -> Pipeline:
    """The program compiled; `rows` are the rows of a microbatch for each argument that is a batch."""
    executables = tuple(segment.compile() for segment in program.segments)
    constants = tuple((slot, jax.device_put(value, sharding)) for slot, value, sharding in program.constants)
    return Pipeline(program=program, executables=executables, constants=constants, rows=rows, out_tree=out_tree)
