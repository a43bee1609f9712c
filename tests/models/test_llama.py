"""LLaMA: rotary positions, grouped queries, stacked layers, and the sizes of its presets."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models.llama import Config

SMALL = Config(vocab_size=40, sequence_length=8, hidden=16, layers=2, heads=4, kv_heads=2, mlp=24)


@pytest.fixture(scope="module")
def params(random_like):
    return random_like(partial(llama.init, SMALL))


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(SMALL.vocab_size, size=(2, 9), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.fixture(scope="module")
def gradient(quick_jit, params, batch):
    return quick_jit(jax.value_and_grad(partial(llama.loss, SMALL)))(params, batch)


def assert_close(left, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), left, right)


def test_rotated_products_depend_on_the_distance_alone():
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    queries, keys = (llama.rotate(jnp.broadcast_to(x, (1, 6, 8)), base=100.0)[0] for x in (query, key))
    products = np.asarray(queries @ keys.T)
    for distance in range(-5, 6):
        np.testing.assert_allclose(np.diff(products.diagonal(distance)), 0, atol=1e-5)
    assert np.ptp(products[0]) > 0.1
    np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5)


def test_rotation_turns_each_pair_by_its_angle():
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 3, 6)).astype(np.float32)
    numbers = x[..., :3] + 1j * x[..., 3:]
    angles = np.arange(5)[:, None] * 50.0 ** (-np.arange(3) / 3)
    turned = numbers * np.exp(1j * angles)[:, None, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(llama.rotate(jnp.asarray(x), 50.0), expected, rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_full_attention_with_repeated_keys(params, batch, quick_jit):
    def repeated(block):
        attention = block["attention"]
        query, pair, out = (attention[name]["kernel"] for name in ("query", "key_value", "out"))
        full = {
            "query": {"kernel": query.reshape(16, 4, 1, 4)},
            "key_value": {"kernel": pair.repeat(2, axis=2)},
            "out": {"kernel": out.reshape(4, 1, 4, 16)},
        }
        return block | {"attention": full}

    full = {name: repeated(x) if "Block" in name else x for name, x in params.items()}
    expected = quick_jit(partial(llama.logits, SMALL))(params, batch["inputs"])
    assert_close(quick_jit(partial(llama.logits, replace(SMALL, kv_heads=4)))(full, batch["inputs"]), expected)


@pytest.mark.slow
def test_scanned_and_recomputed_layers_equal_plain_ones(params, batch, gradient, quick_jit, stacked):
    config = replace(SMALL, scan_layers=True, remat=True)
    loss, gradients = quick_jit(jax.value_and_grad(partial(llama.loss, config)))(stacked(params), batch)
    assert_close((loss, gradients), (gradient[0], stacked(gradient[1])))
    fresh = jax.eval_shape(partial(llama.init, config), jax.random.key(0))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, stacked(params))


def test_a_token_does_not_change_earlier_logits(params, batch, quick_jit):
    logits = quick_jit(partial(llama.logits, SMALL))
    changed = batch["inputs"].copy()
    changed[:, 5] = (changed[:, 5] + 1) % SMALL.vocab_size
    before, after = (np.asarray(logits(params, inputs)) for inputs in (batch["inputs"], changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 0).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [("7B", 6.74e9), ("13B", 13.02e9), ("33B", 32.53e9), ("65B", 65.29e9), ("3-8B", 8.03e9), ("3-70B", 70.55e9)],
)
def test_presets_have_the_published_size(name, size):
    assert llama.parameters(Config.preset(name)) == pytest.approx(size, rel=1e-3)


def test_flops_are_about_six_a_parameter_and_token():
    config = replace(Config.preset("65B"), remat=False)
    tokens = 4 * config.sequence_length
    attention = 12 * config.layers * config.sequence_length * config.hidden * tokens
    embedding = config.vocab_size * config.hidden  # a lookup, no product
    expected = 6 * tokens * (llama.parameters(config) - embedding) + attention
    assert llama.flops(config, 4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"heads": 3}, "heads=3 does not divide hidden=16"),
        ({"heads": 16}, "is odd"),
        ({"mlp": 0}, "mlp=0"),
    ],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
