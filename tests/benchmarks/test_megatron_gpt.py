"""Megatron-LM's model and its layout in stages, as published rows are planned with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest

from benchmarks.published import megatron_gpt
from benchmarks.published.alike import DeepMegatron
from benchmarks.published.planned import Job, step
from models import gpt
from passes.errors import PlanningError
from passes.ir import phase
from passes.pipeline import body_of


@pytest.mark.slow
def test_megatrons_kernels_compute_what_the_zoos_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is dropped out: the loss and every gradient."""
    config = gpt.Config(vocab_size=64, sequence_length=16, hidden=32, layers=2, heads=4, scan_layers=True)
    params = megatron_gpt.init(config, jax.random.key(0))
    batch = megatron_gpt.example_batch(config, 4, jax.random.key(1))
    monkeypatch.setattr(megatron_gpt, "DROPOUT", 0.0)
    monkeypatch.setattr(megatron_gpt, "BOUND", 1e9)
    monkeypatch.setattr(megatron_gpt, "EPSILON", 1e-6)  # flax's
    ours, theirs = (jax.value_and_grad(lambda p, m=m: m.loss(config, p, batch))(params) for m in (megatron_gpt, gpt))
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_megatrons_kernels_keep_of_a_layer_what_the_paper_says() -> None:
    """34 + 5 a s / h bytes for each of s b h elements, beside what is the same in each layer: zeros."""
    config = gpt.Config(
        vocab_size=64, sequence_length=64, hidden=128, layers=1, heads=8, scan_layers=True, dtype="float16"
    )
    params = jax.eval_shape(partial(megatron_gpt.init, replace(config, param_dtype="float16")), jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["Block"])
    x = jax.ShapeDtypeStruct((4, 64, 128), "float16")
    program = jax.make_jaxpr(lambda *given: jax.vjp(megatron_gpt._block, *given)[1])(layer, x).jaxpr
    zeros = {v for e in program.eqns if e.primitive.name == "broadcast_in_dim" for v in e.outvars}
    kept = [v for v in {id(v): v for v in program.outvars}.values() if v.aval.shape[:1] == (4,) and v not in zeros]
    nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in kept)
    assert nbytes / x.size == 34 + 5 * 8 * 64 / 128


def test_the_ends_of_a_model_count_as_a_layer_each() -> None:
    """Six layers on four stages: one beside the embedding, two, two, one beside the head."""
    config = gpt.Config(vocab_size=64, sequence_length=8, hidden=16, layers=6, heads=2, scan_layers=True)
    job = Job(module=gpt, config=config, batch=8, precision="master copy")
    body = body_of(step(job, 2, 4, by_layer=True).graph)
    firsts = DeepMegatron(data=1, tensor=1, pipeline=4, microbatches=2, ends_count=True)._firsts(body)
    loops = [i for i, node in enumerate(body.nodes) if node.primitive == "scan" and phase(node) == "forward"]
    assert [sum(a <= i < b for i in loops) for a, b in pairwise((*firsts, len(body.nodes)))] == [1, 2, 2, 1]
    with pytest.raises(PlanningError, match="8 layers, the ends among them, do not fill 3 stages"):
        DeepMegatron(data=1, tensor=1, pipeline=3, microbatches=2, ends_count=True)._firsts(body)
