"""A compiled program is held to its plan: what it may save, and what it may not add."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.checks import Verification, verify
from autopar.checks.hlo import UNCOMBINED
from benchmarks.trainings import MODELS, make_state, make_step
from passes.cluster import Collective, Mesh, parse_cluster
from passes.sharding import ShardingSpec
from tests.sample import slow


def train_step(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch["inputs"] @ params["up"])
        return jnp.sum((hidden @ params["down"] - batch["targets"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value


def arguments(dtype: str) -> tuple[Any, Any]:
    shapes = {"up": (16, 64), "down": (64, 8)}, {"inputs": (32, 16), "targets": (32, 8)}
    return tuple({name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in group.items()} for group in shapes)


def lowered(planner: Any, dtype: str = "float32", fun: Any = train_step) -> Any:
    return autopar.parallelize(fun, planner=planner).lower(*arguments(dtype))


@pytest.fixture(scope="module")
def megatron() -> tuple[Any, str]:
    """A plan and the program compiled from it."""
    compiled = lowered(autopar.Megatron(data=2, tensor=4)).compile(dict(UNCOMBINED))
    return compiled.plan, compiled.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Zero(3)], ids=["dp", "zero"])
def test_planned_program_passes(planner: Any, dtype: str):
    """Whatever the types it is sent in: XLA's CPU backend sends bfloat16 as float32."""
    verification = lowered(planner, dtype).verify()
    assert verification.ok
    assert verification.rows
    verification.check()
    assert all(0 < row.compiled == row.planned for row in verification.rows)


def test_compiled_programs_verify_themselves():
    step = lowered(autopar.DataParallel())
    assert step.compile().verify() == step.verify()


def test_every_missing_collective_is_missed(megatron: tuple[Any, str]):
    plan, text = megatron
    assert len(plan.collectives) > 1
    for i, gone in enumerate(plan.collectives):
        verification = verify(replace(plan, collectives=plan.collectives[:i] + plan.collectives[i + 1 :]), text)
        assert not verification.ok
        assert Counter({(c.kind, c.axes, c.nbytes): c.count for c in verification.unplanned}) == {
            (gone.kind, gone.axes, gone.nbytes): gone.count
        }
        with pytest.raises(autopar.InternalError, match=f"{gone.kind}@.*move_") as raised:
            verification.check()
        assert ".py:" in str(raised.value)


def test_fewer_tensors_than_planned_pass_while_one_is_left(megatron: tuple[Any, str]):
    plan, text = megatron
    doubled = replace(plan, collectives=tuple(replace(c, count=2 * c.count) for c in plan.collectives))
    assert verify(doubled, text).ok


def test_a_planned_collective_that_is_never_sent_is_missing(megatron: tuple[Any, str]):
    plan, text = megatron
    assert plan.collectives
    for one in plan.collectives:
        other = replace(one, nbytes=4 * one.nbytes + 4, count=2)
        verification = verify(replace(plan, collectives=(*plan.collectives, other)), text)
        assert not verification.ok
        assert [(row.kind, row.axes, row.planned, row.compiled) for row in verification.missing] == [
            (one.kind, one.axes, 2, 0)
        ]
        with pytest.raises(autopar.InternalError, match=rf"lacks 2 tensors .*\n.*{one.kind}@"):
            verification.check()


def test_values_computed_twice_are_sent_once():
    """Equal sums of one value, as of the gradients of two biases that are added: XLA merges them, and so do plans."""

    def step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["inputs"] @ params["up"] + params["a"] + params["b"])
            return jnp.sum((hidden @ params["down"] - batch["targets"]) ** 2)

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    params, batch = arguments("float32")
    params |= {name: jax.ShapeDtypeStruct((64,), "float32") for name in ("a", "b")}
    verification = autopar.parallelize(step, planner=autopar.DataParallel()).lower(params, batch).verify()
    verification.check()
    once = sum(p.size for p in jax.tree.leaves(params)) * 4 - params["b"].size * 4
    assert sum(row.planned * row.nbytes for row in verification.rows) == once


