"""JAX's coordination service within one process: its texts, for several `Processes` that are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax

from autopar.distributed import Processes


class FakeService:
    """The client of a service whose texts are a dict; waiting ends as soon as a text is there."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, text: bytes) -> None:
        with self._changed:
            assert key not in self.texts
            self.texts[key] = text
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.texts, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.texts[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(name, text.decode()) for name, text in self.texts.items() if name.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        """Deletes a text with all that are below it, as the service does."""
        with self._changed:
            self.texts = {name: text for name, text in self.texts.items() if not f"{name}/".startswith(f"{key}/")}


def processes_of(service: FakeService, count: int) -> list[Processes]:
    """All processes of a program, each with its host."""
    for rank in range(count):
        Processes((rank,), rank, service).share(f"host/{rank}", f"h{rank}")
    return [Processes(tuple(range(count)), rank, service, wait_seconds=20) for rank in range(count)]


def together(functions: list[Callable[[], object]]) -> list[object]:
    """What functions return, or the errors that they raise, each in a thread that is called by its place."""
    ends: list[object] = [None] * len(functions)

    def run(at: int) -> None:
        try:
            ends[at] = functions[at]()
        except Exception as error:
            ends[at] = error

    threads = [threading.Thread(target=run, args=(at,), name=str(at)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends
