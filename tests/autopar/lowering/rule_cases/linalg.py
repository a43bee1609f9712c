"""Products of arrays, and matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.autopar.lowering.rule_cases.case import Case, floats


def _products() -> list[Case]:
    return [
        Case("dot_general", jnp.matmul, (floats(4, 8), floats(8, 12)), "of matrices"),
        Case("dot_general", jnp.matmul, (floats(8), floats(8)), "of vectors"),
        Case(
            "dot_general",
            partial(jnp.einsum, "abik,bakj->abij"),
            (floats(4, 4, 8, 12), floats(4, 4, 12, 4)),
            "in batches",
        ),
        Case(
            "dot_general",
            partial(jnp.einsum, "ikl,lkj->ij"),
            (floats(4, 8, 12), floats(12, 8, 4)),
            "over two dimensions",
        ),
        Case("dot_general", _outer, (floats(4), floats(8)), "over none"),
    ]


def _ragged() -> list[Case]:
    """Groups that end inside of pieces, that are empty, and that leave the last rows to none."""
    rows, sizes = floats(16, 8), np.asarray([5, 0, 8, 1], np.int32)
    by_group, by_rows = floats(4, 8, 12), floats(16, 12)
    at_once = np.stack([sizes, sizes[::-1], [16, 0, 0, 0], [0, 0, 0, 3]]).astype(np.int32)
    within = (((0,), (0,)), ((), ()))
    name = "ragged_dot_general"
    return [
        Case(name, lax.ragged_dot, (rows, by_group, sizes), "of rows"),
        Case(name, partial(_ragged_dot, within, 0, ()), (rows, by_rows, sizes), "over rows"),
        Case(name, jax.vmap(lax.ragged_dot), (floats(4, 16, 8), floats(4, 4, 8, 12), at_once), "of rows in batches"),
        Case(
            name,
            jax.vmap(partial(_ragged_dot, within, 0, ())),
            (floats(4, 16, 8), floats(4, 16, 12), at_once),
            "over rows in batches",
        ),
        Case(
            name,
            partial(_ragged_dot, (((2,), (1,)), ((0,), (0,))), 0, ()),
            (floats(16, 4, 8), floats(16, 8, 12), sizes),
            "of batches",
        ),
    ]


def _ragged_dot(
    dims: Any, ragged: int, grouped: tuple[int, ...], x: jax.Array, y: jax.Array, sizes: jax.Array
) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers(dims, [ragged], grouped)
    return lax.ragged_dot_general(x, y, sizes, numbers)


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((), ()), ((), ())))


def _matrices() -> list[Case]:
    """Batches of matrices that are well-conditioned, so that pieces round as the whole does."""
    x, sides = floats(4, 4, 4) + 6 * np.eye(4), floats(4, 4, 8)
    symmetric, pivots = (
        x + x.swapaxes(1, 2),
        np.array([[2, 5, 2, 3], [0, 1, 4, 3], [1, 1, 2, 5], [3, 3, 3, 3]], "int32"),
    )
    of_any = {"eig": lax.linalg.eig, "hessenberg": lax.linalg.hessenberg, "lu": lax.linalg.lu, "qr": lax.linalg.qr,
              "schur": lax.linalg.schur, "svd": lax.linalg.svd}  # fmt: skip
    of_symmetric = {"cholesky": lax.linalg.cholesky, "eigh": lax.linalg.eigh, "tridiagonal": lax.linalg.tridiagonal}
    transforms = {"FFT": jnp.fft.fft2, "RFFT": jnp.fft.rfft, "IRFFT": jnp.fft.irfft}
    solve = lax.linalg.triangular_solve
    return [
        *(Case(name, function, (x,)) for name, function in of_any.items()),
        *(Case(name, function, (symmetric,)) for name, function in of_symmetric.items()),
        Case("qr", lambda x: lax.linalg.qr(x, full_matrices=False), (floats(4, 8, 4),), "of tall matrices"),
        Case("svd", lambda x: lax.linalg.svd(x, compute_uv=False), (floats(4, 4, 8),), "values alone"),
        Case("householder_product", lax.linalg.householder_product, (x, floats(4, 4))),
        Case("lu_pivots_to_permutation", partial(lax.linalg.lu_pivots_to_permutation, permutation_size=6), (pivots,)),
        Case("triangular_solve", partial(solve, left_side=True, lower=True), (x, sides), "from the left"),
        Case("triangular_solve", partial(solve, left_side=False), (x, sides.swapaxes(1, 2)), "from the right"),
        Case(
            "tridiagonal_solve",
            lax.linalg.tridiagonal_solve,
            (floats(4, 4), floats(4, 4) + 6, floats(4, 4, seed=1), sides),
        ),
        *(Case("fft", function, (floats(4, 4, 8),), label) for label, function in transforms.items()),
    ]


def cases() -> list[Case]:
    """Every case of this module."""
    return [*_products(), *_ragged(), *_matrices()]
