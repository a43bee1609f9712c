"""Steps that repeat two kinds of blocks, an encoder's and a decoder's: stages are cut in both, samples shorten both."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.rewrite import step_of
from passes.layers.cuts import work
from passes.layers.forward import forward_nodes
from passes.layers.repeats import stretches
from passes.layers.sampling import SAMPLE_BLOCKS
from passes.pipeline.samples import finest, sampled
from passes.pipeline.step_blocks import Sample, StepBlocks
from passes.step import Variant
from passes.transforms import loop_of
from passes.transforms.stages import cut

WIDTH, ROWS = 128, 64


@cache
def translation(encoders: int, decoders: int) -> Any:
    """(step, arguments): blocks of one product, then blocks of two that read what the first ones made."""
    struct = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {"encode": [struct] * encoders, "decode": [(struct, struct)] * decoders}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def loss(params: Any, batch: Any) -> jax.Array:
        source, h, labels = batch
        for w in params["encode"]:
            source = source + jnp.tanh(source @ w)
        for w, across in params["decode"]:
            h = h + jax.nn.relu(h @ w) + jax.nn.sigmoid(source @ across)
        return jnp.sum((h - labels) ** 2)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return step, ((params, jax.eval_shape(optimizer.init, params)), (rows, rows, rows))


@pytest.mark.parametrize(("encoders", "decoders"), [(12, 6), (12, 12), (6, 12)])
def test_stages_are_cut_in_both(encoders: int, decoders: int) -> None:
    """All of the encoder was in one stage, or all of the decoder."""
    step, given = translation(encoders, decoders)
    parallel = autopar.parallelize(step, planner=autopar.Pipeline(stages=4, microbatches=4), cluster="8:a100-80g")
    plan = parallel.plan(*given)
    graph = parallel.trace(*given).graph
    loop = loop_of(graph)
    assert loop is not None
    body = graph.nodes[loop].subgraphs[0]
    assert [len(stretch) - 1 for stretch in stretches(body)] == [encoders, decoders]
    flops = dict(zip(forward_nodes(body), work(body, forward_nodes(body)), strict=True))
    ends = (*plan.firsts[1:], len(body.nodes))
    each = [sum(flops[i] for i in flops if a <= i < b) for a, b in zip(plan.firsts, ends, strict=True)]
    of_a_decoder = 2 / (encoders + 2 * decoders)
    assert max(each) <= sum(each) * (1 / 4 + of_a_decoder)


def test_a_sample_has_four_of_each_and_the_step_by_its_counts() -> None:
    step, given = translation(12, 9)
    whole = autopar.parallelize(step, cluster="8:a100-80g").trace(*given)
    variants = step_of(whole, jax.tree.leaves(given))
    short = sampled(variants, 4, 4)
    assert short is not None
    assert short.left_out == (12 - SAMPLE_BLOCKS, 9 - SAMPLE_BLOCKS)
    full = Sample(graph=variants.variant(Variant(microbatches=4, stages=4)).graph, state_pairs=whole.state_pairs)
    kinds = [[b.kind for b in StepBlocks(samples={4: one}, n_layers=8).blocks(4)] for one in (short, full)]
    assert len(kinds[0]) == len(kinds[1]) == 12 + 9 + 1
    differs = [at for at, (one, other) in enumerate(zip(*kinds, strict=True)) if one != other]
    assert len(differs) <= 2  # the first of each adds up what all of them have
    assert finest(short, 4) == 12 + 9


def test_what_an_encoder_makes_is_sent_to_every_stage_of_the_decoder() -> None:
    """It was counted once, however many stages read it."""
    step, given = translation(6, 12)
    parallel = autopar.parallelize(step, planner=autopar.Pipeline(stages=5, microbatches=4), cluster="10:a100-80g")
    plan = parallel.plan(*given)
    traced = parallel.trace(*given)
    parts = cut(traced.graph, plan.firsts, traced.state_pairs).parts
    stream = ROWS // 4 * WIDTH * 4
    made = next(k for k, part in enumerate(parts) if plan.sent_nbytes[k] > 2 * stream)
    read = Counter(v for part in parts for v in part.boundary_values if v in part.graph.inputs)
    own = [v for v in parts[made].boundary_values if v in parts[made].graph.outputs]
    assert max(read[v] for v in own) > 2
    assert plan.sent_nbytes[made] == stream * sum(read[v] for v in own)
