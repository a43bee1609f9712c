"""Transfers of arrays between submeshes: any sharding to any other over other devices, in order, never through the
host.

    plan      who sends which part of which shard to whom, as plain data     `plan_transfer`
    move      single-device pieces from device to device                     `Transport`, `Local`
    run       cut, move, join: nothing traced or compiled in a call          `compile_transfer`, `Transfer`

Every call returns before its operand is computed. It neither donates nor deletes: pieces live as long as a pending
copy reads them, whatever the caller drops. Where `TransferPlan.shares` says so the result has buffers in common with
the operand, and neither may be donated while the other is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.errors import ArgumentError, explain
from autopar.jax_compat import Device
from autopar.runtime.transfer_plan import Box, Tile, TransferPlan, blocks_of, devices_of, shape_of, type_text, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The path of a piece of this type from one device to another."""

    source: Device
    target: Device
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True)
class Later:
    """An array that comes from another process: `make` waits for it and returns it."""

    make: Callable[[], jax.Array]


def arrived(array: jax.Array | Later) -> jax.Array:
    """The array, after waiting for it if it is a `Later`."""
    return array.make() if isinstance(array, Later) else array


Move = Callable[[list[jax.Array]], list[jax.Array | Later]]
"""Takes a piece on each route's source device and returns them on the targets, not waiting for their contents."""


class Transport(Protocol):
    """The way in which pieces get from device to device.

    Preparation happens once; what it returns is called for every array.

    A transport between processes is prepared by all of them, in the same order and with the same routes.
    """

    def connect(self, routes: tuple[Route, ...]) -> Move:
        """The function that moves pieces along these routes, all at once."""
        ...

    def put(self, target: Sharding) -> Callable[[jax.Array], jax.Array]:
        """The function that moves a whole array, its i-th shard to the i-th device of `target`."""
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """The transport where all devices belong to this process."""

    def connect(self, routes: tuple[Route, ...]) -> Move:
        # A device in place of its sharding: JAX spends half the time on one piece, and nothing differs.
        targets: list[Device] = [route.target for route in routes]
        if len(targets) == 1:
            return lambda pieces: [jax.device_put(pieces[0], targets[0])]
        return lambda pieces: jax.device_put(pieces, targets)

    def put(self, target: Sharding) -> Callable[[jax.Array], jax.Array]:
        if target == SingleDeviceSharding(device := devices_of(target)[0]):
            return lambda array: jax.device_put(array, device)
        return lambda array: jax.device_put(array, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A plan compiled for its devices. A call returns the array in the target's sharding, which may not be computed
    yet.

    `run` returns at once, with a `Later` in place of an array that has to be waited for here.
    """

    plan: TransferPlan
    run: Callable[[jax.Array], jax.Array | Later]

    def __call__(self, array: jax.Array) -> jax.Array:
        """Raises ArgumentError for anything but an array of the plan's type in the source's sharding."""
        plan = self.plan
        if not jax_compat.is_concrete(array):
            raise ArgumentError(_refusal(plan, f"an operand of type {type(array).__name__}", "pass a jax.Array"))
        if array.shape != plan.shape or array.dtype != plan.dtype:
            argument = f"an array {type_text(array.shape, array.dtype)}"
            raise ArgumentError(_refusal(plan, argument, "plan a transfer for arrays of this type"))
        if array.sharding is not plan.source and array.sharding != plan.source:
            argument = f"an array in {where(array.sharding)}"
            raise ArgumentError(_refusal(plan, argument, "plan a transfer from this sharding, or move the array first"))
        return arrived(self.run(array))


def compile_transfer(plan: TransferPlan, transport: Transport | None = None, *, keeps: bool = False) -> Transfer:
    """The plan as a function, with every cut and join compiled and every route connected.

    `transport` is `Local()` if None. With `keeps` the operand may be donated or deleted at any time afterwards, unless
    the plan is an alias: copies are sent.
    """
    plan.verify()
    transport = transport or Local()
    across = not isinstance(transport, Local)
    with jax_compat.no_mesh():
        match plan.kind:
            case "alias":
                run = _identity
            case "put" if not across and not keeps:
                run = transport.put(plan.target)
            case "reshard":
                operand = jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=plan.source)
                run = jax_compat.compiled(jax.jit(_identity, out_shardings=plan.target).lower(operand))
            case "tiles" | "put":
                run = _Tiles.of(plan, transport, copies=keeps).__call__
    return Transfer(plan=plan, run=run)


Program = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """The steps of a tile plan over a list of slots, one for each tile, later one for each target device.

    Of several processes each has the steps on its own devices, and empty slots for those on others'. Cut: (source
    device, program or None, slots); moved: slots; joined: (program or None, slots), by target device; copied: (from,
    to) target devices.
    """

    plan: TransferPlan
    cuts: tuple[tuple[Device, Program | None, tuple[int, ...]], ...]
    moved: tuple[int, ...]
    move: Move
    joined: tuple[tuple[int, Program | None, tuple[int, ...]], ...]
    copied: tuple[tuple[int, int], ...]
    copy: Move
    n_targets: int

    @classmethod
    def of(cls, plan: TransferPlan, transport: Transport, *, copies: bool = False) -> _Tiles:
        source_blocks, places = blocks_of(plan.source, plan.shape), _positions(plan.target, plan.shape)
        rank = jax.process_index()
        source_blocks = {device: block for device, block in source_blocks.items() if device.process_index == rank}
        tiles = plan.tiles
        moved = tuple(i for i, tile in enumerate(tiles) if tile.source_device != tile.target_device)
        joins: dict[Device, list[int]] = {}
        for i, tile in enumerate(tiles):
            if tile.target_device.process_index == rank:
                joins.setdefault(tile.target_device, []).append(i)
        shard = plan.target.shard_shape(plan.shape)
        copied = tuple((places[copy.source_device], places[copy.target_device]) for copy in plan.copies)
        return cls(
            plan=plan,
            cuts=_cuts(plan, source_blocks, copies=copies),
            moved=moved,
            move=transport.connect(
                tuple(
                    Route(source=t.source_device, target=t.target_device, shape=t.shape, dtype=plan.dtype)
                    for t in (tiles[i] for i in moved)
                )
            ),
            joined=tuple(
                (places[device], _join(device, [tiles[i] for i in slots], plan.dtype), tuple(slots))
                for device, slots in joins.items()
            ),
            copied=copied,
            copy=transport.connect(
                tuple(
                    Route(source=c.source_device, target=c.target_device, shape=shard, dtype=plan.dtype)
                    for c in plan.copies
                )
            ),
            n_targets=len(places),
        )

    def __call__(self, array: jax.Array) -> jax.Array | Later:
        shards = {shard.device: shard.data for shard in array.addressable_shards} if self.cuts else {}
        pieces: list[Any] = [None] * len(self.plan.tiles)
        for device, program, slots in self.cuts:
            if program is None:
                for slot in slots:
                    pieces[slot] = shards[device]
            else:
                for slot, piece in zip(slots, program(shards[device]), strict=True):
                    pieces[slot] = piece
        if self.moved:
            for slot, piece in zip(self.moved, self.move([pieces[i] for i in self.moved]), strict=True):
                pieces[slot] = piece
        if any(isinstance(piece, Later) for piece in pieces):
            return Later(partial(self._whole, pieces))
        return self._whole(pieces)

    def _whole(self, pieces: Sequence[Any]) -> jax.Array:
        """The array of pieces that are where they are read, or on their way there."""
        pieces = list(map(arrived, pieces))
        results: list[Any] = [None] * self.n_targets
        for place, program, slots in self.joined:
            results[place] = pieces[slots[0]] if program is None else program(*[pieces[i] for i in slots])
        if self.copied:
            for (_, place), piece in zip(self.copied, self.copy([results[i] for i, _ in self.copied]), strict=True):
                results[place] = piece
        plan, parts = self.plan, [part for part in results if part is not None]
        return jax.make_array_from_single_device_arrays(plan.shape, plan.target, parts, dtype=plan.dtype)


def _cuts(
    plan: TransferPlan, source_blocks: Mapping[Device, Box], *, copies: bool
) -> tuple[tuple[Device, Program | None, tuple[int, ...]], ...]:
    """The programs that cut out each device's parts; whole shards need none, unless they are sent as copies."""
    programs: list[tuple[Device, Program | None, tuple[int, ...]]] = []
    for device, block in source_blocks.items():
        shape = shape_of(block)
        mine = [i for i, tile in enumerate(plan.tiles) if tile.source_device == device]
        whole = tuple(i for i in mine if plan.tiles[i].shape == shape)
        uncut = () if copies else whole
        parts = tuple(i for i in mine if i not in uncut)
        if uncut:
            programs.append((device, None, uncut))
        if parts:
            boxes = tuple(plan.tiles[i].source_slice for i in parts)
            programs.append((device, _compiled(partial(_cut, boxes=boxes), device, [shape], plan.dtype), parts))
    return tuple(programs)