def test_an_edited_plan_has_the_numbers_of_its_placements():
    args = arguments("float32")
    fresh = autopar.parallelize(train_step, planner=autopar.DataParallel(), donate_argnums=0)
    plan = fresh.plan(*args)
    again = fresh.replan(planner=autopar.Manual(plan)).plan(*args)
    assert again == plan
    assert fresh.replan(planner=autopar.Manual(replace(plan, counted_for="others"))).plan(*args) == plan
    changed = {"nbytes": {**plan.nbytes, "outputs": 10**9}, "counted_for": "others"}
    stale = replace(plan, collectives=plan.collectives[:1], **changed)
    counted = fresh.replan(planner=autopar.Manual(stale)).plan(*args)
    assert (counted.collectives, counted.seconds, counted.nbytes) == (plan.collectives, plan.seconds, plan.nbytes)
    assert counted.solution.status == "edited"
    assert not counted.is_stale


@pytest.mark.parametrize(
    ("planner", "microbatches"),
    [slow(autopar.Zero(3), None), (autopar.Megatron(data=2, tensor=4), None), slow(autopar.DataParallel(), 2)],
    ids=["zero", "megatron", "microbatches"],
)
def test_seconds_of_computing_follow_from_placements(planner: Any, microbatches: int | None):
    """What each operator group was priced with is found again in the layout: in loops, cut by several axes, gathered
    late.
    """
    model, optimizer = MODELS["llama-scan"], optax.adamw(1e-3)
    state = jax.eval_shape(partial(make_state, model.module, model.least, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, model.least, 16), jax.random.key(1))
    step = make_step(model.module, model.least, optimizer)
    parallel = autopar.parallelize(step, cluster="8:a100-80g", planner=planner, microbatches=microbatches)
    plan = parallel.plan(state, batch)
    stale = replace(plan, seconds={**plan.seconds, "compute": 1.0}, phases={})
    counted = parallel.replan(planner=autopar.Manual(stale)).plan(state, batch)
    assert counted.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert counted.phases == pytest.approx(plan.phases, rel=1e-9)
    assert counted.solution.status == "edited"


@pytest.mark.slow
def test_an_edited_stage_has_the_numbers_of_its_placements_and_so_has_its_pipeline():
    model, optimizer = MODELS["gpt-scan"], optax.sgd(0.1)
    state = jax.eval_shape(partial(make_state, model.module, model.least, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, model.least, 16), jax.random.key(1))
    step = make_step(model.module, model.least, optimizer)
    parallel = autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.GPipe(2, 2), donate_argnums=0)
    plan = parallel.plan(state, batch)
    assert parallel.replan(planner=autopar.Manual(plan)).plan(state, batch) == plan
    first = plan.stages[0]
    stale = replace(first, seconds={**first.seconds, "compute": 1.0}, phases={"forward": 1.0}, collectives=())
    cheap = replace(plan.costs[1], persistent_nbytes=0)
    edited = replace(plan, stages=(stale, *plan.stages[1:]), costs=(plan.costs[0], cheap))
    counted = parallel.replan(planner=autopar.Manual(edited)).plan(state, batch)
    assert counted.stages[0].seconds == pytest.approx(first.seconds, rel=1e-9)
    assert counted.stages[0].collectives == first.collectives
    assert counted.stages[1] == plan.stages[1]
    assert counted.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert counted.nbytes == plan.nbytes


def test_an_edited_plan_sends_what_it_says():
    args = arguments("float32")
    fresh = autopar.parallelize(train_step, planner=autopar.DataParallel(), donate_argnums=0)
    plan = fresh.plan(*args)
    cut = ShardingSpec(dims=(("data",), ()))
    position = plan.input_names.index("params['up']")
    edited = replace(plan, inputs=tuple(cut if i == position else spec for i, spec in enumerate(plan.inputs)))
    step = fresh.replan(planner=autopar.Manual(edited))
    planned = step.plan(*args)
    assert {c.kind for c in planned.collectives} - {c.kind for c in plan.collectives} == {"all_gather"}
    assert planned.step_seconds > plan.step_seconds
    step.lower(*args).verify().check()


