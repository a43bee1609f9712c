"""Large arrays between processes: plain connections, with reused memory.

Touching new memory takes longer than the copy itself: with a fresh buffer for each array a connection has a fifth of
its bandwidth. Arrays are sent from where they are, and what arrives becomes an array's memory as it is.
"""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np

from autopar.distributed.agreement import Processes
from autopar.errors import PeerError, explain
from passes.errors import InternalError

_ALIGNMENT_NBYTES = 64
"""The alignment in bytes from which on JAX takes memory over without a copy."""

_FREE_NBYTES = 1 << 28
"""The most bytes of free buffers that are kept: four of 64 MiB, as many as a stage has microbatches in flight."""

_TOKEN_NBYTES = 16
"""Bytes of the token by which a sender knows its receiver: more than can be guessed."""

_HEAD = struct.Struct("!Q")
"""The number of bytes of an array, which is sent in front of it."""


@dataclass(slots=True)
class Memory:
    """Buffers for arrays. One is free again as soon as nothing refers to its contents, which may be long after.

    At most `most_nbytes` of free buffers are kept.
    """

    most_nbytes: float = _FREE_NBYTES
    free: dict[int, list[np.ndarray]] = field(default_factory=dict[int, list[np.ndarray]])
    free_nbytes: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(self, nbytes: int) -> np.ndarray:
        """An aligned array of `nbytes` bytes; its buffer is free again once all views of the array are gone."""
        with self._lock:
            kept = self.free.get(nbytes)
            memory = kept.pop() if kept else None
            self.free_nbytes -= nbytes if memory is not None else 0
        if memory is None:
            whole = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
            start = -whole.ctypes.data % _ALIGNMENT_NBYTES
            memory = whole[start : start + nbytes]
        # Of an array over another object's memory, views refer to this array; of another array's, to that one.
        lent = np.frombuffer(memory.data, np.uint8)
        weakref.finalize(lent, self._give, memory).atexit = False
        return lent

    def _give(self, memory: np.ndarray) -> None:
        with self._lock:
            if self.free_nbytes + memory.nbytes <= self.most_nbytes:
                self.free.setdefault(memory.nbytes, []).append(memory)
                self.free_nbytes += memory.nbytes


