"""Every model as an ordinary train step, in the size that benchmarks measure and in the least that 8 devices share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import alexnet, bert, dlrm, gpt, llama, moe, transformer, wide_resnet

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for what is not timed: unoptimized, a program takes a fraction of the time to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step (state, batch) -> (state, loss) with the state it starts from and a batch.

    State is (parameters, running statistics, the optimizer's own); no model but Wide-ResNet has statistics.
    """

    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    state: Any
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model in the configuration and batch size that are measured, and in the `least` ones, for tests."""

    module: ModuleType
    config: Any
    batch: int
    least: Any
    least_batch: int = 8

    def training(self, precision: str = "float32", *, least: bool = False) -> Training:
        """Its training by SGD with momentum; `precision` is of parameters and computation (float64 needs x64)."""
        config, batch = (self.least, self.least_batch) if least else (self.config, self.batch)
        return training(self.module, replace(config, dtype=precision, param_dtype=precision), batch)


def training(
    module: ModuleType, config: Any, batch_size: int, optimizer: optax.GradientTransformation | None = None
) -> Training:
    """The training of a model of `models`, from random numbers on random data, by default by SGD with momentum."""
    optimizer = optimizer or optax.sgd(0.05, momentum=0.9)
    rng = np.random.default_rng(0)

    def draw(struct: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(scale=0.1, size=struct.shape), struct.dtype)

    create = partial(make_state, module, config, optimizer)  # too slow to compile for the sake of a few numbers
    return Training(
        step=make_step(module, config, optimizer),
        state=jax.tree.map(draw, jax.eval_shape(create, jax.random.key(0))),
        batch=jax.jit(partial(module.example_batch, config, batch_size), compiler_options=QUICK)(jax.random.key(1)),
    )


def make_state(module: ModuleType, config: Any, optimizer: optax.GradientTransformation, key: jax.Array) -> Any:
    """The state at step 0."""
    params, stats = module.init(config, key) if module is wide_resnet else (module.init(config, key), ())
    return params, stats, optimizer.init(params)


def make_step(
    module: ModuleType, config: Any, optimizer: optax.GradientTransformation
) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """An ordinary train step (state, batch) -> (state, loss)."""

    def objective(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        if module is wide_resnet:
            return module.loss(config, params, stats, batch)
        return module.loss(config, params, batch), stats

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, stats, moments = state
        (loss, stats), gradients = jax.value_and_grad(objective, has_aux=True)(params, stats, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), stats, moments), loss

    return train_step


TOKENS: dict[str, Any] = {"vocab_size": 256, "sequence_length": 128, "hidden": 128, "layers": 2, "heads": 8}
FEW_TOKENS: dict[str, Any] = {"vocab_size": 16, "sequence_length": 8, "hidden": 16, "layers": 1, "heads": 8}

GPT = Model(module=gpt, config=gpt.Config(**TOKENS), batch=8, least=gpt.Config(**FEW_TOKENS))
LLAMA = Model(
    module=llama,
    config=replace(llama.Config(**TOKENS, kv_heads=8, mlp=384), heads=16),
    batch=8,
    least=llama.Config(**FEW_TOKENS, kv_heads=8, mlp=16),
)


def scanned(model: Model) -> Model:
    """The same model with its blocks as one loop over stacked parameters; the least has two."""
    return replace(
        model,
        config=replace(model.config, scan_layers=True),
        least=replace(model.least, scan_layers=True, layers=2),
    )


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "gpt": GPT,
        "gpt-scan": scanned(GPT),
        "llama": LLAMA,
        "llama-scan": scanned(LLAMA),
        "bert": Model(module=bert, config=bert.Config(**TOKENS), batch=8, least=bert.Config(**FEW_TOKENS)),
        "transformer": Model(
            module=transformer,
            config=replace(transformer.Config(**TOKENS), layers=1),
            batch=8,
            least=transformer.Config(**FEW_TOKENS),
        ),
        "moe": Model(
            module=moe,
            config=moe.Config(**TOKENS, experts=8, group_size=128),
            batch=8,
            least=moe.Config(**FEW_TOKENS, experts=8, group_size=8, mlp_factor=2),
        ),
        "wide-resnet": Model(
            module=wide_resnet,
            config=wide_resnet.Config.tiny(),
            batch=64,
            least=wide_resnet.Config(image_size=32, classes=8, depth=14, base_channels=8, width_factor=1),
        ),
        "alexnet": Model(
            module=alexnet,
            config=alexnet.Config(image_size=64, channels=(16, 32, 48, 48, 32), hidden=512, classes=64),
            batch=64,
            least=alexnet.Config(image_size=63, channels=(8, 8, 8, 8, 8), hidden=8, classes=8),
        ),
        "dlrm": Model(
            module=dlrm,
            config=dlrm.Config(rows=(32768, 16384, 4096, 1024), dense_features=16, bottom=(256, 64), top=(256, 128, 1)),
            batch=2048,
            least=dlrm.Config(rows=(32, 16), dense_features=8, bottom=(16, 8), top=(8, 1)),
        ),
    }
)
"""What `benchmarks.zoo` measures: a step takes from 20 to 300 ms on 8 CPU devices that share a few cores."""
