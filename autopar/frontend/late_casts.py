"""Sums that a backward loop over layers rounds, such as the gradients of norms in bfloat16: rounded after the loop.

In the loop, a sum over the batch would have to be all there before it is rounded: devices would reduce it in each
iteration, and no microbatch could be computed by itself. Those of each layer are stacked as they are, and the numbers
are the same. Those of an array that all layers share, as a position bias or the weights of a recurrent network, are
added up as they are: rounded once, in place of once a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Var

from autopar import jax_compat

_LOOP = "scan"

_PLAIN = frozenset({_LOOP, "jit", "pjit", "remat2", "checkpoint", "closed_call"})
"""Loops, and calls that have no derivative of their own; what they run is their parameter `jaxpr`."""

_SUM, _CAST, _ADDED = "reduce_sum", "convert_element_type", "add_any"


def with_late_casts(jaxpr: Any, *, in_loop: bool = False) -> Any:
    """The jaxpr, open or closed, with casts of sums behind its backward loops and calls, also inside of these.

    If it is `in_loop`, sums of casts are casts of sums.
    """
    opened, _ = jax_compat.open_jaxpr(jaxpr)
    inside = (_with_late_inside(equation, in_loop) for equation in opened.eqns)
    equations = [each for equation in inside for wide in _widened(equation) for each in _split(wide)]
    equations = list(_with_late_sums(opened, equations)) if in_loop else equations
    if len(equations) == len(opened.eqns) and all(a is b for a, b in zip(equations, opened.eqns, strict=True)):
        return jaxpr
    return _put(jaxpr, opened.replace(eqns=equations))


def _put(jaxpr: Any, opened: Any) -> Any:
    """The jaxpr with another inside, closed as it is."""
    return opened if jaxpr is jax_compat.open_jaxpr(jaxpr)[0] else jaxpr.replace(jaxpr=opened)


def _with_late_inside(equation: Any, in_loop: bool) -> Any:
    """The equation with late casts in what it runs; itself if it runs nothing that has any."""
    inside, in_loop = _inside(equation), in_loop or _is_backward_loop(equation)
    if inside is None or (late := with_late_casts(inside, in_loop=in_loop)) is inside:
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
    if (inside := _inside(equation)) is None or (is_loop and not _is_backward_loop(equation)):
        return
    body, _ = jax_compat.open_jaxpr(inside)
    makers = _makers(body.eqns)
    for position in range(jax_compat.scan_counts(equation.params)["num_carry"] if is_loop else 0, len(body.outvars)):
        var = body.outvars[position]
        cast = None if isinstance(var, jax_compat.Literal) else makers.get(var)
        if cast is not None and _rounds_a_sum(cast, makers):
            yield position, cast


def _with_late_sums(jaxpr: Any, equations: Sequence[Any]) -> Iterator[Any]:
    """The equations of an open jaxpr in which two rounded sums are added up before they are rounded."""
    makers, once = dict[Any, Any](), _read_once(equations, jaxpr.outvars)
    for equation in equations:
        casts: list[Any] = [makers.get(each) for each in equation.invars] if _adds(equation, once) else []
        if not all(cast and _rounds_a_sum(cast, makers) for cast in casts) or not _have_one_type(casts):
            makers.update(dict.fromkeys(equation.outvars, equation))
            yield equation
            continue
        totals = [total for cast in casts for total in cast.invars]
        wide = Var(ShapedArray(totals[0].aval.shape, totals[0].aval.dtype))
        added = equation.replace(invars=totals, outvars=[wide])
        rounded = casts[0].replace(invars=[wide], outvars=equation.outvars, source_info=equation.source_info)
        makers.update({wide: added, equation.outvars[0]: rounded})
        yield from (added, rounded)


def _widened(equation: Any) -> Iterator[Any]:
    """The equations in place of a backward loop that rounds sums and adds them up: it carries the sums as they are."""
    sums = dict(_carried_sums(equation))
    if not sums:
        yield equation
        return
    jaxpr, constants = equation.params["jaxpr"], jax_compat.scan_counts(equation.params)["num_consts"]
    body, _ = jax_compat.open_jaxpr(jaxpr)
    inputs, begins, ends, results = map(list, (equation.invars, body.invars, body.outvars, equation.outvars))
    changed, after = dict[int, list[Any]](), list[Any]()
    for carry, (place, casts) in sums.items():
        totals = [total for cast in casts for total in cast.invars]
        aval, begin, narrowing = totals[0].aval, constants + carry, casts[0]
        wide, result, *partial = (Var(ShapedArray(aval.shape, aval.dtype)) for _ in range(3 + len(totals)))
        widening = {"params": {**narrowing.params, "new_dtype": aval.dtype}, "source_info": equation.source_info}
        yield narrowing.replace(invars=[inputs[begin]], outvars=[wide], **widening)
        steps = zip(partial, totals, partial[1:], strict=False)
        changed[place] = [body.eqns[place].replace(invars=[a, b], outvars=[c]) for a, b, c in steps]
        after.append(narrowing.replace(invars=[result], outvars=[results[carry]], source_info=equation.source_info))
        inputs[begin], begins[begin], ends[carry], results[carry] = wide, partial[0], partial[-1], result
    equations = [each for place, written in enumerate(body.eqns) for each in changed.get(place, [written])]
    late = _put(jaxpr, body.replace(invars=begins, outvars=ends, eqns=equations))
    yield equation.replace(invars=inputs, outvars=results, params={**equation.params, "jaxpr": late})
    yield from after


def _carried_sums(equation: Any) -> Iterator[tuple[int, tuple[int, list[Any]]]]:
    """(carry, (equation of the body that adds to it, casts)) of each carry of a backward loop to which an iteration
    only adds rounded sums.
    """
    if not _is_backward_loop(equation):
        return
    body, _ = jax_compat.open_jaxpr(equation.params["jaxpr"])
    counts, makers = jax_compat.scan_counts(equation.params), _makers(body.eqns)
    once = _read_once(body.eqns, body.outvars)
    places = {var: place for place, each in enumerate(body.eqns) for var in each.outvars}
    for carry in range(counts["num_carry"]):
        begin, end = body.invars[counts["num_consts"] + carry], body.outvars[carry]
        summands = [] if isinstance(end, jax_compat.Literal) else list(_summands(end, makers, once))
        if begin not in summands or not once.issuperset(summands):
            continue
        casts = [makers.get(each) for each in summands if each is not begin]
        if all(cast and _rounds_a_sum(cast, makers) for cast in casts) and _have_one_type(casts):
            yield carry, (places[end], casts)


def _summands(var: Any, makers: Mapping[Any, Any], once: set[Any]) -> Iterator[Any]:
    """The summands of a value of a derivative; itself if it is no sum, or has other readers."""
    maker = makers.get(var) if var in once else None
    if maker is None or not _adds(maker, once):
        yield var
        return
    for each in maker.invars:
        yield from _summands(each, makers, once)


def _adds(equation: Any, once: set[Any]) -> bool:
    """Whether an equation adds up parts of a derivative that nobody else reads."""
    operands = equation.invars
    are_variables = not any(isinstance(each, jax_compat.Literal) for each in operands)
    return equation.primitive.name == _ADDED and are_variables and once.issuperset(operands)


def _read_once(equations: Sequence[Any], outvars: Sequence[Any]) -> set[Any]:
    """The variables that are read once, by the equations of a jaxpr or as a result of it."""
    atoms = (*(atom for equation in equations for atom in equation.invars), *outvars)
    read = Counter(atom for atom in atoms if not isinstance(atom, jax_compat.Literal))
    return {var for var, count in read.items() if count == 1}


def _have_one_type(casts: Sequence[Any]) -> bool:
    """Whether casts, of which there are some, have operands of one type."""
    return len({total.aval.dtype for cast in casts for total in cast.invars}) == 1


def _is_backward_loop(equation: Any) -> bool:
    return equation.primitive.name == _LOOP and "transpose(" in jax_compat.scope_of(equation)


def _makers(equations: Sequence[Any]) -> Mapping[Any, Any]:
    """The equation that makes each variable."""
    return {var: equation for equation in equations for var in equation.outvars}


def _rounds_a_sum(equation: Any, makers: Mapping[Any, Any]) -> bool:
    return _rounds(equation) and _is_sum(equation.invars[0], makers)


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
            if _is_sum(body.outvars[maker.outvars.index(value)], _makers(body.eqns)):
                return True
        else:
            pending += [each for each in maker.invars if each.aval.size == size]
    return False
