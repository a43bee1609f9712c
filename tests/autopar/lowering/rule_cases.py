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
from jax.extend.random import threefry2x32_p
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from autopar import jax_compat

SINCE_0_11 = jax.__version_info__ >= (0, 11)


NEWER = {name: "a primitive since JAX 0.11" for name in ("log2", "one_minus_square") if not hasattr(lax, "log2")}
ABSENT = NEWER | {
    **dict.fromkeys(
        ("debug_callback", "debug_print", "io_callback", "pure_callback"),
        "it runs once, on whole operands: tests/autopar/lowering/test_effects.py",
    ),
    "mulhi": "XLA's CPU compiler refuses it for more than one device",
    "shard_map": "its pieces are the user's, not the rule's",
    "sharding_constraint": "it passes its operand on in pieces that the user chose",
}
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
        *([] if NEWER else _newer()),
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
        *_convolutions(),
        *_windows(),
        *_matrices(),
        *_others(),
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
        "nextafter": lax.nextafter, "complex": lax.complex, "eq_to": lax.eq_to_p.bind, "le_to": lax.le_to_p.bind,
        "lt_to": lax.lt_to_p.bind,
    }  # fmt: skip
    positive = {
        "pow": lax.pow, "igamma": lax.igamma, "igammac": lax.igammac,
        "igamma_grad_a": lax.igamma_grad_a,
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
        Case("regularized_incomplete_beta", lax.betainc, (x, y, _floats(4, 8, low=0.1, high=0.9))),
        Case("threefry2x32", threefry2x32_p.bind, tuple(_ints(4, 8, low=i, dtype=np.uint32) for i in range(4))),
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
    mixed = GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
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
        *(
            Case(
                "gather",
                lambda x, i, mode=mode: x.at[i[..., 0], i[..., 1]].get(mode=mode),
                (_floats(8, 12), _ints(4, 8, 2, low=-20, high=20)),
                f"of points beyond, {mode.name}",
            )
            for mode in (clip, fill)
        ),
        *(
            Case(
                "gather",
                lambda x, i, mode=mode: lax.gather(x, i, mixed, (1, 4), mode=mode),
                (_floats(16, 12), _ints(8, 2, low=-4, high=18)),
                f"of windows beyond, {mode.name}",
            )
            for mode in (clip, fill)
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
    clip, fill, promise = _MODES
    points = ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(1, 0)
    )
    windows = ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    kinds = {
        "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-sub": lax.scatter_sub,
        "scatter-mul": lax.scatter_mul, "scatter-min": lax.scatter_min, "scatter-max": lax.scatter_max,
    }  # fmt: skip
    once = np.random.default_rng(0).permutation(np.arange(-8, 24)).reshape(4, 8, 1)
    corners = np.stack(np.meshgrid(np.arange(-2, 14), np.arange(-3, 9), indexing="ij"), -1)[::2]
    along = np.stack([np.arange(-2, 6) * 3, np.arange(-2, 6) * 2], -1)

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
        *(
            Case(name, partial(scatter, dimension_numbers=rows, mode=fill), (table, once, updates), "of rows, beyond")
            for name, scatter in kinds.items()
            if name != "scatter-add"
        ),
        Case(
            "scatter", partial(lax.scatter, dimension_numbers=rows, mode=promise), (table, inside, updates), "of rows"
        ),
        *(
            Case(
                name, partial(scatter, dimension_numbers=numbers, mode=mode), (to, at, values), f"{label}, {mode.name}"
            )
            for name, scatter in kinds.items()
            if name in ("scatter", "scatter-add")
            for numbers, to, at, values, label in (
                (points, _floats(8, 12), corners, _floats(*corners.shape[:-1]), "of points"),
                (windows, _floats(16, 12), along, _floats(8, 4), "of windows"),
            )
            for mode in (fill, clip)
        ),
        Case("scatter", lambda x, i, u: x.at[i].set(u), (_ints(8), np.arange(-2, 10) % 8, _ints(12)), "of integers"),
        Case(
            "scatter",
            lambda x, i: lax.scatter_apply(x, i, jnp.sin, rows, update_shape=(4, 8, 12)),
            (table, once),
            "by a function",
        ),
        Case(
            "scatter",
            lambda x, i, u: lax.scatter(x, i, u, batched, mode=fill),
            (
                _floats(4, 8),
                np.random.default_rng(0).permuted(np.full((4, 12), np.arange(-2, 10)), axis=1)[..., None],
                _floats(4, 12),
            ),
            "in batches",
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


def _convolutions() -> list[Case]:
    """Gradients are two more convolutions each, with channels and batches exchanged."""
    layouts = {"channels last": ("NHWC", "HWIO", "NHWC"), "channels first": ("NCHW", "OIHW", "NCHW")}

    def conv(x: Any, kernel: Any, **options: Any) -> jax.Array:
        options = {"window_strides": (1,), "padding": [(1, 1)], "dimension_numbers": ("NWC", "WIO", "NWC")} | options
        return lax.conv_general_dilated(x, kernel, **options)

    def both(**options: Any) -> Callable[..., Any]:
        return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv(x, kernel, **options))), (0, 1))

    x, pointed = _floats(4, 6, 8), _floats(3, 8, 4)
    dilated = {"window_strides": (2,), "lhs_dilation": (2,), "rhs_dilation": (2,), "padding": [(2, 3)]}
    grouped = {"four groups": (4, (3, 2, 12)), "depthwise": (8, (3, 1, 8)), "depthwise, twice": (8, (3, 1, 16))}
    batches = {"four batch groups": (4, (3, 8, 12)), "batch groups of one": (8, (3, 8, 8))}
    forms: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("strided", x, pointed, {"window_strides": (2,)}),
        ("dilated", x, pointed, dilated),
        *((label, x, _floats(*k), {"feature_group_count": n}) for label, (n, k) in grouped.items()),
        *((label, _floats(8, 6, 8), _floats(*k), {"batch_group_count": n}) for label, (n, k) in batches.items()),
    ]
    planes = {"padding": "SAME", "window_strides": (2, 1)}
    return [
        Case("conv_general_dilated", partial(conv, **planes, dimension_numbers=layouts["channels last"]),
             (_floats(4, 6, 6, 8), _floats(3, 3, 8, 4)), "channels last"),
        Case("conv_general_dilated", partial(conv, **planes, dimension_numbers=layouts["channels first"]),
             (_floats(4, 8, 6, 6), _floats(4, 8, 3, 3)), "channels first"),
        Case("conv_general_dilated", partial(conv, preferred_element_type=np.float32),
             (x.astype(jnp.bfloat16), pointed.astype(jnp.bfloat16)), "to more bits"),
        *(Case("conv_general_dilated", both(**options), (x, k), f"{label}, by grad") for label, x, k, options in forms),
    ]  # fmt: skip


