"""Digests of the copies of arrays on several devices, and the first copy that differs from the others.

An array that is not cut over all of its devices has shards that are copies of each other, and stay so as long as every
device computes the same. A device or a network that fails silently, or a program that reads what only one process has,
makes them differ, and nothing else shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.distributed import digest_of

_WORD_NBYTES = 4
"""Bytes of a word: devices have integers of 32 bits, and JAX no wider ones by default."""

_FACTORS = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
"""Odd numbers, by which a word and its place are multiplied in each half of a digest."""

_SHIFT_BITS = 15
"""Half of a word: its upper bits reach the lower ones."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of one process on a state: by number of a leaf, its name and part, and the digest on each device;
    and the first leaf with values that are not finite.
    """

    digests: Mapping[str, Mapping[int, str]]
    not_finite: str = ""


def findings(named: Iterable[tuple[str, Any]]) -> Findings:
    """The findings of this process on leaves with their names; parts without a copy have no digest, and leaves that are
    no arrays or numbers have none.
    """
    placed: dict[Any, list[tuple[str, str, Any]]] = {}
    digests: dict[str, dict[int, str]] = {}
    not_finite: list[str] = []
    order: list[str] = []
    for number, (name, leaf) in enumerate(named):
        order.append(name)
        if not isinstance(leaf, jax.Array):
            array = np.asarray(leaf)
            if array.dtype.hasobject:  # a function, say: it has an address of its own in each process
                continue
            digests[_key(number, name)] = {-1: digest_of(array)}
            if array.dtype.kind in "fc" and not np.isfinite(array).all():
                not_finite.append(name)
            continue
        copies = _copies(leaf)
        for shard in leaf.addressable_shards:
            part = _part(shard.index, leaf.shape)
            key = _key(number, f"{name}{part}") if copies[part] > 1 else ""
            placed.setdefault(shard.device, []).append((name, key, shard.data))
    for device, shards in placed.items():
        rows = np.asarray(_digests([_words_of_key(data) for _, _, data in shards]))
        for (name, key, _), (high, low, is_finite) in zip(shards, rows.tolist(), strict=True):
            if key:
                digests.setdefault(key, {})[device.id] = f"{high:08x}{low:08x}"
            if not is_finite:
                not_finite.append(name)
    return Findings(digests, min(not_finite, key=order.index, default=""))


def first_difference(of_all: Sequence[Mapping[str, Mapping[int, str]]]) -> tuple[str, int, int, int, int] | None:
    """(leaf and part, rank and device with another digest, rank and device with the most frequent one) of the first
    part whose copies differ, from the digests of all processes; None if there is none.
    """
    holders: dict[str, list[tuple[int, int, str]]] = {}
    for rank, digests in enumerate(of_all):
        for key, by_device in digests.items():
            holders.setdefault(key, []).extend((rank, int(device), text) for device, text in by_device.items())
    for key, copies in sorted(holders.items()):
        usual, _ = Counter(text for _, _, text in copies).most_common(1)[0]
        if others := [copy for copy in copies if copy[2] != usual]:
            reference = next(copy for copy in copies if copy[2] == usual)
            return key.partition(" ")[2], *others[0][:2], *reference[:2]
    return None


def _key(number: int, text: str) -> str:
    """A text key that sorts by number."""
    return f"{number:08} {text}"


def _copies(array: jax.Array) -> Counter[str]:
    """The number of devices that have each part of an array; of one on this process alone, other processes' too."""
    if array.is_fully_addressable and jax.process_count() > 1:
        return Counter({_part(shard.index, array.shape): 2 for shard in array.addressable_shards})
    indices = array.sharding.devices_indices_map(array.shape).values()
    return Counter(_part(index, array.shape) for index in indices)


def _part(index: Any, shape: Sequence[int]) -> str:
    """The part of an array that a shard is, as it is written after a name; empty for the whole array."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    if all(pair == (0, size) for pair, size in zip(ranges, shape, strict=True)):
        return ""
    return f"[{','.join(f'{start}:{stop}' for start, stop in ranges)}]"


def _words_of_key(data: Any) -> Any:
    return jax.random.key_data(data) if jnp.issubdtype(data.dtype, jax.dtypes.prng_key) else data


@jax.jit
def _digests(shards: list[jax.Array]) -> jax.Array:
    """Two halves of a digest of each array on one device, and whether its values are finite."""
    return jnp.stack([jnp.stack([*_halves(shard), _is_finite(shard).astype(jnp.uint32)]) for shard in shards])


def _halves(array: jax.Array) -> list[jax.Array]:
    """Sums over the words of an array, each mixed with its place."""
    words = _words(array).reshape(-1)
    places = lax.iota(jnp.uint32, words.size)
    halves: list[jax.Array] = []
    for value, place in _FACTORS:
        mixed = words * jnp.uint32(value) ^ (places * jnp.uint32(place) + jnp.uint32(place))
        mixed = (mixed ^ (mixed >> _SHIFT_BITS)) * jnp.uint32(place)
        halves.append(jnp.sum(mixed ^ (mixed >> _SHIFT_BITS), dtype=jnp.uint32))
    return halves


def _words(array: jax.Array) -> jax.Array:
    """The bits of an array as words; narrower elements take one each."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_words(array.real), _words(array.imag)])
    if array.dtype == bool or (jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 8):
        return array.astype(jnp.int32).astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 8:
        array = array.astype(jnp.float32)
    size = min(array.dtype.itemsize, _WORD_NBYTES)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)


def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all() if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.bool_(True)
