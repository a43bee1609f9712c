"""Sums that a backward loop over layers rounds and stacks, such as the gradients of norms in bfloat16: stacked as they
are and rounded after the loop, all layers' at once.

The numbers are the same. In the loop, a sum over the batch would have to be all there before it is rounded: devices
would reduce it in each iteration, and no microbatch could be computed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Var

from autopar import jax_compat

_LOOP = "scan"

_PLAIN = frozenset({_LOOP, "jit", "pjit", "remat2", "checkpoint", "closed_call"})
"""Loops, and calls that have no derivative of their own; what they run is their parameter `jaxpr`."""

_SUM, _CAST = "reduce_sum", "convert_element_type"


def with_late_casts(jaxpr: Any) -> Any:
    """The jaxpr, open or closed, with casts of sums behind its backward loops and calls, also inside of these."""
    opened, _ = jax_compat.open_jaxpr(jaxpr)
    equations = [each for equation in opened.eqns for each in _split(_with_late_inside(equation))]
    if len(equations) == len(opened.eqns) and all(a is b for a, b in zip(equations, opened.eqns, strict=True)):
        return jaxpr
    return _put(jaxpr, opened.replace(eqns=equations))


def _put(jaxpr: Any, opened: Any) -> Any:
    """The jaxpr with another inside, closed as it is."""
    return opened if jaxpr is jax_compat.open_jaxpr(jaxpr)[0] else jaxpr.replace(jaxpr=opened)


def _with_late_inside(equation: Any) -> Any:
    """The equation with late casts in what it runs; itself if it runs nothing that has any."""
    inside = _inside(equation)
    if inside is None or (late := with_late_casts(inside)) is inside:
        return equation
    return equation.replace(params={**equation.params, "jaxpr": late})


def _inside(equation: Any) -> Any | None:
    """The jaxpr that a loop or plain call runs; None for any other equation."""
    return equation.params.get("jaxpr") if equation.primitive.name in _PLAIN else None


def _split(equation: Any) -> Iterator[Any]:
    """The equations in place of one: a loop or call that returns sums as they are, and their casts; else itself."""
    casts = dict(_returned_casts(equation))
    if not casts:
        yield equation
        return
    jaxpr = equation.params["jaxpr"]
    body, _ = jax_compat.open_jaxpr(jaxpr)
    inside, outside = list(body.outvars), list(equation.outvars)
    stack = (equation.params["length"],) if equation.primitive.name == _LOOP else ()
    for position, cast in casts.items():
        (inside[position],) = cast.invars
        aval = inside[position].aval
        outside[position] = Var(ShapedArray((*stack, *aval.shape), aval.dtype))
    late = _put(jaxpr, body.replace(outvars=inside))
    yield equation.replace(outvars=outside, params={**equation.params, "jaxpr": late})
    for position, cast in casts.items():
        ends = {"invars": [outside[position]], "outvars": [equation.outvars[position]]}
        yield cast.replace(**ends, source_info=equation.source_info)


def _returned_casts(equation: Any) -> Iterator[tuple[int, Any]]:
    """The (position, cast) of each result of a call, or of those that a backward loop stacks, that is a rounded sum."""
    is_loop = equation.primitive.name == _LOOP
    if (inside := _inside(equation)) is None or (is_loop and "transpose(" not in jax_compat.scope_of(equation)):
        return
    body, _ = jax_compat.open_jaxpr(inside)
    makers = _makers(body)
    for position in range(jax_compat.scan_counts(equation.params)["num_carry"] if is_loop else 0, len(body.outvars)):
        var = body.outvars[position]
        cast = None if isinstance(var, jax_compat.Literal) else makers.get(var)
        if cast is not None and _rounds(cast) and _is_sum(cast.invars[0], makers):
            yield position, cast


def _makers(jaxpr: Any) -> Mapping[Any, Any]:
    """The equation that makes each variable."""
    return {var: equation for equation in jaxpr.eqns for var in equation.outvars}


def _rounds(equation: Any) -> bool:
    """Whether an equation casts floating-point numbers to fewer bytes."""
    if equation.primitive.name != _CAST:
        return False
    before, after = (var.aval.dtype for var in (*equation.invars, *equation.outvars))
    is_float = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return is_float and before.itemsize > after.itemsize


def _is_sum(var: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a value is made of a sum over the leading dimension of an array, element by element.

    Such sums have no batch, so that a stack of them as they are takes little room.
    """
    pending, seen = [var], set[Any]()
    while pending:
        value = pending.pop()
        size = value.aval.size
        maker = None if isinstance(value, jax_compat.Literal) or value in seen else makers.get(value)
        if maker is None:
            continue
        if maker.primitive.name == _SUM and 0 in maker.params["axes"]:
            return True
        seen.add(value)
        if (inside := _inside(maker)) is not None:
            body, _ = jax_compat.open_jaxpr(inside)
            if _is_sum(body.outvars[maker.outvars.index(value)], _makers(body)):
                return True
        else:
            pending += [each for each in maker.invars if each.aval.size == size]
    return False
