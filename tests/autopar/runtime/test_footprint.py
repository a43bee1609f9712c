"""The bytes that a device needs, by what XLA's compilers report of a program."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

import autopar
from autopar.runtime import needed_nbytes

RESULTS_NBYTES = 1024

HEAPS = {
    "bert-large, searched": (35_809_280, 738_645_504, 479_281_664, 591_217_152),
    "bert-large, data parallel": (281_456_640, 496_961_536, 679_578_112, 447_693_312),
    "gpt-large, data parallel": (272_941_056, 625_282_048, 845_486_080, 599_048_704),
    "wide-resnet-large, ZeRO 3": (18_148_864, 180_423_168, 164_600_320, 163_611_136),
}
"""Bytes of arguments, of temporaries and at the peak by `memory_analysis()` on v5e:2x4, and those of the heap of
temporaries beside the chip in the account of buffers that libtpu 0.0.42 writes of the same program.
"""


def plan_for(cluster: str) -> autopar.Plan:
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    return autopar.parallelize(lambda x: x + 1, planner=autopar.DataParallel(), cluster=cluster).plan(x)


def analysis(arguments: int, temporaries: int, peak: int) -> SimpleNamespace:
    """What `memory_analysis()` returns of a program whose results are written over arguments, but for one number."""
    return SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=arguments,
        alias_size_in_bytes=arguments - RESULTS_NBYTES,
        temp_size_in_bytes=temporaries,
        peak_memory_in_bytes=peak,
        host_argument_size_in_bytes=0,
    )


@pytest.mark.parametrize("case", HEAPS)
def test_gaps_of_a_tpus_heap_count_once(case: str):
    arguments, temporaries, peak, heap = HEAPS[case]
    needed = needed_nbytes(plan_for("8:tpu-v5e"), analysis(arguments, temporaries, peak))
    assert needed == pytest.approx(arguments + heap, rel=1e-3)


def test_a_program_that_fits_on_the_chip_needs_no_other_bytes():
    """A small program: nothing is beside the chip, and what lives on it is in the peak that libtpu reports."""
    assert needed_nbytes(plan_for("8:tpu-v5e"), analysis(3_611_648, 0, 8_200_000)) == 3_611_648 + RESULTS_NBYTES


@pytest.mark.parametrize("cluster", ["8:h100", "8:cpu"])
def test_other_compilers_count_every_byte_once(cluster: str):
    assert needed_nbytes(plan_for(cluster), analysis(1000, 700, 1200)) == 1000 + RESULTS_NBYTES + 700
