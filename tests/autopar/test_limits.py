"""A limit is kept or an error says so: by hand-made plans, and by what XLA makes of any plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar import DataParallel, GPipe, Megatron, Pipeline, Zero
from autopar.frontend import trace
from autopar.runtime import limit_of, pipeline_nbytes
from passes import memory
from passes.cluster import local_cluster, parse_cluster
from passes.errors import OverBudgetError
from passes.inter_op import StageCost, build, peaks
from passes.intra_op import MeshProblems, MeshSearch, mesh_problems, named
from passes.intra_op import extract as read_off
from passes.planners import infeasible, manual
from passes.solver import SolverOptions
from passes.step import Step
from tests.autopar.rewrite.deep_steps import momentum_step, wide
from tests.autopar.runtime.pipeline_steps import OPTIMIZERS, mlp, squared, step_of
from tests.autopar.runtime.test_donation import on, pipeline_of
from tests.closeness import assert_close
from tests.sample import half, slow

WEIGHT = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)  # 16 GiB
GIB = 2**30


def dense(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = x
        for name in sorted(params):
            h = jnp.tanh(h @ params[name])
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(jnp.subtract, params, grads), value


LARGE = {f"l{i}": WEIGHT for i in range(4)}, jax.ShapeDtypeStruct((16, 65536), jnp.float32)


@pytest.mark.parametrize(
    "planner",
    [DataParallel(), Zero(2), Zero(3), Megatron(data=1, tensor=2), Pipeline(stages=2, microbatches=2), GPipe(2, 2)],
    ids=["dp", "zero2", "zero3", "megatron", "pipeline", "gpipe"],
)
def test_a_hand_made_plan_for_devices_that_are_too_small_is_an_error(planner: Any):
    step = autopar.parallelize(dense, cluster="2:v100-16g", planner=planner, donate_argnums=0)
    with pytest.raises(OverBudgetError) as caught:
        step.plan(*LARGE)
    message, plan = str(caught.value), caught.value.least_memory_plan
    assert plan.peak_nbytes > 32 * GIB  # half of the weights
    assert f"{plan.peak_nbytes:,} bytes" in message
    assert "'2:v100-16g', whose devices have 16.0 GiB each" in message
    assert "parameters" in message or "state" in message
    assert __file__ in message
    asked = int(re.findall(r"memory_limit=([\d,]+)", message)[-1].replace(",", ""))
    assert step.replan(memory_limit=asked).plan(*LARGE).peak_nbytes == asked
    with pytest.raises(OverBudgetError, match=f"memory_limit={asked - 1:,} bytes"):
        step.replan(memory_limit=asked - 1).plan(*LARGE)


def test_virtual_devices_share_their_machine_and_have_no_limit_of_their_own():
    local = local_cluster(jax.devices())
    assert infeasible.device_memory_nbytes(local) == float("inf")
    assert infeasible.device_memory_nbytes(parse_cluster("8:h100")) == 80 * GIB
    plan = autopar.parallelize(dense, planner=DataParallel()).plan(*LARGE)
    assert plan.peak_nbytes > local.group().device.memory_nbytes


def test_compiled_programs_are_held_against_what_was_asked_or_what_real_devices_have():
    plan = autopar.parallelize(momentum_step, planner=DataParallel(), cluster="8:h100").plan(*wide())
    real, virtual = [SimpleNamespace(platform="gpu")], jax.devices()
    assert limit_of(plan, virtual, None, "", searched=False) is None
    for devices in (real, virtual):
        limit = limit_of(plan, devices, 1000, "", searched=False)
        assert limit is not None
        assert limit.nbytes == 1000
    limit = limit_of(plan, real, None, "at train.py:3 (step)", searched=False)
    assert limit is not None
    assert limit.nbytes == 80 * GIB
    message = str(limit.error(plan, 100 * GIB))
    assert "80.0 GiB each" in message
    assert f"{100 * GIB:,} bytes" in message
    assert f"{plan.peak_nbytes:,} bytes" in message


def update(loss: Any) -> Any:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mixed(w: jax.Array, a: jax.Array) -> jax.Array:
    product = a.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return (product.astype(jnp.float32) ** 2).mean()


def attended(w: jax.Array, a: jax.Array) -> jax.Array:
    rows = a.reshape(8, 32, 64)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", rows @ w, rows).astype(jnp.float32)).astype(a.dtype)
    return (jnp.einsum("bqk,bkd->bqd", weights, rows) ** 2).mean()


def recurrent(w: jax.Array, a: jax.Array) -> jax.Array:
    return (lax.scan(lambda h, r: (jnp.tanh(h @ w + r),) * 2, a[:16], a.reshape(16, 16, 64))[1] ** 2).mean()


FUNCTIONS = {
    "mixed": update(mixed),
    "attention": update(attended),
    "scan": update(recurrent),
    "sort": lambda w, a: jnp.sort(a, 0) @ w,
    "scatter": lambda w, a: jnp.zeros((512, 64), a.dtype).at[jnp.arange(256) * 7 % 512].add(a) @ w,
}


@pytest.mark.parametrize(("name", "dtype"), half(FUNCTIONS, ("float32", "bfloat16")))
def test_a_compiled_program_keeps_the_limit_or_raises(name: str, dtype: str):
    given = jax.ShapeDtypeStruct((64, 64), dtype), jax.ShapeDtypeStruct((256, 64), dtype)
    free = autopar.parallelize(FUNCTIONS[name], planner=DataParallel(), devices=jax.devices()[:2])
    needed, planned = free.lower(*given).compile().needed_nbytes, free.plan(*given).peak_nbytes
    assert nbytes_kept(free.replan(memory_limit=max(needed, planned)), given) == needed
    limit = min(needed, planned) - 1  # by one count or by both it is too little
    if planned <= needed - 1:
        limit = needed - 1  # the plan is within it, what XLA makes of it is not
    with pytest.raises(OverBudgetError) as caught:
        free.replan(memory_limit=limit).lower(*given).compile()
    assert f"{limit:,} bytes" in str(caught.value)
    assert f"{planned:,} bytes" in str(caught.value)
    assert planned > limit or f"{needed:,} bytes" in str(caught.value)


def nbytes_kept(step: Any, given: Any) -> int:
    needed: int = step.lower(*given).compile().needed_nbytes
    return needed


def underestimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the memory model see six tenths of what is needed."""
    true = memory.peak

    def short(*args: Any, **kwargs: Any) -> Any:
        found = true(*args, **kwargs)
        return replace(found, nbytes={cause: int(0.6 * nbytes) for cause, nbytes in found.nbytes.items()})

    for module in (mesh_problems, read_off):
        monkeypatch.setattr(module, "peak", short)


