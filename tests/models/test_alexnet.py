"""AlexNet: the published sizes, and dropout."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from models import alexnet
from models.alexnet import Config

SMALL = Config(image_size=63, channels=(2, 2, 4, 4, 2), hidden=4, classes=3)


def test_the_full_model_has_the_published_layers():
    config = Config.preset("full")
    assert config.sizes == (55, 27, 13, 13, 13, 6)
    params = jax.eval_shape(partial(alexnet.init, config), jax.random.key(0))
    kernels = [params[f"Conv_{i}"]["kernel"].shape for i in range(5)]
    assert kernels == [(11, 11, 3, 64), (5, 5, 64, 192), (3, 3, 192, 384), (3, 3, 384, 384), (3, 3, 384, 256)]
    assert params["Dense_0"]["kernel"].shape == (6, 6, 256, 4096)


def test_weights_are_dense_and_work_is_convolution():
    config = Config.preset("full")
    *convolutions, first, second, third = alexnet.products(config)
    dense = [first, second, third]
    assert sum(n * m for n, m, _ in dense) > 0.9 * alexnet.parameters(config)
    work = [sum(n * m * pixels for n, m, pixels in part) for part in (convolutions, dense)]
    assert work[0] > 0.9 * sum(work)


def test_dropout_needs_a_key_and_a_rate():
    params, batch = jax.eval_shape(
        lambda key: (alexnet.init(SMALL, key), alexnet.example_batch(SMALL, 2, key)), jax.random.key(0)
    )

    def jaxpr(config, key):
        return str(jax.make_jaxpr(lambda p, b: alexnet.loss(config, p, b, key))(params, batch))

    plain, dropping = jaxpr(SMALL, None), replace(SMALL, dropout=0.5)
    assert jaxpr(SMALL, jax.random.key(0)) == plain
    assert jaxpr(dropping, None) == plain
    assert jaxpr(dropping, jax.random.key(0)) != plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 62}, "image_size=62 is too small"),
        ({"channels": (1, 2, 3)}, "five sizes"),
        ({"dropout": 1.0}, "dropout=1.0"),
    ],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
