"""The laws that every model obeys: counts that agree with its shapes, precisions, gradients, and learning."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log, prod
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import alexnet, bert, dlrm, gpt, llama, moe, transformer, wide_resnet
from tests.sample import slow

BATCH = 4


@dataclass(frozen=True)
class Case:
    """A model, a small configuration, the answers it guesses among, and a step of descent that is not too far."""

    model: ModuleType
    config: Any
    answers: int
    step: float = 0.1

    def variables(self, key):
        """Parameters, and a tuple of what else the loss takes before the batch."""
        variables = self.model.init(self.config, key)
        return (variables[0], variables[1:]) if isinstance(variables, tuple) else (variables, ())

    def batch(self, key):
        return self.model.example_batch(self.config, BATCH, key)

    def loss(self, params, stats, batch):
        loss = self.model.loss(self.config, params, *stats, batch)
        return loss[0] if stats else loss

    def trace(self, **changes):
        """The inputs' shapes and the jaxpr of the loss and its gradients, under a changed configuration."""
        case, key = replace(self, config=replace(self.config, **changes)), jax.random.key(0)
        inputs = (*jax.eval_shape(case.variables, key), jax.eval_shape(case.batch, key))
        return inputs, jax.make_jaxpr(jax.value_and_grad(case.loss))(*inputs).jaxpr

    @cached_property
    def jaxpr(self):
        return self.trace()[1]


TOKENS = {"vocab_size": 40, "sequence_length": 8, "hidden": 16, "layers": 1, "heads": 2}

CASES = {
    "gpt": Case(gpt, gpt.Config(**TOKENS), 40),
    "moe": Case(moe, moe.Config(**TOKENS | {"layers": 2}, experts=4, group_size=8), 40),
    "llama": Case(llama, llama.Config(**TOKENS | {"heads": 4}, kv_heads=2, mlp=24), 40),
    "bert": Case(bert, bert.Config(**TOKENS | {"sequence_length": 16}), 40),
    "transformer": Case(transformer, transformer.Config(**TOKENS, tied=False), 40),
    "dlrm": Case(dlrm, dlrm.Config(rows=(8, 16, 5), dense_features=3, bottom=(8, 4), top=(8, 1)), 2),
    "alexnet": Case(alexnet, alexnet.Config(image_size=63, channels=(4, 4, 8, 8, 4), hidden=8, classes=5), 5, 0.03),
    "wide_resnet": Case(
        wide_resnet, wide_resnet.Config(image_size=32, classes=5, depth=14, base_channels=2, width_factor=2), 5
    ),
}


@pytest.fixture(scope="module", params=[slow(name) if name == "wide_resnet" else name for name in CASES])
def case(request) -> Case:
    return CASES[request.param]


TRAINED = {"gpt", "moe", "dlrm", "alexnet"}
"""Those that take a step in every run: a language model, one with experts, one of tables, one of convolutions."""


@pytest.fixture(scope="module", params=[name if name in TRAINED else slow(name) for name in CASES])
def learner(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def trained(learner, quick_jit):
    """Losses and gradients before and after a step of descent."""
    key = jax.random.key(0)
    params, stats, batch = jax.device_get(quick_jit(lambda key: (*learner.variables(key), learner.batch(key)))(key))
    evaluate = quick_jit(jax.value_and_grad(learner.loss))
    before = jax.device_get(evaluate(params, stats, batch))
    params = jax.tree.map(lambda p, g: p - learner.step * g, params, before[1])
    return before, jax.device_get(evaluate(params, stats, batch))


def product_flops(equation) -> int:
    """Twice the multiplications of a matrix product or a convolution, those with the zeros of a dilation left out."""
    match equation.primitive.name:
        case "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            inner = prod(equation.invars[0].aval.shape[i] for i in contracted)
        case "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            _, features, *space = (kernel[i] for i in equation.params["dimension_numbers"].rhs_spec)
            inner = features * prod(space) // prod(equation.params["lhs_dilation"])
        case _:
            return 0
    return 2 * inner * equation.outvars[0].aval.size


def presets() -> list[Any]:
    """Every model with every preset: the first for every run, the others for the slow one."""
    return [
        slow(case.model, name) if i else (case.model, name)
        for case in CASES.values()
        for i, name in enumerate(case.model.PRESETS)
    ]


@pytest.mark.parametrize(("model", "preset"), presets())
def test_parameters_counts_the_leaves_of_every_preset(model, preset):
    config = model.Config.preset(preset)
    if hasattr(config, "scan_layers"):
        config = replace(config, scan_layers=True)  # the same parameters, sooner traced
    params, _ = jax.eval_shape(Case(model, config, 0).variables, jax.random.key(0))
    assert model.parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_flops_counts_the_products_of_the_step(case, equations):
    counted = sum(map(product_flops, equations(case.jaxpr)))
    # The literature's formula for experts counts two gradients of the dispatch, which has one, and weights slots.
    assert case.model.flops(case.config, BATCH) == pytest.approx(counted, rel=0.1 if case.model is moe else 1e-9)


def test_every_part_of_a_batch_has_the_batch_first(case):
    for size in (BATCH, 2 * BATCH):
        batch = jax.eval_shape(partial(case.model.example_batch, case.config, size), jax.random.key(0))
        assert {part.shape[0] for part in batch.values()} == {size}


def test_an_untrained_model_guesses_evenly(learner, trained):
    (loss, _), _ = trained
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert float(loss) == pytest.approx(log(learner.answers), rel=0.25)


def test_a_step_of_descent_lowers_the_loss(trained):
    (before, _), (after, _) = trained
    assert np.isfinite(after)
    assert after < before


def test_gradients_reach_every_parameter(trained):
    _, (_, gradients) = trained
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.any(gradient != 0), path


def test_half_precision_keeps_float32_parameters_gradients_and_loss(case, equations):
    (params, stats, _), jaxpr = case.trace(dtype="bfloat16")
    outputs = [out.aval for out in jaxpr.outvars]
    assert {leaf.dtype for leaf in jax.tree.leaves((params, stats, outputs))} == {jnp.dtype("float32")}
    products = [equation for equation in equations(jaxpr) if product_flops(equation)]
    assert any(equation.outvars[0].aval.dtype == jnp.bfloat16 for equation in products)


def test_float64_stays_float64(case, equations):
    with jax.enable_x64(True):
        (params, stats, _), jaxpr = case.trace(dtype="float64", param_dtype="float64")
        assert {leaf.dtype for leaf in jax.tree.leaves((params, stats))} == {jnp.dtype("float64")}
        narrow = [e for e in equations(jaxpr) for out in e.outvars if out.aval.dtype == jnp.float32]
        assert not narrow


def test_no_reshape_merges_or_splits_a_dimension(case, equations):
    for equation in equations(case.jaxpr):
        if equation.primitive.name == "reshape":
            before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            assert [n for n in before if n != 1] == [n for n in after if n != 1], equation


def test_an_unknown_preset_is_refused_with_those_there_are(case):
    with pytest.raises(ValueError, match=f"'3T'; there are {', '.join(case.model.PRESETS)}"):
        case.model.Config.preset("3T")


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("param_dtype", "half")])
def test_an_unknown_dtype_is_refused(case, field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}'.*float32"):
        replace(case.config, **{field: value})
