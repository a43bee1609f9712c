"""Arrays between submeshes: any sharding over some devices to any other over others, in order, never through the host.

    plan      who sends which part of which shard to whom, as plain data     `plan_transfer`
    move      single-device pieces from device to device                     `Transport`, `Local`
    run       cut, move, join: nothing traced or compiled in a call          `compile_transfer`, `Transfer`

Every call returns before its operand is computed. It neither donates nor deletes: pieces live as long as a pending
copy reads them, whatever the caller drops. Where `TransferPlan.shares` says so the result has buffers in common with
the operand, and neither may be donated while the other is in use.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.errors import ArgumentError, InternalError, explain
from autopar.jax_compat import Device

Box = tuple[tuple[int, int], ...]
"""The (start, stop) of each dimension."""

Kind = Literal["alias", "put", "reshard", "tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of the source device's shard that becomes a part of the target device's; slices count within shards."""

    source_device: Device
    source_slice: Box
    target_device: Device
    target_slice: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape(self.source_slice)

    def __str__(self) -> str:
        giver, taker = self.source_device.id, self.target_device.id
        return f"{giver}[{_text(self.source_slice)}] -> {taker}[{_text(self.target_slice)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A whole target shard that another target device has already and hands on."""

    source_device: Device
    target_device: Device

    def __str__(self) -> str:
        return f"{self.source_device.id} => {self.target_device.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """How an array of one type gets from `source` to `target`.

    alias     it is there already
    put       shard by shard: the i-th devices of both hold the same part
    reshard   the same devices in the same order, which exchange what they hold by collectives
    tiles     everything else: first the tiles, then the copies of what they made

    A put lists its tiles too, one whole shard each.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: Sharding
    target: Sharding
    kind: Kind
    tiles: tuple[Tile, ...] = ()
    copies: tuple[Copy, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether the result may have buffers in common with the operand."""
        if self.kind == "alias":
            return True
        shards = _blocks(self.source, self.shape)
        return any(
            t.source_device == t.target_device and t.shape == _shape(shards[t.source_device]) for t in self.tiles
        )

    def sent_nbytes(self) -> Mapping[Device, int]:
        """Bytes that each device sends to others, without what a reshard's collectives send."""
        sent: Counter[Device] = Counter()
        for tile in self.tiles:
            if tile.source_device != tile.target_device:
                sent[tile.source_device] += math.prod(tile.shape) * self.dtype.itemsize
        nbytes = math.prod(self.target.shard_shape(self.shape)) * self.dtype.itemsize
        for copy in self.copies:
            sent[copy.source_device] += nbytes
        return sent

    def verify(self) -> None:
        """Raises InternalError unless every element of every target shard comes from its place exactly once."""
        if self.kind in ("alias", "reshard"):
            there = self.source == self.target if self.kind == "alias" else _same_devices(self.source, self.target)
            _require(there and not self.tiles and not self.copies, f"{self.kind} between other devices, or with tiles")
            return
        shards, wanted = _blocks(self.source, self.shape), _blocks(self.target, self.shape)
        covers: dict[Device, list[Box]] = {device: [] for device in wanted}
        for tile in self.tiles:
            held, block = shards.get(tile.source_device), wanted.get(tile.target_device)
            if held is None or block is None:
                raise InternalError(f"a transfer's plan is wrong: tile {tile} is between devices of neither side")
            inside = _within(tile.source_slice, _shape(held)) and _within(tile.target_slice, _shape(block))
            _require(inside, f"tile {tile} leaves a shard")
            _require(
                _globally(tile.source_slice, held) == _globally(tile.target_slice, block), f"tile {tile} displaces"
            )
            covers[tile.target_device].append(tile.target_slice)
        made = {device for device, boxes in covers.items() if boxes}
        for device in made:
            boxes = covers[device]
            apart = all(_overlap(a, b) is None for a, b in itertools.combinations(boxes, 2))
            whole = sum(math.prod(_shape(box)) for box in boxes) == math.prod(_shape(wanted[device]))
            _require(apart and whole, f"device {device.id} gets its shard not exactly once from {len(boxes)} tiles")
        copied = [copy.target_device for copy in self.copies]
        _require(
            sorted(d.id for d in (*made, *copied)) == sorted(d.id for d in wanted),
            "tiles and copies together do not reach every target device once",
        )
        for copy in self.copies:
            same = copy.source_device in made and wanted[copy.source_device] == wanted[copy.target_device]
            _require(same, f"copy {copy} hands on another shard")

    def format(self) -> str:
        """The plan as text: a line for the whole, then one for each tile and copy, with device numbers."""
        sides = " -> ".join(_where(sharding) for sharding in (self.source, self.target))
        head = f"{self.kind} {_type(self.shape, self.dtype)}: {sides}"
        return "\n".join([head, *(f"  {part}" for part in (*self.tiles, *self.copies))])


def plan_transfer(shape: Sequence[int], dtype: Any, source: Sharding, target: Sharding) -> TransferPlan:
    """The plan for arrays of this type.

    An element that several devices hold is taken from the target device itself if it is one of them, else from the one
    that sends least so far. A shard that several target devices want is sent to one of them, which hands it on.

    Raises ArgumentError for a sharding that does not divide the shape or that is not in its devices' default memory.
    """
    shape = tuple(shape)
    dtype = jax.ShapeDtypeStruct((), dtype).dtype
    for sharding in (source, target):
        _check(shape, dtype, sharding)
    make = partial(TransferPlan, shape=shape, dtype=dtype, source=source, target=target)
    if source == target:
        return make(kind="alias")
    held, wanted = _blocks(source, shape), _blocks(target, shape)
    if tuple(held.values()) == tuple(wanted.values()):
        pairs = zip(held, wanted.items(), strict=True)
        whole = (_tile(a, held[a], b, block, block) for a, (b, block) in pairs)
        return make(kind="put", tiles=tuple(whole))
    if _same_devices(source, target):
        return make(kind="reshard")
    tiles, copies = _spread(held, wanted, dtype.itemsize)
    return make(kind="tiles", tiles=tiles, copies=copies)


def _spread(
    held: Mapping[Device, Box], wanted: Mapping[Device, Box], itemsize: int
) -> tuple[tuple[Tile, ...], tuple[Copy, ...]]:
    holders = _by_block(held)
    sent: Counter[Device] = Counter()
    tiles: list[Tile] = []
    copies: list[Copy] = []
    for block, devices in _by_block(wanted).items():
        parts = [(part, who) for shard, who in holders.items() if (part := _overlap(shard, block)) is not None]

        def here(device: Device, parts: list[tuple[Box, list[Device]]] = parts) -> int:
            return sum(math.prod(_shape(part)) for part, who in parts if device in who)

        volume = math.prod(_shape(block))
        complete = [device for device in devices if here(device) == volume and len(parts) == 1]
        roots = complete or [max(devices, key=here)]
        for root in roots:
            for part, who in parts:
                giver = root if root in who else min(who, key=sent.__getitem__)
                tiles.append(_tile(giver, held[giver], root, block, part))
                sent[giver] += itemsize * math.prod(_shape(part)) * (giver != root)
        for device in devices:
            if device not in roots:
                giver = min(roots, key=sent.__getitem__)
                copies.append(Copy(source_device=giver, target_device=device))
                sent[giver] += itemsize * volume
    return tuple(tiles), tuple(copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A piece of this type that goes from one device to another."""

    source: Device
    target: Device
    shape: tuple[int, ...]
    dtype: Any


Move = Callable[[list[jax.Array]], list[jax.Array]]
"""Takes a piece on each route's source device and returns them on the targets, not waiting for their contents."""


class Transport(Protocol):
    """A way between devices. Preparation happens once; what it returns is called for every array.

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
    """All devices belong to this process."""

    def connect(self, routes: tuple[Route, ...]) -> Move:
        # A device in place of its sharding: JAX spends half the time on one piece, and nothing differs.
        targets: list[Device] = [route.target for route in routes]
        if len(targets) == 1:
            return lambda pieces: [jax.device_put(pieces[0], targets[0])]
        return lambda pieces: jax.device_put(pieces, targets)

    def put(self, target: Sharding) -> Callable[[jax.Array], jax.Array]:
        if target == SingleDeviceSharding(device := _devices(target)[0]):
            return lambda array: jax.device_put(array, device)
        return lambda array: jax.device_put(array, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A plan compiled for its devices. A call returns the array in the target's sharding, which may not be computed."""

    plan: TransferPlan
    run: Callable[[jax.Array], jax.Array]

    def __call__(self, array: jax.Array) -> jax.Array:
        """Raises ArgumentError for anything but an array of the plan's type in the source's sharding."""
        plan = self.plan
        if not jax_compat.is_concrete(array):
            raise ArgumentError(_refusal(plan, f"an operand of type {type(array).__name__}", "pass a jax.Array"))
        if array.shape != plan.shape or array.dtype != plan.dtype:
            what = f"an array {_type(array.shape, array.dtype)}"
            raise ArgumentError(_refusal(plan, what, "plan a transfer for arrays of this type"))
        if array.sharding is not plan.source and array.sharding != plan.source:
            what = f"an array in {_where(array.sharding)}"
            raise ArgumentError(_refusal(plan, what, "plan a transfer from this sharding, or move the array first"))
        return self.run(array)


def compile_transfer(plan: TransferPlan, transport: Transport | None = None) -> Transfer:
    """The plan as a function: every cut and join compiled, every route connected. `transport` is `Local()` if None."""
    plan.verify()
    transport = transport or Local()
    with jax_compat.no_mesh():
        match plan.kind:
            case "alias":
                run = _identity
            case "put":
                run = transport.put(plan.target)
            case "reshard":
                operand = jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=plan.source)
                run = jax.jit(_identity, out_shardings=plan.target).lower(operand).compile()
            case "tiles":
                run = _Tiles.of(plan, transport).__call__
    return Transfer(plan=plan, run=run)


Program = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """The steps of a tile plan over a list of slots, one for each tile, later one for each target device.

    Cut: (source device, program or None, slots); moved: slots; joined: (program or None, slots), by target device;
    copied: (from, to) target devices.
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
    def of(cls, plan: TransferPlan, transport: Transport) -> _Tiles:
        held, places = _blocks(plan.source, plan.shape), _positions(plan.target, plan.shape)
        tiles = plan.tiles
        moved = tuple(i for i, tile in enumerate(tiles) if tile.source_device != tile.target_device)
        joins: dict[Device, list[int]] = {}
        for i, tile in enumerate(tiles):
            joins.setdefault(tile.target_device, []).append(i)
        shard = plan.target.shard_shape(plan.shape)
        copied = tuple((places[copy.source_device], places[copy.target_device]) for copy in plan.copies)
        return cls(
            plan=plan,
            cuts=_cuts(plan, held),
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

    def __call__(self, array: jax.Array) -> jax.Array:
        shards = {shard.device: shard.data for shard in array.addressable_shards}
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
        results: list[Any] = [None] * self.n_targets
        for place, program, slots in self.joined:
            results[place] = pieces[slots[0]] if program is None else program(*[pieces[i] for i in slots])
        if self.copied:
            for (_, place), piece in zip(self.copied, self.copy([results[i] for i, _ in self.copied]), strict=True):
                results[place] = piece
        return jax.make_array_from_single_device_arrays(self.plan.shape, self.plan.target, results)


def _cuts(plan: TransferPlan, held: Mapping[Device, Box]) -> tuple[tuple[Device, Program | None, tuple[int, ...]], ...]:
    """One program for each device's parts; whole shards need none."""
    found: list[tuple[Device, Program | None, tuple[int, ...]]] = []
    for device, block in held.items():
        shape = _shape(block)
        mine = [i for i, tile in enumerate(plan.tiles) if tile.source_device == device]
        whole = tuple(i for i in mine if plan.tiles[i].shape == shape)
        parts = tuple(i for i in mine if plan.tiles[i].shape != shape)
        if whole:
            found.append((device, None, whole))
        if parts:
            boxes = tuple(plan.tiles[i].source_slice for i in parts)
            found.append((device, _compiled(partial(_cut, boxes=boxes), device, [shape], plan.dtype), parts))
    return tuple(found)


def _join(device: Device, tiles: Sequence[Tile], dtype: Any) -> Program | None:
    if len(tiles) == 1:
        return None
    boxes = tuple(tile.target_slice for tile in tiles)
    return _compiled(partial(_joined, boxes=boxes), device, [tile.shape for tile in tiles], dtype)


def _compiled(function: Program, device: Device, shapes: Sequence[tuple[int, ...]], dtype: Any) -> Program:
    sharding = SingleDeviceSharding(device)
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shapes)).compile()


