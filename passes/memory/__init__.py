"""The peak bytes of one device under a choice of placements, by a model of the compiler's simplification, fusion,
scheduling and packing.
"""

from passes.memory.accounting import margin_of, model_of, peak
from passes.memory.compilers import compiler_of
from passes.memory.holders import PERSISTENT, Holder, Memory, Temporaries
from passes.memory.tpu_chips import is_tpu

__all__ = [
    "PERSISTENT",
    "Holder",
    "Memory",
    "Temporaries",
    "compiler_of",
    "is_tpu",
    "margin_of",
    "model_of",
    "peak",
]
