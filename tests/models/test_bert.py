"""BERT: which positions count in its loss, that it sees both ways, and the sizes of its presets."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models import bert
from models.bert import Config

SMALL = Config(vocab_size=40, sequence_length=8, hidden=16, layers=2, heads=2)


@pytest.fixture(scope="module")
def params(random_like):
    return random_like(partial(bert.init, SMALL))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.integers(40, size=(2, 8), dtype=np.int32),
        "targets": rng.integers(40, size=(2, 8), dtype=np.int32),
        "mask": np.array([[0, 0, 0, 0, 0, 0, 0, 1], [1, 0, 1, 0, 0, 0, 1, 0]], dtype=bool),
        "segments": np.array([[0] * 4 + [1] * 4] * 2, dtype=np.int32),
    }


@pytest.fixture(scope="module")
def logits(params, quick_jit):
    return quick_jit(partial(bert.logits, SMALL, params))


@pytest.fixture(scope="module")
def gradient(params, batch, quick_jit):
    return quick_jit(jax.value_and_grad(partial(bert.loss, SMALL)))(params, batch)


def test_example_batch_masks_about_fifteen_percent():
    config = replace(SMALL, sequence_length=512)
    batch = bert.example_batch(config, 8, jax.random.key(0))
    assert float(batch["mask"].mean()) == pytest.approx(bert.MASKED_SHARE, abs=0.02)
    np.testing.assert_array_equal(batch["inputs"] == bert.MASK_TOKEN, batch["mask"])
    kept = ~np.asarray(batch["mask"])
    np.testing.assert_array_equal(batch["inputs"][kept], batch["targets"][kept])
    assert float(batch["segments"].mean()) == 0.5


def test_the_loss_is_a_mean_over_all_masked_tokens(batch, logits, gradient):
    scores = np.asarray(logits(batch["inputs"], batch["segments"]), dtype=np.float64)
    chances = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    nats = -np.log(np.take_along_axis(chances, batch["targets"][..., None], axis=-1)[..., 0])
    assert float(gradient[0]) == pytest.approx(nats[batch["mask"]].mean(), rel=1e-5)


def test_every_token_and_segment_changes_every_logit(batch, logits):
    before = np.asarray(logits(batch["inputs"], batch["segments"]))
    for position in (0, 7):
        inputs, segments = batch["inputs"].copy(), batch["segments"].copy()
        inputs[:, position] = (inputs[:, position] + 1) % 40
        segments[:, position] = 1 - segments[:, position]
        for after in (logits(inputs, batch["segments"]), logits(batch["inputs"], segments)):
            assert (np.abs(np.asarray(after) - before).max(axis=-1) > 0).all()


@pytest.mark.slow
def test_scanned_and_recomputed_layers_equal_plain_ones(params, batch, gradient, quick_jit, stacked):
    config = replace(SMALL, scan_layers=True, remat=True)
    outputs = quick_jit(jax.value_and_grad(partial(bert.loss, config)))(stacked(params), batch)
    expected = gradient[0], stacked(gradient[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), outputs, expected)


@pytest.mark.parametrize(("name", "size"), [("base", 110e6), ("large", 335e6)])
def test_presets_have_about_the_published_size(name, size):
    assert bert.parameters(Config.preset(name)) == pytest.approx(size, rel=0.02)


def test_heads_must_divide_hidden():
    with pytest.raises(ValueError, match="heads=3 does not divide hidden=16"):
        replace(SMALL, heads=3)
