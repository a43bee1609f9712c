"""XLA's CPU compiler: every independent all-reduce is combined, and kernels run breadth first."""

from __future__ import annotations

from functools import partial

from passes.memory import xla
from passes.memory.all_reduces import combined
from passes.memory.fusion import fuse
from passes.memory.liveness import schedule

COMPILER = xla.Compiler(combine=combined, fuse=fuse, schedule=schedule, canonical_bodies=False)
temporaries = partial(xla.temporaries, COMPILER)
"""The bytes that a compiled step needs beside arguments and outputs (`passes.memory.accounting.Model`)."""