def _join(device: Device, tiles: Sequence[Tile], dtype: Any) -> Program | None:
    if len(tiles) == 1:
        return None
    boxes = tuple(tile.target_slice for tile in tiles)
    return _compiled(partial(_joined, boxes=boxes), device, [tile.shape for tile in tiles], dtype)


def _compiled(function: Program, device: Device, shapes: Sequence[tuple[int, ...]], dtype: Any) -> Program:
    sharding = SingleDeviceSharding(device)
    operands = (jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shapes)
    return jax_compat.compiled(jax.jit(function).lower(*operands))


def _cut(shard: jax.Array, *, boxes: tuple[Box, ...]) -> tuple[jax.Array, ...]:
    cuts = (lax.slice(shard, [a for a, _ in box], [b for _, b in box]) for box in boxes)
    return tuple(jnp.copy(part) if part.shape == shard.shape else part for part in cuts)


def _joined(*pieces: jax.Array, boxes: tuple[Box, ...], dimension: int = 0) -> jax.Array:
    """The array of pieces joined side by side.

    They form a grid, as the shards of every sharding do, and are joined one dimension after another.
    """
    if len(pieces) == 1:
        return pieces[0]
    rows: dict[tuple[int, int], list[int]] = {}
    for i, box in enumerate(boxes):
        rows.setdefault(box[dimension], []).append(i)
    inner = [
        _joined(*(pieces[i] for i in rows[row]), boxes=tuple(boxes[i] for i in rows[row]), dimension=dimension + 1)
        for row in sorted(rows)
    ]
    return inner[0] if len(inner) == 1 else jnp.concatenate(inner, axis=dimension)


def _identity(array: jax.Array) -> jax.Array:
    return array


def _positions(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, int]:
    return {device: i for i, device in enumerate(sharding.devices_indices_map(shape))}


def _refusal(plan: TransferPlan, argument: str, remedy: str) -> str:
    return explain(
        argument, f"the transfer takes {type_text(plan.shape, plan.dtype)} in {where(plan.source)}", "", remedy
    )
