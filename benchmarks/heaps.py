"""The bytes that a compiled step needs of one device, by XLA's account.

On TPUs `memory_analysis()` alone does not say it: it counts the gaps between temporaries twice, and reports the most
that is live at once in one memory, the HBM or the chip's own, whichever has more. In steps of a few megabytes that is
the chip's, and says nothing of the HBM. So the HBM's temporaries are read from the table of buffers that the compiler
writes (`options`). Where the analysis has no temporaries at all, that table may still list tables of copies, which the
program is then made without.
"""

import re
from pathlib import Path
from typing import Any

IN_HBM = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.MULTILINE)
"""The line of the table for temporaries in the HBM; those on the chip have a color."""


def step_nbytes(analysis: Any) -> int:
    """The bytes of arguments, of results that no donated argument's memory takes, and of temporaries."""
    return _permanent_nbytes(analysis) + analysis.temp_size_in_bytes


def _permanent_nbytes(analysis: Any) -> int:
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def options(folder: str) -> dict[str, Any]:
    """The options under which XLA writes the compiled program and its buffers into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def needed_nbytes(folder: Path, analysis: Any) -> int:
    """The same for a TPU, with the temporaries of the one program that was written into a folder (`options`)."""
    permanent = _permanent_nbytes(analysis)
    if not analysis.temp_size_in_bytes:
        return permanent
    (written,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    return permanent + sum(int(nbytes) for nbytes in IN_HBM.findall(written.read_text()))
