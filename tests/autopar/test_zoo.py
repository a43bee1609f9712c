"""Every model, planned by Auto for the devices here, steps as `jax.jit` does and sends what its plan says."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from benchmarks.trainings import MODELS, QUICK
from tests.closeness import assert_close

STEPS = 2

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
            assert_close(ours, theirs)
            ours, theirs = ours[0], theirs[0]
