"""A pipeline's program as values: segments, instructions in one total order, and the rules of slots.

Nothing is decided while a program runs: which segment runs when, what is sent where and when a value is freed is all
written down, and checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.checks import hlo
from autopar.errors import ArgumentError, explain
from passes.errors import InternalError
from passes.inter_op import Task
from passes.sharding import ShardingSpec

Slot = int
Held = tuple[int, ShardingSpec]
"""A value in a placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a stage's program from flat arrays to flat arrays; buffers of `donated` inputs are reused for outputs.

    It is compiled for the `platform` of its stage, with the user's options for XLA.
    """

    name: str
    stage: int
    function: Any
    inputs: tuple[Held, ...]
    outputs: tuple[Held, ...]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    in_structs: tuple[jax.ShapeDtypeStruct, ...]
    out_structs: tuple[jax.ShapeDtypeStruct, ...]
    platform: str
    donated: tuple[int, ...] = ()
    user_options: Mapping[str, Any] | None = None

    def lower(self) -> Any:
        """The segment in StableHLO, as a module named after its kind, so that profiles tell a forward from a
        backward.
        """

        def run(*inputs: Any) -> Any:
            return self.function(*inputs)

        # Without the stage's number: equal stages are one entry of JAX's compilation cache.
        run.__name__ = run.__qualname__ = self.name.partition(" ")[0]
        jitted = jax.jit(
            run,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated,
            compiler_options=hlo.compiler_options(self.platform, user_options=self.user_options),
        )
        with jax_compat.no_mesh():
            return jitted.lower(*self.in_structs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The instruction that runs a segment: `inputs` and `outputs` are slots."""

    segment: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    task: Task | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """The instruction that sends an array of this `struct` and sharding to another stage's submesh, in another
    `sharding`.
    """

    source: Slot
    target: Slot
    struct: jax.ShapeDtypeStruct
    sharding: Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The instruction that drops arrays which nothing reads any more."""

    slots: tuple[Slot, ...]


Instruction = Run | Send | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """An argument that a stage reads: all of it (a batch as microbatches), or microbatch number `slice`."""

    argument: int
    slot: Slot
    sharding: Sharding
    slice: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Donation:
    """The positions of the arguments that are deleted after a step, as after `jax.jit`, and all names.

    Donated arguments that are `unread` are not part of the planned program, which leaves them alone.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    unread: tuple[int, ...] = ()

    def check_there(self, leaves: Sequence[Any]) -> None:
        """Raises RuntimeError for a donated array that was deleted, as JAX does for one that is not donated.

        For a donated one, JAX 0.10.2 ends the process (SIGSEGV) if the program is for several devices.
        """
        if not jax_compat.are_there([leaves[position] for position in self.positions]):
            raise RuntimeError("a donated array has been deleted")

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises ArgumentError for an array that is donated and passed again."""
        if not self.positions or len(set(map(id, leaves))) == len(leaves):
            return
        times = Counter(map(id, leaves))
        for position in self.positions:
            leaf = leaves[position]
            if times[id(leaf)] > 1 and isinstance(leaf, jax.Array):
                same = [self.names[i] for i, other in enumerate(leaves) if other is leaf]
                argument = f"arguments {' and '.join(same)} are one array"
                rule = f"{self.names[position]} is donated, and what is donated can be passed once"
                raise ArgumentError(explain(argument, rule, "", "pass a copy, or donate none of them"))

    def delete(self, leaves: Sequence[Any], positions: Iterable[int] | None = None) -> None:
        """Deletes the donated arrays that still exist: they were moved first, or no segment could reuse them.

        If `positions` are given, only those.
        """
        for position in self.positions if positions is None else sorted({*self.positions}.intersection(positions)):
            leaf = leaves[position]
            if jax_compat.is_concrete(leaf) and not leaf.is_deleted():
                leaf.delete()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The work of the runtime in one step, in order. `results[o]` is the slot of output o."""

    segments: tuple[Segment, ...]
    feeds: tuple[Feed, ...]
    constants: tuple[tuple[Slot, Any, Sharding], ...]
    instructions: tuple[Instruction, ...]
    results: tuple[Slot, ...]
    n_slots: int
    donation: Donation = Donation()

    def input_shardings(self, count: int, elsewhere: Sharding) -> list[Sharding]:
        """The sharding in which each of `count` arguments is read first; `elsewhere` for those that are never read.

        For a batch it is that of its rows, which are sharded as those of a microbatch.
        """
        chosen: dict[int, Sharding] = {}
        for feed in sorted(self.feeds, key=lambda feed: feed.slice is None):
            chosen.setdefault(feed.argument, feed.sharding)
        return [chosen.get(argument, elsewhere) for argument in range(count)]

    def verify(self) -> None:
        """Raises InternalError unless slots are written before they are read, and read before they are gone."""
        live = {feed.slot for feed in self.feeds} | {slot for slot, _, _ in self.constants}
        readable = {slot for slot, _, _ in self.constants}
        readable |= {
            feed.slot for feed in self.feeds if feed.slice is None and feed.argument not in self.donation.positions
        }
        if len(set(self.results)) < len(self.results) or readable & set(self.results):
            raise InternalError("a result is another's array, or not the step's own")
        for instruction in self.instructions:
            match instruction:
                case Run():
                    self._known(instruction.inputs, live)
                    gone = {instruction.inputs[i] for i in self.segments[instruction.segment].donated}
                    if any(instruction.inputs.count(slot) > 1 for slot in gone) or gone & readable:
                        raise InternalError(f"{instruction} donates what it reads twice, or what is not the step's own")
                    live -= gone
                    live.update(instruction.outputs)
                case Send():
                    self._known((instruction.source,), live)
                    live.add(instruction.target)
                case Free():
                    self._known(instruction.slots, live)
                    live.difference_update(instruction.slots)
        self._known(self.results, live)

    def _known(self, slots: Iterable[Slot], live: set[Slot]) -> None:
        missing = [slot for slot in slots if slot not in live]
        if missing:
            raise InternalError(f"slots {missing} are read before they are written, or after they are gone")


def freed(
    instructions: Sequence[Instruction],
    segments: Sequence[Segment],
    results: Sequence[Slot],
    constants: Sequence[tuple[Slot, Any, Sharding]],
) -> list[Instruction]:
    """The instructions, with a `Free` after the last use of everything that is neither a result nor donated."""
    permanent = {*results, *(slot for slot, _, _ in constants)}
    last: dict[Slot, int] = {}
    for at, instruction in enumerate(instructions):
        match instruction:
            case Run():
                last.update(dict.fromkeys((*instruction.inputs, *instruction.outputs), at))
            case Send():
                last.update({instruction.source: at, instruction.target: at})
            case Free():
                raise InternalError("values are freed last")
    ends: dict[int, list[Slot]] = {}
    for slot, at in last.items():
        instruction = instructions[at]
        donated = segments[instruction.segment].donated if isinstance(instruction, Run) else ()
        gone = {instruction.inputs[i] for i in donated} if isinstance(instruction, Run) else set[Slot]()
        if slot not in permanent and slot not in gone:
            ends.setdefault(at, []).append(slot)
    listed: list[Instruction] = []
    for at, instruction in enumerate(instructions):
        listed.append(instruction)
        if at in ends:
            listed.append(Free(slots=tuple(ends[at])))
    return listed
