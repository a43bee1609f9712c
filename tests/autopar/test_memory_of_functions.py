"""Planned peak memory of layers whose kernels XLA's CPU compiler cuts or joins in its own way, against its own."""

from __future__ import annotations

import jax
import pytest

import autopar
from benchmarks.functions import FUNCTIONS

pytestmark = pytest.mark.usefixtures("as_users_compile")

WHY = {
    "wavelet": "a kernel would repeat the code of every level for each that is below it",
    "state-space": "zeros between elements are padded by no kernel of the library",
    "running-maximum": "zeros beside a single element are not either: it would be repeated",
    "causal": "of two quotients by one broadcast sum, in the softmax and in its transpose, one becomes a product",
    "gated": "halves are joined along rows of less than 128 elements in the kernel that reads them",
    "best-rows": "the transpose of a sort scatters to places that are told with those of the batch, three numbers each",
    "rotary": "pairs that are stacked are written once, for the sum and for its transpose",
    "messages": "scatters onto the same zeros have a copy each, made at once; large ones that are added stay two",
    "adapted": "a sum of reshaped products is computed before the reshape, which alone has several readers",
    "variational": "normal numbers are drawn by a logarithm and a root, each of which is kept",
    "coupled": "halves of joined halves are those halves",
    "window-means": "the transpose of a sum over windows pads what it reads itself, between elements too",
}


@pytest.mark.parametrize("name", WHY)
def test_kernels_are_cut_as_xla_cuts_them(name: str):
    function = FUNCTIONS[name]
    given = jax.tree.map(lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype), function.arguments)
    step = autopar.parallelize(function.call, planner=autopar.DataParallel(), donate_argnums=function.donated)
    compiled = step.lower(*given).compile()
    error = compiled.plan.peak_nbytes / compiled.needed_nbytes - 1
    assert abs(error) <= (0.05 if name in ("window-means", "coupled") else 0.01), WHY[name]
