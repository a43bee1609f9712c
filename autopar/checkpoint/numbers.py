"""Numbers of a state, restored as Python's, NumPy's or JAX's, whichever they were when they were saved.

A step count that is a Python int before the first step, as in Flax's `TrainState`, is an int32 array of JAX's after it:
one program has both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.checkpoint.arrays import is_key
from autopar.checkpoint.manifest import Leaf, Manifest, RefusedError


def dtype_name(leaf: Any) -> str:
    """The name of a leaf's dtype, of a Python number NumPy's."""
    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def as_stored(like: Any, manifest: Manifest) -> Any:
    """`like` with NumPy's numbers of the stored dtypes in place of numbers that are the same to JAX."""
    pairs, tree = tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [_as_stored(leaf, manifest.leaves.get(keystr(path))) for path, leaf in pairs])


def as_like(state: Any, stored: Any, like: Any) -> Any:
    """A state that was restored like `stored`, with its numbers as `like` has them.

    Raises RefusedError for an int that is too large for that.
    """
    trees = (jax.tree.leaves(each) for each in (state, stored, like))
    leaves = [value if struct is leaf else _as_like(value, leaf) for value, struct, leaf in zip(*trees, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _as_stored(leaf: Any, stored: Leaf | None) -> Any:
    if stored is None or stored.shape or np.shape(leaf) or is_key(leaf) or stored.dtype == dtype_name(leaf):
        return leaf
    return np.zeros((), stored.dtype) if _to_jax(stored.dtype) == _to_jax(dtype_name(leaf)) else leaf


def _to_jax(name: str) -> str:
    """The dtype that JAX computes in for one of Python's or NumPy's."""
    return str(jax.dtypes.canonicalize_dtype(name)) if name in ("int64", "uint64", "float64", "complex128") else name


def _as_like(value: np.ndarray, leaf: Any) -> Any:
    """A number as an array, a scalar or a Python number, as the leaf is."""
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(value.item())
    if jnp.issubdtype(leaf.dtype, jnp.integer) and not np.can_cast(np.min_scalar_type(value), leaf.dtype):
        raise RefusedError(f"it has the number {value}, which is too large for {leaf.dtype}")
    number = value.astype(leaf.dtype)
    if isinstance(leaf, np.ndarray | np.generic):
        return number if isinstance(leaf, np.ndarray) else number[()]
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    array = jax.make_array_from_callback((), sharding, lambda index: number)
    return jax_compat.with_weakness(array, bool(getattr(leaf, "weak_type", False)))