@dataclass(slots=True)
class Streams:
    """The connections of a process for large arrays: one to and one from each other process, with a thread each.

    Arrays are sent in order, and must be received in it.
    """

    processes: Processes
    address: str
    memory: Memory = field(default_factory=Memory)
    threads: dict[tuple[int, int], ThreadPoolExecutor] = field(default_factory=dict)
    peers: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    errors: dict[tuple[int, int], BaseException] = field(default_factory=dict)
    """The first of each connection, with which all that would go over it ends, too."""

    def send(self, receiver: int, arrays: Sequence[jax.Array]) -> Future[None]:
        """A future that is done once these arrays are computed and sent. Raises the error of an earlier one first."""
        way = self.processes.rank, receiver
        self._check(way)
        return self._thread(way).submit(self._over, way, receiver, self._send, list(arrays))

    def receive(self, sender: int, structs: Sequence[jax.ShapeDtypeStruct]) -> Future[list[np.ndarray]]:
        """A future of the contents of the arrays that another process sends next."""
        way = sender, self.processes.rank
        return self._thread(way).submit(self._over, way, sender, self._receive, list(structs))

    def _thread(self, way: tuple[int, int]) -> ThreadPoolExecutor:
        if way not in self.threads:
            self.threads[way] = ThreadPoolExecutor(1, f"autopar arrays {way[0]} to {way[1]}")
        return self.threads[way]

    def _check(self, way: tuple[int, int]) -> None:
        if error := self.errors.get(way):
            raise error

    def _over(self, way: tuple[int, int], other: int, work: Callable[..., Any], *args: Any) -> Any:
        """The result of work over the connection with another process. Raises the connection's first error."""
        self._check(way)
        try:
            return work(way, *args)
        except BaseException as error:
            if way in self.peers:  # so that the other side does not wait for what does not come
                self.peers[way].close()
            if not isinstance(error, OSError):
                self.errors[way] = error
                raise
            self.errors[way] = self._lost(other, error)
            raise self.errors[way] from error

    def _send(self, way: tuple[int, int], arrays: list[jax.Array]) -> None:
        if way not in self.peers:
            self.peers[way] = self._accepted(way)
        for array in arrays:
            content = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
            self.peers[way].sendall(_HEAD.pack(content.nbytes))
            self.peers[way].sendall(content.data)

    def _receive(self, way: tuple[int, int], structs: list[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
        if way not in self.peers:
            self.peers[way] = self._connected(way)
        return [self._read(self.peers[way], struct) for struct in structs]

    def _read(self, peer: socket.socket, struct: jax.ShapeDtypeStruct) -> np.ndarray:
        (nbytes,) = _HEAD.unpack(_filled(peer, np.empty(_HEAD.size, np.uint8)).tobytes())
        if nbytes != (expected := math.prod(struct.shape) * struct.dtype.itemsize):
            raise InternalError(f"an array of {nbytes} bytes arrives in place of one of {expected}")
        return _filled(peer, self.memory.take(nbytes)).view(struct.dtype).reshape(struct.shape)

    def _accepted(self, way: tuple[int, int]) -> socket.socket:
        """The connection on which another process receives what this one sends."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.create_server((self.address, 0), family=family) as server:
            token = secrets.token_bytes(_TOKEN_NBYTES)
            address, port = server.getsockname()[:2]
            self.processes.share(_name(way), f"{address} {port} {token.hex()}")
            return _prompt(_authenticated(server, token))

    def _connected(self, way: tuple[int, int]) -> socket.socket:
        """The connection on which this process receives what another one sends."""
        address, port, token = self.processes.shared(_name(way), way[0]).split()
        peer = _prompt(socket.create_connection((address, int(port))))
        peer.sendall(bytes.fromhex(token))
        return peer

    def _lost(self, rank: int, error: OSError) -> PeerError:
        rule = f"the connection over which it exchanges arrays with process {self.processes.rank} has ended: {error}"
        return PeerError(explain(self.processes.name(rank), rule, "", "see what that process prints"))


def _name(way: tuple[int, int]) -> str:
    return f"stream/{way[0]}/{way[1]}"


def _prompt(peer: socket.socket) -> socket.socket:
    """The connection, set to send small pieces at once."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _authenticated(server: socket.socket, token: bytes) -> socket.socket:
    """The first connection that sends the token. Others are closed, and a silent one does not hold it up."""
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while True:
                for event, _ in selector.select():
                    if event.fileobj is server:
                        _admit(server, selector)
                    elif _has_given(event, token, selector):
                        return cast("socket.socket", event.fileobj)
        finally:
            for stranger in list(selector.get_map().values()):
                if stranger.fileobj is not server:
                    cast("socket.socket", stranger.fileobj).close()


def _admit(server: socket.socket, selector: selectors.BaseSelector) -> None:
    """Accepts a connection, which has sent nothing yet."""
    with suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
        peer = server.accept()[0]
        peer.setblocking(True)
        selector.register(peer, selectors.EVENT_READ, bytearray())


def _has_given(stranger: selectors.SelectorKey, token: bytes, selector: selectors.BaseSelector) -> bool:
    """Whether a connection has sent the token, which is read as it arrives; one that sent another is closed."""
    peer, text = cast("socket.socket", stranger.fileobj), stranger.data
    text += (arrived := _arrived(peer, len(token) - len(text)))
    if arrived and len(text) < len(token):
        return False
    selector.unregister(peer)
    is_token = secrets.compare_digest(bytes(text), token)
    if not is_token:
        peer.close()
    return is_token


def _arrived(peer: socket.socket, most: int) -> bytes:
    """The bytes that have arrived, at most `most`; empty where the other side has closed the connection."""
    try:
        return peer.recv(most)
    except OSError:
        return b""


def _filled(peer: socket.socket, buffer: Any) -> Any:
    """The buffer, filled with what arrives. Raises OSError where less arrives."""
    view, at = memoryview(buffer), 0
    while at < len(view):
        count = peer.recv_into(view[at:])
        if not count:
            raise ConnectionResetError("the other side has closed it")
        at += count
    return buffer
