"""A text to train on that every machine has: the sources of Python's standard library, one token for each byte.

It differs a little between Python versions, so compare losses only under the same one.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two texts that share no file, each uint8[bytes]: one to train on, one held out to judge the result."""

    train: np.ndarray
    held_out: np.ndarray


def sources(root: Path) -> list[Path]:
    """The `*.py` files under `root` by their path, without tests and installed packages."""
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    paths = (path for path in relative if EXCLUDED_FOLDERS.isdisjoint(path.parts))
    return [root / path for path in sorted(paths, key=Path.as_posix)]


def read(megabytes: float = 16, root: Path | None = None) -> Corpus:
    """The corpus: the first `megabytes` (of 1e6 bytes) of the sources under `root`, by default the standard library.

    One file in twenty is held out. Raises FileNotFoundError if `root` has too few sources for that.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    train, held_out, nbytes = [], [], 0
    for i, path in enumerate(sources(root)):
        if nbytes >= megabytes * 1e6:
            break
        text = path.read_bytes()[: int(megabytes * 1e6) - nbytes]
        nbytes += len(text)
        (held_out if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(text)
    if not held_out:
        raise FileNotFoundError(
            f"{root} gave {len(train)} Python sources within {megabytes} MB, and one in {HELD_OUT_EVERY} is held out: "
            "give more megabytes, or the folder of a Python that has its standard library as files"
        )
    return Corpus(train=join(train), held_out=join(held_out))


def join(texts: list[bytes]) -> np.ndarray:
    """All of `texts`, one after another, as uint8[bytes]."""
    return np.frombuffer(b"\n".join(texts), dtype=np.uint8)


def batches(text: np.ndarray, *, batch_size: int, sequence_length: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of `inputs` and `targets`, each int32[batch, sequence], the targets one byte ahead.

    Each row is a window of `text` at a random place; the same `seed` gives the same batches.
    """
    generator = np.random.default_rng(seed)
    offsets = np.arange(sequence_length + 1)
    while True:
        starts = generator.integers(0, len(text) - sequence_length, size=batch_size)
        windows = text[starts[:, None] + offsets].astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
