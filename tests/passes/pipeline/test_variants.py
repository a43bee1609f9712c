"""The search over stages of a step as it is written and with less kept: which variants are searched, in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from passes.pipeline.samples import layers_of, samples_of
from passes.pipeline.variants import LESS_KEPT, StagedVariants
from passes.progress import SearchContext
from passes.step import Variant

LAYERS, WIDTH, ROWS = 8, 16, 256
DRAWS = np.random.default_rng(0)
WEIGHTS = {
    "up": 0.1 * DRAWS.normal(size=(LAYERS, WIDTH, 4 * WIDTH)).astype("float32"),
    "down": 0.1 * DRAWS.normal(size=(LAYERS, 4 * WIDTH, WIDTH)).astype("float32"),
}
BATCH = DRAWS.normal(size=(ROWS, WIDTH)).astype("float32")


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def step_of(*, scanned: bool, recomputed: bool = False) -> Any:
    block = jax.checkpoint(layer) if recomputed else layer

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)
        else:
            for number in range(LAYERS):
                x = block(x, {name: stack[number] for name, stack in weights.items()})
        return (x**2).sum()

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights, x))

    return step


@dataclass
class Searches:
    """Searches that find what they are told: for each variant, the seconds of its plan, and of what memory refused."""

    outcomes: list[tuple[float | None, float]]
    begun: list[tuple[Variant, float]] = field(default_factory=list)

    def begin(self, *, step: Any, samples: Any, layers: int, context: SearchContext) -> Any:
        assert samples
        assert layers > 1
        seconds, refused = self.outcomes[len(self.begun)]
        self.begun.append((step.chosen, context.cutoff))
        plan = SimpleNamespace(step_seconds=seconds) if seconds is not None and seconds < context.cutoff else None
        return SimpleNamespace(run=lambda: plan, least_refused=refused, met=[seconds], least_memory_plan=None)


def searched(step: Any, searches: Searches) -> StagedVariants:
    return StagedVariants(
        step=step, samples={4: step}, stages=2, layers=LAYERS, begin=searches.begin, context=SearchContext()
    )


FITS, BOUND, NOTHING = (1.0, math.inf), (1.0, 0.5), (None, 0.5)
CASES = {
    "memory is there": (False, [FITS], 1.0),
    "memory is short, and hardly matters": (False, [(1.0, 0.9)], 1.0),
    "memory is short, and less kept is faster": (False, [BOUND, (0.8, 0.5)], 0.8),
    "nothing fits but with inputs kept": (False, [NOTHING, NOTHING, (2.0, 0.5)], 2.0),
    "less kept is slower": (False, [BOUND, (1.1, 0.5), (1.2, 0.5)], 1.0),
    "loops stack what they keep": (True, [FITS, (0.9, math.inf)], 0.9),
}


@pytest.mark.parametrize("name", CASES)
def test_less_is_kept_where_memory_is_short_or_loops_stack_it(name: str):
    scanned, outcomes, best = CASES[name]
    searches = Searches(outcomes)
    step = autopar.parallelize(step_of(scanned=scanned)).step(WEIGHTS, BATCH)
    staged = searched(step, searches)
    plan = staged.run(cutoff := 5.0)
    assert plan is not None
    assert plan.step_seconds == best
    assert len(searches.begun) == len(outcomes) == len(staged.met)
    kept = [variant.kept for variant, _ in searches.begun]
    assert kept == [(), *((kind,) * step.layers for kind in LESS_KEPT)][: len(outcomes)]
    assert next(most for _, most in searches.begun) == cutoff


def test_drafts_whose_prices_need_too_much_are_planned_below_a_cutoff_too():
    """Prices count stacked weights that are read layer by layer once for each, several times what plans need."""
    limit = 150_000
    planner = autopar.Auto(stages=2, memory_limit=limit)
    plan = autopar.parallelize(step_of(scanned=False), planner=planner).plan(WEIGHTS, BATCH[:64])
    assert plan.peak_nbytes <= limit
    assert plan.remat  # all kept: 16.9 ms, in four times as many microbatches; this 5.6


def test_a_variant_is_cut_into_as_many_layers_as_it_has_places_for():
    """What is computed again may have fewer: it was searched in those of the step as written, and refused."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    square = jax.ShapeDtypeStruct((256, 256), "float32")
    written = autopar.parallelize(step).step([square] * 2, jax.ShapeDtypeStruct((8, 256), "float32"))
    samples, made = samples_of(written, 8), list[int]()

    def begin(*, layers: int, **_: Any) -> Any:
        made.append(layers)
        return SimpleNamespace(run=lambda: None, least_refused=0.5, met=[], least_memory_plan=None)

    most = layers_of(samples, None, 8)
    StagedVariants(step=written, samples=samples, stages=8, layers=most, begin=begin, context=SearchContext()).run(5.0)
    assert made[0] == most > min(made) >= 2


