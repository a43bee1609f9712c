"""Functions that are no model of the zoo: decompositions, loops, kernels that models do without, and single layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.decompositions import DECOMPOSITIONS
from benchmarks.gradients import GRADIENTS

ROWS, COLUMNS = 1024, 512
RATE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function with the shapes that it is planned for; a step gives back its first argument, which is donated."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    is_step: bool = False

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of arguments whose memory the step may reuse."""
        return (0,) if self.is_step else ()


def _step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent: (parameters, ...) -> (parameters, loss)."""

    def step(params: Any, *data: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), value

    return step


def _sorted(a: jax.Array) -> jax.Array:
    return jnp.sort(a, axis=0) + jnp.argsort(a, axis=1)


def _spectrum(a: jax.Array) -> jax.Array:
    return jnp.abs(jnp.fft.fft2(a)).sum(axis=0)


def _running_sums(a: jax.Array) -> jax.Array:
    return jnp.cumsum(a, axis=0) @ a.T


def _triangle(a: jax.Array) -> jax.Array:
    return jnp.linalg.qr(a)[1]


def _solved(a: jax.Array) -> jax.Array:
    gram = a.T @ a + jnp.eye(COLUMNS, dtype=a.dtype)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(gram), a.T)


def _normalized(a: jax.Array) -> jax.Array:
    return jax.nn.softmax(a @ a.T) @ a


def _power_iteration(a: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: s.sum() < 1e9, lambda s: jnp.tanh(s @ s.T) @ s + s, a)


def _either(a: jax.Array) -> jax.Array:
    return lax.cond(a.sum() > 0, lambda x: jnp.sin(x @ x.T) @ x, lambda x: 2 * x, a)


def _dropped(a: jax.Array) -> jax.Array:
    return (a * jax.random.bernoulli(jax.random.key(0), 0.5, a.shape)) @ a.T


def _products(a: jax.Array) -> jax.Array:
    return (a[:, None, :64] * a[None, :256, :64]).sum(axis=-1)


def _distances(a: jax.Array) -> jax.Array:
    return jnp.linalg.norm(a[:256, None] - a[None, :256], axis=-1)


def _scattered(a: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.zeros((4 * ROWS, COLUMNS), a.dtype).at[places].add(a) @ a.T


def _curvature(v: jax.Array, a: jax.Array) -> jax.Array:
    return jax.hessian(lambda u: jnp.sum(jax.nn.sigmoid(a @ u) ** 2))(v)


def _largest(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, places = lax.top_k(a @ a.T, 16)
    return jax.nn.softmax(values), places


def _recurrent(w: jax.Array, a: jax.Array) -> jax.Array:
    def next_state(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(state @ w + row), state

    return jnp.mean(lax.scan(next_state, jnp.zeros((64, COLUMNS), a.dtype), a.reshape(16, 64, COLUMNS))[1] ** 2)


def _layers(params: Any, a: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.gelu(jax.nn.gelu(a @ params["inner"]) @ params["outer"]) ** 2)


def _looked_up(table: jax.Array, places: jax.Array, a: jax.Array) -> jax.Array:
    return jnp.mean((table[places % COLUMNS] * a) ** 2)


def _filtered(kernel: jax.Array, images: jax.Array) -> jax.Array:
    features = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(features) ** 2)


def _attended(w: jax.Array, a: jax.Array) -> jax.Array:
    rows = a.reshape(8, 128, COLUMNS)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", rows @ w, rows))
    return jnp.mean(jnp.einsum("bqk,bkd->bqd", scores, rows) ** 2)


def _with_keys(a: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """(attention of 4 heads, keys, values) of rows, of which the latter two are kept for rows that come later."""
    rows = a.reshape(-1, 32, w.shape[1])
    query, key, value = (rows @ w[i] for i in range(3))
    heads = (x.reshape(*rows.shape[:2], 4, -1) for x in (query, key, value))
    return jax.nn.dot_product_attention(*heads, is_causal=True), key, value


def _half(w: jax.Array, a: jax.Array) -> jax.Array:
    return jnp.mean((a.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


_MATRIX = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
_WEIGHT = jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32)
_NARROW = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
_VECTOR = jax.ShapeDtypeStruct((COLUMNS,), jnp.float32)
_PLACES = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
_KERNEL = jax.ShapeDtypeStruct((3, 3, 16, 64), jnp.float32)
_IMAGES = jax.ShapeDtypeStruct((64, 32, 32, 16), jnp.float32)

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "sort": Function(call=_sorted, arguments=(_MATRIX,)),
        "fft": Function(call=_spectrum, arguments=(_MATRIX,)),
        "cumsum": Function(call=_running_sums, arguments=(_MATRIX,)),
        "qr": Function(call=_triangle, arguments=(_MATRIX,)),
        "cholesky": Function(call=_solved, arguments=(_MATRIX,)),
        "softmax": Function(call=_normalized, arguments=(_MATRIX,)),
        "while": Function(call=_power_iteration, arguments=(_MATRIX,)),
        "cond": Function(call=_either, arguments=(_MATRIX,)),
        "dropout": Function(call=_dropped, arguments=(_MATRIX,)),
        "outer": Function(call=_products, arguments=(_MATRIX,)),
        "pairwise": Function(call=_distances, arguments=(_MATRIX,)),
        "scatter": Function(call=_scattered, arguments=(_MATRIX, _PLACES)),
        "hessian": Function(call=_curvature, arguments=(_VECTOR, _MATRIX)),
        "top-k": Function(call=_largest, arguments=(_MATRIX,)),
        "rnn": Function(call=_step(_recurrent), arguments=(_WEIGHT, _MATRIX), is_step=True),
        "mlp": Function(call=_step(_layers), arguments=({"inner": _WEIGHT, "outer": _WEIGHT}, _MATRIX), is_step=True),
        "embedding": Function(call=_step(_looked_up), arguments=(_WEIGHT, _PLACES, _MATRIX), is_step=True),
        "convolution": Function(call=_step(_filtered), arguments=(_KERNEL, _IMAGES), is_step=True),
        "attention": Function(call=_step(_attended), arguments=(_WEIGHT, _MATRIX), is_step=True),
        "prefill": Function(call=_with_keys, arguments=(_MATRIX, _NARROW)),
        "half": Function(call=_step(_half), arguments=(_WEIGHT, _MATRIX), is_step=True),
    }
    | {name: Function(call=call, arguments=(matrix,)) for name, (call, matrix) in DECOMPOSITIONS.items()}
    | {name: Function(call=_step(loss), arguments=given, is_step=True) for name, (loss, given) in GRADIENTS.items()}
)
