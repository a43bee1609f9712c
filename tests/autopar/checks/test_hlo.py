"""Collectives read from compiled programs and from every syntax that XLA has for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.checks.hlo import UNCOMBINED, HloCollective, collectives
from autopar.checks.hlo_groups import UNKNOWN
from passes.errors import InternalError

LOCAL = (16, 32)
NBYTES = math.prod(LOCAL) * 4


def names(sizes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple("xyzw"[: len(sizes)])


def device_mesh(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def compiled(
    body: Callable[..., object],
    sizes: tuple[int, ...],
    *,
    inputs: int = 1,
    dtype: jnp.dtype = jnp.float32,
    combine: bool = False,
) -> str:
    """The optimized HLO of `body` over inputs of which every device holds `LOCAL`."""
    spec = P(names(sizes))
    step = jax.shard_map(body, mesh=device_mesh(sizes), in_specs=spec, out_specs=spec, check_vma=False)
    whole = jax.ShapeDtypeStruct((LOCAL[0] * math.prod(sizes), *LOCAL[1:]), dtype)
    options = {} if combine else dict(UNCOMBINED)
    return jax.jit(step).lower(*[whole] * inputs).compile(compiler_options=options).as_text()


def moved(text: str, sizes: tuple[int, ...]) -> list[tuple[str, tuple[str, ...], int, int]]:
    return sorted((c.kind, c.axes, c.nbytes, c.count) for c in collectives(text, names(sizes), sizes))


def subsets(sizes: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    axes = names(sizes)
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))


@pytest.mark.parametrize(
    ("sizes", "axes"), [(sizes, axes) for sizes in ((8,), (2, 4), (2, 2, 2)) for axes in subsets(sizes)]
)
def test_every_kind_over_every_axes(sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
    ranks = math.prod(sizes[names(sizes).index(axis)] for axis in axes)
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]

    def body(a: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(a, axes),
            lax.all_gather(a, axes, tiled=True),
            lax.psum_scatter(a, axes, scatter_dimension=0, tiled=True),
            lax.all_to_all(a, axes, split_axis=1, concat_axis=0, tiled=True),
            lax.ppermute(a, axes, ring),
        )

    text = compiled(body, sizes)
    assert moved(text, sizes) == [
        ("all_gather", axes, NBYTES * ranks, 1),
        ("all_reduce", axes, NBYTES, 1),
        ("all_to_all", axes, NBYTES, 1),
        ("permute", axes, NBYTES, 1),
        ("reduce_scatter", axes, NBYTES // ranks, 1),
    ]
    shapes = {c.kind: c.shape for c in collectives(text, names(sizes), sizes)}
    assert shapes == {
        "all_gather": (16 * ranks, 32),
        "all_reduce": LOCAL,
        "all_to_all": (ranks, 16, 32 // ranks),
        "permute": LOCAL,
        "reduce_scatter": (16 // ranks, 32),
    }


def test_nested_loops_multiply() -> None:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(lax.psum(c, "y")), None

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c, _ = lax.scan(inner, c, None, length=3)
        return jnp.cos(lax.psum(c, "x")), None

    text = compiled(lambda a: lax.scan(outer, lax.ppermute(a, "x", [(0, 1)]), None, length=5)[0], (2, 4))
    assert moved(text, (2, 4)) == [
        ("all_reduce", ("x",), NBYTES, 5),
        ("all_reduce", ("y",), NBYTES, 15),
        ("permute", ("x",), NBYTES, 1),
    ]


def test_an_unknown_trip_count_is_one() -> None:
    def shrink(a: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: lax.psum(c.sum(), "x") > 1, lambda c: c / lax.pmax(c, "x"), a)

    assert ("all_reduce", ("x",), NBYTES, 1) in moved(compiled(shrink, (8,)), (8,))


def test_every_branch_of_a_conditional_counts() -> None:
    def body(a: jax.Array) -> jax.Array:
        return lax.cond(lax.axis_index("x") < 0, lambda v: lax.psum(v, "x"), lambda v: lax.pmax(v, "y"), a)

    expected = [("all_reduce", ("x",), NBYTES, 1), ("all_reduce", ("y",), NBYTES, 1)]
    assert moved(compiled(body, (2, 4)), (2, 4)) == expected


def test_a_combined_collective_counts_each_tensor() -> None:
    def body(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        return lax.psum((a, b[:4], c[:, :8]), "y")

    combined = compiled(body, (2, 4), inputs=3, combine=True)
    assert combined.count(" all-reduce(") == 1
    assert moved(combined, (2, 4)) == [("all_reduce", ("y",), nbytes, 1) for nbytes in (512, 512, 2048)]
    assert sorted(c.shape for c in collectives(combined, ("x", "y"), (2, 4))) == [(4, 32), (16, 8), (16, 32)]


def test_uncombined_keeps_all_reduces_apart() -> None:
    def body(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        return lax.psum((a, b, c), "y")

    assert compiled(body, (2, 4), inputs=3).count(" all-reduce(") == 3
    assert moved(compiled(body, (2, 4), inputs=3), (2, 4)) == [("all_reduce", ("y",), NBYTES, 1)] * 3


def test_several_all_to_alls_are_one_tensor_each() -> None:
    def body(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.all_to_all(a, "x", split_axis=0, concat_axis=0, tiled=True) for a in inputs)

    assert moved(compiled(body, (8,), inputs=2), (8,)) == [("all_to_all", ("x",), NBYTES, 1)] * 2


def test_xla_merges_equal_collectives() -> None:
    def body(a: jax.Array) -> tuple[jax.Array, ...]:
        return lax.psum(a, "x") + 1, jnp.sin(lax.psum(a, "x"))

    assert moved(compiled(body, (8,)), (8,)) == [("all_reduce", ("x",), NBYTES, 1)]


def test_the_cpu_backend_widens_bfloat16() -> None:
    text = compiled(lambda a: lax.all_gather(a, "x", tiled=True), (8,), dtype=jnp.bfloat16)
    (gather,) = collectives(text, ("x",), (8,))
    assert (gather.dtype, gather.nbytes) == ("float32", NBYTES * 8)


def test_axes_of_one_device_do_not_communicate() -> None:
    def body(a: jax.Array) -> tuple[jax.Array, ...]:
        return lax.psum(a, "x"), lax.all_gather(a, "z", tiled=True), lax.pmax(a, ("x", "y")), lax.pmin(a, ("y", "z"))

    assert moved(compiled(body, (1, 8, 1)), (1, 8, 1)) == [("all_reduce", ("y",), NBYTES, 1)] * 2


def test_a_permute_to_oneself_does_not_communicate() -> None:
    text = compiled(lambda a: lax.ppermute(a, "x", [(i, i) for i in range(8)]), (8,))
    assert "collective-permute(" in text
    assert moved(text, (8,)) == []


def test_op_name_and_source() -> None:
    def summed(a: jax.Array) -> jax.Array:
        with jax.named_scope("edge_7"):
            return lax.psum(a, "x")

    (collective,) = collectives(compiled(summed, (8,)), ("x",), (8,))
    assert collective.op_name == "jit(summed)/shard_map/edge_7/psum"
    line = summed.__code__.co_firstlineno + 2
    assert collective.source == f"{__file__}:{line} (test_op_name_and_source.<locals>.summed)"
    assert str(collective) == "all_reduce@x float32[16,32] jit(summed)/shard_map/edge_7/psum"


@pytest.mark.parametrize(("spec", "axes"), [(P(None, "y"), ("x",)), (P("x"), ("y",))])
def test_the_partitioner_writes_mesh_groups(spec: P, axes: tuple[str, ...]) -> None:
    mesh = device_mesh((2, 4))
    split = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    gather = jax.jit(lambda a: lax.with_sharding_constraint(a, NamedSharding(mesh, spec)))
    text = gather.lower(split).compile().as_text()
    assert "replica_groups=mesh[" in text
    (collective,) = collectives(text, ("x", "y"), (2, 4))
    assert (collective.kind, collective.axes) == ("all_gather", axes)


def one(line: str, sizes: tuple[int, ...] = (2, 4)) -> HloCollective:
    (collective,) = collectives(line, names(sizes), sizes)
    return collective


def all_reduce(groups: str, sizes: tuple[int, ...] = (2, 4)) -> tuple[str, ...]:
    line = f"  %c = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    return one(f"{line}, to_apply=%add", sizes).axes


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("y",)),
        ("{{4,6,5,7},{3,1,2,0}}", ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("x",)),
        ("{{0,1,2,3,4,5,6,7}}", ("x", "y")),
        ("{}", ("x", "y")),
        ("{{0,1},{2,3},{4,5},{6,7}}", UNKNOWN),
        ("{{0,1,2,3},{4,5},{6,7}}", UNKNOWN),
        ("{{0,1,2,3}}", UNKNOWN),
        ("{{0}}", UNKNOWN),
        ("{{0,1,2,3},{8,9,10,11}}", UNKNOWN),
        ("[2,4]<=[8]", ("y",)),
        ("[4,2]<=[2,4]T(1,0)", ("x",)),
        ("[1,8]<=[8]", ("x", "y")),
        ("[4,2]<=[8]", UNKNOWN),
        ("mesh['x'=2,'y'=4] {'y'}", ("y",)),
        ("mesh['x'=2,'y'=4] {'x','y'}", ("x", "y")),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", ("y",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("y",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("x",)),
        ("mesh[a=2,b=4], device_ids=(4,5,6,7,0,1,2,3) {b}", ("y",)),
        ("mesh['a'=8] {'a':(1)2}", ("x",)),
        ("mesh['a'=8] {'a':(2)4}", ("y",)),
        ("mesh['a'=8] {'a':(2)2}", UNKNOWN),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", UNKNOWN),
    ],
)
def test_replica_groups(groups: str, axes: tuple[str, ...]) -> None:
    assert all_reduce(groups) == axes


def test_jax_versions_write_the_same_groups_differently() -> None:
    older = "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}"
    newer = "mesh['x'=2,'y'=4] {'y':(2)2}"
    assert all_reduce(older, (2, 2, 2)) == all_reduce(newer, (2, 2, 2)) == ("z",)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3, 2), (2, 2, 2), (1, 2, 1, 4), (2, 3, 1, 2)])
def test_all_syntaxes_agree_on_every_subset(sizes: tuple[int, ...]) -> None:
    axes = names(sizes)
    for subset in subsets(sizes):
        inside = [i for i, axis in enumerate(axes) if axis in subset]
        outside = [i for i, axis in enumerate(axes) if axis not in subset]
        ranks = math.prod(sizes[i] for i in inside)
        order = (*outside, *inside)
        groups = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, ranks)
        listed = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
        extents = ",".join(map(str, sizes))
        named = ",".join(f"'{axis}'={size}" for axis, size in zip(axes, sizes, strict=True))
        written = (
            f"{{{listed}}}",
            f"[{len(groups)},{ranks}]<=[{extents}]T({','.join(map(str, order))})",
            f"mesh[{named}] {{{','.join(map(repr, subset))}}}",
        )
        minimal = tuple(axis for axis in subset if sizes[axes.index(axis)] > 1)
        for text in written:
            line = f"  %c = f32[4]{{0}} all-gather(%p), replica_groups={text}, dimensions={{0}}"
            assert [c.axes for c in collectives(line, axes, sizes)] == ([minimal] if minimal else []), text


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,1},{1,2},{2,3},{4,5}}", ("y",)),
        ("{{0,4},{1,1}}", ("x",)),
        ("{{0,5}}", ("x", "y")),
        ("{{0,1},{0,4}}", ("x", "y")),
        ("{{0,8}}", UNKNOWN),
    ],
)
def test_source_target_pairs(pairs: str, axes: tuple[str, ...]) -> None:
    assert one(f"  ROOT %p.3 = f32[8,8]{{1,0}} collective-permute(%a), source_target_pairs={pairs}").axes == axes


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("f32[16]{0} all-reduce-start(%p)", [("all_reduce", (16,))]),
        ("(f32[16]{0}, f32[8]{0}) all-reduce-start(%p, %q)", [("all_reduce", (8,)), ("all_reduce", (16,))]),
        ("((f32[16]{0}), f32[16]{0}, u32[]) all-reduce-start(%p)", [("all_reduce", (16,))]),
        ("(f32[4]{0}, f32[16]{0}) all-gather-start(%p)", [("all_gather", (16,))]),
        (
            "((f32[4], f32[2]), (f32[16], f32[8])) all-gather-start(%p, %q)",
            [("all_gather", (8,)), ("all_gather", (16,))],
        ),
        ("((f32[16]{0}), f32[4]{0}) reduce-scatter-start(%p)", [("reduce_scatter", (4,))]),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p)", [("permute", (8,))]),
        (
            "((f32[8], f32[2]), (f32[8], f32[2])) collective-permute-start(%p, %q)",
            [("permute", (2,)), ("permute", (8,))],
        ),
        ("((f32[2], f32[2]), (f32[2], f32[2])) all-to-all-start(%p, %q)", [("all_to_all", (2, 2))]),
        ("((f32[2,4]), f32[2,4]) all-to-all-start(%p), dimensions={1}", [("all_to_all", (2, 4))]),
        ("f32[2,4]{1,0} all-to-all(%p), dimensions={1}", [("all_to_all", (2, 4))]),
        ("f32[16]{0} collective-broadcast(%p)", [("broadcast", (16,))]),
        ("f32[16]{0} ragged-all-to-all(%p, %q, %a, %b, %c, %d)", [("ragged_all_to_all", (16,))]),
        ("(token[], f32[<=16,128]{1,0:T(8,128)S(1)}) all-reduce(%p)", [("all_reduce", (16, 128))]),
        ("f32[16]{0} all-reduce-done(%s)", []),
        ("f32[16]{0} all-gather-done(%s)", []),
        ("f32[8]{0} collective-permute-done(%s)", []),
        ("((f32[16]), f32[4]) reduce-scatter-update(%s)", []),
        ("f32[4]{0} reduce-scatter-done(%s)", []),
        ('f32[] add(%a, %b), metadata={op_name="jit(f)/an all-reduce(a)"}', []),
    ],
)
def test_asynchronous_and_other_forms(instruction: str, expected: list[tuple[str, tuple[int, ...]]]) -> None:
    who = "source_target_pairs={{0,1}}" if "permute" in instruction else "replica_groups=[2,4]<=[8]"
    sent = collectives(f"  %i = {instruction}, channel_id=1, {who}", ("x", "y"), (2, 4))
    assert sorted((c.kind, c.shape) for c in sent) == expected
    assert {c.axes for c in sent} <= {("y",)}


@pytest.mark.parametrize(
    ("written", "dtype", "nbytes"),
    [
        ("pred", "bool", 6),
        ("bf16", "bfloat16", 12),
        ("f16", "float16", 12),
        ("f64", "float64", 48),
        ("f8e4m3fn", "float8_e4m3fn", 6),
        ("s32", "int32", 24),
        ("u8", "uint8", 6),
        ("c64", "complex64", 48),
    ],
)
def test_dtypes(written: str, dtype: str, nbytes: int) -> None:
    collective = one(f"  %c = {written}[2,3]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}")
    assert (collective.dtype, collective.nbytes) == (dtype, nbytes)


def test_a_scalar() -> None:
    collective = one("  %c = f32[] all-reduce(%p), replica_groups={}, to_apply=%add")
    assert (collective.shape, collective.nbytes) == ((), 4)


PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

%async_wrapped (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}, execution_thread="parallel"

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %start = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%async_wrapped
  %done = f32[4]{0} async-done(%start)
}

%shared (p: f32[16]) -> f32[16] {
  ROOT %ar = f32[16]{0} all-reduce(%p), replica_groups={}, metadata={op_name="\\"a\\"" source_file="b.py" source_line=7}
}

ENTRY %main (a: f32[16]) -> f32[16] {
  %w.1 = (s32[], f32[16]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %c.1 = f32[16]{0} call(%a), to_apply=%shared
  %w.2 = (s32[], f32[16]{0}) while(%t), condition=%cond, body=%shared, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %i = f32[16]{0} conditional(%q, %a, %a), branch_computations={%other, %shared}
}
"""


