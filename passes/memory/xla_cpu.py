"""XLA's CPU compiler: windows are reduced in the layout that a collective wants, every independent all-reduce is
combined, and kernels run breadth first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from passes.memory import xla
from passes.memory.all_reduces import combined_as_visited
from passes.memory.fusion import fuse
from passes.memory.layouts import laid_out
from passes.memory.liveness import schedule
from passes.memory.operations import Operation
from passes.memory.reshapes import moved_down
from passes.memory.update_copies import with_copies


def _rewritten(
    operations: Sequence[Operation], outputs: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[int, ...]]:
    """The operations with reshapes moved, laid out, and all-reduces combined; the new position of each old one."""
    reshaped, moved = moved_down(operations, outputs)
    changed, place = laid_out(reshaped)
    joined, combined = combined_as_visited(changed, [place[moved[o]] for o in outputs])
    return joined, tuple(combined[place[p]] for p in moved)


COMPILER = xla.Compiler(rewrite=_rewritten, fuse=fuse, schedule=schedule, finish=with_copies)
temporaries = partial(xla.temporaries, COMPILER)
"""The bytes that a compiled step needs beside arguments and outputs (`passes.memory.accounting.Model`)."""
