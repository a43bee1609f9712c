"""Plans of every model, as they are: what must not change while the code around them does.

`python -m tests.autopar.test_golden_plans`, run from the checkout, writes tests/golden/plans again; name cases to write
only those. Each is planned from shapes alone, on a mesh of two axes and, over two hosts far from each other, in stages.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import optax
import pytest

import autopar
from benchmarks.trainings import make_state, make_step
from models import alexnet, bert, dlrm, gpt, llama, moe, transformer, wide_resnet
from passes.plan import PipelinePlan
from tests.conftest import TRACED_ALIKE

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"

WORDS: dict[str, Any] = {"vocab_size": 4096, "sequence_length": 256, "hidden": 1024, "layers": 2, "heads": 16}
MODELS: dict[str, tuple[ModuleType, Callable[[], Any], int]] = {
    "gpt": (gpt, lambda: gpt.Config(**WORDS), 32),
    "gpt-scan": (gpt, lambda: gpt.Config(**WORDS | {"layers": 4}, scan_layers=True), 32),
    "llama": (llama, lambda: llama.Config(**WORDS, kv_heads=8, mlp=2816), 32),
    "bert": (bert, lambda: bert.Config(**WORDS), 32),
    "transformer": (transformer, lambda: transformer.Config(**WORDS | {"layers": 1}), 32),
    "moe": (moe, lambda: moe.Config(**WORDS, experts=8, group_size=256), 32),
    "wide-resnet": (wide_resnet, wide_resnet.Config.tiny, 64),
    "alexnet": (alexnet, partial(alexnet.Config.preset, "full"), 128),
    "dlrm": (dlrm, partial(dlrm.Config.preset, "1B"), 8192),
}
CLUSTERS: dict[str, tuple[str, Any]] = {
    "mesh": ("2x2:a100-80g", autopar.Auto()),
    "stages": ("2x1:v100-16g", autopar.Auto(pipeline=True, layers=4)),
}
CASES = [f"{model} {cluster}" for model in MODELS for cluster in CLUSTERS]
QUICK = {"gpt mesh", "gpt-scan stages", "moe mesh", "alexnet mesh"}
"""The cases of a default run."""


def golden(case: str) -> Path:
    return GOLDEN / f"{case.replace(' ', '_')}.txt"


def planned(case: str) -> str:
    """The plan of a case as text."""
    model, cluster = case.split()
    module, config, batch_size = MODELS[model]
    optimizer, config = optax.adam(1e-3), config()
    state = jax.eval_shape(partial(make_state, module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(module.example_batch, config, batch_size), jax.random.key(0))
    name, planner = CLUSTERS[cluster]
    step = autopar.parallelize(make_step(module, config, optimizer), cluster=name, planner=planner, donate_argnums=0)
    plan = step.plan(state, batch)
    parts = plan.stages if isinstance(plan, PipelinePlan) else (plan,)
    lines = [f"fingerprint {plan.fingerprint}"]
    lines += [f"seconds {plan.step_seconds:.12g}", f"bytes {plan.peak_nbytes}", *_schedule(plan)]
    for part in parts:
        lines += ["", *_part(part)]
    return "\n".join(lines) + "\n"


def _schedule(plan: Any) -> Iterator[str]:
    if isinstance(plan, PipelinePlan):
        yield f"{plan.schedule.name} of {len(plan.stages)} stages, {plan.microbatches} microbatches"


def _part(plan: autopar.Plan) -> Iterator[str]:
    """A plan on one mesh: where inputs and outputs are, every collective, and a digest of where operators are."""
    yield f"mesh {plan.mesh}: {plan.step_seconds:.12g} seconds, {plan.peak_nbytes} bytes, gap {plan.gap:.6g}"
    yield from (f"{name}: {spec}" for name, spec in zip(plan.input_names, plan.inputs, strict=True))
    yield f"outputs: {' '.join(map(str, plan.outputs))}"
    yield from sorted(f"{c.kind} {c.nbytes} bytes over {c.axes}, {c.count} times" for c in plan.collectives)
    operators = [[str(s) for s in (*o.placement.operands, *o.placement.results)] for o in plan.operators]
    yield f"{len(operators)} operators {hashlib.sha256(json.dumps(operators).encode()).hexdigest()[:16]}"


@pytest.mark.skipif(not TRACED_ALIKE, reason="this JAX traces models to fewer operators, and so to other plans")
@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_a_plan_is_the_golden_one(case: str) -> None:
    assert planned(case) == golden(case).read_text()


def test_some_golden_plan_has_stages() -> None:
    assert any(" stages, " in golden(case).read_text() for case in QUICK if case.endswith(" stages"))


def main(cases: list[str]) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in cases or CASES:
        golden(case).write_text(planned(case))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
