"""Arrays between submeshes: exact for every pair of shardings, each way as documented, and never through the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import ArgumentError
from autopar.runtime.transfer import Local, Route, Transfer, compile_transfer
from autopar.runtime.transfer_plan import Kind, TransferPlan, plan_transfer
from passes.errors import InternalError
from tests.sample import half, slow


def over(devices: list[int], *spec: Any, sizes: tuple[int, ...] | None = None) -> NamedSharding:
    grid = np.array([jax.devices()[i] for i in devices]).reshape(sizes or (len(devices),))
    return NamedSharding(Mesh(grid, ("x", "y", "z")[: grid.ndim]), P(*spec))


def on(device: int) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[device])


def contents(shape: tuple[int, ...], dtype: Any = "float32") -> np.ndarray:
    whole = np.random.default_rng(0).integers(-99, 99, shape)
    return (whole > 0 if dtype == "bool" else whole).astype(jnp.dtype(dtype))


def planned(shape: tuple[int, ...], source: Sharding, target: Sharding, dtype: Any = "float32") -> TransferPlan:
    plan = plan_transfer(shape, dtype, source, target)
    plan.verify()
    return plan


class HostCopies:
    """How often a JAX array was read by the host."""

    count = 0


@pytest.fixture
def host_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCopies]:
    """Counts reads of contents; on CPU JAX's own guard lets them pass, as they cost no copy there."""
    copies, kind = HostCopies(), type(jnp.zeros(()))

    def counted(read: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            copies.count += 1
            return read(*args, **kwargs)

        return count

    monkeypatch.setattr(kind, "__array__", counted(kind.__array__))
    monkeypatch.setattr(kind, "_value", property(counted(kind._value.fget)))
    with jax.transfer_guard_device_to_host("disallow"):
        yield copies


def assert_arrives(shape: tuple[int, ...], source: Sharding, target: Sharding, dtype: Any = "float32") -> TransferPlan:
    """Moves an array and compares every shard."""
    whole = contents(shape, dtype)
    plan = planned(shape, source, target, dtype)
    array = jax.device_put(whole, source)
    moved = compile_transfer(plan)(array)
    assert moved.sharding == target
    assert (moved.shape, moved.dtype, moved.committed) == (whole.shape, whole.dtype, True)
    for shard in moved.addressable_shards:
        assert shard.data.devices() == {shard.device}
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    np.testing.assert_array_equal(np.asarray(moved), whole)
    np.testing.assert_array_equal(np.asarray(array), whole)
    return plan


CASES: dict[str, tuple[Kind, Any, Any]] = {
    "same": ("alias", ([0, 1], "x"), ([0, 1], "x")),
    "same layout, other devices": ("put", ([0, 1], "x"), ([2, 3], "x")),
    "one dimension named twice over": ("put", ([0, 1], "x"), ([0, 1], "x", None)),
    "overlapping": ("put", ([0, 1], "x"), ([1, 2], "x")),
    "another order": ("put", ([0, 1], "x"), ([1, 0], "x")),
    "replicated": ("put", ([0, 1],), ([4, 5],)),
    "other layout, same devices": ("reshard", ([0, 1], "x"), ([0, 1], None, "x")),
    "other layout, other order": ("tiles", ([0, 1], "x"), ([1, 0], None, "x")),
    "other layout, other devices": ("tiles", ([0, 1], "x"), ([2, 3], None, "x")),
    "4 to 2": ("tiles", ([0, 1, 2, 3], "x"), ([4, 5], "x")),
    "2 to 4": ("tiles", ([0, 1], "x"), ([4, 5, 6, 7], "x")),
    "4 to 1": ("tiles", ([0, 1, 2, 3], "x"), ([4],)),
    "1 to 4": ("tiles", ([4],), ([0, 1, 2, 3], None, "x")),
    "6 to 2": ("tiles", ([0, 1, 2, 3, 4, 5], "x"), ([6, 7], None, "x")),
    "8 to 3": ("tiles", ([0, 1, 2, 3, 4, 5, 6, 7], "x"), ([1, 3, 5], "x")),
    "2 to 4 within": ("tiles", ([0, 1], "x"), ([0, 1, 2, 3], "x")),
    "replicated to fewer": ("tiles", ([0, 1, 2, 3],), ([2, 5],)),
    "sharded to replicated": ("tiles", ([0, 1], "x"), ([2, 3, 4, 5],)),
}


@pytest.mark.parametrize(("kind", "source", "target"), CASES.values(), ids=CASES)
def test_each_way(kind: Kind, source: Any, target: Any) -> None:
    plan = assert_arrives((24, 24), over(source[0], *source[1:]), over(target[0], *target[1:]))
    assert plan.kind == kind


def test_single_devices() -> None:
    assert assert_arrives((8, 4), on(0), on(0)).kind == "alias"
    assert assert_arrives((8, 4), on(0), on(3)).kind == "put"
    assert assert_arrives((8, 4), on(0), over([0], "x")).kind == "put"
    assert assert_arrives((8, 4), over([2], "x"), on(0)).kind == "put"
    assert assert_arrives((8, 4), on(0), over([0, 1, 2, 3], "x")).kind == "tiles"
    assert assert_arrives((8, 4), over([0, 1, 2, 3], "x"), on(1)).kind == "tiles"


def test_several_axes() -> None:
    source = over([0, 1, 2, 3], "x", "y", sizes=(2, 2))
    for devices, spec, sizes in [
        ([4, 5, 6, 7], ("y", "x"), (2, 2)),
        ([4, 5, 6, 7], (("x", "y"), None), (2, 2)),
        ([4, 5, 6, 7], (None, ("y", "x")), (2, 2)),
        ([4, 5, 6, 7], ("y", None), (2, 2)),
        ([2, 3, 4, 5, 6, 7], ("x", "y"), (2, 3)),
        ([0, 1, 2, 3, 4, 5, 6, 7], ("z", ("x", "y")), (2, 2, 2)),
    ]:
        assert_arrives((24, 12), source, over(devices, *spec, sizes=sizes))


@pytest.mark.parametrize("shape", [(), (0,), (0, 24), (24, 0), (1,)])
def test_scalars_and_empty_arrays(shape: tuple[int, ...]) -> None:
    spec = [("x",) if size != 1 else () for size in shape[-1:]]
    last = (*(None for _ in shape[1:]), *(axis for axes in spec for axis in axes))
    source = over([0, 1, 2, 3], *last)
    for target in (over([4, 5]), over([0, 1, 2, 3]), on(7), over([2, 3], *last)):
        assert_arrives(shape, source, target)


@pytest.mark.parametrize(("dtype", "seed"), half(["float32", "bfloat16", "int32", "bool", "float64"], range(8)))
def test_random_shardings(dtype: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(dtype)])

    def sharding(rank: int) -> NamedSharding:
        sizes = [(1,), (2,), (4,), (6,), (2, 2), (3, 2), (2, 2, 2)][rng.integers(7)]
        devices = [int(i) for i in rng.permutation(8)[: int(np.prod(sizes))]]
        spec: list[list[str]] = [[] for _ in range(rank)]
        for axis in rng.permutation(["x", "y", "z"][: len(sizes)]):
            if rank and rng.random() < 0.75:
                spec[rng.integers(rank)].append(str(axis))
        return over(devices, *(tuple(axes) or None for axes in spec), sizes=sizes)

    rank = int(rng.integers(1, 4))
    with jax.enable_x64(dtype == "float64"):
        assert_arrives((24,) * rank, sharding(rank), sharding(rank), dtype)


