"""Transfers as plain data: which device sends which part of which shard to which device."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from autopar.errors import ArgumentError, explain
from autopar.jax_compat import Device
from passes.errors import InternalError

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
        return shape_of(self.source_slice)

    def __str__(self) -> str:
        giver, taker = self.source_device.id, self.target_device.id
        return f"{giver}[{_text(self.source_slice)}] -> {taker}[{_text(self.target_slice)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A whole target shard that is copied from one target device to another."""

    source_device: Device
    target_device: Device

    def __str__(self) -> str:
        return f"{self.source_device.id} => {self.target_device.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The transfer of an array of one type from `source` to `target`.

    alias     it is there already
    put       shard by shard: the i-th devices of both have the same part
    reshard   the same devices in the same order, which exchange their shards by collectives
    tiles     everything else: first the tiles, then copies of what they make

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
        """Whether the result may share buffers with the operand."""
        if self.kind == "alias":
            return True
        shards = blocks_of(self.source, self.shape)
        return any(
            t.source_device == t.target_device and t.shape == shape_of(shards[t.source_device]) for t in self.tiles
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
            agrees = self.source == self.target if self.kind == "alias" else _same_devices(self.source, self.target)
            _require(agrees and not self.tiles and not self.copies, f"{self.kind} between other devices, or with tiles")
            return
        shards, targets = blocks_of(self.source, self.shape), blocks_of(self.target, self.shape)
        covers: dict[Device, list[Box]] = {device: [] for device in targets}
        for tile in self.tiles:
            source_block, block = shards.get(tile.source_device), targets.get(tile.target_device)
            if source_block is None or block is None:
                raise InternalError(f"a transfer's plan is wrong: tile {tile} is between devices of neither side")
            inside = _within(tile.source_slice, shape_of(source_block)) and _within(tile.target_slice, shape_of(block))
            _require(inside, f"tile {tile} leaves a shard")
            _require(
                _globally(tile.source_slice, source_block) == _globally(tile.target_slice, block),
                f"tile {tile} displaces",
            )
            covers[tile.target_device].append(tile.target_slice)
        covered = {device for device, boxes in covers.items() if boxes}
        for device in covered:
            boxes = covers[device]
            apart = all(_overlap(a, b) is None for a, b in itertools.combinations(boxes, 2))
            is_covered = sum(math.prod(shape_of(box)) for box in boxes) == math.prod(shape_of(targets[device]))
            _require(
                apart and is_covered, f"device {device.id} gets its shard not exactly once from {len(boxes)} tiles"
            )
        copied = [copy.target_device for copy in self.copies]
        _require(
            sorted(d.id for d in (*covered, *copied)) == sorted(d.id for d in targets),
            "tiles and copies together do not reach every target device once",
        )
        for copy in self.copies:
            same = copy.source_device in covered and targets[copy.source_device] == targets[copy.target_device]
            _require(same, f"copy {copy} hands on another shard")

    def format(self) -> str:
        """The plan as text: a line for the whole, then one for each tile and copy, with device numbers."""
        sides = " -> ".join(where(sharding) for sharding in (self.source, self.target))
        head = f"{self.kind} {type_text(self.shape, self.dtype)}: {sides}"
        return "\n".join([head, *(f"  {part}" for part in (*self.tiles, *self.copies))])


def plan_transfer(shape: Sequence[int], dtype: Any, source: Sharding, target: Sharding) -> TransferPlan:
    """The plan for arrays of this type.

    An element that several devices have is taken from the target device itself if it is one of them, else from the
    device of its process that sends least so far, if any has it, else from the one of all. A shard that several target
    devices need is sent to one of them in each process that has any, which copies it to the others.

    Raises ArgumentError for a sharding that does not divide the shape or that is not in its devices' default memory.
    """
    shape = tuple(shape)
    dtype = jax.ShapeDtypeStruct((), dtype).dtype
    for sharding in (source, target):
        _check(shape, dtype, sharding)
    make = partial(TransferPlan, shape=shape, dtype=dtype, source=source, target=target)
    if source == target:
        return make(kind="alias")
    sources, targets = blocks_of(source, shape), blocks_of(target, shape)
    if tuple(sources.values()) == tuple(targets.values()):
        pairs = zip(sources, targets.items(), strict=True)
        whole = (_tile(a, sources[a], b, block, block) for a, (b, block) in pairs)
        return make(kind="put", tiles=tuple(whole))
    if _same_devices(source, target):
        return make(kind="reshard")
    tiles, copies = _spread(sources, targets, dtype.itemsize)
    return make(kind="tiles", tiles=tiles, copies=copies)


def _spread(
    sources: Mapping[Device, Box], targets: Mapping[Device, Box], itemsize: int
) -> tuple[tuple[Tile, ...], tuple[Copy, ...]]:
    holders = _by_block(sources)
    sent: Counter[Device] = Counter()
    tiles: list[Tile] = []
    copies: list[Copy] = []
    for block, devices in _by_block(targets).items():
        parts = [(part, who) for shard, who in holders.items() if (part := _overlap(shard, block)) is not None]

        def here(device: Device, parts: list[tuple[Box, list[Device]]] = parts) -> int:
            return sum(math.prod(shape_of(part)) for part, who in parts if device in who)

        volume = math.prod(shape_of(block))
        complete = [device for device in devices if here(device) == volume and len(parts) == 1]
        by_process: dict[int, list[Device]] = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        roots: list[Device] = []
        for local in by_process.values():
            roots += [device for device in local if device in complete] or [max(local, key=here)]
        for root in roots:

            def load(device: Device, root: Device = root) -> tuple[bool, int]:
                return device.process_index != root.process_index, sent[device]

            for part, who in parts:
                giver = root if root in who else min(who, key=load)
                tiles.append(_tile(giver, sources[giver], root, block, part))
                sent[giver] += itemsize * math.prod(shape_of(part)) * (giver != root)
        for device in devices:
            if device not in roots:
                near = [root for root in roots if root.process_index == device.process_index]
                giver = min(near, key=sent.__getitem__)
                copies.append(Copy(source_device=giver, target_device=device))
                sent[giver] += itemsize * volume
    return tuple(tiles), tuple(copies)


def blocks_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """The block of the array on each device, in the order of the sharding's devices."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
        if index is not None
    }


def _by_block(blocks: Mapping[Device, Box]) -> dict[Box, list[Device]]:
    devices_of: dict[Box, list[Device]] = {}
    for device, block in blocks.items():
        devices_of.setdefault(block, []).append(device)
    return devices_of


def _same_devices(a: Sharding, b: Sharding) -> bool:
    """Whether two shardings have the same devices in the same order, as one program needs."""
    return devices_of(a) == devices_of(b)


def devices_of(sharding: Sharding) -> tuple[Device, ...]:
    if isinstance(sharding, NamedSharding):
        grid: Any = sharding.mesh.devices
        return tuple(grid.flat)
    return tuple(sharding.device_set)


def _tile(giver: Device, source_block: Box, taker: Device, block: Box, part: Box) -> Tile:
    """The tile for a part of the whole array."""
    return Tile(
        source_device=giver,
        source_slice=_locally(part, source_block),
        target_device=taker,
        target_slice=_locally(part, block),
    )


def _overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty. A dimension of size 0 that both have whole counts
    as shared.
    """
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    parts = zip(common, a, b, strict=True)
    return common if all(start < stop or p == q for (start, stop), p, q in parts) else None


def _within(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))


