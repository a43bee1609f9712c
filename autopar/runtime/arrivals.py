"""Arguments brought to where a program of several processes reads them.

A global array, of which each process has its part, is transferred. An argument that a process has whole (NumPy arrays,
numbers, arrays on its own devices) is taken to be the same on all of them, and every device gets its piece from there.
No process can tell the two apart alone, as an array on the devices of one process looks global to the others. So the
processes compare, once for each combination of shardings, and with it the contents of arguments that should be the
same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar.distributed import Processes, digest_of, nowhere, placed
from autopar.errors import DisagreementError, explain
from autopar.plan import axes_of
from autopar.runtime.cross_process import takes_part, transport_of
from autopar.runtime.transfer import Transfer, arrived, compile_transfer
from autopar.runtime.transfer_plan import plan_transfer, where

_Combination = tuple[Sharding | None, ...]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arguments `names` of a program of these processes, and how each is brought to its devices."""

    processes: Processes
    names: tuple[str, ...]
    known: dict[_Combination, tuple[bool, ...]] = field(default_factory=dict)
    transfers: dict[Hashable, Transfer] = field(default_factory=dict)
    divisions: dict[Hashable, Any] = field(default_factory=dict)

    def survey(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        """Whether each argument is a global array.

        Raises DisagreementError for arguments that should be the same on all processes, and are not.
        """
        self.processes.begin_step()
        combination = tuple(getattr(leaf, "sharding", None) for leaf in leaves)
        if combination not in self.known:
            self.known[combination] = self._compared(leaves)
        return self.known[combination]

    def _compared(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        places = self._gathered("where the arguments lie", [_place(leaf) for leaf in leaves])
        is_global = tuple(bool(column[0]) and len(set(column)) == 1 for column in places)
        whole = [leaf for leaf, everywhere in zip(leaves, is_global, strict=True) if not everywhere]
        if whole:
            names = [name for name, everywhere in zip(self.names, is_global, strict=True) if not everywhere]
            contents = self._gathered("the arguments", [_contents(leaf) for leaf in whole])
            for name, column in zip(names, contents, strict=True):
                self._check_same(name, column)
        return is_global

    def _gathered(self, topic: str, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """The texts of all processes for each argument."""
        return list(zip(*map(json.loads, self.processes.gather(topic, json.dumps(texts))), strict=True))

    def _check_same(self, name: str, contents: Sequence[str]) -> None:
        first = self.processes.ranks[0]
        for rank, content in zip(self.processes.ranks, contents, strict=True):
            if content != contents[0]:
                rule = f"its contents are {content}, and {contents[0]} on process {first}"
                remedy = (
                    "pass the same on every process, or the global array of which each has a part: "
                    "jax.make_array_from_process_local_data(sharding, part)"
                )
                raise DisagreementError(explain(f"{name} on {self.processes.name(rank)}", rule, "", remedy))

    def place(self, leaf: Any, sharding: Sharding, *, is_global: bool) -> jax.Array:
        """The argument in a sharding."""
        return self.transferred(leaf, sharding) if is_global else placed(leaf, sharding)

    def transferred(self, array: jax.Array, sharding: Sharding) -> jax.Array:
        """A global array in a sharding: the array itself if it has that, else one with buffers of its own."""
        if array.sharding == sharding:
            return array
        key = array.shape, array.dtype, array.sharding, sharding
        if not takes_part(array.sharding, sharding, self.processes):
            return nowhere(array.shape, array.dtype, sharding)
        if key not in self.transfers:
            plan = plan_transfer(*key)
            self.transfers[key] = compile_transfer(plan, transport_of(plan, self.processes), keeps=True)
        return arrived(self.transfers[key].run(array))

    def divided(self, leaf: Any, shape: tuple[int, ...], *, is_global: bool) -> Any:
        """The argument with its dimension 0 divided into the first two of `shape`."""
        if not is_global:
            return leaf.reshape(shape)
        key = shape, leaf.shape, leaf.dtype, leaf.sharding
        if key not in self.divisions:
            target = _divided(leaf.sharding, shape) if isinstance(leaf.sharding, NamedSharding) else None
            self.divisions[key] = jax.jit(lambda array: array.reshape(shape), out_shardings=target)
        return self.divisions[key](leaf)


def _place(leaf: Any) -> str:
    """The devices of an array and its layout on them, as text; empty for anything that is on no device."""
    return where(leaf.sharding) if isinstance(leaf, jax.Array) else ""


def _contents(leaf: Any) -> str:
    """A digest of an argument that this process has whole; a fixed text for a part of a global array."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f"a part of a global array in {where(leaf.sharding)}"
    return digest_of(leaf)


def _divided(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array whose dimension 0 has become the first two of `shape`.

    The axes of that dimension go to the first of the two if they divide it, else to the second, else to neither.
    """
    along, *others = tuple(sharding.spec) or (None,)
    ways = math.prod(sharding.mesh.shape[name] for name in axes_of(along))
    is_first, is_second = (size % ways == 0 for size in shape[:2])
    halves = (along if is_first else None, along if is_second and not is_first else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*halves, *others))
