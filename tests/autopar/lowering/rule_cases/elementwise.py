"""Elementwise primitives: of one number, of two, of bits; conversions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

from tests.autopar.lowering.rule_cases.case import Case, floats, ints

SINCE = {"log2": (0, 11), "one_minus_square": (0, 11), "polynomial": (0, 12)}
NEWER = {
    name: f"a primitive since JAX {version[0]}.{version[1]}"
    for name, version in SINCE.items()
    if jax.__version_info__ < version
}


def _unary() -> list[Case]:
    """Functions of one float; their domains are (-2, 2), (0, 2), (-1, 1) and (1, 2)."""
    anywhere = {
        "abs": lax.abs, "asinh": lax.asinh, "atan": lax.atan, "bessel_i0e": lax.bessel_i0e, "ceil": lax.ceil,
        "bessel_i1e": lax.bessel_i1e, "cbrt": lax.cbrt, "cos": lax.cos, "cosh": lax.cosh, "erf": lax.erf,
        "erfc": lax.erfc, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor,
        "is_finite": lax.is_finite, "logistic": lax.logistic, "neg": lax.neg, "round": lax.round, "sign": lax.sign,
        "sin": lax.sin, "sinh": lax.sinh, "square": lax.square, "tan": lax.tan, "tanh": lax.tanh,
        "integer_pow": lambda x: lax.integer_pow(x, 3), "copy": jnp.copy, "name": lambda x: checkpoint_name(x, "x"),
        "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    }  # fmt: skip
    positive = {
        "digamma": lax.digamma, "lgamma": lax.lgamma, "log": lax.log, "log1p": lax.log1p, "rsqrt": lax.rsqrt,
        "sqrt": lax.sqrt,
    }  # fmt: skip
    unit = {"acos": lax.acos, "asin": lax.asin, "atanh": lax.atanh, "erf_inv": lax.erf_inv}
    domains = [
        (anywhere, floats(4, 8)),
        (positive, floats(4, 8, low=0.1)),
        (unit, floats(4, 8, low=-0.9, high=0.9)),
        ({"acosh": lax.acosh}, floats(4, 8, low=1.1)),
    ]
    return [Case(name, function, (x,)) for functions, x in domains for name, function in functions.items()]


def _newer() -> list[Case]:
    x = floats(4, 8, low=0.1)
    cases = [
        Case("log2", jnp.log2, (x,)),
        Case("one_minus_square", jax.grad(lambda x: jnp.sum(jnp.tanh(x))), (x,)),
        Case("polynomial", lambda x: lax.polynomial(x, [1.0, x, 2.0]), (x,)),
        Case("polynomial", lambda x, y: lax.polynomial(x, [y, 3.0]), (x, floats(1, 8)), "of a dimension of 1"),
    ]
    return [case for case in cases if case.primitive not in NEWER]


def _binary() -> list[Case]:
    functions = {
        "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "atan2": lax.atan2, "eq": lax.eq, "ge": lax.ge,
        "gt": lax.gt, "le": lax.le, "lt": lax.lt, "ne": lax.ne, "max": lax.max, "min": lax.min, "rem": lax.rem,
        "nextafter": lax.nextafter, "complex": lax.complex, "eq_to": lax.eq_to_p.bind, "le_to": lax.le_to_p.bind,
        "lt_to": lax.lt_to_p.bind,
    }  # fmt: skip
    positive = {
        "pow": lax.pow, "igamma": lax.igamma, "igammac": lax.igammac,
        "igamma_grad_a": lax.igamma_grad_a,
        "zeta": lambda x, y: lax.zeta(x + 1.0, y), "polygamma": lambda x, y: lax.polygamma(lax.round(x), y),
    }  # fmt: skip
    x, y = floats(4, 8, low=0.5, high=3.0), floats(4, 8, low=0.5, high=3.0, seed=1)
    plain = [Case(name, function, (x - 1.7, y)) for name, function in functions.items()]
    from_0 = [Case(name, function, (x, y)) for name, function in positive.items()]
    return [
        *plain,
        *from_0,
        Case("mul", lambda x, y: x * y, (floats(4, 1), floats(4, 8)), "of a dimension of 1 and one of 8"),
        Case("add", lambda x, y: x + y, (floats(1, 8), floats(4, 8)), "of a dimension of 1 and one of 4"),
        Case("add", lambda x: x + 3.0, (floats(4, 8),), "of a literal"),
        Case("mul", lambda x: 3.0 * x, (floats(4, 8),), "by a literal"),
        Case("div", lambda x: x / 3.0, (floats(4, 8),), "by a literal"),
        Case("div", lax.div, (ints(4, 8, low=1), ints(8, low=1, high=5)[None].repeat(4, 0)), "of integers"),
        Case("add", lax.add, (ints(4, 8), ints(4, 8)), "of integers"),
        Case("add_any", jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), (floats(4, 8),)),
        Case("regularized_incomplete_beta", lax.betainc, (x, y, floats(4, 8, low=0.1, high=0.9))),
        Case("threefry2x32", threefry2x32_p.bind, tuple(ints(4, 8, low=i, dtype=np.uint32) for i in range(4))),
        Case("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (floats(4, 8),), "by scalars"),
        Case("clamp", lax.clamp, (floats(4, 8) - 3, floats(4, 8, seed=1), floats(4, 8) + 3), "by arrays"),
    ]


def _bitwise() -> list[Case]:
    x, y = ints(4, 8), ints(4, 8, low=0, high=5)
    two = {
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "shift_left": lax.shift_left,
        "shift_right_arithmetic": lax.shift_right_arithmetic,
        "shift_right_logical": lax.shift_right_logical,
    }
    one = {"not": lax.bitwise_not, "clz": lax.clz, "population_count": lax.population_count}
    return [
        *(Case(name, function, (x, y)) for name, function in two.items()),
        *(Case(name, function, (x,)) for name, function in one.items()),
    ]


def _elementwise() -> list[Case]:
    x, flags = floats(4, 8), floats(4, 8, seed=1) > 0
    return [
        Case("select_n", lax.select_n, (flags, x, -x), "by an array"),
        Case("select_n", lambda x: lax.select_n(jnp.sum(x) > 0, x, -x), (x,), "by a scalar"),
        Case("convert_element_type", lambda x: x.astype(np.float32), (x,), "to fewer bits"),
        Case("convert_element_type", lambda x: x.astype(np.float64), (x.astype(np.float32),), "to more bits"),
        Case("convert_element_type", lambda x: x.astype(np.int32), (x,), "to integers"),
        Case("convert_element_type", lambda x: x.astype(np.float32), (x.astype(jnp.bfloat16),), "from bfloat16"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int64), (x,), "of equal width"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.uint16), (x,), "to narrower pieces"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.float64), (ints(8, 2),), "to wider"),
        Case("real", lambda x: lax.real(x + 2j), (x,)),
        Case("imag", lambda x: lax.imag(x + 2j), (x,)),
        Case("conj", lambda x: lax.conj(x + 2j), (x,)),
        Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (x, ints(8))),
        Case("stop_gradient", lambda x: lax.stop_gradient(x), (x,)),
    ]


def cases() -> list[Case]:
    """Every case of this module."""
    return [*_unary(), *_newer(), *_binary(), *_bitwise(), *_elementwise()]
