"""A program on flat arguments: arguments are moved to where it reads them, donated ones deleted, and traced calls
staged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import is_not
from typing import Any

import jax
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.errors import not_here
from autopar.jax_compat import Device, PyTreeDef
from autopar.runtime.argument_groups import Groups
from autopar.runtime.arrivals import Arrivals
from autopar.runtime.moves import Moves
from autopar.runtime.program import Donation


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """A program on flat arguments, each of which is moved to its planned sharding unless it has it already.

    A donated argument is deleted after the call even if it was moved first, and is refused if it is passed again, as
    with `jax.jit`. Arguments at `stacked` are reshaped to these shapes first: the same rows, as microbatches. What is
    no array yet is placed by JAX, but for the `state`: it comes back as a placed array, for which JAX would compile
    again.
    """

    run: Callable[..., Sequence[jax.Array]]
    groups: Groups
    nested: Callable[..., Sequence[jax.Array]]
    in_shardings: tuple[Sharding, ...]
    donation: Donation
    out_tree: PyTreeDef
    stacked: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    state: frozenset[int] = frozenset()
    arrivals: Arrivals | None = None
    moves: Moves = field(default_factory=lambda: Moves(names=(), source=""))
    _described: Device | None = field(init=False)
    """A device that is described for compiling, None where the program runs here."""
    _in_place: list[object] = field(init=False)
    """The sharding object that each argument last had and that equals the planned one: a step's results come back with
    the same objects, so that asking for identity does, where comparing a thousand shardings takes milliseconds. What
    takes another shape first is looked at in each call: it has the shape's object, which is no sharding."""

    def __post_init__(self) -> None:
        given = (self.stacked.get(i, sharding) for i, sharding in enumerate(self.in_shardings))
        object.__setattr__(self, "_in_place", list(given))
        devices = (device for sharding in self.in_shardings[:1] for device in sharding.device_set)
        object.__setattr__(self, "_described", next(filter(jax_compat.is_described, devices), None))

    def __call__(self, leaves: list[Any]) -> Any:
        if not jax_compat.has_ambient_mesh():
            return self._call(leaves)
        with jax_compat.no_mesh():
            return self._call(leaves)

    def _call(self, leaves: list[Any]) -> Any:
        present = jax_compat.sharding_objects(leaves)
        others = list(compress(count(), map(is_not, present, self._in_place)))
        if jax_compat.is_writing() or any(jax_compat.is_traced(leaves[i]) for i in others):
            return jax.tree.unflatten(self.out_tree, self.nested(*leaves))
        if self._described is not None:
            raise not_here(self._described)
        self.donation.check_there(leaves)
        if self.arrivals:
            return self._call_together(leaves, self.arrivals)
        given = leaves
        if self.stacked:
            leaves = [leaf.reshape(self.stacked[i]) if i in self.stacked else leaf for i, leaf in enumerate(leaves)]
        moving = [i for i in others if not self._is_in_place(i, leaves[i])]
        if not moving:
            results = self.run(*self.groups(leaves))
            if self.donation.unread:
                self.donation.delete(given, self.donation.unread)
            return jax.tree.unflatten(self.out_tree, results)
        self.donation.check(given)
        self.moves.tell(leaves, self.in_shardings, moving)
        placed = list(leaves)
        moved = jax.device_put([leaves[i] for i in moving], [self.in_shardings[i] for i in moving])
        for i, array in zip(moving, moved, strict=True):
            placed[i] = array
        results = self.run(*self.groups(placed))
        self.donation.delete(given, (*moving, *self.donation.unread))
        return jax.tree.unflatten(self.out_tree, results)

    def _is_in_place(self, index: int, leaf: Any) -> bool:
        """Whether an argument has its planned sharding, by whatever names of axes, or none, so that JAX places it."""
        if not isinstance(leaf, jax.Array):
            return index not in self.state
        sharding, planned = leaf.sharding, self.in_shardings[index]
        if sharding != planned and not (
            jax_compat.has_plain_type(leaf) and sharding.is_equivalent_to(planned, leaf.ndim)
        ):
            return False
        if index not in self.stacked:
            self._in_place[index] = sharding
        return True

    def _call_together(self, leaves: list[Any], arrivals: Arrivals) -> Any:
        """The results of a call that all processes make."""
        is_global = arrivals.survey(leaves)
        self.donation.check(leaves)
        placed: list[jax.Array] = []
        for i, (leaf, everywhere, target) in enumerate(zip(leaves, is_global, self.in_shardings, strict=True)):
            array = arrivals.divided(leaf, self.stacked[i], is_global=everywhere) if i in self.stacked else leaf
            placed.append(arrivals.place(array, target, is_global=everywhere))
        results = self.run(*self.groups(placed))
        self.donation.delete(leaves)
        return jax.tree.unflatten(self.out_tree, results)
