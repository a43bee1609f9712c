"""The mesh axes of a collective, from the replica groups of its HLO."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

UNKNOWN = ("?",)
"""The axes of a collective whose device groups are no axes of the mesh."""


_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


_LISTED = re.compile(r"\{(?:\{[\d,]*\},?)*\}")


_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}")


_GROUPS = re.compile(rf"replica_groups=(?:{_LISTED.pattern}|{_IOTA.pattern}|{_MESH.pattern})")


_MESH_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


_SUB_AXIS = re.compile(r"(.*):\((\d+)\)(\d+)")


def participants(kind: str, attributes: str) -> str:
    """The attribute of a collective that lists its devices, as text."""
    pattern = _PAIRS if kind == "permute" else _GROUPS
    match = pattern.search(attributes)
    if not match:
        raise ValueError("no replica groups or source-target pairs that autopar knows")
    return match[0]


@lru_cache(maxsize=4096)
def spanned_axes(who: str, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The axes along which a collective's devices differ; `UNKNOWN` if its groups are not along axes of this mesh."""
    n_devices = math.prod(sizes)
    if pairs := _PAIRS.fullmatch(who):
        groups = _nested(pairs[1])
        if any(device >= n_devices for group in groups for device in group):
            return UNKNOWN
        spanned = set().union(*(_differing(group, sizes) for group in groups))
    else:
        groups = _groups(who.removeprefix("replica_groups=")) or (tuple(range(n_devices)),)
        if sorted(device for group in groups for device in group) != list(range(n_devices)):
            return UNKNOWN
        spanned = _differing(groups[0], sizes)
        if {frozenset(group) for group in groups} != _partition(spanned, sizes):
            return UNKNOWN
    return tuple(axis for i, axis in enumerate(axes) if i in spanned)


def _differing(devices: Iterable[int], sizes: tuple[int, ...]) -> set[int]:
    """The positions of the mesh axes along which the devices' coordinates differ."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return {
        i
        for i, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        if len({device // stride % size for device in devices}) > 1
    }


def _partition(spanned: set[int], sizes: tuple[int, ...]) -> set[frozenset[int]]:
    """The groups of devices that differ only along the axes at positions `spanned`."""
    others = [i for i in range(len(sizes)) if i not in spanned]
    grid = np.arange(math.prod(sizes)).reshape(sizes).transpose(*others, *sorted(spanned))
    return {frozenset(group) for group in grid.reshape(-1, math.prod(sizes[i] for i in spanned)).tolist()}


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """The device groups of any of the three syntaxes; none where `{}` stands for one group of all devices."""
    if _LISTED.fullmatch(text):
        return _nested(text[1:-1])
    if iota := _IOTA.fullmatch(text):
        return tuple(map(tuple, _iota(iota[2], iota[3]).reshape(numbers(iota[1])).tolist()))
    mesh = _MESH.fullmatch(text)
    if not mesh:
        raise ValueError(f"unknown replica groups {text}")
    names, extents = zip(*(axis.rsplit("=", 1) for axis in mesh[1].split(",")), strict=True)
    shape = tuple(map(int, extents))
    listed = _MESH_IDS.fullmatch(mesh[2]) if mesh[2] else None
    ids = _iota(listed[1], listed[2]) if listed else np.array(numbers(mesh[2]) or range(math.prod(shape)))
    return _along(ids.reshape(shape), [_sub_axis(axis, names, shape) for axis in mesh[3].split(",") if axis])


def _sub_axis(text: str, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, int, int]:
    """`'x'` or `'x':(before)size` as the axis position, the extent of the sub-axis, and the steps between its members.

    A sub-axis is the middle of its axis read as a row-major [before, size, after].
    """
    part = _SUB_AXIS.fullmatch(text)
    axis = names.index(part[1] if part else text)
    size = int(part[3]) if part else shape[axis]
    return axis, size, shape[axis] // (int(part[2]) * size) if part else 1


def _along(ids: np.ndarray, sub_axes: list[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    """The groups of ids whose coordinates differ only along the sub-axes (position, extent, stride)."""
    origins = np.indices(ids.shape)
    for axis, size, stride in sub_axes:
        origins[axis] -= origins[axis] // stride % size * stride
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for origin, device in zip(np.ravel_multi_index(tuple(origins), ids.shape).flat, ids.flat, strict=True):
        groups[int(origin)].append(int(device))
    return tuple(map(tuple, groups.values()))


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    """XLA's `[shape]T(permutation)`: the device ids counted row-major in `shape`, then transposed."""
    dims = numbers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(numbers(permutation) or range(len(dims)))


def _nested(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def numbers(text: str | None) -> tuple[int, ...]:
    """The whole numbers between commas."""
    return tuple(map(int, text.split(","))) if text else ()
