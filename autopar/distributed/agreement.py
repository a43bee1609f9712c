"""Texts that processes exchange through JAX's coordination service, and what they must agree on.

The exchanges of a group of processes are numbered. Errors name a process that is at another exchange than the first
one, and the first that has another text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.errors import DeviceError, DisagreementError, explain
from autopar.jax_compat import Device

WAIT_SECONDS = 1800.0
"""Seconds that a process waits for another, which may be planning or compiling meanwhile, before that is an error."""

BEATS = "autopar/beats"
"""The key under which the service has each process's last sign of life, which ends with the number of steps it has
begun.
"""
FAILED = "failed: "
"""The prefix of a process's last sign of life if an error ends it."""

_POLL_MILLISECONDS = 1000
"""Milliseconds that a process waits for a text before it looks whether others have gone on without it."""

_CHUNK_NBYTES = 1 << 20
"""The most bytes of a value of the service, whose messages are limited to a few MiB."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes `ranks` of a program, of which this one is `rank` and the first one leads.

    All of them must make the same calls in the same order.
    """

    ranks: tuple[int, ...]
    rank: int
    client: Any
    wait_seconds: float = WAIT_SECONDS
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False)
    earlier: list[str] = field(default_factory=list[str], compare=False)
    """The leader's exchanges whose texts the service still holds."""
    steps: list[int] = field(default_factory=lambda: [0], compare=False)
    """The steps of parallel functions that this process has begun, for who watches it."""
    begun: list[float] = field(default_factory=lambda: [0.0], compare=False)
    """When it has begun the last of them, on `time.perf_counter`."""

    def begin_step(self) -> None:
        """Counts one more step of a parallel function."""
        self.steps[0] += 1
        self.begun[0] = time.perf_counter()

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def broadcast(self, topic: str, make: Callable[[], str]) -> str:
        """The text of the leader, on all processes; the leader waits for nobody."""
        name = self.fresh_name()
        if self.leads:
            text = make()
            self.share(f"{name}/text", text)
            self.earlier.append(name)
            return text
        return self._get(f"autopar/{name}/text", self.ranks[0], topic, in_order=True)

    def gather(self, topic: str, text: str) -> tuple[str, ...]:
        """The texts of all processes, by rank. Raises DisagreementError if one of them is at another exchange."""
        key = f"autopar/{(name := self.fresh_name())}"
        if not self.leads:
            self._put(f"{key}/{self.rank}", json.dumps([topic, text]))
            topics, texts = json.loads(self._get(f"{key}/all", self.ranks[0], topic, in_order=True))
        else:
            others = [json.loads(self._get(f"{key}/{rank}", rank, topic, in_order=True)) for rank in self.ranks[1:]]
            topics, texts = zip((topic, text), *others, strict=True)
            self._put(f"{key}/all", json.dumps([topics, texts]))
            self._forget_earlier()
            self.earlier.append(name)
        for rank, other in zip(self.ranks, topics, strict=True):
            if other != topics[0]:
                rule = f"it is at {other}, while process {self.ranks[0]} is at {topics[0]}"
                remedy = "call the same functions with the same types in the same order on every process"
                raise DisagreementError(explain(self.name(rank), rule, "", remedy))
        return tuple(texts)

    def agree(self, topic: str, items: Mapping[str, str], where: str = "", remedy: str = "") -> None:
        """Raises DisagreementError, with the first rank and item that differ, unless all have the same items."""
        texts = self.gather(topic, json.dumps(list(items.items())))
        first, *others = (json.loads(text) for text in texts)
        for rank, other in zip(self.ranks[1:], others, strict=True):
            if other != first:
                pairs = itertools.zip_longest(first, other, fillvalue=("nothing", "nothing"))
                (ours, a), (theirs, b) = next((x, y) for x, y in pairs if x != y)
                item = ours if ours == theirs else f"{theirs} in place of {ours}"
                raise self._disagreement(topic, rank, self.ranks[0], f"{item} is {b}, and {a}", where, remedy)

    def agree_on_segments(self, digests: Mapping[str, str]) -> None:
        """Raises DisagreementError, with the first rank and segment that differ, unless processes agree on the segments
        they share.
        """
        topic = "the pipeline"
        known: dict[str, tuple[int, str]] = {}
        for rank, text in zip(self.ranks, self.gather(topic, json.dumps(digests)), strict=True):
            for name, mine in json.loads(text).items():
                other, theirs = known.setdefault(name, (rank, mine))
                if mine != theirs:
                    raise self._disagreement(topic, rank, other, f"{name} is {mine}, and {theirs}", "", "")

    def _disagreement(
        self, topic: str, rank: int, other: int, difference: str, where: str, remedy: str
    ) -> DisagreementError:
        what, rule = f"{topic} on {self.name(rank)}", f"{difference} on process {other}"
        return DisagreementError(explain(what, rule, where, remedy or "run the same code on every process"))

    def name(self, rank: int) -> str:
        """A process as text: its rank and its host."""
        return f"process {rank} on host {self.host(rank)}"

    def host(self, rank: int) -> str:
        """The name of the host that a process runs on."""
        return self.shared(f"host/{rank}", rank)

    def share(self, name: str, text: str) -> None:
        """Publishes a text to all processes of the program under a name, once."""
        self._put(f"autopar/{name}", text)

    def shared(self, name: str, rank: int) -> str:
        """The text that process `rank` shares under a name; waits for it."""
        return self._get(f"autopar/{name}", rank, name)

    def forget(self, name: str) -> None:
        """Deletes the texts of all processes under a name, once all have read them."""
        self.client.key_value_delete(f"autopar/{name}")

    def _forget_earlier(self) -> None:
        """Deletes the texts of all exchanges before the one in which the leader has read those of every other process.

        No process reads them any more: each ends an exchange before it begins the next.
        """
        for name in self.earlier:
            self.forget(name)
        self.earlier.clear()

    def _ahead(self) -> list[int]:
        """The processes that have begun more steps than this one; empty unless all of the program give signs
        of life.
        """
        try:
            signs = {int(key.rpartition("/")[2]): text for key, text in self.client.key_value_dir_get(BEATS)}
        except jax.errors.JaxRuntimeError:  # nobody gives any
            return []
        if signs.keys() != {*self.ranks}:
            return []
        steps = {rank: int(text.split()[-1]) for rank, text in signs.items() if not text.startswith(FAILED)}
        return [rank for rank, begun in steps.items() if begun > self.steps[0]]

    def fresh_name(self) -> str:
        """A name that no exchange has used; the same on all processes, which make the same calls."""
        return f"rounds/{'.'.join(map(str, self.ranks))}/{next(self.numbers)}"

    def _put(self, key: str, text: str) -> None:
        packed = zlib.compress(text.encode(), 1)
        chunks = [packed[at : at + _CHUNK_NBYTES] for at in range(0, len(packed), _CHUNK_NBYTES)]
        for number, chunk in enumerate(chunks[1:], 1):
            self.client.key_value_set_bytes(f"{key}/part{number}", chunk)
        self.client.key_value_set_bytes(key, len(chunks).to_bytes(4, "big") + chunks[0])

    def _get(self, key: str, rank: int, topic: str, *, in_order: bool = False) -> str:
        """The text under a key, once process `rank` has put it there. Raises DeviceError if it does not.

        A text that is exchanged `in_order` of steps never comes if another process has begun a later step without it:
        that is a DisagreementError, as its program waits for this process, and this one for it.
        """
        deadline = time.monotonic() + self.wait_seconds
        ahead: list[int] = []
        while True:
            try:
                head = self.client.blocking_key_value_get_bytes(key, _POLL_MILLISECONDS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if ahead:  # and what it put there before it began that step had a second to come
                    rule = f"it is at {topic} before step {self.steps[0] + 1}, which process {ahead[0]} has begun"
                    remedy = (
                        "call the same functions with the same types in the same order on every process: a batch of "
                        "another shape on one is another program"
                    )
                    raise DisagreementError(explain(self.name(self.rank), rule, "", remedy)) from None
                ahead = self._ahead() if in_order else []
                if time.monotonic() > deadline:
                    rule = f"process {rank} has not come to {topic} in {self.wait_seconds:.0f} s"
                    remedy = f"see what process {rank} prints; call the same functions on every process"
                    raise DeviceError(explain(f"process {self.rank} waits", rule, "", remedy)) from error
        count = int.from_bytes(head[:4], "big")
        parts = [
            self.client.blocking_key_value_get_bytes(f"{key}/part{number}", _POLL_MILLISECONDS)
            for number in range(1, count)
        ]
        return zlib.decompress(b"".join([head[4:], *parts])).decode()


def digest_of(value: Any) -> str:
    """16 hex digits for a text, or for the type and contents of an array or number of this process."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()[:16]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def among(devices: Sequence[Device]) -> Processes | None:
    """The processes of these devices; None if all devices belong to this one.

    Raises DeviceError where none of them does.
    """
    ranks = tuple(sorted({device.process_index for device in devices}))
    rank = jax.process_index()
    if ranks == (rank,) or not ranks:
        return None
    client = jax_compat.coordination_client()
    if rank not in ranks or client is None:
        rule = f"they are of processes {', '.join(map(str, ranks))}, and none of process {rank}, which calls"
        remedy = f"call it on those processes only, or pass devices of process {rank} as well"
        raise DeviceError(explain(f"{len(devices)} devices", rule, "", remedy))
    return _processes(ranks, rank, client)


def everyone() -> Processes | None:
    """All processes of the program, known before devices are; None if it is this one alone."""
    rank, count = jax_compat.process_of_how_many()
    client = jax_compat.coordination_client()
    return _processes(tuple(range(count)), rank, client) if count > 1 and client is not None else None


@functools.cache
def _processes(ranks: tuple[int, ...], rank: int, client: Any) -> Processes:
    """The one value of these processes: its exchanges are numbered."""
    _share_host(rank, client)
    return Processes(ranks, rank, client)


@functools.cache
def _share_host(rank: int, client: Any) -> None:
    Processes((rank,), rank, client).share(f"host/{rank}", socket.gethostname())