def test_the_first_call_checks_what_it_compiles_as_well(monkeypatch: pytest.MonkeyPatch):
    underestimate(monkeypatch)
    given = jnp.ones((64, 64)), jnp.ones((256, 64))
    free = autopar.parallelize(FUNCTIONS["mixed"], planner=DataParallel(), devices=jax.devices()[:2])
    needed, planned = nbytes_kept(free, given), free.plan(*given).peak_nbytes
    assert planned < needed
    with pytest.raises(OverBudgetError, match=f"compiled, the step needs {needed:,} bytes"):
        free.replan(memory_limit=needed - 1)(*given)
    step = free.replan(memory_limit=needed)
    for _ in range(2):
        assert_close(step(*given), jax.jit(FUNCTIONS["mixed"])(*given), 1e-5)
    grown = jax.jit(step)(*given)  # inside another transformation it is that one's program
    assert_close(grown, jax.jit(FUNCTIONS["mixed"])(*given), 1e-5)


@pytest.mark.slow
def test_a_search_tries_again_for_as_much_less_as_xla_needed_more(monkeypatch: pytest.MonkeyPatch):
    """A memory model that sees six tenths of what is needed: the first plan is over the limit, the second keeps it."""
    step = update(lambda w, a: ((a @ w) ** 2).mean())
    given = jnp.ones((256, 256)) / 16, jnp.ones((512, 256))
    free = autopar.parallelize(step, planner=autopar.Auto(seconds=2.0), devices=jax.devices()[:2])
    needed = nbytes_kept(free, given)
    underestimate(monkeypatch)
    limited = free.replan(memory_limit=int(0.9 * needed))
    first = limited.plan(*given)
    lowered = limited.lower(*given)
    assert lowered.plan == first
    again = lowered.compile()
    assert again.plan != first
    assert again.needed_nbytes <= 0.9 * needed
    assert limited.plan(*given) == again.plan
    assert_close(limited(*given), jax.jit(step)(*given), 1e-5)
    called = free.replan(memory_limit=int(0.9 * needed))
    assert_close(called(*given), jax.jit(step)(*given), 1e-5)
    assert called.plan(*given).layout == again.plan.layout
    with pytest.raises(OverBudgetError, match="compiled, the step needs"):
        free.replan(memory_limit=int(0.46 * needed))(*given)


@pytest.mark.parametrize("donated", [slow(True), slow(False)])
def test_a_pipelines_peak_is_what_its_stages_need(donated: bool):
    """State, twice unless it is donated, what is in flight and working memory, within the bounds of other plans."""
    params, batch = mlp(rows=4096)
    for optimizer in ("sgd", "adamw+clip"):
        step, state = step_of(squared, OPTIMIZERS[optimizer]), (params, OPTIMIZERS[optimizer].init(params))
        parallel = on(step, Pipeline(stages=2, microbatches=2), devices=2, donate_argnums=0 if donated else ())
        parallel(jax.tree.map(jnp.array, state), batch)
        pipeline, plan = pipeline_of(parallel), parallel.plan(state, batch)
        compiled = pipeline_nbytes(pipeline.program, pipeline.executables)
        assert -0.05 < plan.peak_nbytes / compiled - 1 < 0.15
        with pytest.raises(OverBudgetError) as caught:
            parallel.replan(memory_limit=min(compiled, plan.peak_nbytes) - 1)(state, batch)
        assert f"{plan.peak_nbytes:,} bytes" in str(caught.value)


