"""Assertions that trees of arrays are close or the same, for tests that hold a step against `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-10) -> None:
    """Fails unless leaves have the same shapes and dtypes, and errors within a share of each leaf's largest entry."""
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        scale = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-30)
        error = np.max(np.abs(mine - theirs), initial=0.0) / scale
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


def assert_same_bits(ours: Any, theirs: Any) -> None:
    """Fails unless trees have the same structure, and leaves the same types, dtypes and bits."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert type(a) is type(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
