"""Random programs under random plans: whatever JAX's primitives are composed to, the parallel program equals `jax.jit`.

A program is written as source text, one call a line, so that a failure can be pasted and run. What it computes is
compared up to rounding, and rounding must not decide anything: ties and signs are only asked of numbers that every
order of summation gives exactly. Those are whole and below `writer.LARGEST`; `Value.exact` keeps track of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED
from tests.autopar.random_plans import Dice
from tests.autopar.random_programs.operations import OPERATIONS
from tests.autopar.random_programs.writer import FLOAT, INT, SIZES, Program, Skip, Value, Writer

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
MOST_OPERATIONS = 5

QUICK = {"xla_backend_optimization_level": 0}
"""Less of LLVM, which changes no result; XLA's own passes all run."""


def input_values(w: Writer) -> Iterator[Value]:
    for name in "abc"[: w.integer(1, 3)]:
        sizes = tuple(w.pick(8, *SIZES) for _ in range(w.integer(0, 3)))
        yield Value(name=name, shape=sizes, dtype=FLOAT, exact=True, bound=4)
    sizes = tuple(w.pick(8, *SIZES) for _ in range(w.integer(1, 2)))
    yield Value(name="i", shape=sizes, dtype=INT, exact=True, bound=4)
    yield Value(name="n", shape=(), dtype=INT, exact=True, bound=4)


@st.composite
def programs(draw: Any) -> Program:
    """A program of one to `MOST_OPERATIONS` operations; some of those drawn fit nothing and are left out."""
    w = Writer(draw, smooth=draw(st.sampled_from((False, False, True))))
    inputs = tuple(input_values(w))
    w.pool.extend(inputs)
    for _ in range(w.integer(1, 2 * MOST_OPERATIONS)):
        try:
            w.pick(*OPERATIONS)(w)
        except Skip:
            continue
        if len(w.lines) == MOST_OPERATIONS:
            break
    if not w.lines:
        w.write("jnp.sin(a)", inputs[0], bound=1)
    made = w.pool[len(inputs) :]
    results = [v for v in made if v.name not in w.read]
    floats = tuple(i for i, v in enumerate(inputs) if v.dtype == FLOAT)
    is_float = any(v.dtype == FLOAT for v in results)
    return Program(
        inputs=inputs,
        lines=tuple(w.lines),
        results=tuple(v.name for v in results),
        differentiated=floats if w.smooth and is_float else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A program and the random plan that it runs under."""

    program: Program
    sizes: tuple[int, ...]
    seed: int


EXAMPLES = st.builds(Example, program=programs(), sizes=st.sampled_from(MESHES), seed=st.integers(0, 999))


def assert_equals_jit(example: Example) -> None:
    """The parallel program gives what `jax.jit` gives, for two sets of arguments, and sends only what the plan says."""
    with jax.enable_x64(True):
        function = example.program.function
        planner = Dice(seed=example.seed, sizes=example.sizes)
        first, second = example.program.arguments(0), example.program.arguments(1)
        step = autopar.parallelize(function, planner=planner).lower(*first).compile({**UNCOMBINED, **QUICK})
        whole = jax.jit(function).lower(*first).compile(QUICK)
        for arguments in (first, second):
            assert_close(step(*arguments), whole(*arguments))
        # XLA may see that what is sent has no effect, as in where(p, a, a): nothing may be sent beyond the plan.
        assert not verify(step.plan, step.as_text()).unplanned


def assert_close(got: Any, wanted: Any) -> None:
    """Equal integers; floats up to 1e-9 of the largest that is wanted."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    mine, theirs = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (got, wanted))
    finite = (x[np.isfinite(x)] for x in theirs if x.dtype == FLOAT)
    largest = max((np.abs(x).max(initial=1.0) for x in finite), default=1.0)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * largest if a.dtype == FLOAT else 0)


def examples(count: int) -> settings:
    """The same `count` examples in every run, unless they are seeded. One is mostly compilation, of no fixed length."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )


@examples(5)
@given(EXAMPLES)
def test_random_programs_equal_jit(example: Example) -> None:
    assert_equals_jit(example)


@pytest.mark.slow
def test_many_random_programs_equal_jit(fresh_seed: int) -> None:
    print(f"to draw these programs again: --seed={fresh_seed}")
    seed(fresh_seed)(examples(2000)(given(EXAMPLES)(assert_equals_jit)))()
