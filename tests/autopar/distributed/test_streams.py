"""Memory that arrays from other processes lie in: used again, and never while one of them is in use."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.distributed.streams import Memory

NBYTES = 1 << 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_memory_is_an_arrays_as_long_as_anything_reads_it(dtype: str):
    memory, type = Memory(), jnp.dtype(dtype)
    lent = memory.take(NBYTES)
    lent[:] = 1
    at = lent.ctypes.data
    array = jax.device_put(lent.view(type).reshape(8, -1), jax.devices()[1])
    assert array.unsafe_buffer_pointer() == at  # as it is
    del lent
    view = np.asarray(array)
    expected = view.copy()
    result = jax.jit(lambda x: ~x if x.dtype == bool else x + x, donate_argnums=0)(array).block_until_ready()
    del array
    gc.collect()
    assert memory.free_nbytes == 0
    np.testing.assert_array_equal(view, expected)  # no program was given it to write to
    assert result.unsafe_buffer_pointer() != at
    del view, result
    gc.collect()
    jnp.zeros(()).block_until_ready()  # JAX lets go of NumPy's arrays when it is called next
    assert memory.free_nbytes == NBYTES
    assert memory.take(NBYTES).ctypes.data == at