def test_typed_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    source, target = over([0, 1, 2, 3], "x"), over([4, 5], "x")
    moved = compile_transfer(planned((8,), source, target, keys.dtype))(jax.device_put(keys, source))
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_whole_shards_are_not_cut() -> None:
    plan = planned((8, 8), over([0, 1, 2, 3], "x"), over([4, 5], "x"))
    assert [tile.shape for tile in plan.tiles] == [(2, 8)] * 4
    assert not plan.shares
    assert plan.sent_nbytes() == dict.fromkeys(jax.devices()[:4], 64)


def test_replicas_share_the_sending() -> None:
    plan = planned((8, 8), over([0, 1, 2, 3]), over([4, 5], "x"))
    assert sorted(plan.sent_nbytes().values()) == [128, 128]
    plan = planned((8, 8), over([0, 1, 2, 3], "y", sizes=(2, 2)), over([4, 5, 6, 7], None, "x"))
    assert list(plan.sent_nbytes().values()) == [64] * 4


def test_a_block_is_sent_once_and_handed_on() -> None:
    plan = planned((8, 8), over([0, 1], "x"), over([2, 3, 4]))
    assert [tile.target_device.id for tile in plan.tiles] == [2, 2]
    assert [(copy.source_device.id, copy.target_device.id) for copy in plan.copies] == [(2, 3), (2, 4)]


