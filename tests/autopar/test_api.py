"""The decorator and what it plans: programs told apart as `jax.jit` does, plans in the user's pytrees, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from passes.cluster import parse_cluster

CLUSTER = "1x8:a100-80g"


def train_step(params, batch):
    """One step of plain gradient descent."""

    def loss(params):
        hidden = jnp.tanh(batch["inputs"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["targets"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"up": struct(16, 64), "down": struct(64, 8)}
BATCH = {"inputs": struct(32, 16), "targets": struct(32, 8)}


def parallel(fun: Any = train_step, **options: Any) -> autopar.ParallelFunction:
    options = {"cluster": CLUSTER, "planner": autopar.DataParallel(), **options}
    return autopar.parallelize(fun, **options)


@dataclass(frozen=True)
class Watched:
    """A planner that notes what it was asked."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, step: Any, cluster: Any, options: Any) -> Any:
        self.asked.append({"step": step, "cluster": cluster, "options": options})
        return autopar.DataParallel().plan(step, cluster, options)


# The decorator.


def test_a_parallel_function_looks_like_its_function():
    step = parallel()
    assert isinstance(step, autopar.ParallelFunction)
    assert step.__name__ == "train_step"
    assert step.__doc__ == "One step of plain gradient descent."
    assert step.__wrapped__ is train_step


def test_a_parallel_function_is_shown_by_name_and_place():
    line = train_step.__code__.co_firstlineno
    assert repr(autopar.parallelize(train_step)) == f"<ParallelFunction of {__file__}:{line} (train_step)>"


def test_decorator_bare_and_with_options():
    @autopar.parallelize
    def bare(x):
        return x

    @autopar.parallelize(cluster=CLUSTER, donate_argnums=0)
    def optioned(x):
        return x

    assert isinstance(bare, autopar.ParallelFunction)
    assert optioned.trace(struct(8)).donated == (True,)


def test_a_method_gets_its_instance():
    class Model:
        @autopar.parallelize(cluster=CLUSTER, planner=autopar.DataParallel(), static_argnums=0)
        def loss(self, x):
            return x.sum()

    model = Model()
    assert Model.loss.plan(model, struct(8)).input_names == ("x",)
    assert model.loss.__func__ is Model.loss


def test_a_wrong_option_is_refused_at_once():
    with pytest.raises(TypeError):
        autopar.parallelize(train_step, static_argnums="params")
    with pytest.raises(autopar.ClusterError, match="known devices"):
        autopar.parallelize(train_step, cluster="8 fast ones")


# Planning.


def test_plan_in_the_users_pytrees():
    plan = parallel().plan(PARAMS, BATCH)
    assert isinstance(plan, autopar.Plan)
    (args, kwargs), outputs = plan.shardings
    assert args == ({"up": P(), "down": P()}, {"inputs": P("data"), "targets": P("data")})
    assert kwargs == {}
    assert outputs == ({"up": P(), "down": P()}, P())


def test_plans_in_microbatches_tell_the_shardings_of_whole_batches():
    function = parallel(planner=autopar.Megatron(data=4, tensor=2, microbatches=2))
    compiled = function.lower(PARAMS, BATCH).compile()
    ((params, batch), _), outputs = function.plan(PARAMS, BATCH).shardings
    assert params == {"up": P(None, "tensor"), "down": P("tensor")}
    assert batch == {"inputs": P("data"), "targets": P("data")}
    assert outputs == jax.tree.map(lambda sharding: sharding.spec, compiled.output_shardings)


def test_keyword_arguments_are_a_tree_of_their_own():
    (args, kwargs), _ = parallel().plan(PARAMS, batch=BATCH).shardings
    assert args == ({"up": P(), "down": P()},)
    assert kwargs == {"batch": {"inputs": P("data"), "targets": P("data")}}


def test_plan_touches_no_device(monkeypatch: pytest.MonkeyPatch):
    def devices(*_: Any):
        raise AssertionError("a device was asked for")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax, "local_devices", devices)
    assert parallel().plan(PARAMS, BATCH).mesh.size == 8


def test_cluster_by_name_value_devices_or_default():
    assert parallel(cluster="2x8:a100-80g").plan(PARAMS, BATCH).mesh.size == 16
    assert parallel(cluster=parse_cluster("1x2:h100")).plan(PARAMS, BATCH).mesh.size == 2
    assert parallel(cluster=None).plan(PARAMS, BATCH).mesh.size == len(jax.devices())
    assert parallel(cluster=None, devices=jax.devices()[:2]).plan(PARAMS, BATCH).mesh.size == 2


