"""Peak bytes of one device under a choice of placements, by the compiler's own simplification, fusion, scheduling and
packing of buffers.
"""

from passes.memory.peak import PERSISTENT, Holder, Memory, memory

__all__ = ["PERSISTENT", "Holder", "Memory", "memory"]
