"""All-reduce written out in permutes: the sum of psum, and the bytes and steps that the literature prints."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax

from benchmarks.allreduce import ALGORITHMS, over, placed, printed_nbytes, sent

NUMBERS = 16


def held(devices: int, spares: int) -> jax.Array:
    """Whole numbers, so that every order of adding them gives the same; none where there is no worker."""
    values = np.arange(devices * NUMBERS, dtype=np.float32).reshape(devices, NUMBERS) ** 2 % 101
    values[devices - spares :] = 0
    return placed(values)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_sum_is_that_of_psum(name: str, devices: int):
    algorithm = ALGORITHMS[name]
    x = held(devices, algorithm.spares)
    found = over(devices, partial(algorithm.program, devices=devices))(x)
    rows = np.asarray(found)[: devices - algorithm.spares]
    expected = np.asarray(over(devices, lambda x: lax.psum(x, "x"))(x))[: len(rows)]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_compiled_algorithms_send_the_derived_bytes(name: str, devices: int):
    algorithm = ALGORITHMS[name]
    workers = devices - algorithm.spares
    program = over(devices, partial(algorithm.program, devices=devices))
    found = sent(program.lower(held(devices, 0)).compile().as_text())
    assert found.nbytes == 4 * algorithm.traffic(workers, NUMBERS)
    assert found.steps == algorithm.steps(workers)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_derived_bytes_are_the_printed_ones(name: str):
    """To the byte where the file is exact; a ring's and a tree's 2 N M counts what a worker sends itself, too."""
    derived, printed = 4 * ALGORITHMS[name].traffic(8, NUMBERS), printed_nbytes(name, NUMBERS, 8)
    assert derived == pytest.approx(printed * (7 / 8 if name in ("ring", "tree") else 1), rel=1e-12)


def test_no_worker_of_a_ring_sends_more_than_another():
    program = over(8, partial(ALGORITHMS["ring"].program, devices=8))
    found = sent(program.lower(held(8, 0)).compile().as_text())
    assert found.busiest_nbytes * 8 == found.nbytes


def test_a_permute_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="a permute that cannot be read"):
        sent("  %x = s4[3]{0} collective-permute(%y), channel_id=1")
    assert sent("ROOT %add = f32[3]{0} add(%a, %b)").nbytes == 0
