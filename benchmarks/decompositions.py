"""Decompositions of matrices, which LAPACK computes column after column, and filters of Fourier transforms."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SQUARE, TALL = (256, 256), (512, 128)
ROUNDS = 8


def _vectors(a: jax.Array) -> Any:
    return jnp.linalg.svd(a, full_matrices=False)


def _values(a: jax.Array) -> jax.Array:
    return jnp.linalg.svd(a, compute_uv=False)


def _symmetric(a: jax.Array) -> jax.Array:
    return jnp.linalg.eigvalsh(a + a.T)


def _schur(a: jax.Array) -> Any:
    return jax.scipy.linalg.schur(a)


def _filtered(a: jax.Array) -> jax.Array:
    decay = jnp.exp(-jnp.arange(a.shape[1] // 2 + 1) / 50)
    return jnp.fft.irfft(jnp.fft.rfft(a, axis=1) * decay, axis=1)


def _transported(a: jax.Array) -> jax.Array:
    kernel = jnp.exp(-a)

    def scaled(scales: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        rows = 1 / (kernel @ scales[1])
        return (rows, 1 / (kernel.T @ rows)), None

    start = jnp.ones(a.shape[0], a.dtype), jnp.ones(a.shape[1], a.dtype)
    (rows, columns), _ = lax.scan(scaled, start, None, length=ROUNDS)
    return rows[:, None] * kernel * columns[None]


_SQUARE, _TALL = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (SQUARE, TALL))

DECOMPOSITIONS: Mapping[str, tuple[Callable[..., Any], Any]] = MappingProxyType(
    {
        "svd": (_vectors, _TALL),
        "singular-values": (_values, _TALL),
        "eigenvalues": (_symmetric, _SQUARE),
        "eig": (jnp.linalg.eigvals, _SQUARE),
        "schur": (_schur, _SQUARE),
        "lu": (jax.scipy.linalg.lu, _SQUARE),
        "inverse": (jnp.linalg.inv, _SQUARE),
        "spectral-filter": (_filtered, _TALL),
        "sinkhorn": (_transported, _SQUARE),
    }
)
"""Functions of one matrix with its shape, by name."""
