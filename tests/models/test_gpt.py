"""The GPT model: its shapes, its counts against the literature's formulas, and the laws any such model must obey."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt
from models.gpt import Config

SMALL = Config(vocab_size=40, sequence_length=8, hidden=16, layers=1, heads=2)
DEEPER = replace(SMALL, layers=2)

quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles twice as fast


@pytest.fixture(scope="module")
def params():
    return quick_jit(gpt.init, static_argnums=0)(SMALL, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    return quick_jit(lambda key: gpt.example_batch(SMALL, 3, key))(jax.random.key(1))


@pytest.fixture(scope="module")
def logits(params):
    return quick_jit(lambda inputs: gpt.logits(SMALL, params, inputs))


def count(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def shapes(config: Config):
    return jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))


def test_example_batch_holds_shifted_tokens(batch):
    assert batch["inputs"].shape == batch["targets"].shape == (3, 8)
    assert batch["inputs"].dtype == batch["targets"].dtype == jnp.int32
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_logits_and_loss_have_their_shapes_and_dtypes(params, batch):
    logits = jax.eval_shape(lambda: gpt.logits(SMALL, params, batch["inputs"]))
    assert (logits.shape, logits.dtype) == ((3, 8, 40), jnp.float32)
    loss = jax.eval_shape(lambda: gpt.loss(SMALL, params, batch))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_parameters_are_named_and_shaped_for_splitting():
    params = shapes(DEEPER)
    assert set(params) == {"embed", "positions", "Block_0", "Block_1", "norm"}
    assert params["Block_0"]["attention"]["qkv"]["kernel"].shape == (16, 3, 2, 8)
    assert params["Block_0"]["attention"]["out"]["kernel"].shape == (2, 8, 16)
    assert params["Block_1"]["mlp"]["up"]["kernel"].shape == (16, 64)


@pytest.mark.parametrize("config", [DEEPER, replace(DEEPER, mlp_factor=3), Config.preset("tiny")])
def test_parameters_counts_the_leaves(config):
    assert gpt.parameters(config) == count(shapes(config))


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_presets_follow_the_published_formulas(name):
    config = Config.preset(name)
    v, s, h, layers = config.vocab_size, config.sequence_length, config.hidden, config.layers
    published = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    last_norm = 2 * h  # which the formula leaves out
    assert gpt.parameters(config) == pytest.approx(published + last_norm, abs=0.5)
    k = 96 if config.remat else 72
    step = k * 1024 * s * layers * h**2 * (1 + s / (6 * h)) + 6 * 1024 * s * h * v
    assert gpt.flops(config, 1024) == pytest.approx(step)


@pytest.mark.parametrize("name", gpt.ALPA_SIZES)
def test_presets_have_about_the_size_in_their_name(name):
    size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert gpt.parameters(Config.preset(name)) == pytest.approx(size, rel=0.06)


def test_flops_worked_by_hand():
    # 1.3B with recomputation, batch 2: 2048 tokens, hidden 2048, 24 layers, vocabulary 51200.
    # A block forward, per token: 8 H^2 (qkv, out) + 16 H^2 (MLP) = 24 * 4194304 = 100663296; attention 4 S H = 8388608.
    # 109051904 * 2048 tokens * 24 layers * 4 passes = 21440476741632; output projection 6 * 2048 * 2048 * 51200.
    assert gpt.flops(Config.preset("1.3B"), 2) == 21_440_476_741_632 + 1_288_490_188_800


def test_flops_without_remat_run_one_forward_less():
    config = replace(Config.preset("1.3B"), remat=False)
    assert gpt.flops(config, 2) == 21_440_476_741_632 * 3 / 4 + 1_288_490_188_800


def test_a_token_does_not_change_earlier_logits(logits, batch):
    changed = batch["inputs"].at[:, 5].add(1) % SMALL.vocab_size
    before, after = logits(batch["inputs"]), logits(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (jnp.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 0).all()


def test_dropout_depends_on_its_key_alone(params, batch):
    config = replace(SMALL, dropout=0.3)
    loss = quick_jit(lambda key: gpt.loss(config, params, batch, key))
    first, again, other = (float(loss(jax.random.key(seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_dropout_needs_a_key_and_a_rate(params, batch):
    def jaxpr(config, key):
        return str(jax.make_jaxpr(lambda p: gpt.loss(config, p, batch, key))(params))

    plain = jaxpr(SMALL, None)
    assert jaxpr(SMALL, jax.random.key(0)) == plain
    assert jaxpr(replace(SMALL, dropout=0.3), None) == plain
    assert jaxpr(replace(SMALL, dropout=0.3), jax.random.key(0)) != plain


@pytest.mark.slow  # as one of the two ways in which scanned layers differ below, without dropout, in every run
def test_remat_changes_neither_loss_nor_gradients(params, batch):
    def value_and_grad(config):
        loss = partial(gpt.loss, config, batch=batch, key=jax.random.key(2))
        return quick_jit(jax.value_and_grad(loss))(params)

    config = replace(SMALL, dropout=0.3)
    plain, remat = value_and_grad(config), value_and_grad(replace(config, remat=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, remat)


def test_remat_recomputes_every_block(batch, equations):
    config = replace(DEEPER, remat=True)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: gpt.loss(config, p, batch)))(shapes(config))
    assert sum(equation.primitive.name == "remat2" for equation in equations(jaxpr.jaxpr)) == config.layers


def test_remat_keeps_the_parameter_tree():
    assert shapes(DEEPER) == shapes(replace(DEEPER, remat=True))


def test_scanned_layers_equal_unrolled_ones(batch, random_like, stacked):
    params = random_like(partial(gpt.init, DEEPER))
    loss, gradients = quick_jit(jax.value_and_grad(partial(gpt.loss, DEEPER)))(params, batch)
    scanned = partial(gpt.loss, replace(DEEPER, scan_layers=True, remat=True))
    outputs = quick_jit(jax.value_and_grad(scanned))(stacked(params), batch)
    expected = loss, stacked(gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), outputs, expected)


def test_scanned_layers_have_stacked_parameters_and_one_body(batch):
    config = replace(DEEPER, scan_layers=True, dropout=0.3)
    params = shapes(config)
    leading = {leaf.shape[0] for leaf in jax.tree.leaves(params["Block"])}
    assert leading == {DEEPER.layers}
    assert count(params) == gpt.parameters(config)
    jaxpr = jax.make_jaxpr(lambda p, key: gpt.loss(config, p, batch, key))(params, jax.random.key(0))
    (loop,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    assert loop.params["length"] == DEEPER.layers


def test_an_untrained_model_guesses_evenly(params, batch):
    loss = quick_jit(lambda: gpt.loss(SMALL, params, batch))()
    assert float(loss) == pytest.approx(np.log(SMALL.vocab_size), rel=0.02)


def test_half_precision_keeps_float32_parameters_gradients_and_loss(params, batch):
    config = replace(SMALL, dtype="float16")
    outputs = jax.eval_shape(jax.value_and_grad(lambda p: gpt.loss(config, p, batch)), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(outputs)} == {jnp.dtype("float32")}
    assert jax.eval_shape(lambda: gpt.logits(config, params, batch["inputs"])).dtype == jnp.float16


def test_half_precision_gives_about_the_same_logits(params, logits, batch):
    half = quick_jit(lambda inputs: gpt.logits(replace(SMALL, dtype="bfloat16"), params, inputs))(batch["inputs"])
    np.testing.assert_allclose(half.astype(jnp.float32), logits(batch["inputs"]), atol=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config.preset("3B"), r"'3B'.*tiny, 125M, 350M, .*76B"),
        (lambda: replace(SMALL, heads=3), "heads=3 does not divide hidden=16"),
        (lambda: replace(SMALL, layers=0), "layers=0"),
        (lambda: replace(SMALL, dropout=1.0), "dropout=1.0"),
        (lambda: replace(SMALL, dtype="int8"), "dtype='int8'.*float32"),
    ],
)
def test_a_wrong_configuration_says_what_is_right(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrong_sequence_length_is_refused(params):
    with pytest.raises(ValueError, match=r"shape \[2, 9\], where \[batch, 8\]"):
        gpt.logits(SMALL, params, jnp.zeros((2, 9), jnp.int32))
