"""Checks every so many steps: a copy that differs, a value that is not finite and a process that is slow are named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.errors import DeviceError, DisagreementError
from autopar.training.pace import Pace, stragglers
from autopar.training.replicas import findings, first_difference
from tests.autopar.distributed.launching import HERE, launch, lines

DTYPES = ("float32", "bfloat16", "bool", "int4", "int8", "uint16", "complex64", "float8_e4m3fn")


def in_shards(values: np.ndarray, spec: PartitionSpec, changed: int | None = None) -> jax.Array:
    """An array on a 2x2 grid of devices, on one of which, by its place, the last element of the shard is another."""
    grid = np.asarray(jax.devices()[:4], dtype=object).reshape(2, 2)
    sharding = NamedSharding(Mesh(grid, ("x", "y")), spec)
    parts: list[Any] = []
    for place, (device, index) in enumerate(sharding.addressable_devices_indices_map(values.shape).items()):
        part = values[index].copy()
        if place == changed:
            part[-1, -1] = 1 - part[-1, -1] if part.dtype != bool else not part[-1, -1]
        parts.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(values.shape, sharding, parts)


def test_a_copy_that_differs_is_named_with_its_device():
    draw, cut, whole = np.random.default_rng(0), PartitionSpec("x"), PartitionSpec()
    values = {dtype: draw.integers(0, 2, (8, 4)).astype(jnp.dtype(dtype)) for dtype in DTYPES}

    def found(changed: int | None, columns: slice = slice(None)) -> dict[str, Any]:
        named = [(dtype, in_shards(each[:, columns], cut, changed)) for dtype, each in values.items()]
        whole_too = ("whole", in_shards(values["int8"], whole, changed))
        mine = findings([*named, whole_too, ("host", np.ones(3))])
        assert mine.not_finite == ""
        return dict(mine.digests)

    good, bad, turned = found(None), found(3), found(None, slice(None, None, -1))
    assert len(good) == 2 * len(DTYPES) + 1 + 1
    assert first_difference([good]) is None
    ids = [device.id for device in jax.devices()[:4]]
    for dtype in DTYPES:  # on the last device one element of each is another
        (key,) = (key for key in bad if key.endswith(f" {dtype}[4:8,0:4]"))
        assert first_difference([{key: bad[key]}]) == (f"{dtype}[4:8,0:4]", 0, ids[3], 0, ids[2])
        assert good[key] != turned[key]  # the same elements in other places
    # Of several leaves the first is named; of several devices who differs from most; of processes, too.
    assert first_difference([bad]) == (f"{DTYPES[0]}[4:8,0:4]", 0, ids[3], 0, ids[2])
    (key,) = (key for key in bad if key.endswith(" whole"))
    assert first_difference([{key: bad[key]}]) == ("whole", 0, ids[3], 0, ids[0])
    assert first_difference([{}, {key: {"0": "b"}}, {key: {"8": "a", "9": "a"}}]) == ("whole", 1, 0, 2, 8)


def test_a_function_in_a_state_is_no_copy_of_another_processs():
    """An Equinox module's activation: its address differs from process to process."""
    assert findings([("state.activation", jnp.tanh), ("state.rate", 0.1)]).digests.keys() == {"00000001 state.rate"}


def test_an_array_cut_over_all_devices_has_no_digest_and_is_checked_for_finite_values():
    values = np.ones((8, 2), np.float32)
    mine = findings([("a", in_shards(values, PartitionSpec("x", "y"), 3))])
    assert (mine.digests, mine.not_finite) == ({}, "")
    values[5] = np.nan
    mine = findings([("z", jnp.ones(2)), ("a", in_shards(values, PartitionSpec("x", "y")))])
    assert mine.not_finite == "a"


def test_a_step_is_checked_every_so_many():
    checks = autopar.parallelize(lambda x: x + 1).checks(every=2)
    good, bad = (in_shards(np.ones((8, 4), np.float32), PartitionSpec("x"), at) for at in (None, 3))
    checks(1, {"w": bad})
    checks(2, {"w": good}, loss=1.0)
    checks(3, {"w": bad})
    with pytest.raises(DisagreementError, match=r"state\['w'\]\[4:8,0:4\] of step 4 on device 3 of this process"):
        checks(4, {"w": bad})
    checks(5, {"w": good}, loss=np.nan)
    with pytest.raises(DeviceError, match="loss of step 6 on this process"):
        checks(6, {"w": good}, loss=jnp.float32(np.inf))


@pytest.mark.parametrize("options", [{"every": 0}, {"every": "100"}, {"every": 2.5}, {"slow": 1}, {"slow": None}])
def test_an_option_that_is_no_such_number_is_named(options: dict[str, Any]):
    with pytest.raises(autopar.ArgumentError, match=f"{next(iter(options))}={next(iter(options.values()))!r}"):
        autopar.parallelize(lambda x: x).checks(**options)


def pace(host: float, compute: float, planned: float = 0.1, step: float = 1.0) -> Pace:
    return Pace(step=step, host=host, compute=compute, planned=planned)


def test_a_process_above_its_planned_share_at_the_others_pace_is_slow():
    even = [pace(0.0, 0.3)] * 3
    assert stragglers(even, 1.5) == []
    (late,) = stragglers([*even, pace(0.3, 0.3)], 1.5)
    assert (late.rank, late.due, round(late.ratio, 6)) == (3, pytest.approx(0.3), 2.0)
    assert stragglers([*even, pace(0.3, 0.3)], 2.5) == []
    # A stage that has three times the work takes three times as long.
    assert stragglers([pace(0.0, 0.2, 0.1), pace(0.0, 0.6, 0.3)], 1.5) == []
    assert [late.rank for late in stragglers([pace(0.0, 0.6, 0.1), pace(0.0, 0.6, 0.3)], 1.5)] == [0]
    # What is little of a step is no matter, and without a profile, or a plan, the host alone is compared.
    assert stragglers([pace(0.001, 0.0), pace(0.01, 0.0)], 1.5) == []
    assert [late.rank for late in stragglers([pace(0.0, 0.0, 0.0), pace(0.4, 0.0, 0.0)], 1.5)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["DataParallel()", "Pipeline(stages=2, microbatches=2)"])
@pytest.mark.parametrize("how", ["host", "device"])
def test_a_process_that_is_slow_is_named(planner: str, how: str):
    done = launch(HERE / "checked.py", planner, how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("process 1 on host") == 1, done.stderr
    assert "process 0 on host" not in done.stderr
    assert [line for line in lines(done, 0) if line.startswith("slow")] == ["slow 1"]
