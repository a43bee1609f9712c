"""Train steps as programs, for tests of what planners do with them."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from autopar.frontend import Traced, trace


def traced_step(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, optimizer: optax.GradientTransformation
) -> Traced:
    """An ordinary step of an optimizer on shapes of parameters and of a batch, its state donated."""

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = (params, jax.eval_shape(optimizer.init, params))
    return trace(step, (state, batch), {}, donate_argnums=(0,))
