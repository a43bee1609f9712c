"""Fused attention: what is recognised, through loops and rematerialisation, and what is not."""

import jax
import jax.numpy as jnp
import pytest

from autopar.frontend import trace
from passes.layers import fused_attention
from passes.layers.attention import MADE_AGAIN
from passes.placement import is_free

BATCH, LENGTH, HEADS, DEPTH, LAYERS = 2, 16, 4, 8, 3
WIDTH = HEADS * DEPTH
SCORES = BATCH * HEADS * LENGTH * LENGTH


def attend(x, w):
    q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[i]) for i in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores)
    return weights, jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


def layers(x, w, remat):
    def block(x, w):
        return x + attend(x, w)[1], None

    return jax.lax.scan(jax.checkpoint(block) if remat else block, x, w)[0]


def unrolled(x, w):
    for i in range(LAYERS):
        x = x + attend(x, w[i])[1]
    return x


def fused(loss):
    """A loss and its gradient, with attention fused, and as they were traced."""
    w = jax.ShapeDtypeStruct((LAYERS, 3, WIDTH, HEADS, DEPTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    graph = trace(jax.value_and_grad(loss), (w, x), {}, donate_argnums=()).graph
    return fused_attention(graph), graph


def every(graph):
    """All programs inside a program, itself included."""
    yield graph
    for node in graph.nodes:
        for body in node.subgraphs:
            yield from every(body)


def kept(graph):
    """The types of what takes memory, of all values that nodes make."""
    made = [(g, v) for g in every(graph) for i, node in enumerate(g.nodes) if not is_free(g, i) for v in node.outputs]
    return [g.types[v] for g, v in made if g.types[v].nbytes]


@pytest.mark.parametrize(
    ("loss", "gradients"),
    [
        pytest.param(lambda w, x: unrolled(x, w).sum(), LAYERS, id="unrolled"),
        pytest.param(lambda w, x: layers(x, w, remat=False).sum(), 1, id="loop"),
        pytest.param(lambda w, x: layers(x, w, remat=True).sum(), 1, id="recomputed loop"),
    ],
)
def test_no_scores_are_in_memory_and_each_layer_makes_them_again_once(loss, gradients):
    graph, before = fused(loss)
    assert not [type for type in kept(graph) if type.size % SCORES == 0 and type.shape[-2:] == (LENGTH, LENGTH)]
    assert sum(type.fused == MADE_AGAIN for g in every(graph) for type in g.types) == gradients
    assert graph.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        pytest.param(lambda w, x: (attend(x, w[0])[0] @ jnp.ones((LENGTH, LENGTH))).sum(), 0, id="weights are read"),
        pytest.param(
            lambda w, x: attend(x, w[0])[0][:, :, :, 3:].sum() + unrolled(x, w).sum(), LAYERS, id="a slice of them"
        ),
        pytest.param(lambda w, x: jnp.einsum("bsw,whd->bshd", x, w[0, 0]).sum(), 0, id="no attention"),
    ],
)
def test_attention_whose_weights_others_read_is_not_fused(loss, layers):
    """In the second case all layers but the first attention are fused, whose weights are in memory."""
    graph, before = fused(loss)
    assert sum(type.fused == MADE_AGAIN for g in every(graph) for type in g.types) == layers
    assert (graph == before) == (layers == 0)
    sizes = [type.size for type in kept(before)]
    assert (SCORES in [type.size for type in kept(graph)]) == (SCORES in sizes)


def test_scores_that_a_step_returns_are_not_fused():
    w = jax.ShapeDtypeStruct((3, WIDTH, HEADS, DEPTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    graph = trace(lambda w, x: attend(x, w), (w, x), {}, donate_argnums=()).graph
    assert fused_attention(graph) == graph
