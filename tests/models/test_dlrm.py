"""DLRM: the products of all pairs, which rows a click's features read, and the sizes of its presets."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models import dlrm
from models.dlrm import Config

SMALL = Config(rows=(8, 16, 5), dense_features=3, bottom=(8, 4), top=(1,))


@pytest.fixture(scope="module")
def params(random_like):
    return random_like(partial(dlrm.init, SMALL), scale=1.0)


def test_the_logit_follows_the_definition(params, quick_jit):
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(6, 3)).astype(np.float32)
    categories = rng.integers(SMALL.rows, size=(6, 3), dtype=np.int32)

    def layer(x, layer):
        return x @ layer["kernel"] + layer["bias"]

    bottom = params["bottom"]
    x = np.maximum(layer(np.maximum(layer(dense, bottom["Dense_0"]), 0), bottom["Dense_1"]), 0)
    features = [x, *(params[f"Table_{i}"]["embedding"][categories[:, i]] for i in range(3))]
    pairs = [(features[i] * features[j]).sum(axis=-1) for i in range(4) for j in range(i)]
    expected = layer(np.hstack([x, np.stack(pairs, axis=1)]), params["top"]["Dense_0"])[:, 0]
    logits = quick_jit(partial(dlrm.logits, SMALL))(params, dense, categories)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_example_categories_are_rows_of_their_tables():
    batch = jax.device_get(dlrm.example_batch(SMALL, 64, jax.random.key(0)))
    assert batch["categories"].min() == 0
    np.testing.assert_array_equal(batch["categories"].max(axis=0), np.array(SMALL.rows) - 1)
    assert set(batch["clicks"]) == {0, 1}


@pytest.mark.parametrize(("name", "size"), [("1B", 1.08e9), ("24B", 24.03e9)])
def test_presets_have_about_the_size_in_their_name(name, size):
    config = Config.preset(name)
    assert dlrm.parameters(config) == pytest.approx(size, rel=0.01)
    assert len(config.rows) == 26
    assert all(rows % 64 == 0 for rows in config.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": ()}, r"rows=\(\)"), ({"bottom": (4, 0)}, r"bottom=\(4, 0\)"), ({"top": (4, 2)}, "must end in 1")],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
