"""The bytes that a step needs of a TPU by its compiler's own account of buffers.

`memory_analysis()` counts the gaps between temporaries twice, and has the most that lives at once in that memory where
most does: beside the chip, or on it. So where more lives on the chip, as in steps of a few megabytes, what lies beside
it does not follow from the two. Where nothing but tables of copies would lie there, the program is made without them.
"""

import re
from pathlib import Path
from typing import Any

BESIDE_CHIP = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.MULTILINE)
"""The allocation of temporaries in a TPU's memory; those on the chip have a color."""


def options(folder: str) -> dict[str, Any]:
    """The compiler's options under which it writes what it makes into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def needed_nbytes(folder: Path, analysis: Any) -> int:
    """The bytes of arguments, results that are written over none, and temporaries of the one program in a folder."""
    permanent = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if not analysis.temp_size_in_bytes:
        return permanent
    (written,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    return permanent + sum(int(nbytes) for nbytes in BESIDE_CHIP.findall(written.read_text()))
