"""Taps of kernels that meet a pixel, held against trying every place."""

from __future__ import annotations

import numpy as np
import pytest

from passes.rules import small_image_taps


def tried(image: int, kernel: int, stride: int, padding: tuple[int, int], apart: int, between: int) -> set[int]:
    """The taps that meet a pixel somewhere."""
    dilated = (image - 1) * apart + 1
    places = (dilated + sum(padding) - (kernel - 1) * between - 1) // stride + 1
    positions = ((tap, place * stride - padding[0] + tap * between) for tap in range(kernel) for place in range(places))
    return {tap for tap, position in positions if 0 <= position < dilated}


@pytest.mark.parametrize("seed", range(200))
def test_the_taps_that_meet_the_image_between_its_dilated_ends(seed: int):
    rng = np.random.default_rng(seed)
    image = int(rng.integers(1, 6))
    kernel = image + int(rng.integers(1, 5))
    stride, apart, between = (int(rng.integers(1, 4)) for _ in range(3))
    before, after = int(rng.integers(0, 6)), int(rng.integers(0, 6))
    dilated, span = (image - 1) * apart + 1, (kernel - 1) * between + 1
    padding = before, max(after, span - dilated - before)  # one place at least
    places = (dilated + sum(padding) - span) // stride + 1
    params = {"padding": (padding,), "window_strides": (stride,), "lhs_dilation": (apart,), "rhs_dilation": (between,)}
    (met,) = small_image_taps(params, (image,), (kernel,), (places,))
    needed = tried(image, kernel, stride, padding, apart, between)
    assert needed <= set(range(met.first, met.last + 1))
    if stride == 1 and needed:
        assert (met.first, met.last) == (min(needed), max(needed))
    span_kept = (met.last - met.first) * between + 1
    assert (dilated + sum(met.padding) - span_kept) // stride + 1 == places


def test_an_image_is_small_if_the_kernel_is_larger_along_a_dimension():
    same: dict[str, object] = {"padding": ((1, 1), (1, 1))}
    same |= dict.fromkeys(("window_strides", "lhs_dilation", "rhs_dilation"), (1, 1))
    assert len(small_image_taps(same, (2, 9), (3, 3), (2, 9))) == 2
    assert small_image_taps(same, (3, 9), (3, 3), (3, 9)) == ()
