"""Every model, planned by Auto for the devices here, steps as `jax.jit` does and sends what its plan says."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from benchmarks.trainings import MODELS, QUICK

STEPS = 2
TOLERANCE = 1e-10

SAMPLE = {"dlrm"}
"""The models of a default run: tables. Experts are in tests/autopar/rewrite/test_microbatch.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in MODELS]
)
def test_auto_equals_jit(name: str):
    with jax.enable_x64(True):
        training = MODELS[name].training("float64", least=True)
        lowered = autopar.parallelize(training.step).lower(training.state, training.batch)
        compiled = lowered.compile({**UNCOMBINED, **QUICK})
        verify(compiled.plan, compiled.as_text()).check()
        plain = jax.jit(training.step, compiler_options=QUICK)
        ours = theirs = training.state
        for _ in range(STEPS):
            ours, theirs = compiled(ours, training.batch), plain(theirs, training.batch)
            assert_equal(ours, theirs)
            ours, theirs = ours[0], theirs[0]


def assert_equal(ours: object, theirs: object) -> None:
    """Every array is within `TOLERANCE`, relative to its largest entry."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        error = np.max(np.abs(x - y)) / max(float(np.max(np.abs(y))), 1e-30)
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"
