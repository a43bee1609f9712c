"""The functions that models share: attention against its definition, masks, and means."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import layers


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_attention_follows_its_definition():
    query, key, value = normal(1, 3, 2, 4), normal(1, 5, 2, 4), normal(1, 5, 2, 4) + 1
    mask = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], dtype=bool)
    mixed = layers.attend(query, key, value, mask)
    for head in range(2):
        scores = np.exp(query[0, :, head] @ key[0, :, head].T / 2) * mask
        expected = scores / scores.sum(axis=-1, keepdims=True) @ value[0, :, head]
        np.testing.assert_allclose(mixed[0, :, head], expected, rtol=1e-5)


def test_a_group_of_queries_shares_its_key_and_value():
    query, key, value = normal(2, 3, 2, 4, 6), normal(2, 3, 2, 6), normal(2, 3, 2, 6)
    grouped = layers.attend(query, key, value, layers.causal(3))
    each = [layers.attend(query[:, :, :, i], key, value, layers.causal(3)) for i in range(4)]
    np.testing.assert_allclose(grouped, np.stack(each, axis=3), rtol=1e-5, atol=1e-6)


def test_causal_shows_the_past_and_the_present():
    np.testing.assert_array_equal(layers.causal(3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_a_masked_mean_ignores_what_is_masked_even_if_infinite():
    mean = layers.masked_mean(jnp.array([[1.0, jnp.inf], [3.0, 5.0]]), jnp.array([[True, False], [True, True]]))
    assert float(mean) == 3
    assert float(layers.masked_mean(jnp.ones(2), jnp.zeros(2, dtype=bool))) == 0


def test_half_precision_logits_give_a_float32_loss():
    nats = layers.cross_entropy(jnp.zeros((2, 3, 7), jnp.float16), jnp.zeros((2, 3), jnp.int32))
    assert (nats.shape, nats.dtype) == ((2, 3), jnp.float32)
    np.testing.assert_allclose(nats, np.log(7), rtol=1e-6)


def test_tokens_of_another_shape_are_refused():
    class Config:
        sequence_length = 8

    with pytest.raises(ValueError, match=r"source has shape \[8\], where \[batch, 8\]"):
        layers.verify_tokens(Config, "source", jnp.zeros(8, jnp.int32))