def test_planner_hears_of_state_and_donation():
    planner = Watched()
    parallel(planner=planner, donate_argnames="params").plan(PARAMS, BATCH)
    (asked,) = planner.asked
    assert asked["step"].state_pairs == ((0, 0), (1, 1))
    assert asked["step"].donated == (True, True, False, False)
    assert asked["cluster"].n_devices == 8


def test_one_plan_for_each_program():
    def f(x, n, y=1.0):
        return x * n + y

    planner = Watched()
    g = parallel(f, planner=planner, static_argnames="n")
    g.plan(struct(8), 2)
    g.plan(struct(8), 2)
    g.plan(jnp.ones(8), 2)
    g.plan(np.ones(8), n=2)  # another structure, as n is no longer among the positional arguments
    assert len(planner.asked) == 1
    g.plan(struct(8), 3)
    g.plan(struct(16), 2)
    g.plan(struct(8, dtype=jnp.bfloat16), 2)
    g.plan(struct(8), 2, 1.0)
    assert len(planner.asked) == 5
    g.plan(struct(8), 2, jnp.asarray(1.0))  # weakly typed, like the number
    assert len(planner.asked) == 5
    g.plan(struct(8), 2, jnp.float32(1.0))
    g.plan(struct(8), 2, y=1.0)
    assert len(planner.asked) == 7


def test_a_saved_plan_is_a_planner(tmp_path: Any):
    plan = parallel().plan(PARAMS, BATCH)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autopar.Plan.load(path)
    assert isinstance(loaded, autopar.Plan)
    assert loaded == plan
    for source in (path, str(path), loaded, plan):
        replayed = parallel(planner=autopar.Manual(source)).plan(PARAMS, BATCH)
        assert replayed == plan
        assert replayed.shardings == plan.shardings


# Errors.


def test_a_loaded_plan_has_no_pytrees(tmp_path: Any):
    parallel().plan(PARAMS, BATCH).save(tmp_path / "plan.json")
    with pytest.raises(autopar.UnboundPlanError, match=r"\.plan\(state, batch\)\.shardings"):
        _ = autopar.Plan.load(tmp_path / "plan.json").shardings


def test_a_plan_for_other_shapes_is_refused():
    plan = parallel().plan(PARAMS, BATCH)
    double = {"inputs": struct(64, 16), "targets": struct(64, 8)}
    with pytest.raises(autopar.PlanMismatchError):
        parallel(planner=autopar.Manual(plan)).plan(PARAMS, double)


def test_a_batch_that_cannot_be_split_is_refused():
    odd = {"inputs": struct(30, 16), "targets": struct(30, 8)}
    with pytest.raises(autopar.PlanningError, match=r"batch\['inputs'\].*30"):
        parallel().plan(PARAMS, odd)


def test_devices_that_are_not_here():
    step = parallel(cluster="2x8:a100-80g")
    params, batch = (jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), tree) for tree in (PARAMS, BATCH))
    for run in (step, step.lower):
        with pytest.raises(autopar.DeviceError, match=r"16 devices \(data=16\).*8 are here") as caught:
            run(params, batch)
        assert f"at {__file__}:" in str(caught.value)
        assert ".plan(...)" in str(caught.value)


def test_arguments_are_checked_in_calls_as_in_plans():
    def f(x, options):
        return x

    step = parallel(f, static_argnames="options")
    for run in (step, step.plan, step.lower, step.trace):
        with pytest.raises(autopar.ArgumentError, match=r"static argument options = \[1\]"):
            run(struct(8), [1])
        with pytest.raises(autopar.ArgumentError, match=r"argument x\['mode'\] = 'fast' of type str"):
            run({"mode": "fast"}, 1)
        with pytest.raises(TypeError, match="missing"):
            run()


# The walk of a call's arguments.


def rooms_entered(call: Callable[[], object]) -> list[str]:
    """The files of autopar that a call goes through in order, each once for a stay: calls alone, no returns."""
    files: list[str] = []
    stack: list[str] = []

    def follow(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename.partition(f"{Path(autopar.__file__).parent}{os.sep}")[2]
            stack.append(file)
            if file and (len(stack) < 2 or stack[-2] != file):
                files.append(file)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def test_the_walk_of_a_call_enters_the_decorator_once():
    step = parallel(lambda w, x: w @ x, cluster="1:cpu")
    for n in (4, 4, 8):  # the first call compiles, the second finds it, the third compiles for another type
        entered = rooms_entered(lambda n=n: step(jnp.ones((2, n)), jnp.ones((n, 2))))
        assert entered[0] == "api.py"
        assert entered.count("api.py") == 1