def _locally(part: Box, block: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(part, block, strict=True))


def _globally(part: Box, block: Box) -> Box:
    return tuple((a + start, b + start) for (a, b), (start, _) in zip(part, block, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InternalError(f"a transfer's plan is wrong: {otherwise}")


def _check(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> None:
    argument = f"a transfer of {type_text(shape, dtype)} with {where(sharding)}"
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        rule = f"{type(sharding).__name__} is neither a NamedSharding nor a SingleDeviceSharding"
        raise ArgumentError(explain(argument, rule, "", "give the sharding over a mesh that says the same"))
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        rule = f"the dimensions of {sharding.spec} are more than the array's {len(shape)}"
        raise ArgumentError(explain(argument, rule, "", "name mesh axes only for dimensions that the array has"))
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        remedy = "shard only dimensions that the mesh axes divide"
        raise ArgumentError(explain(argument, f"every shard must have the same size; {error}", "", remedy)) from error
    default = devices_of(sharding)[0].default_memory().kind
    if sharding.memory_kind not in (None, default):
        rule = f"memory {sharding.memory_kind!r} is not the devices' default, {default!r}"
        raise ArgumentError(explain(argument, rule, "", f"use .with_memory_kind({default!r})"))


def where(sharding: Any) -> str:
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        return str(sharding)
    ids = ",".join(str(device.id) for device in devices_of(sharding))
    if isinstance(sharding, SingleDeviceSharding):
        return f"device {ids}"
    axes = "x".join(f"{axis}{size}" for axis, size in sharding.mesh.shape.items())
    return f"{sharding.spec} on {axes} of devices {ids}"


def type_text(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def _text(box: Box) -> str:
    return ",".join(f"{a}:{b}" for a, b in box)
