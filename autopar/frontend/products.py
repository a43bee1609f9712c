"""Products written so that nothing is arranged anew around them: one whose result is only transposed with its operands
exchanged, one of two arrays as vectors over the dimensions that they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.lax import dot_general_p, reshape_p, transpose_p

from autopar import jax_compat


def without_transposes(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr with these outputs, its batched products in the order in which they are read.

    JAX computes the gradient of the weights of experts, [experts, in, out], as [experts, out, in] and transposes it.
    XLA:CPU (jaxlib 0.10.2) gives a collective behind it the product's order in memory, but the product itself the
    other, so that it copies the array, element by element, both before the collective and behind it (`python -m
    benchmarks.transposed_products`). It exchanges the operands of other products by itself.
    """
    reads = Counter(atom for e in equations for atom in e.invars if not isinstance(atom, jax_compat.Literal))
    reads.update(atom for atom in outputs if not isinstance(atom, jax_compat.Literal))
    products = {
        equation.outvars[0]: equation
        for equation in equations
        if equation.primitive is dot_general_p and reads[equation.outvars[0]] == 1 and _is_symmetric(equation)
    }
    written = list[Any]()
    for equation in equations:
        product = products.get(equation.invars[0]) if equation.primitive is transpose_p else None
        if product is not None and equation.params["permutation"] == _exchanged(product):
            (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = product.params["dimension_numbers"]
            numbers = ((rhs_summed, lhs_summed), (rhs_batch, lhs_batch))
            params = product.params | {"dimension_numbers": numbers}
            equation = product.replace(invars=product.invars[::-1], outvars=equation.outvars, params=params)
        written.append(equation)
    return written


def without_vectors(equations: Sequence[Any]) -> list[Any]:
    """The equations of a jaxpr, its products of two arrays as vectors, such as `jnp.vdot`, over all their dimensions.

    The norm of gradients is such a sum. As a vector an array can only be cut along its first dimension, so that one
    cut along another would have to be brought elsewhere to be summed up.
    """
    vectors = (
        e for e in equations if e.primitive is reshape_p and e.params["dimensions"] is e.params["sharding"] is None
    )
    sources = {reshaped.outvars[0]: reshaped.invars[0] for reshaped in vectors}
    written = list[Any]()
    for equation in equations:
        if equation.primitive is dot_general_p and not equation.outvars[0].aval.shape:
            vectors = [atom for atom in equation.invars if not isinstance(atom, jax_compat.Literal)]
            arrays = [sources[vector] for vector in vectors if vector in sources]
            if len(arrays) == 2 and arrays[0].aval.shape == arrays[1].aval.shape:
                every = tuple(range(len(arrays[0].aval.shape)))
                params = equation.params | {"dimension_numbers": ((every, every), ((), ()))}
                equation = equation.replace(invars=arrays, params=params)
        written.append(equation)
    return written


def _is_symmetric(product: Any) -> bool:
    """Whether a product has a batch, and options that hold for either operand."""
    (_, _), (batch, _) = product.params["dimension_numbers"]
    precision = product.params["precision"]
    is_even = precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
    return bool(batch) and is_even and product.params["out_sharding"] is None


def _exchanged(product: Any) -> tuple[int, ...]:
    """The order in which a batched product's dimensions are with its operands exchanged."""
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    count, rank = len(batch), len(product.outvars[0].aval.shape)
    of_right = len(product.invars[0].aval.shape) - len(summed)
    return (*range(count), *range(of_right, rank), *range(count, of_right))