def test_parts_that_a_target_has_already_are_not_sent() -> None:
    plan = planned((8, 8), over([0, 1, 2, 3]), over([2, 3, 5]))
    assert all(tile.source_device == tile.target_device for tile in plan.tiles)
    assert [copy.target_device.id for copy in plan.copies] == [5]
    assert plan.shares
    assert not planned((8, 8), over([0, 1]), over([2, 3], "x")).shares


def test_text() -> None:
    plan = planned((4, 4), over([0, 1], "x"), over([2, 3, 4]))
    assert plan.format() == (
        "tiles float32[4,4]: P('x',) on x2 of devices 0,1 -> P() on x3 of devices 2,3,4\n"
        "  0[0:2,0:4] -> 2[0:2,0:4]\n"
        "  1[0:2,0:4] -> 2[2:4,0:4]\n"
        "  2 => 3\n"
        "  2 => 4"
    ).replace("P('x',)", str(P("x")))


def test_plans_are_values() -> None:
    plans = [planned((8, 8), over([0, 1], "x"), over([2, 3], None, "x")) for _ in range(2)]
    assert plans[0] == plans[1]
    assert len(set(plans)) == 1


def wrong_plans() -> Iterator[Any]:
    plan = plan_transfer((8, 8), "float32", over([0, 1], "x"), over([2, 3, 4]))
    first, *rest = plan.tiles
    yield pytest.param(replace(plan, tiles=tuple(rest)), id="a tile lacks")
    yield pytest.param(replace(plan, tiles=(first, *plan.tiles)), id="a tile twice")
    yield pytest.param(replace(plan, copies=plan.copies[1:]), id="a copy lacks")
    yield pytest.param(replace(plan, copies=(*plan.copies, plan.copies[0])), id="a copy twice")
    displaced = replace(first, source_slice=((0, 4), (1, 8)), target_slice=((0, 4), (0, 7)))
    yield pytest.param(replace(plan, tiles=(displaced, *rest)), id="displaced")
    outside = replace(first, source_slice=((0, 9), (0, 8)), target_slice=((0, 9), (0, 8)))
    yield pytest.param(replace(plan, tiles=(outside, *rest)), id="outside")
    yield pytest.param(replace(plan, tiles=(replace(first, source_device=jax.devices()[7]), *rest)), id="no source")
    yield pytest.param(replace(plan, kind="alias"), id="another kind")


def test_verify_finds_wrong_plans() -> None:
    for case in wrong_plans():
        with pytest.raises(InternalError, match="a transfer's plan is wrong"):
            case.values[0].verify()


@pytest.mark.parametrize(("kind", "source", "target"), CASES.values(), ids=CASES)
def test_nothing_goes_through_the_host(kind: Kind, source: Any, target: Any, host_copies: HostCopies) -> None:
    shardings = over(source[0], *source[1:]), over(target[0], *target[1:])
    array = jax.device_put(contents((24, 24)), shardings[0])
    compile_transfer(planned((24, 24), *shardings))(array).block_until_ready()
    assert host_copies.count == 0


def test_host_copies_are_noticed(host_copies: HostCopies) -> None:
    """As plain `device_put` makes them where the layouts differ; from 0.12 on JAX's guard forbids them on CPU too."""
    array = jax.device_put(contents((24, 24)), over([0, 1, 2, 3], "x"))
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.device_put(array, over([4, 5], None, "x"))
    assert host_copies.count > 0


def busy(x: jax.Array, turns: int = 150) -> jax.Array:
    """`x`, after a while."""
    a = jax.lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ a), jnp.full((512, 512), 0.5))
    return x + 0 * a[0, 0]


