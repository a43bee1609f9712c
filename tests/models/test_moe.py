"""The mixture of experts: how the gate fills slots, what groups are, and the literature's counts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import moe
from models.moe import Config

SMALL = Config(vocab_size=40, sequence_length=8, hidden=16, layers=2, heads=2, experts=4, group_size=8)


@pytest.fixture(scope="module")
def combine():
    """Weights [2, 12, 5, 4] of random scores in which some experts are wanted by more tokens than they take."""
    scores = np.random.default_rng(0).normal(size=(2, 12, 5)) + np.array([2, 1, 0, 0, 0])
    return scores, *map(np.asarray, moe.gate(jnp.asarray(scores, jnp.float32), 4))


def reference(scores, capacity):
    """The gate, one token after another: first choices, then second choices."""
    tokens, experts = scores.shape
    gates = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    order = np.argsort(-scores, axis=-1)
    combine, filled = np.zeros((tokens, experts, capacity)), np.zeros(experts, dtype=int)
    for choice in range(2):
        for token, expert in enumerate(order[:, choice]):
            if filled[expert] < capacity:
                best = gates[token, order[token, :2]].sum()
                combine[token, expert, filled[expert]] = gates[token, expert] / best
            filled[expert] += 1
    return combine


def test_the_gate_fills_slots_as_a_loop_over_tokens_does(combine):
    scores, weights, _ = combine
    np.testing.assert_allclose(weights, [reference(group, 4) for group in scores], rtol=1e-5, atol=1e-7)


def test_a_token_takes_two_experts_at_most_and_a_slot_one_token(combine):
    _, weights, _ = combine
    taken = weights > 0
    assert taken.sum(axis=(2, 3)).max() == 2
    assert taken.sum(axis=1).max() == 1
    assert (taken.sum(axis=(1, 3)) <= 4).all()
    assert taken.sum() < 2 * 2 * 12, "no expert was wanted too much"


def test_enough_capacity_serves_both_choices_in_full():
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 3)), jnp.float32)
    weights, _ = moe.gate(scores, 6)
    np.testing.assert_allclose(weights.sum(axis=(2, 3)), 1, rtol=1e-6)
    assert (np.asarray(weights > 0).sum(axis=(2, 3)) == 2).all()


def test_balanced_loads_have_a_loss_of_one_and_a_single_favourite_that_of_all():
    _, balanced = moe.gate(10 * jnp.eye(4)[None], 2)
    assert float(balanced) == pytest.approx(1)
    _, favourite = moe.gate(jnp.broadcast_to(jnp.array([30.0, 0, 0, 0]), (1, 4, 4)), 2)
    assert float(favourite) == pytest.approx(4)


def test_groups_are_routed_apart(quick_jit, random_like):
    """The loss of a batch is the mean of its groups' losses, the load-balancing part included."""
    config = replace(SMALL, group_size=16)
    params = random_like(partial(moe.init, config))
    tokens = np.random.default_rng(0).integers(40, size=(4, 9), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss = quick_jit(partial(moe.loss, config))
    halves = [loss(params, {name: x[i : i + 2] for name, x in batch.items()}) for i in (0, 2)]
    np.testing.assert_allclose(loss(params, batch), np.mean(halves), rtol=1e-5)


@pytest.mark.slow
def test_remat_changes_neither_loss_nor_gradients(quick_jit, random_like):
    params = random_like(partial(moe.init, SMALL))
    tokens = np.random.default_rng(0).integers(40, size=(2, 8), dtype=np.int32)
    plain, remat = (
        quick_jit(jax.value_and_grad(partial(moe.loss, config)))(params, {"inputs": tokens, "targets": tokens})
        for config in (SMALL, replace(SMALL, remat=True))
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), plain, remat)


def test_even_blocks_have_experts_and_odd_ones_an_mlp():
    params = jax.eval_shape(partial(moe.init, replace(SMALL, layers=3)), jax.random.key(0))
    feeds = [sorted({"experts", "mlp"} & set(params[f"Block_{i}"])) for i in range(3)]
    assert feeds == [["experts"], ["mlp"], ["experts"]]
    assert params["Block_0"]["experts"]["up"].shape == (4, 16, 128)


@pytest.mark.parametrize("name", moe.ALPA_SIZES)
def test_presets_have_about_the_size_in_their_name(name):
    size = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert moe.parameters(Config.preset(name)) == pytest.approx(size, rel=0.04)


@pytest.mark.parametrize("name", moe.ALPA_SIZES)
def test_flops_follow_the_published_formula(name):
    config = Config.preset(name)
    b, s, h, f, e, g = 8, 1024, config.hidden, 8, config.experts, 2048
    dense = b * s * h**2 * (8 + 4 * f) + 4 * b * s**2 * h
    sparse = 8 * b * s * h**2 + 4 * b * s**2 * h + 8 * b * s * h**2 * f
    sparse += 2 * b * s * h * e + 4 * b * s * g + 8 * b * s * h * g
    expected = 4 * config.layers / 2 * (dense + sparse) + 6 * b * s * h * 32000
    assert moe.flops(config, b) == pytest.approx(expected)


def test_capacity_is_an_experts_share_of_two_choices():
    assert Config.preset("380M").capacity == 512
    assert Config.preset("27B").capacity == 85


@pytest.mark.parametrize(
    ("change", "message"),
    [({"experts": 1}, "two experts"), ({"experts": 17}, r"not in \[2, 16\]"), ({"group_size": 0}, "group_size=0")],
)
def test_a_wrong_configuration_says_what_is_right(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_a_batch_without_whole_groups_is_refused():
    config = replace(SMALL, group_size=16)
    params = jax.eval_shape(partial(moe.init, config), jax.random.key(0))
    with pytest.raises(ValueError, match=r"24 tokens .* group_size=16"):
        jax.eval_shape(partial(moe.logits, config), params, jnp.zeros((3, 8), jnp.int32))
