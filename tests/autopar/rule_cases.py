"""At least one use of every primitive that has a sharding rule, as ordinary JAX; add one with each rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

SINCE_0_11 = jax.__version_info__ >= (0, 11)


ABSENT = {name: "a primitive since JAX 0.11" for name in ("log2", "one_minus_square") if not hasattr(lax, "log2")}
"""Primitives with a rule and without a case, and why."""


@dataclass(frozen=True, slots=True)
class Case:
    """`function(*args)` uses `primitive`; every extent is a multiple of 4, so that two axes can share a dimension."""

    primitive: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    label: str = ""

    def __str__(self) -> str:
        return f"{self.primitive} {self.label}".rstrip()


def cases() -> list[Case]:
    """Every case; made by a function because arrays of 64 bits need JAX to be told first."""
    return [
        *_unary(),
        *([] if ABSENT else _newer()),
        *_binary(),
        *_bitwise(),
        *_elementwise(),
        *_shape(),
        *_products(),
        *_reductions(),
        *_random(),
        *_gathers(),
        *_scatters(),
        *_slices(),
    ]


def _floats(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def _ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(list(shape)).integers(low, high, shape).astype(dtype)


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
    if SINCE_0_11:
        positive |= {"log2": jnp.log2, "one_minus_square": lambda x: jax.vjp(jnp.tanh, x)[1](x)[0]}
    unit = {"acos": lax.acos, "asin": lax.asin, "atanh": lax.atanh, "erf_inv": lax.erf_inv}
    domains = [
        (anywhere, _floats(4, 8)),
        (positive, _floats(4, 8, low=0.1)),
        (unit, _floats(4, 8, low=-0.9, high=0.9)),
        ({"acosh": lax.acosh}, _floats(4, 8, low=1.1)),
    ]
    return [Case(name, function, (x,)) for functions, x in domains for name, function in functions.items()]


def _newer() -> list[Case]:
    x = _floats(4, 8, low=0.1)
    return [
        Case("log2", jnp.log2, (x,)),
        Case("one_minus_square", jax.grad(lambda x: jnp.sum(jnp.tanh(x))), (x,)),
    ]


def _binary() -> list[Case]:
    functions = {
        "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "atan2": lax.atan2, "eq": lax.eq, "ge": lax.ge,
        "gt": lax.gt, "le": lax.le, "lt": lax.lt, "ne": lax.ne, "max": lax.max, "min": lax.min, "rem": lax.rem,
        "nextafter": lax.nextafter,
    }  # fmt: skip
    positive = {
        "pow": lax.pow, "igamma": lax.igamma, "igammac": lax.igammac,
        "zeta": lambda x, y: lax.zeta(x + 1.0, y), "polygamma": lambda x, y: lax.polygamma(lax.round(x), y),
    }  # fmt: skip
    x, y = _floats(4, 8, low=0.5, high=3.0), _floats(4, 8, low=0.5, high=3.0, seed=1)
    plain = [Case(name, function, (x - 1.7, y)) for name, function in functions.items()]
    from_0 = [Case(name, function, (x, y)) for name, function in positive.items()]
    return [
        *plain,
        *from_0,
        Case("mul", lambda x, y: x * y, (_floats(4, 1), _floats(4, 8)), "of a dimension of 1 and one of 8"),
        Case("add", lambda x, y: x + y, (_floats(1, 8), _floats(4, 8)), "of a dimension of 1 and one of 4"),
        Case("add", lambda x: x + 3.0, (_floats(4, 8),), "of a literal"),
        Case("mul", lambda x: 3.0 * x, (_floats(4, 8),), "by a literal"),
        Case("div", lambda x: x / 3.0, (_floats(4, 8),), "by a literal"),
        Case("div", lax.div, (_ints(4, 8, low=1), _ints(8, low=1, high=5)[None].repeat(4, 0)), "of integers"),
        Case("add", lax.add, (_ints(4, 8), _ints(4, 8)), "of integers"),
        Case("add_any", jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x))), (_floats(4, 8),)),
        Case("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (_floats(4, 8),), "by scalars"),
        Case("clamp", lax.clamp, (_floats(4, 8) - 3, _floats(4, 8, seed=1), _floats(4, 8) + 3), "by arrays"),
    ]


def _bitwise() -> list[Case]:
    x, y = _ints(4, 8), _ints(4, 8, low=0, high=5)
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
    x, flags = _floats(4, 8), _floats(4, 8, seed=1) > 0
    return [
        Case("select_n", lax.select_n, (flags, x, -x), "by an array"),
        Case("select_n", lambda x: lax.select_n(jnp.sum(x) > 0, x, -x), (x,), "by a scalar"),
        Case("convert_element_type", lambda x: x.astype(np.float32), (x,), "to fewer bits"),
        Case("convert_element_type", lambda x: x.astype(np.float64), (x.astype(np.float32),), "to more bits"),
        Case("convert_element_type", lambda x: x.astype(np.int32), (x,), "to integers"),
        Case("convert_element_type", lambda x: x.astype(np.float32), (x.astype(jnp.bfloat16),), "from bfloat16"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int64), (x,), "of equal width"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.uint16), (x,), "to narrower pieces"),
        Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.float64), (_ints(8, 2),), "to wider"),
        Case("real", lambda x: lax.real(x + 2j), (x,)),
        Case("imag", lambda x: lax.imag(x + 2j), (x,)),
        Case("conj", lambda x: lax.conj(x + 2j), (x,)),
        Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (x, _ints(8))),
        Case("stop_gradient", lambda x: lax.stop_gradient(x), (x,)),
    ]


def _shape() -> list[Case]:
    x = _floats(4, 8, 12)
    reshapes = [
        ((32, 12), "merges"), ((4, 96), "merges minor dimensions"), ((4, 2, 4, 12), "splits"), ((384,), "flattens"),
        ((4, 8, 3, 4), "splits off a minor dimension"), ((1, 4, 8, 1, 12), "adds dimensions of 1"),
        ((16, 24), "merges and splits at once"), ((12, 8, 4), "shuffles"), ((2, 192), "splits and merges"),
    ]  # fmt: skip
    pads = [
        (((0, 0, 0), (1, 2, 0)), "of one dimension"), (((0, 0, 0), (-1, 1, 0)), "that shifts a dimension"),
        (((0, 0, 1), (0, 0, 0)), "between elements"), (((0, 0, 0), (-2, -2, 0)), "that crops"),
    ]  # fmt: skip
    return [
        *(Case("reshape", partial(jnp.reshape, shape=to), (x,), label) for to, label in reshapes),
        Case("reshape", lambda x: lax.reshape(x, (32,), dimensions=(1, 0)), (_floats(4, 8),), "after a transpose"),
        *(Case("pad", partial(_pad, config=config), (_floats(4, 8),), label) for config, label in pads),
        Case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (x,)),
        Case("squeeze", lambda x: lax.squeeze(x, (1, 3)), (_floats(4, 1, 8, 1),)),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 12, 8), (0, 2)), (_floats(4, 8),)),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)), (_floats(4, 1),), "of a 1"),
        Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8), ()), (np.float64(3),), "of a scalar"),
        Case("iota", lambda: lax.broadcasted_iota(np.int32, (8, 12), 1), (), "of integers"),
        Case("iota", lambda: lax.broadcasted_iota(np.float64, (8, 12), 0), (), "of floats"),
        Case("iota", lambda: lax.iota(jnp.bfloat16, 1024), (), "beyond what bfloat16 counts exactly"),
        Case("iota", lambda: lax.iota(np.uint8, 64), (), "of bytes"),
        Case("slice", lambda x: lax.slice(x, (0, 2, 0), (4, 6, 12)), (x,)),
        Case("slice", lambda x: lax.slice(x, (0, 1, 0), (4, 8, 12), (1, 2, 1)), (x,), "with strides"),
        Case("slice", lambda x: lax.slice(x, (0, 1, 0), (4, 8, 12), (1, 2, 3)), (x,), "with strides to a multiple"),
        Case("rev", lambda x: lax.rev(x, (1,)), (x,)),
        Case("concatenate", lambda x, y: lax.concatenate([x, y, x], 1), (x, _floats(4, 4, 12))),
    ]


def _pad(x: jax.Array, config: tuple[tuple[int, int, int], ...]) -> jax.Array:
    return lax.pad(x, np.float64(7), config)


def _products() -> list[Case]:
    return [
        Case("dot_general", jnp.matmul, (_floats(4, 8), _floats(8, 12)), "of matrices"),
        Case("dot_general", jnp.matmul, (_floats(8), _floats(8)), "of vectors"),
        Case(
            "dot_general",
            partial(jnp.einsum, "abik,bakj->abij"),
            (_floats(4, 4, 8, 12), _floats(4, 4, 12, 4)),
            "in batches",
        ),
        Case(
            "dot_general",
            partial(jnp.einsum, "ikl,lkj->ij"),
            (_floats(4, 8, 12), _floats(12, 8, 4)),
            "over two dimensions",
        ),
        Case("dot_general", _outer, (_floats(4), _floats(8)), "over none"),
    ]


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((), ()), ((), ())))


def _reductions() -> list[Case]:
    x, flags = _floats(4, 8, 12), _floats(4, 8, 12) > 0
    along = {"cumsum": lax.cumsum, "cumprod": lax.cumprod, "cummax": lax.cummax, "cummin": lax.cummin,
             "cumlogsumexp": lax.cumlogsumexp}  # fmt: skip
    return [
        *(Case("reduce_sum", partial(jnp.sum, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2), None)),
        *(Case("reduce_max", partial(jnp.max, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2))),
        *(Case("reduce_min", partial(jnp.min, axis=axis), (x,), f"over {axis}") for axis in ((1,), (0, 2))),
        Case("reduce_sum", partial(jnp.sum, axis=1), (_ints(4, 8),), "of integers"),
        Case("reduce_prod", partial(jnp.prod, axis=1), (x,)),
        Case("reduce_or", partial(jnp.any, axis=1), (flags,)),
        Case("reduce_and", partial(jnp.all, axis=1), (flags,)),
        Case("argmax", partial(jnp.argmax, axis=1), (x,)),
        Case("argmin", partial(jnp.argmin, axis=2), (x,)),
        *(Case(name, partial(function, axis=1), (x,)) for name, function in along.items()),
        Case("sort", lambda x: lax.sort(x, dimension=1), (x,)),
        Case("sort", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (x, _ints(4, 8, 12)), "with a companion"),
    ]


def _random() -> list[Case]:
    key = jax.random.key(7)
    widths = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
    return [
        *(
            Case("random_bits", partial(jax.random.bits, shape=(4, 8, 12), dtype=dtype), (key,), f"of {width} bits")
            for width, dtype in widths.items()
        ),
        Case(
            "random_bits", jax.vmap(partial(jax.random.bits, shape=(8,))), (jax.random.split(key, 4),), "of many keys"
        ),
        Case("random_wrap", jax.random.wrap_key_data, (np.array([1, 2], np.uint32),)),
        Case("random_unwrap", jax.random.key_data, (key,)),
        Case("random_fold_in", lambda key: jax.random.fold_in(key, 3), (key,)),
        Case("random_split", lambda key: jax.random.split(key, 4), (key,)),
        Case("random_seed", jax.random.key, (3,)),
        Case("random_clone", jax.random.clone, (key,)),
    ]


_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)


def _gathers() -> list[Case]:
    rows = GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    batched = GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(1,), start_index_map=(1,),
        operand_batching_dims=(0,), start_indices_batching_dims=(0,),
    )  # fmt: skip
    columns = GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,))
    table, inside = _floats(16, 12), _ints(4, 8, low=0, high=16)[..., None]
    outside = _ints(4, 8, low=-20, high=36)[..., None]

    def lookup(table: Any, indices: Any, mode: GatherScatterMode, fill: Any = None) -> jax.Array:
        return lax.gather(table, indices, rows, (1, table.shape[1]), mode=mode, fill_value=fill)

    clip, fill, _ = _MODES
    return [
        *(Case("gather", partial(lookup, mode=m), (table, inside), f"of rows, {m.name}") for m in _MODES),
        *(Case("gather", partial(lookup, mode=m), (table, outside), f"beyond, {m.name}") for m in (clip, fill)),
        Case("gather", partial(lookup, mode=fill, fill=5), (table, outside), "beyond, with a fill value"),
        Case("gather", partial(lookup, mode=fill), (_ints(16, 12), outside), "beyond, of integers"),
        Case("gather", partial(lookup, mode=fill), (_ints(16, 12, low=0, dtype=np.uint8), outside), "beyond, of bytes"),
        Case("gather", partial(lookup, mode=fill), (_ints(16, 12) > 0, outside), "beyond, of flags"),
        *(
            Case("gather", partial(lookup, mode=m), (table, outside.astype(dtype)), f"by {dtype.__name__}, {m.name}")
            for dtype in (np.uint8, np.int8, np.uint32, np.int64, np.uint64)
            for m in (clip, fill)
        ),
        Case(
            "gather",
            lambda x, i: lax.gather(x, i, batched, (1, 1), mode=clip),
            (_floats(4, 8), _ints(4, 12, low=-3, high=11)[..., None]),
            "in batches",
        ),
        Case(
            "gather",
            lambda x, i: lax.gather(x, i, columns, (8, 1), mode=fill),
            (_floats(8, 16), _ints(12, low=-3, high=20)[..., None]),
            "of columns",
        ),
        Case("gather", lambda x, i: x[i], (table, _ints(4, 8, low=-16, high=16)), "written as an index"),
        Case(
            "gather",
            lambda x, i, j: x[i, j],
            (_floats(8, 12), _ints(4, low=0, high=8), _ints(4, low=0, high=12)),
            "of points",
        ),
        Case("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (_floats(4, 8), _ints(4, 8, low=0, high=8)), "along"),
        Case(
            "gather",
            jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (4,))),
            (_floats(4, 8), _ints(4, low=0, high=5)),
            "of windows",
        ),
    ]


def _scatters() -> list[Case]:
    rows = ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    batched = ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,), scatter_indices_batching_dims=(0,),
    )  # fmt: skip
    table, updates = _floats(16, 12), _floats(4, 8, 12)
    inside, outside = _ints(4, 8, low=0, high=16)[..., None], _ints(4, 8, low=-20, high=36)[..., None]
    clip, fill, _ = _MODES

    def add(table: Any, indices: Any, updates: Any, mode: GatherScatterMode) -> jax.Array:
        return lax.scatter_add(table, indices, updates, rows, mode=mode)

    return [
        *(Case("scatter-add", partial(add, mode=m), (table, inside, updates), f"of rows, {m.name}") for m in _MODES),
        *(
            Case("scatter-add", partial(add, mode=m), (table, outside, updates), f"beyond, {m.name}")
            for m in (clip, fill)
        ),
        *(
            Case(
                "scatter-add",
                partial(add, mode=mode),
                (table, outside.astype(dtype), updates),
                f"by {dtype.__name__}, {mode.name}",
            )
            for dtype in (np.uint8, np.uint32, np.int64)
            for mode in (clip, fill)
        ),
        Case(
            "scatter-add",
            lambda x, i, u: lax.scatter_add(x, i, u, batched, mode=fill),
            (_floats(4, 8), _ints(4, 12, low=-3, high=11)[..., None], _floats(4, 12)),
            "in batches",
        ),
        Case("scatter-add", jax.grad(lambda x, i: jnp.sum(x[i] ** 2)), (table, _ints(4, 8, low=0, high=16)), "by grad"),
        Case(
            "scatter-add",
            lambda x, i, u: x.at[i].add(u),
            (_ints(8), _ints(12, low=0, high=8), _ints(12)),
            "of integers",
        ),
    ]


def _slices() -> list[Case]:
    x, at, zero = _floats(4, 8, 12), np.int32(3), np.int32(0)
    return [
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (zero, i, zero), (4, 4, 12)), (x, at)),
        Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i, i), (4, 4, 12)), (x, at), "clamped"),
        Case(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (zero, i, zero)),
            (x, _floats(4, 4, 12), at),
        ),
        Case(
            "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, i)),
            (x, _floats(4, 4, 12), at),
            "clamped",
        ),
    ]