@pytest.mark.parametrize("target", [slow("one"), "cut", slow("replicated")])
def test_a_call_does_not_wait_for_its_operand(target: str) -> None:
    to = {"one": on(1), "cut": over([1, 2], None, "x"), "replicated": over([1, 2])}[target]
    compute = jax.jit(busy)
    start = jax.device_put(contents((8, 8)), on(0))
    transfer = compile_transfer(planned((8, 8), on(0), to))
    transfer(jax.block_until_ready(compute(start, 1)))
    array = compute(start, 150)
    moved = transfer(array)
    assert not array.is_ready()
    assert not moved.is_ready()
    np.testing.assert_array_equal(np.asarray(moved), contents((8, 8)))


def test_the_operand_may_be_dropped() -> None:
    transfer = compile_transfer(planned((8, 8), on(0), over([1, 2], None, "x")))
    moved = transfer(jax.jit(busy)(jax.device_put(contents((8, 8)), on(0))))
    np.testing.assert_array_equal(np.asarray(moved), contents((8, 8)))


def test_calls_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source, target = over([0, 1, 2, 3], "x"), over([4, 5], None, "x")
    transfer = compile_transfer(planned((12, 12), source, target))
    arrays = [jax.device_put(contents((12, 12)) + i, source) for i in range(2)]
    with jax.log_compiles():
        for array in arrays:
            transfer(array).block_until_ready()
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]


def test_under_an_ambient_mesh() -> None:
    with jax.set_mesh(Mesh(np.array(jax.devices()[4:8]), ("x",))):
        transfer = compile_transfer(planned((8, 8), over([0, 1], "x"), over([0, 1], None, "x")))
        array = jax.device_put(contents((8, 8)), over([0, 1], "x"))
        np.testing.assert_array_equal(np.asarray(transfer(array)), contents((8, 8)))
        tiled = compile_transfer(planned((8, 8), over([0, 1], "x"), over([2, 3], None, "x")))
        np.testing.assert_array_equal(np.asarray(tiled(array)), contents((8, 8)))


def test_any_transport_serves() -> None:
    class Recording:
        routes: tuple[Route, ...] = ()

        def connect(self, routes: tuple[Route, ...]) -> Any:
            self.routes += routes
            return Local().connect(routes)

        def put(self, target: Sharding) -> Any:
            return Local().put(target)

    transport = Recording()
    plan = planned((8, 8), over([0, 1], "x"), over([2, 3]))
    moved = compile_transfer(plan, transport)(jax.device_put(contents((8, 8)), plan.source))
    np.testing.assert_array_equal(np.asarray(moved), contents((8, 8)))
    found = [(route.source.id, route.target.id, route.shape) for route in transport.routes]
    assert found == [(0, 2, (4, 8)), (1, 2, (4, 8)), (2, 3, (8, 8))]


def a_transfer() -> Transfer:
    return compile_transfer(planned((8, 8), over([0, 1], "x"), over([2, 3], None, "x")))


@pytest.mark.parametrize(
    ("operand", "says"),
    [
        (lambda: contents((8, 8)), r"an operand of type ndarray: .* takes float32\[8,8\] in .* of devices 0,1"),
        (lambda: 3.0, "an operand of type float"),
        (lambda: jax.device_put(contents((8, 8)), over([0, 1])), r"an array in P\(\) on x2 of devices 0,1"),
        (lambda: jax.device_put(contents((8, 8)), over([2, 3], "x")), "of devices 2,3"),
        (lambda: jax.device_put(contents((8, 4)), over([0, 1], "x")), r"an array float32\[8,4\]"),
        (lambda: jax.device_put(contents((8, 8), "int32"), over([0, 1], "x")), r"an array int32\[8,8\]"),
    ],
)
def test_refuses_other_operands(operand: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        a_transfer()(operand())


def test_refuses_traced_values() -> None:
    transfer = a_transfer()
    with pytest.raises(ArgumentError, match=r"pass a jax\.Array"):
        jax.jit(lambda x: transfer(x))(jax.device_put(contents((8, 8)), over([0, 1], "x")))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda: over([0, 1, 2], "x"), "every shard must have the same size"),
        (lambda: over([0, 1], None, None, "x"), "dimensions of .* are more than the array's 2"),
        (lambda: jax.devices()[3], "neither a NamedSharding nor"),
        (lambda: over([0, 1], "x").with_memory_kind("pinned_host"), "memory 'pinned_host' is not"),
    ],
)
def test_refuses_other_shardings(target: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        plan_transfer((8, 8), "float32", on(0), target())
