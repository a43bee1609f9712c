"""GPipe's schedule, in which stages compute activations again before gradients are there."""

from __future__ import annotations

import math

import jax
import pytest

from benchmarks.published import gpipe_transformer
from benchmarks.published.gpipe import seconds_ahead
from models import gpt
from passes.inter_op import StageCost, Transfer, build, simulate

COST = StageCost(forward_seconds=1.0, backward_seconds=3.0, finish_seconds=0.5)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seconds"),
    [(1, 1, 1 + 3), (2, 1, 2 + 1 + 2 * 2), (8, 1, 8 + 1 + 2 * 8), (8, 4, 11 + 4 * 3 + 2 * 7)],
)
def test_only_gradients_are_waited_for(stages: int, microbatches: int, seconds: float) -> None:
    transfers = [Transfer(forward_seconds=0.0, backward_seconds=0.0)] * (stages - 1)
    assert seconds_ahead([COST] * stages, transfers, microbatches) == pytest.approx(seconds + COST.finish_seconds)


def test_nothing_is_computed_ahead_where_the_backward_pass_is_all_gradients() -> None:
    cost = StageCost(forward_seconds=0.0, backward_seconds=2.0)
    transfers = [Transfer(forward_seconds=0.1, backward_seconds=0.2)] * 3
    simulated = simulate(build("gpipe", 4, 6), [cost] * 4, transfers)
    assert seconds_ahead([cost] * 4, transfers, 6) == pytest.approx(simulated.seconds)


@pytest.mark.parametrize(("layers", "millions"), [(3, 282.2), (13, 785.8)])
def test_a_transformer_has_as_many_parameters_as_the_paper_prints(layers: int, millions: float) -> None:
    config = gpt.Config(
        vocab_size=32000, sequence_length=1024, hidden=2048, layers=layers, heads=32, remat=True, scan_layers=True
    )
    params = jax.eval_shape(lambda key: gpipe_transformer.init(config, key), jax.random.key(0))
    del params["positions"]  # of which the paper's are sinusoids
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == pytest.approx(millions * 1e6, abs=0.1e6)


def test_a_transformer_of_random_weights_knows_nothing() -> None:
    config = gpt.Config(vocab_size=64, sequence_length=8, hidden=16, layers=2, heads=4, scan_layers=True)
    params = gpipe_transformer.init(config, jax.random.key(0))
    batch = gpipe_transformer.example_batch(config, 2, jax.random.key(1))
    assert float(gpipe_transformer.loss(config, params, batch)) == pytest.approx(math.log(64), abs=1.0)