def test_a_compiled_pipeline_over_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """A plan that promises too little is found out at the first call, with nothing run."""
    params, batch = mlp()
    step, state = step_of(squared, OPTIMIZERS["sgd"]), (params, OPTIMIZERS["sgd"].init(params))
    parallel = on(step)
    plan = parallel.plan(state, batch)
    small = replace(plan, costs=tuple(replace(cost, persistent_nbytes=0, in_flight_nbytes=0) for cost in plan.costs))
    assert small.peak_nbytes < plan.peak_nbytes
    monkeypatch.setattr(manual, "recounted", lambda plan, *_: plan)  # which would find it out before
    promised = on(step, autopar.Manual(small), memory_limit=small.peak_nbytes, donate_argnums=0)
    with pytest.raises(OverBudgetError) as caught:
        promised(state, batch)
    assert f"{small.peak_nbytes:,} bytes" in str(caught.value)
    assert "compiled, the step needs" in str(caught.value)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_pipelines_peak_is_in_its_tasks_or_at_its_end():
    cost = StageCost(forward_seconds=1.0, backward_seconds=2.0, persistent_nbytes=100, in_flight_nbytes=10)
    busy = replace(cost, working_nbytes=7, finish_nbytes=5)
    late = replace(cost, working_nbytes=7, finish_nbytes=90)
    first, last = peaks(build("1f1b", 2, 4), [busy, late])
    assert sum(first.values()) == 100 + 2 * 10 + 7
    assert sum(last.values()) == 100 + 90


def test_no_bytes_of_a_plan_are_negative_with_state_offloaded():
    traced = trace(momentum_step, wide(), {}, donate_argnums=0)
    cluster = parse_cluster("2:h100")
    step = Step(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated)
    problems = MeshProblems(step=step, offload=True)
    search = MeshSearch(planner="auto", problems=problems, options=SolverOptions())
    search.over([named(cluster, ("data", 2))])
    assert not search.cheapest.offloaded
    (solved,) = search.solved
    away = solved.assembly.offloading(solved.answer.choice, solved.assembly.idle)
    plan = problems.plan("auto", solved, replace(solved.answer, choice=away))
    there = autopar.parallelize(momentum_step, planner=DataParallel(), cluster=cluster, donate_argnums=0).plan(*wide())
    assert len(plan.offloaded) == 2
    assert min(plan.nbytes.values()) >= 0
    assert plan.peak_nbytes == sum(plan.nbytes.values())
    assert sum(plan.offloaded_nbytes) == there.nbytes["optimizer state"]


@pytest.mark.slow
def test_a_plan_with_state_on_the_host_is_the_same_read_again(tmp_path: Path) -> None:
    """Its bytes, seconds and status are those that were planned, and it keeps the limit that it was made for.

    No more is with the host than that asks for: of 8 arrays, none could stay without another that comes.
    """
    layer = {"a": jax.ShapeDtypeStruct((512, 2048), jnp.float32), "b": jax.ShapeDtypeStruct((2048, 512), jnp.float32)}
    params = [layer] * 2

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = x + jnp.tanh(x @ layer["a"]) @ layer["b"]
        return jnp.mean(x**2)

    def step(state: Any, x: jax.Array) -> Any:
        params, mean, square = state
        gradients = jax.grad(loss)(params, x)
        mean = jax.tree.map(lambda m, g: 0.9 * m + g, mean, gradients)
        square = jax.tree.map(lambda v, g: 0.9 * v + g * g, square, gradients)
        params = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-6), params, mean, square)
        return params, mean, square

    arguments, file = ((params,) * 3, jax.ShapeDtypeStruct((256, 512), jnp.float32)), tmp_path / "plan.json"
    options: dict[str, Any] = {"cluster": "8:a100-80g", "donate_argnums": 0}
    planner = autopar.Auto(memory_limit="9 MiB", max_axes=1)
    plan = autopar.parallelize(step, planner=planner, **options).plan(*arguments)
    assert 2 < len(plan.offloaded) < 8
    left = 9 * 2**20 / (1 + memory.margin_of(plan.cluster.group().device)) - plan.peak_nbytes
    assert 0 <= left < 2 * max(plan.offloaded_nbytes)  # an update reads two
    plan.save(file)
    again = autopar.parallelize(step, planner=autopar.Manual(file), memory_limit="9 MiB", **options).plan(*arguments)
    assert (again.nbytes, again.seconds, again.peak_nbytes) == (plan.nbytes, plan.seconds, plan.peak_nbytes)
    assert again.solution.status == plan.solution.status


def test_a_mesh_that_the_user_fixed_is_not_said_to_have_too_few_devices() -> None:
    planner = autopar.Auto(mesh={"data": 8}, memory_limit="10 KiB")
    with pytest.raises(OverBudgetError, match="more on each device") as error:
        autopar.parallelize(momentum_step, planner=planner, cluster="8:a100-80g").plan(*wide())
    assert "x 2" not in str(error.value)
