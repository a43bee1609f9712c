"""Wide-ResNet: what the width factor widens, the statistics of batch norm, and the sizes of the presets."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models import wide_resnet
from models.wide_resnet import Config

SMALL = Config(image_size=32, classes=3, depth=14, base_channels=2, width_factor=2)


@pytest.fixture(scope="module")
def variables(random_like):
    params, stats = random_like(partial(wide_resnet.init, SMALL))
    return params, jax.tree.map(np.abs, stats)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 32, 32, 3)).astype(np.float32)
    return {"images": images, "labels": np.array([0, 1, 2, 0], dtype=np.int32)}


def test_the_width_factor_widens_the_inner_convolution_alone():
    narrow, wide = (
        jax.eval_shape(partial(wide_resnet.init, replace(SMALL, width_factor=factor)), jax.random.key(0))[0]["Block_1"]
        for factor in (1, 8)
    )
    kernels = {name: layer["kernel"].shape for name, layer in wide.items() if "kernel" in layer}
    assert kernels == {"narrow": (1, 1, 8, 4), "wide": (3, 3, 4, 32), "out": (1, 1, 32, 16), "shortcut": (1, 1, 8, 16)}
    assert narrow["wide"]["kernel"].shape == (3, 3, 4, 4)


def test_the_loss_updates_statistics_that_it_does_not_depend_on(variables, batch, quick_jit):
    params, stats = variables
    loss = quick_jit(partial(wide_resnet.loss, SMALL))
    first, new = loss(params, stats, batch)
    second, newer = loss(params, new, batch)
    assert float(first) == float(second)
    assert jax.tree.structure(new) == jax.tree.structure(stats)
    for old, once, twice in zip(*map(jax.tree.leaves, (stats, new, newer)), strict=True):
        np.testing.assert_allclose(twice - once, 0.9 * (once - old), rtol=1e-3, atol=1e-5)
    stem, batch_mean = new["stem_norm"]["BatchNorm_0"]["mean"], convolved_mean(params, batch["images"])
    expected = 0.9 * stats["stem_norm"]["BatchNorm_0"]["mean"] + 0.1 * batch_mean
    np.testing.assert_allclose(stem, expected, rtol=1e-4, atol=1e-6)


def convolved_mean(params, images):
    """The mean over batch and image of the stem's output."""
    dimensions = jax.lax.conv_dimension_numbers(images.shape, (7, 7, 3, 2), ("NHWC", "HWIO", "NHWC"))
    kernel = params["stem"]["kernel"]
    output = jax.lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=dimensions)
    return np.asarray(output).mean(axis=(0, 1, 2))


def test_running_statistics_make_images_independent(variables, batch, quick_jit):
    logits = quick_jit(partial(wide_resnet.logits, SMALL, *variables))
    other = batch["images"].copy()
    other[1:] += 1
    before, after = (np.asarray(logits(images)) for images in (batch["images"], other))
    np.testing.assert_allclose(before[0], after[0], rtol=1e-5)
    assert np.abs(before[1:] - after[1:]).max() > 0


@pytest.mark.parametrize("name", wide_resnet.ALPA_SIZES)
def test_presets_have_about_the_size_in_their_name(name):
    size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert wide_resnet.parameters(Config.preset(name)) == pytest.approx(size, rel=0.05)


def test_flops_of_the_plain_resnet_50_are_the_published_ones():
    config = Config(image_size=224, classes=1000, depth=50, base_channels=64, width_factor=1)
    assert wide_resnet.parameters(config) == 25_557_032
    assert wide_resnet.flops(config, 1) / 3 == pytest.approx(2 * 4.1e9, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 20}, "depth=20: choose one of 14, 26, 50, 101"),
        ({"image_size": 48}, "image_size=48 is no multiple of 32"),
        ({"width_factor": 0}, "width_factor=0"),
    ],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
