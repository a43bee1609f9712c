"""Products in a dtype that a device has no units for: a warning with both rates, and none where all is well."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import autopar


def planned(dtype: str, cluster: str) -> None:
    def step(w, x):
        return w - jax.grad(lambda w: (x @ w).astype(jnp.float32).sum())(w)

    shapes = jax.ShapeDtypeStruct((64, 64), dtype), jax.ShapeDtypeStruct((16, 64), dtype)
    autopar.parallelize(step, cluster=cluster, planner=autopar.DataParallel(), donate_argnums=(0,)).plan(*shapes)


def test_bfloat16_on_a_device_without_it_is_warned_of_with_both_rates():
    numbers = r"products in bfloat16.*v100-32g.* 12\.6 TFLOP/s, and 100 in float16\n  at \S*test_dtypes.py:"
    with pytest.warns(UserWarning, match=numbers):
        planned("bfloat16", "8:v100-32g")


@pytest.mark.parametrize(
    ("dtype", "cluster"), [("float16", "8:v100-32g"), ("bfloat16", "8:a100-80g"), ("bfloat16", "8:cpu")]
)
def test_what_a_device_computes_or_widens_is_not_warned_of(dtype, cluster):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(dtype, cluster)
    assert [str(warning.message) for warning in caught] == []