def _cut(shard: jax.Array, *, boxes: tuple[Box, ...]) -> tuple[jax.Array, ...]:
    return tuple(lax.slice(shard, [a for a, _ in box], [b for _, b in box]) for box in boxes)


def _joined(*pieces: jax.Array, boxes: tuple[Box, ...], dimension: int = 0) -> jax.Array:
    """The pieces side by side. They lie on a grid, as the shards of every sharding do: one dimension after another."""
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


def _blocks(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """What each device holds, in the order of the sharding's devices."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
        if index is not None
    }


def _positions(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, int]:
    return {device: i for i, device in enumerate(sharding.devices_indices_map(shape))}


def _by_block(blocks: Mapping[Device, Box]) -> dict[Box, list[Device]]:
    found: dict[Box, list[Device]] = {}
    for device, block in blocks.items():
        found.setdefault(block, []).append(device)
    return found


def _same_devices(a: Sharding, b: Sharding) -> bool:
    """In the same order: a program has one."""
    return _devices(a) == _devices(b)


def _devices(sharding: Sharding) -> tuple[Device, ...]:
    if isinstance(sharding, NamedSharding):
        grid: Any = sharding.mesh.devices
        return tuple(grid.flat)
    return tuple(sharding.device_set)


def _tile(giver: Device, held: Box, taker: Device, block: Box, part: Box) -> Tile:
    """The tile for a part of the whole array."""
    return Tile(
        source_device=giver, source_slice=_locally(part, held), target_device=taker, target_slice=_locally(part, block)
    )


def _overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if nothing. A dimension of size 0 that both have whole is in common."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    parts = zip(both, a, b, strict=True)
    return both if all(start < stop or p == q for (start, stop), p, q in parts) else None


def _within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))


def _locally(part: Box, block: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(part, block, strict=True))


def _globally(part: Box, block: Box) -> Box:
    return tuple((a + start, b + start) for (a, b), (start, _) in zip(part, block, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InternalError(f"a transfer's plan is wrong: {otherwise}")


def _check(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> None:
    what = f"a transfer of {_type(shape, dtype)} with {_where(sharding)}"
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        rule = f"{type(sharding).__name__} is neither a NamedSharding nor a SingleDeviceSharding"
        raise ArgumentError(explain(what, rule, "", "give the sharding over a mesh that says the same"))
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        rule = f"the dimensions of {sharding.spec} are more than the array's {len(shape)}"
        raise ArgumentError(explain(what, rule, "", "name mesh axes only for dimensions that the array has"))
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        remedy = "shard only dimensions that the mesh axes divide"
        raise ArgumentError(explain(what, f"every shard must have the same size; {error}", "", remedy)) from error
    default = _devices(sharding)[0].default_memory().kind
    if sharding.memory_kind not in (None, default):
        rule = f"memory {sharding.memory_kind!r} is not the devices' default, {default!r}"
        raise ArgumentError(explain(what, rule, "", f"use .with_memory_kind({default!r})"))


def _refusal(plan: TransferPlan, what: str, remedy: str) -> str:
    return explain(what, f"the transfer takes {_type(plan.shape, plan.dtype)} in {_where(plan.source)}", "", remedy)


def _where(sharding: Any) -> str:
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        return str(sharding)
    ids = ",".join(str(device.id) for device in _devices(sharding))
    if isinstance(sharding, SingleDeviceSharding):
        return f"device {ids}"
    axes = "x".join(f"{axis}{size}" for axis, size in sharding.mesh.shape.items())
    return f"{sharding.spec} on {axes} of devices {ids}"


def _type(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def _text(box: Box) -> str:
    return ",".join(f"{a}:{b}" for a, b in box)
