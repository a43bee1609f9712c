"""The cycles of elementwise operations on GPUs, as bytes of their memory."""

from __future__ import annotations

import pytest

from passes.memory.gpu_cycles import H100, Arithmetic


def arithmetic(capability: tuple[int, int]) -> Arithmetic:
    """That of a GPU whose memory moves a byte in a cycle."""
    return Arithmetic(capability=capability, cycles_per_second=1e12, bytes_per_second=1e12)


@pytest.mark.parametrize(
    ("capability", "name", "cycles"),
    [((8, 0), "tanh", 504), ((8, 0), "exponential", 3), ((9, 0), "exponential", 79), ((7, 0), "rsqrt", 76)],
)
def test_every_generation_has_cycles_of_its_own(capability: tuple[int, int], name: str, cycles: int) -> None:
    assert arithmetic(capability).step_nbytes(name) == cycles


def test_a_generation_without_a_table_has_that_of_8_6() -> None:
    for name in ("tanh", "power", "add"):
        assert arithmetic((8, 9)).step_nbytes(name) == arithmetic((8, 6)).step_nbytes(name)


def test_faster_memory_moves_more_while_a_core_computes_and_a_kernel_starts() -> None:
    assert H100.launch_nbytes == pytest.approx(3.35e6)
    assert H100.step_nbytes("tanh") == pytest.approx(467 * 3.35 / 66.9)


def test_a_multiprocessor_has_a_cache_of_its_generation() -> None:
    assert arithmetic((8, 0)).l1_nbytes < arithmetic((9, 0)).l1_nbytes
    assert arithmetic((8, 9)).l1_nbytes == arithmetic((8, 6)).l1_nbytes
