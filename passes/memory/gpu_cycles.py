"""The work of elementwise operations on GPUs, as bytes that memory moves in the same time.

XLA's GPU compiler counts clock cycles of each operation, from a table for every generation. What a table lacks takes
three: an exponential does on A100, and 79 cycles on H100.

Reference: XLA's `hlo_op_profiles_data.h` and `GpuPerformanceModelBase::ComputeTime`, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CYCLES: Mapping[tuple[int, int], Mapping[str, int]] = MappingProxyType(
    {
        (7, 0): {
            "cbrt": 189,
            "cosine": 373,
            "exponential": 79,
            "exponential-minus-one": 205,
            "log": 180,
            "log-plus-one": 217,
            "rsqrt": 76,
            "sine": 373,
            "sqrt": 76,
            "tanh": 269,
            "atan2": 406,
            "divide": 21,
            "power": 673,
        },
        (8, 0): {"log": 259, "tanh": 504, "power": 1221},
        (8, 6): {
            "cbrt": 867,
            "cosine": 662,
            "exponential": 86,
            "exponential-minus-one": 381,
            "log": 244,
            "log-plus-one": 262,
            "logistic": 176,
            "rsqrt": 75,
            "sine": 662,
            "sqrt": 75,
            "tanh": 190,
            "atan2": 486,
            "power": 925,
        },
        (9, 0): {
            "cbrt": 178,
            "cosine": 978,
            "exponential": 79,
            "exponential-minus-one": 190,
            "log": 166,
            "log-plus-one": 229,
            "rsqrt": 75,
            "sine": 958,
            "sqrt": 75,
            "tanh": 467,
            "atan2": 431,
            "divide": 19,
            "power": 510,
        },
    }
)
"""Cycles of one float32 by CUDA's (major, minor); a capability that is not here has those of (8, 6)."""


UNITS: Mapping[tuple[int, int], int] = MappingProxyType({(7, 0): 64, (8, 0): 64, (8, 6): 128, (9, 0): 128})
"""Units for float32 of a multiprocessor, by capability: CUDA's programming guide."""

L1_NBYTES: Mapping[tuple[int, int], int] = MappingProxyType(
    {(7, 0): 128 * 2**10, (8, 0): 192 * 2**10, (8, 6): 128 * 2**10, (9, 0): 256 * 2**10}
)
"""Bytes of a multiprocessor's own cache, by capability: `l1_cache_size_per_SM` in XLA's device_description.h."""

TRANSACTION_NBYTES = 32
"""Bytes that a multiprocessor reads in a cycle at most: XLA's `memory_transactions_per_clock`."""

STEP = 3
"""Cycles of an operation that `CYCLES` lacks: XLA's `kDefaultFlopsPerElement`."""

RAGGED, RAGGED_CYCLES = "ragged concatenate", 400
"""The name of what joins arrays whose sizes are no multiples of a warp's, and its cycles (HandleConcatenate of XLA's
gpu_hlo_cost_analysis.cc)."""

LAUNCH_SECONDS = 1e-6
"""Seconds that a kernel takes to start: XLA's `kKernelLaunchOverhead`, for every GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The work of a GPU of a (major, minor) `capability`, whose `cores` together take so many cycles a second, two for
    each multiply-add, while memory moves so many bytes.
    """

    capability: tuple[int, int]
    cycles_per_second: float
    bytes_per_second: float
    cores: int = 132

    @property
    def block_bytes_per_second(self) -> float:
        """The bytes that one multiprocessor reads in a second: one transaction a cycle."""
        units = UNITS.get(self.capability, UNITS[8, 6])
        return TRANSACTION_NBYTES * self.cycles_per_second / (2 * units * self.cores)

    @property
    def l1_nbytes(self) -> int:
        """The bytes of a multiprocessor's own cache."""
        return L1_NBYTES.get(self.capability, L1_NBYTES[8, 6])

    @property
    def launch_nbytes(self) -> float:
        """The bytes that memory moves while a kernel starts."""
        return LAUNCH_SECONDS * self.bytes_per_second

    def step_nbytes(self, name: str) -> float:
        """The bytes that memory moves while all multiprocessors compute an element of any opcode."""
        known = CYCLES.get(self.capability, CYCLES[8, 6])
        cycles = RAGGED_CYCLES if name == RAGGED else known.get(name, STEP)
        return cycles * self.bytes_per_second / self.cycles_per_second


H100 = Arithmetic(capability=(9, 0), cycles_per_second=66.9e12, bytes_per_second=3.35e12)
"""An H100's arithmetic, by its data sheet."""
