"""Programs of accelerators move what was planned, whatever collectives their compilers write; the rest is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

import autopar
from autopar.checks import Emitted, Verification, verify
from passes.cluster import Collective, Mesh, parse_cluster

TPU_ZERO3 = (Path(__file__).parents[2] / "golden" / "hlo" / "tpu_zero3.txt").read_text()
"""The collectives of two layers x @ [2048, 8192] @ [8192, 2048] in bfloat16 under Zero(3), as libtpu 0.0.42.1 compiles
them for v5e:2x4: cut from its HLO, with the computations that name them.
"""

MIB = 2**20
LAYERS = (
    ("all_gather", "bfloat16", 32 * MIB, 7),
    ("reduce_scatter", "bfloat16", 4 * MIB, 4),
    ("all_reduce", "float32", 4, 1),
)
"""What it was planned to send."""


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    """Any plan on eight devices along one axis."""
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    return autopar.parallelize(lambda x: x + 1, planner=autopar.DataParallel(), cluster="8:h100").plan(x)


def compare(
    plan: autopar.Plan, planned: tuple[tuple[str, str, int, int], ...], text: str, platform: str = "gpu", runs: int = 1
) -> Verification:
    mesh = Mesh(axes=("data",), sizes=(8,), cluster=parse_cluster("8:h100"))
    collectives = tuple(
        Collective(kind=kind, axes=("data",), dtype=dtype, nbytes=nbytes, count=count, where="")
        for kind, dtype, nbytes, count in planned
    )
    return verify(replace(plan, mesh=mesh, collectives=collectives), [Emitted(text=text, runs=runs)], platform=platform)


def line(result: str, opcode: str, attributes: str = "") -> str:
    return f"  %x = {result} {opcode}(%y), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, {attributes}"


RING = "{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
BACK = "{{1,0},{2,1},{3,2},{4,3},{5,4},{6,5},{7,6},{0,7}}"


def permute(result: str, pairs: str = RING) -> str:
    return f"  %x = {result} collective-permute(%y), source_target_pairs={pairs}"


def test_pieces_of_an_asynchronous_gather_are_one_and_padded_sums_are_scatters(plan: autopar.Plan):
    verification = compare(plan, LAYERS, TPU_ZERO3, "tpu")
    verification.check()
    assert {(m.kind, m.planned_nbytes, m.compiled_nbytes, m.rewrites) for m in verification.moved} == {
        ("all_gather", 224 * MIB, 224 * MIB, ()),
        ("reduce_scatter", 16 * MIB, 16 * MIB, ("padded",)),
        ("all_reduce", 4, 4, ()),
    }


@pytest.mark.parametrize("gone", range(2))
def test_collectives_of_a_tpu_beyond_the_plan_are_unplanned(plan: autopar.Plan, gone: int):
    kind, dtype, nbytes, count = LAYERS[gone]
    fewer = (*LAYERS[:gone], (kind, dtype, nbytes, count - 1), *LAYERS[gone + 1 :])
    assert {c.kind for c in compare(plan, fewer, TPU_ZERO3, "tpu").unplanned} >= {kind}


def test_a_ring_that_realigns_no_padding_is_unplanned(plan: autopar.Plan):
    text = f"{TPU_ZERO3}\n{permute('bf16[512,2048]')}"
    assert [c.kind for c in compare(plan, LAYERS, text, "tpu").unplanned] == ["permute"]


REWRITES = {
    "combined": (
        (("all_reduce", "bfloat16", 2048, 2), ("all_reduce", "bfloat16", 512, 1)),
        [line("bf16[2304]", "all-reduce-start", "to_apply=%add")],
    ),
    "in parts": ((("all_gather", "float32", 4096, 1),), [line("f32[512]", "all-gather", "dimensions={0}")] * 2),
    "halves": (
        (("all_reduce", "float32", 4096, 1),),
        [
            line("f32[128]", "reduce-scatter", "dimensions={0}, to_apply=%add"),
            line("f32[1024]", "all-gather", "dimensions={0}"),
        ],
    ),
    "as a sum": (
        (("all_gather", "float32", 4096, 1), ("reduce_scatter", "float32", 1024, 1)),
        [line("f32[1024]", "all-reduce", "to_apply=%add"), line("f32[2048]", "all-reduce", "to_apply=%add")],
    ),
    "ring": ((("all_gather", "float32", 4096, 1),), [permute("f32[128]")] * 7),
    "ring both ways": (
        (("reduce_scatter", "float32", 512, 1),),
        [permute("f32[64]")] * 7 + [permute("f32[64]", BACK)] * 7,
    ),
}


@pytest.mark.parametrize("case", REWRITES)
def test_rewrites_are_undone(plan: autopar.Plan, case: str):
    planned, lines = REWRITES[case]
    text = "\n".join(lines)
    verification = compare(plan, planned, text)
    verification.check()
    assert {m.rewrites for m in verification.moved} == {(case.removesuffix(" both ways"),)}
    assert all(m.planned_nbytes == m.compiled_nbytes for m in verification.moved)
    assert case.removesuffix(" both ways") in verification.format()


@pytest.mark.parametrize("case", REWRITES)
def test_a_plan_of_less_is_no_rewrite(plan: autopar.Plan, case: str):
    """Every rewrite is held to its bytes: half of each planned tensor explains none of them."""
    planned, lines = REWRITES[case]
    halved = tuple((kind, dtype, nbytes // 2, count) for kind, dtype, nbytes, count in planned)
    assert compare(plan, halved, "\n".join(lines)).unplanned


@pytest.mark.parametrize("case", REWRITES)
def test_a_plan_of_more_is_missing_something(plan: autopar.Plan, case: str):
    planned, lines = REWRITES[case]
    more = (*planned, (planned[0][0], "float32", 10**6, 1))
    assert not compare(plan, more, "\n".join(lines)).ok


@pytest.mark.parametrize("case", REWRITES)
def test_the_cpu_compiler_makes_none_of_them(plan: autopar.Plan, case: str):
    planned, lines = REWRITES[case]
    assert not compare(plan, planned, "\n".join(lines).replace("bf16", "f32"), platform="cpu").ok


def test_equal_tensors_that_are_combined_may_be_sent_once(plan: autopar.Plan):
    planned = (("all_reduce", "float32", 1024, 3),)
    twice = line("f32[512]", "all-reduce", "to_apply=%add")
    assert compare(plan, planned, twice).ok
    assert not compare(plan, (*planned, ("all_reduce", "float32", 8192, 1)), twice).ok


def test_programs_count_as_often_as_a_step_runs_them(plan: autopar.Plan):
    text = line("f32[256]", "all-reduce", "to_apply=%add")
    assert compare(plan, (("all_reduce", "float32", 1024, 3),), text, runs=3).rows[0].compiled == 3
    assert not compare(plan, (("all_reduce", "float32", 1024, 3),), text, runs=4).ok


NARROWER = {
    "narrowed": ("all_gather", 4096, "all-gather", 2048),
    "as a narrow sum": ("reduce_scatter", 512, "all-reduce", 512),
}


@pytest.mark.parametrize("case", NARROWER)
def test_a_collective_before_widening_accounts_for_the_planned_bytes(plan: autopar.Plan, case: str):
    kind, nbytes, opcode, accounted = NARROWER[case]
    text = line("bf16[1024]", opcode, "dimensions={0}")
    verification = compare(plan, ((kind, "float32", nbytes, 1),), text)
    verification.check()
    (moved,) = verification.moved
    assert moved.rewrites == (case,)
    assert moved.compiled_nbytes == accounted
    assert not compare(plan, ((kind, "float32", 3 * nbytes, 1),), text).ok
    assert not compare(plan, ((kind, "float64", 2 * nbytes, 1),), text).ok


def test_sums_stand_for_scatters_before_they_stand_for_gathers_that_may_be_sent_once(plan: autopar.Plan):
    planned = (("all_gather", "float32", 8192, 2), ("reduce_scatter", "float32", 1024, 1))
    gather, total = line("f32[2048]", "all-gather", "dimensions={0}"), line("f32[2048]", "all-reduce", "to_apply=%add")
    verification = compare(plan, planned, f"{gather}\n{total}")
    verification.check()
    assert {m.kind: m.rewrites for m in verification.moved} == {"all_gather": (), "reduce_scatter": ("as a sum",)}
