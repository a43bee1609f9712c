"""Transports of pieces of arrays between processes.

On CPUs the receiver fetches them over a connection of its own (`autopar.distributed.Connections`), so only the two ends
take part, in any order. Accelerators have `jax.device_put` between processes (NCCL on GPUs), which every process of the
program calls for every piece, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from autopar import jax_compat
from autopar.distributed import LARGE_NBYTES, Connections, Processes, nowhere
from autopar.runtime.transfer import Later, Local, Move, Route, Transport
from autopar.runtime.transfer_plan import TransferPlan
from passes.errors import InternalError

CPU = "cpu"


def transport_of(plan: TransferPlan, processes: Processes | None) -> Transport:
    """The transport between the devices of a plan."""
    devices = plan.source.device_set | plan.target.device_set
    if processes is None or {device.process_index for device in devices} == {processes.rank}:
        return Local()
    if all(device.platform == CPU for device in devices):
        return Fetched(Connections.of(processes))
    return Direct(processes.rank)


def takes_part(source: Sharding, target: Sharding, processes: Processes) -> bool:
    """Whether this process does anything in a transfer."""
    devices = source.device_set | target.device_set
    ranks = {device.process_index for device in devices}
    direct = len(ranks) > 1 and any(device.platform != CPU for device in devices)
    return direct or processes.rank in ranks


@dataclass(frozen=True, slots=True)
class Fetched:
    """The transport on which receivers fetch pieces: one message for all pieces between two processes."""

    connections: Connections

    def connect(self, routes: tuple[Route, ...]) -> Move:
        rank = self.connections.processes.rank
        inner, local = _local(routes, rank)
        sent: dict[int, list[int]] = {}
        received: dict[int, list[int]] = {}
        empty: list[int] = []
        for i, route in enumerate(routes):
            sender, receiver = route.source.process_index, route.target.process_index
            if 0 in route.shape:  # a fetch of nothing would never end
                empty += [i] if sender != receiver == rank else []
            elif sender == rank != receiver:
                sent.setdefault(receiver, []).append(i)
            elif receiver == rank != sender:
                received.setdefault(sender, []).append(i)
        structs = {sender: [_struct(routes[i]) for i in at] for sender, at in received.items()}
        large_to = {receiver for receiver, at in sent.items() if _is_large([routes[i] for i in at])}
        large_from = {sender for sender, at in received.items() if _is_large([routes[i] for i in at])}
        zeros = {i: jax.device_put(jnp.zeros(routes[i].shape, routes[i].dtype), routes[i].target) for i in empty}

        def move(pieces: list[Any]) -> list[Any]:
            moved: list[Any] = [zeros.get(i) for i in range(len(routes))]
            for receiver in sorted(sent):
                send = self.connections.send_large if receiver in large_to else self.connections.send
                send(receiver, [_words(pieces[i]) for i in sent[receiver]])
            for i, piece in zip(inner, local([pieces[i] for i in inner]) if inner else (), strict=True):
                moved[i] = piece
            for sender in sorted(received):
                if sender in large_from:
                    contents = self.connections.receive_large(sender, structs[sender])
                    for k, i in enumerate(received[sender]):
                        moved[i] = Later(partial(_arrived, contents, k, routes[i]))
                    continue
                fetched = self.connections.receive(sender, structs[sender])
                for i, piece in zip(received[sender], fetched, strict=True):
                    moved[i] = _typed(piece, routes[i].dtype)
            return moved

        return move

    def put(self, target: Sharding) -> Callable[[jax.Array], jax.Array]:
        raise InternalError("arrays between processes go in tiles")


@dataclass(frozen=True, slots=True)
class Direct:
    """The transport of accelerators: JAX's own, a call for each piece on every process of the program."""

    rank: int

    def connect(self, routes: tuple[Route, ...]) -> Move:
        inner, local = _local(routes, self.rank)
        between = [i for i, route in enumerate(routes) if route.source.process_index != route.target.process_index]
        sides = {i: (SingleDeviceSharding(routes[i].source), SingleDeviceSharding(routes[i].target)) for i in between}
        structs = {i: _struct(routes[i]) for i in between}

        def move(pieces: list[Any]) -> list[Any]:
            moved: list[Any] = [None] * len(routes)
            for i, piece in zip(inner, local([pieces[i] for i in inner]) if inner else (), strict=True):
                moved[i] = piece
            for i in between:
                source, target = sides[i]
                shape, dtype = structs[i].shape, structs[i].dtype
                piece = nowhere(shape, dtype, source) if pieces[i] is None else _words(pieces[i])
                arrived = jax.device_put(piece, target)
                moved[i] = _typed(arrived, routes[i].dtype) if routes[i].target.process_index == self.rank else None
            return moved

        return move

    def put(self, target: Sharding) -> Callable[[jax.Array], jax.Array]:
        raise InternalError("arrays between processes go in tiles")


def _local(routes: Sequence[Route], rank: int) -> tuple[list[int], Move]:
    """(the routes within this process, the function that moves pieces along them)."""
    inner = [i for i, route in enumerate(routes) if _ranks(route) == (rank, rank)]
    return inner, Local().connect(tuple(routes[i] for i in inner))


def _is_large(routes: Sequence[Route]) -> bool:
    """Whether the pieces that are sent together between two processes are waited for in Python."""
    structs = map(_struct, routes)
    return sum(math.prod(struct.shape) * struct.dtype.itemsize for struct in structs) >= LARGE_NBYTES


def _arrived(contents: Future[list[np.ndarray]], at: int, route: Route) -> jax.Array:
    """A piece on its device, made of the memory in which it has arrived."""
    return _typed(jax.device_put(contents.result()[at], route.target), route.dtype)


def _ranks(route: Route) -> tuple[int, int]:
    return route.source.process_index, route.target.process_index


def _struct(route: Route) -> jax.ShapeDtypeStruct:
    """The type of what is sent: for keys, that of their words."""
    words = jax.eval_shape(_words, jax.ShapeDtypeStruct(route.shape, route.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=SingleDeviceSharding(route.target))


def _words(piece: Any) -> Any:
    return jax.random.key_data(piece) if _is_key(piece.dtype) else piece


def _typed(piece: jax.Array, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(piece, impl=jax_compat.key_implementation(dtype)) if _is_key(dtype) else piece


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