def _windows() -> list[Case]:
    x = _floats(4, 8, 6, 4)
    pool: dict[str, Any] = {
        "window_dimensions": (1, 2, 3, 1), "window_strides": (1, 2, 1, 1), "padding": ((0, 0), (0, 0), (1, 1), (0, 0)),
    }  # fmt: skip
    skewed: dict[str, Any] = {
        "window_dimensions": (1, 1, 1, 2), "window_strides": (1, 2, 1, 1), "padding": ((0, 0), (0, 0), (2, 2), (0, 0)),
        "base_dilation": (2, 1, 1, 1), "window_dilation": (1, 1, 1, 2),
    }  # fmt: skip

    def pooled(combine: Callable[..., Any], start: float, options: dict[str, Any] = pool) -> Callable[..., Any]:
        return lambda x: lax.reduce_window(x, start, combine, **options)

    def both(a: Any, b: Any) -> Any:
        return a[0] + b[0], a[1] * b[1]

    highest = pooled(lax.max, -np.inf)
    return [
        Case("reduce_window_sum", pooled(lax.add, 0.0), (x,)),
        Case("reduce_window_sum", pooled(lax.add, 0.0, skewed), (_floats(4, 8, 4, 6),), "that moves every dimension"),
        Case("reduce_window_max", highest, (x,)),
        Case("reduce_window_min", pooled(lax.min, np.inf), (x,)),
        Case("reduce_window", pooled(lax.mul, 1.0), (x,), "by a product"),
        Case("reduce_window", lambda x: lax.reduce_window((x, x + 1), (0.0, 1.0), both, **pool), (x,), "of two"),
        Case("select_and_scatter_add", jax.grad(lambda x: jnp.sum(highest(x) ** 2)), (x,)),
        Case("select_and_gather_add", lambda x, t: jax.jvp(highest, (x,), (t,)), (x, x - 1)),
        Case("select_and_scatter", _spread, (x, _floats(4, 4, 6, 4))),
    ]


