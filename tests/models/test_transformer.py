"""The encoder-decoder Transformer: what padding and the future hide, its example sentences, and its sizes."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models import transformer
from models.transformer import BEGIN, END, PADDING, Config

SMALL = Config(vocab_size=40, sequence_length=8, hidden=16, layers=1, heads=2)

SOURCE = np.array([[5, 6, 7, END, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, END, 0]], dtype=np.int32)
TARGETS = np.array([[11, 12, END, 0, 0, 0, 0, 0], [13, 14, 15, 16, 17, 18, 19, END]], dtype=np.int32)
INPUTS = np.array([[BEGIN, 11, 12, END, 0, 0, 0, 0], [BEGIN, 13, 14, 15, 16, 17, 18, 19]], dtype=np.int32)


@pytest.fixture(scope="module")
def params(random_like):
    return random_like(partial(transformer.init, SMALL))


@pytest.fixture(scope="module")
def logits(params, quick_jit):
    jitted = quick_jit(partial(transformer.logits, SMALL, params))
    return lambda *tokens: np.asarray(jitted(*tokens))


def test_example_sentences_end_and_are_filled_up():
    batch = jax.device_get(transformer.example_batch(SMALL, 16, jax.random.key(0)))
    for sentence in (*batch["source"], *batch["targets"]):
        (end,) = np.flatnonzero(sentence == END)
        assert end >= 4
        assert (sentence[:end] > END).all()
        assert (sentence[end + 1 :] == PADDING).all()
    assert (batch["inputs"][:, 0] == BEGIN).all()
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert len({int((sentence == PADDING).sum()) for sentence in batch["source"]}) > 1


def test_the_future_is_hidden_from_the_decoder_and_the_source_is_not(logits):
    before = logits(SOURCE, INPUTS)
    later = INPUTS.copy()
    later[:, 5] += 20
    after = logits(SOURCE, later)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(after - before)[:, 5:].max(axis=-1) > 0).all()
    other = SOURCE.copy()
    other[:, 2] += 20
    assert (np.abs(logits(other, INPUTS) - before).max(axis=-1) > 0).all()


def test_padding_of_the_source_is_hidden(params, quick_jit):
    """A longer padding, in a model for longer sentences, changes no logit: the positions have no parameters."""
    longer = replace(SMALL, sequence_length=11)
    padded = (np.pad(tokens, ((0, 0), (0, 3))) for tokens in (SOURCE, INPUTS))
    long = quick_jit(partial(transformer.logits, longer, params))(*padded)
    short = quick_jit(partial(transformer.logits, SMALL, params))(SOURCE, INPUTS)
    np.testing.assert_allclose(long[:, :8], short, rtol=1e-4, atol=1e-5)


def test_padding_does_not_count_in_the_loss(params, logits, quick_jit):
    scores = logits(SOURCE, INPUTS).astype(np.float64)
    chances = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    nats = -np.log(np.take_along_axis(chances, TARGETS[..., None], axis=-1)[..., 0])
    batch = {"source": SOURCE, "inputs": INPUTS, "targets": TARGETS}
    loss = quick_jit(partial(transformer.loss, SMALL, params))(batch)
    assert float(loss) == pytest.approx(nats[TARGETS != PADDING].mean(), rel=1e-4)


def test_a_tied_embedding_is_one_matrix_and_separate_ones_are_three():
    tied, separate = (
        jax.eval_shape(partial(transformer.init, replace(SMALL, tied=tied)), jax.random.key(0))
        for tied in (True, False)
    )
    assert set(separate) - set(tied) == {"embed_target", "head"}
    assert transformer.parameters(replace(SMALL, tied=False)) - transformer.parameters(SMALL) == 2 * 40 * 16


def test_positions_are_sines_and_cosines():
    codes = transformer.sinusoids(5, 8, "float32")
    angles = np.arange(5)[:, None] / 10_000 ** (np.arange(4) / 4)
    np.testing.assert_allclose(codes, np.hstack([np.sin(angles), np.cos(angles)]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "size"), [("base", 65e6), ("big", 213e6)])
def test_presets_have_about_the_published_size(name, size):
    assert transformer.parameters(Config.preset(name)) == pytest.approx(size, rel=0.04)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "heads=3"), ({"hidden": 15, "heads": 3}, "hidden=15 is odd"), ({"vocab_size": 3}, "vocab_size=3")],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
