"""Fixtures of the tests of models: a quick compiler, parameters without one, and the contents of a jaxpr."""

from functools import partial

import jax
import numpy as np
import pytest

from tests.conftest import EMITTERS, HAS_OPTIONS


@pytest.fixture(scope="session")
def quick_jit():
    # Neither optimised nor fused by the CPU's newer emitters, a program runs slower but compiles four times as fast.
    options = {"xla_backend_optimization_level": 0}
    return partial(jax.jit, compiler_options=options | ({EMITTERS: False} if HAS_OPTIONS else {}))


@pytest.fixture(scope="session")
def random_like():
    """Random arrays in the shapes that a function of a key returns."""

    def fill(function, scale=0.1):
        rng = np.random.default_rng(0)
        shapes = jax.eval_shape(function, jax.random.key(0))
        return jax.tree.map(lambda s: (scale * rng.normal(size=s.shape)).astype(s.dtype), shapes)

    return fill


@pytest.fixture(scope="session")
def stacked():
    """Parameters as `scan_layers` has them, from those of unrolled layers."""

    def stack(params):
        blocks = [x for name, x in params.items() if name.startswith("Block_")]
        others = {name: x for name, x in params.items() if not name.startswith("Block_")}
        return others | {"Block": jax.tree.map(lambda *x: np.stack(x), *blocks)}

    return stack


@pytest.fixture(scope="session")
def equations():
    """All equations of a jaxpr, those inside of others too."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from walk(getattr(inner, "jaxpr", inner))

    return walk