def _spread(x: jax.Array, updates: jax.Array) -> jax.Array:
    """`lax` has a primitive and no function for this."""
    (select, _), (scatter, _) = (jax_compat.open_jaxpr(jax.make_jaxpr(f)(0.0, 0.0)) for f in (lax.ge, lax.mul))
    return lax.select_and_scatter_p.bind(
        x, updates, jnp.asarray(2.0),
        select_jaxpr=select, select_consts=(), scatter_jaxpr=scatter, scatter_consts=(),
        window_dimensions=(1, 2, 1, 1), window_strides=(1, 2, 1, 1), padding=((0, 0),) * 4,
    )  # fmt: skip


def _matrices() -> list[Case]:
    """Batches of matrices that are well-conditioned, so that pieces round as the whole does."""
    x, sides = _floats(4, 4, 4) + 6 * np.eye(4), _floats(4, 4, 8)
    symmetric = x + x.swapaxes(1, 2)
    of_any = {"eig": lax.linalg.eig, "hessenberg": lax.linalg.hessenberg, "lu": lax.linalg.lu, "qr": lax.linalg.qr,
              "schur": lax.linalg.schur, "svd": lax.linalg.svd}  # fmt: skip
    of_symmetric = {"cholesky": lax.linalg.cholesky, "eigh": lax.linalg.eigh, "tridiagonal": lax.linalg.tridiagonal}
    transforms = {"FFT": jnp.fft.fft2, "RFFT": jnp.fft.rfft, "IRFFT": jnp.fft.irfft}
    solve = lax.linalg.triangular_solve
    return [
        *(Case(name, function, (x,)) for name, function in of_any.items()),
        *(Case(name, function, (symmetric,)) for name, function in of_symmetric.items()),
        Case("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (_floats(4, 8, 4),), "of tall matrices"),
        Case("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (_floats(4, 4, 8),), "values alone"),
        Case("householder_product", lax.linalg.householder_product, (x, _floats(4, 4))),
        Case("triangular_solve", partial(solve, left_side=True, lower=True), (x, sides), "from the left"),
        Case("triangular_solve", partial(solve, left_side=False), (x, sides.swapaxes(1, 2)), "from the right"),
        Case(
            "tridiagonal_solve",
            lax.linalg.tridiagonal_solve,
            (_floats(4, 4), _floats(4, 4) + 6, _floats(4, 4, seed=1), sides),
        ),
        *(Case("fft", function, (_floats(4, 4, 8),), label) for label, function in transforms.items()),
    ]


def _others() -> list[Case]:
    x, keys = _floats(4, 8, 12), jax.random.split(jax.random.key(7), (4, 8))

    def both(a: Any, b: Any) -> Any:
        return a[0] + b[0], a[1] * b[1]

    return [
        Case("split", lambda x: lax.split(x, (3, 5), 1), (x,)),
        Case("stack", lambda x, y: lax.stack((x, y), 1), (x, x + 1)),
        Case("unstack", lambda x: lax.unstack(x, 1), (_floats(4, 2, 8),)),
        Case("tile", lambda x: lax.tile(x, (1, 2, 1)), (x,)),
        Case("top_k", lambda x: lax.top_k(x, 4), (x,)),
        Case("approx_top_k", lambda x: lax.approx_max_k(x, 4, reduction_dimension=1), (x,)),
        Case("reduce", lambda x: lax.reduce(x, 0.5, lambda a, b: a + b + a * b, (1,)), (x,), "by a function"),
        Case("reduce", lambda x: lax.reduce((x, x + 1), (0.0, 1.0), both, (0,)), (x,), "of two"),
        Case("reduce_xor", lambda x: lax.reduce(x, 0, lax.bitwise_xor, (1,)), (_ints(4, 8).astype(np.int64),)),
        Case("device_put", lambda x, y: jax.device_put((x, y)), (x, _ints(8))),
        Case("random_gamma", jax.random.gamma, (jax.random.key(7), _floats(8, low=0.5)), "of one key"),
        Case("random_gamma", jax.vmap(jax.vmap(jax.random.gamma)), (keys, _floats(4, 8, 2, low=0.5)), "of many keys"),
    ]