def test_an_interruption_keeps_what_was_searched_before():
    """Ctrl-C during the second search, which has no plan yet."""
    step = autopar.parallelize(step_of(scanned=False)).step(WEIGHTS, BATCH)
    context = SearchContext(interruptible=True)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    def begin(*, step: Any, **_: Any) -> Any:
        run = interrupted if step.chosen.kept else lambda: SimpleNamespace(step_seconds=1.0)
        return SimpleNamespace(run=run, least_refused=0.5, met=[], least_memory_plan=None)

    staged = StagedVariants(step=step, samples={4: step}, stages=2, layers=LAYERS, begin=begin, context=context)
    plan = staged.run(5.0)
    assert context.is_interrupted
    assert len(staged.searches) == 2
    assert plan is not None
    assert plan.step_seconds == 1.0


def test_no_more_variants_are_searched_if_stages_do_not_pay():
    """A plan without stages is faster, and what memory refuses would hardly be."""
    searches = Searches([(6.0, 4.5)])
    step = autopar.parallelize(step_of(scanned=False)).step(WEIGHTS, BATCH)
    assert searched(step, searches).run(5.0) is None
    assert len(searches.begun) == 1


def test_a_step_that_computes_again_by_itself_is_searched_as_it_is():
    searches = Searches([NOTHING])
    step = autopar.parallelize(step_of(scanned=False, recomputed=True)).step(WEIGHTS, BATCH)
    staged = searched(step, searches)
    assert staged.run(5.0) is None
    assert len(searches.begun) == 1


def test_a_step_with_less_kept_keeps_it_in_all_variants():
    step = autopar.parallelize(step_of(scanned=False)).step(WEIGHTS, BATCH)
    inputs = step.keeping("inputs")
    assert inputs.chosen.kept == ("inputs",) * LAYERS
    assert inputs.layers == 0
    assert inputs.keeping("matmuls") is inputs
    several = inputs.variant(Variant(microbatches=4))
    assert several.graph.fingerprint == step.variant(replace(several.chosen)).graph.fingerprint


def test_stages_of_loops_keep_less_and_a_saved_plan_says_so(tmp_path: Any):
    step = step_of(scanned=True)
    planner = autopar.Auto(stages=2, memory_limit=180_000)
    parallel = autopar.parallelize(step, planner=planner)
    plan = parallel.plan(WEIGHTS, BATCH)
    assert plan.remat
    assert plan.peak_nbytes <= 180_000
    assert "recomputation" in str(plan)
    plan.save(path := tmp_path / "plan.json")
    loaded = autopar.PipelinePlan.load(path)
    assert loaded.remat == plan.remat
    again = autopar.parallelize(step, planner=autopar.Manual(path))
    wanted = jax.jit(step)(WEIGHTS, BATCH)
    for made in (parallel(WEIGHTS, BATCH), again(WEIGHTS, BATCH)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), made, wanted)