def test_counts_add_over_call_sites() -> None:
    scatter, reduce = collectives(PROGRAM, ("x", "y"), (2, 4))
    assert (scatter.kind, scatter.axes, scatter.count) == ("reduce_scatter", ("y",), 6)
    assert (reduce.kind, reduce.count) == ("all_reduce", 1 + 4 + 1)
    assert (reduce.op_name, reduce.source) == ('"a"', "b.py:7")


@pytest.mark.parametrize(
    "line",
    [
        "%c = f32[4]{0} collective-shuffle(%p), replica_groups={}",
        "%c = f32[4]{0} all-reduce(%p), to_apply=%add",
        "%c = f32[4]{0} all-reduce(%p), replica_groups=mesh['x'=2,'y'=4] {'z'}",
        "%c = f32[4]{0} all-reduce(%p), replica_groups=everyone",
        "%c = f32[4]{0} collective-permute(%p), replica_groups={}",
        "%c = (f32[4]{0}, f32[4]{0} all-gather(%p), replica_groups={}",
        "%c = q7[4]{0} all-gather(%p), replica_groups={}",
        "%c = (f32[2]{0}, f32[3]{0}) all-to-all(%p, %q), replica_groups={}",
        "%c = token[] all-gather(%p), replica_groups={}",
        "f32[4]{0} all-gather(%p), replica_groups={}",
    ],
)
def test_an_unreadable_collective_is_an_error(line: str) -> None:
    with pytest.raises(InternalError, match="cannot be read") as raised:
        collectives(f"  {line}\n", ("x", "y"), (2, 4))
    assert line in str(raised.value)


def test_a_program_without_collectives() -> None:
    assert collectives(jax.jit(jnp.sin).lower(1.0).compile().as_text(), ("x",), (8,)) == ()
