"""Planned programs inside JAX's other transformations.

Inside another `jit` or loop the planned program runs. Differentiated or batched it is the user's own function again,
with the custom derivatives that planning has inlined; XLA shards it, starting from the plan's placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.errors import UnsupportedError, explain

Flat = Callable[..., tuple[Any, ...]]


def transformable(planned: Flat, user_function: Flat) -> Flat:
    """A function that is `planned` where it is only staged, and `user_function` where derivatives or batches are taken.

    A staged call may be differentiated or batched later, so it carries the rules that lead to `user_function` with it.
    `checkify` stages its function first, and then checks the operators of the user's function, not those of the plan.
    """
    batchable = custom_vmap(planned)

    @batchable.def_vmap
    def batch(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[Any, Any]:  # pyright: ignore[reportUnusedFunction]
        axes = tuple(0 if is_batched else None for is_batched in batched)
        results = jax.vmap(user_function, in_axes=axes, axis_size=size)(*leaves)
        return results, (True,) * len(results)

    program = jax.custom_jvp(lambda *leaves: batchable(*leaves))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        # What does not change is left out: JAX would take it to change by zero, and zero times infinity is no zero.
        changing = [i for i, tangent in enumerate(tangents) if not _stands_still(tangent)]

        def along(*moved: Any) -> tuple[Any, ...]:
            given = dict(zip(changing, moved, strict=True))
            return user_function(*(given.get(i, primal) for i, primal in enumerate(primals)))

        moved, directions = ([side[i] for i in changing] for side in (primals, tangents))
        return jax.jvp(along, moved, directions)

    program.defjvp(derivative, symbolic_zeros=True)

    def function(*leaves: Any) -> tuple[Any, ...]:
        traced = filter(jax_compat.is_traced, leaves)
        is_staged = all(map(jax_compat.is_staged, traced)) and not jax_compat.is_checked()
        return program(*leaves) if is_staged else user_function(*leaves)

    return function


def own_function(jaxpr: Any, inputs: Sequence[Sharding], outputs: Sequence[Sharding], name: str, source: str) -> Flat:
    """The user's function as traced, of flat arguments, whose arguments and results are in these placements.

    It raises UnsupportedError if `jaxpr` is None, as the planned program is then another function.
    """
    if jaxpr is None:
        rule = 'with microbatch_semantics="independent" each microbatch takes its own statistics'
        remedy = "take the derivative inside the function, or leave microbatch_semantics out"
        text = explain(f"a derivative or a batch of {name}", rule, source, remedy)

        def refuse(*_: Any) -> tuple[Any, ...]:
            raise UnsupportedError(text)

        return refuse
    run = jaxpr_as_fun(jaxpr)

    def constrained(*leaves: Any) -> tuple[Any, ...]:
        results = run(*map(lax.with_sharding_constraint, leaves, inputs))
        return tuple(map(lax.with_sharding_constraint, results, outputs))

    constrained.__name__ = constrained.__qualname__ = name
    jitted = jax.jit(constrained)

    def function(*leaves: Any) -> tuple[Any, ...]:
        placed = zip(leaves, inputs, strict=True)
        return jitted(*(leaf if jax_compat.is_traced(leaf) else jax.device_put(leaf, s) for leaf, s in placed))

    return function


def _stands_still(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or jax.typeof(tangent).dtype == jax.dtypes.float0
