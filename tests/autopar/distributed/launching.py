"""Scripts run by `autopar launch`, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SECONDS = 240
"""A launch of tiny programs takes a tenth of it on an idle machine."""


def launch(
    script: str | Path, *arguments: str, processes: int = 2, devices: int | None = 1, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """What a script, a file or a text, has printed, with its exit status."""
    done = subprocess.run(
        command(script, *arguments, processes=processes, devices=devices, options=options),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done


def command(
    script: str | Path, *arguments: str, processes: int = 2, devices: int | None = 1, options: Sequence[str] = ()
) -> list[str]:
    sizes = ["--processes", str(processes), *(["--devices-per-process", str(devices)] if devices else [])]
    return [sys.executable, "-m", "autopar", "launch", *sizes, *options, str(script), *arguments]


def environment() -> dict[str, str]:
    """The environment of quick programs: hardly optimized, one thread each."""
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **quick}


def lines(done: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    """The lines of one process."""
    return [line.removeprefix(f"[{rank}] ") for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