LINE = '  %{name} = f32[16,8]{{1,0}} {opcode}(%p), {who}, metadata={{op_name="jit(f)/{name}"}}'
EXTRA = {
    "a kind": ("all-gather", "replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", "all_gather@data"),
    "an axis": ("all-reduce", "replica_groups=[1,8]<=[8], to_apply=%add", "all_reduce@data,tensor"),
    "a permute": ("collective-permute", "source_target_pairs={{0,1},{1,0}}", "permute@tensor"),
    "groups off the mesh": ("all-reduce", "replica_groups={{0,5},{1,4},{2,7},{3,6}}, to_apply=%add", r"all_reduce@\?"),
    "a tensor": ("all-reduce", "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", "all_reduce@data"),
}


@pytest.mark.parametrize("extra", EXTRA)
def test_whatever_is_not_planned_is_found(megatron: tuple[Any, str], extra: str):
    plan, text = megatron
    opcode, who, named = EXTRA[extra]
    verification = verify(plan, f"{text}\n{LINE.format(name='extra', opcode=opcode, who=who)}\n")
    assert [c.op_name for c in verification.unplanned] == ["jit(f)/extra"]
    with pytest.raises(autopar.InternalError, match=named):
        verification.check()


def all_reduces(*axes: tuple[str, ...], dtype: str = "float32", nbytes: int = 512) -> tuple[Collective, ...]:
    return tuple(Collective(kind="all_reduce", axes=a, dtype=dtype, nbytes=nbytes, count=1, where="") for a in axes)


def compare(
    megatron: tuple[Any, str], planned: tuple[Collective, ...], *lines: str, platform: str = "cpu"
) -> Verification:
    plan, _ = megatron
    mesh = Mesh(axes=("data", "tensor"), sizes=(2, 4), cluster=parse_cluster("1x8:a100-80g"))
    return verify(replace(plan, mesh=mesh, collectives=planned), "\n".join(lines), platform=platform)


def test_reductions_over_two_axes_may_merge(megatron: tuple[Any, str]):
    """XLA's GPU compiler makes one all-reduce over both axes of two over one each."""
    merged = LINE.format(name="both", opcode="all-reduce", who="replica_groups=[1,8]<=[8], to_apply=%add")
    apart = all_reduces(("data",), ("tensor",))
    assert compare(megatron, apart, merged).ok
    assert not compare(megatron, apart, merged, merged).ok
    assert not compare(megatron, apart[:1], merged).ok
    alone = LINE.format(name="one", opcode="all-reduce", who="replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add")
    assert not compare(megatron, apart, merged, alone).ok


@pytest.mark.parametrize(
    ("dtype", "sent", "platform"),
    [
        ("bfloat16", "f32", "cpu"),
        ("bfloat16", "bf16", "gpu"),
        ("float16", "f16", "cpu"),
        ("float8_e4m3fn", "f16", "cpu"),
        ("float8_e8m0fnu", "f32", "cpu"),
        ("int4", "s8", "cpu"),
        ("bool", "s32", "cpu"),
        ("bool", "s32", "gpu"),
    ],
)
def test_types_are_widened_as_the_platform_does(megatron: tuple[Any, str], dtype: str, sent: str, platform: str):
    planned = replace(all_reduces(("data",), dtype=dtype)[0], nbytes=2 * 128 if dtype.endswith("16") else 128)
    line = LINE.format(name="one", opcode="all-reduce", who="replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add")
    assert compare(megatron, (planned,), line.replace("f32", sent), platform=platform).ok
    assert not compare(megatron, (planned,), line.replace("f32", "f64"), platform=platform).ok


def test_text_shows_both_sides(megatron: tuple[Any, str]):
    plan, text = megatron
    found = verify(replace(plan, collectives=plan.collectives[:-1]), text).format()
    assert max(map(len, found.splitlines())) <= 80
    assert "unplanned: 1" in found
    assert "compiled" in found.splitlines()[0]
    assert verify(plan, text).format().startswith("collectives of one step: 2 planned")
