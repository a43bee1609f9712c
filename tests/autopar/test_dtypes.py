"""Products in a dtype that a device has no units for: a warning with both rates, and none where all is well."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from passes.cluster import Cluster, parse_cluster


def planned(dtype: str, cluster: str | Cluster) -> None:
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
def test_dtypes_that_a_device_computes_or_widens_bring_no_warning(dtype, cluster):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(dtype, cluster)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize(("share", "warned"), [(0.9, 0), (0.5, 1)])
def test_a_rate_as_far_below_another_as_measurements_differ_is_not_warned_of(share, warned):
    """`autopar measure` finds bfloat16 a little below float32 on CPUs; float64, which it leaves out, counts as that."""
    named = parse_cluster("8:v100-32g")
    rates = {"bfloat16": share * 1e13, "float32": 1e13}
    device = replace(named.group().device, flops_per_second=rates, widened={})
    with jax.enable_x64(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned("float64", replace(named, groups=(replace(named.group(), device=device),)))
    assert len(caught) == warned
