"""`argmax` and `argmin` that can be sharded along the dimension that they search.

The extreme element is found first, by a reduction of its own, and then its position, the least one that any piece has.
So logits that are sharded over the vocabulary need not be gathered for an accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from autopar.frontend.primitives import traced_for

Function = Callable[..., Any]


def _position(of_whole: Function, name: str) -> Primitive:
    """The primitive (array, its extreme along `axes`) -> the position of the extreme."""

    def position(x: jax.Array, extreme: jax.Array, *, axes: tuple[int], index_dtype: Any) -> jax.Array:
        del extreme
        return of_whole(x, axes[0], index_dtype)

    primitive = Primitive(name)
    primitive.def_impl(position)
    primitive.def_abstract_eval(
        lambda x, extreme, *, axes, index_dtype: extreme.update(dtype=np.dtype(index_dtype), weak_type=False)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(position, multiple_results=False))

    def batched(operands: Any, dims: Any, *, axes: tuple[int], index_dtype: Any) -> tuple[Any, int]:
        rows = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        x, extreme = (
            jnp.broadcast_to(x, (rows, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        )
        return primitive.bind(x, extreme, axes=(axes[0] + 1,), index_dtype=index_dtype), 0

    batching.primitive_batchers[primitive] = batched
    return primitive


_EXTREMES: dict[Any, tuple[Function, Primitive]] = {
    lax.argmax_p: (lax.reduce_max, _position(lax.argmax, lax.argmax_p.name)),
    lax.argmin_p: (lax.reduce_min, _position(lax.argmin, lax.argmin_p.name)),
}
"""JAX's primitives of positions: (the function for the element, the primitive for its position with that as another
operand).
"""


def by_extreme(equation: Any) -> Any:
    """The jaxpr of an `argmax` or `argmin` that computes the extreme first; None for other equations, and if it
    compares no numbers.
    """
    if equation.primitive not in _EXTREMES or not jnp.issubdtype(equation.invars[0].aval.dtype, np.number):
        return None
    reduce, position = _EXTREMES[equation.primitive]
    params = equation.params
    return traced_for(lambda x: position.bind(x, reduce(x, params["axes"]), **params), equation)
