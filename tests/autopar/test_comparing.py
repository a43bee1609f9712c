"""Plans of one function stepped here: who is run, in which turn, and what is made of the times, which are stand-ins."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autopar
from autopar import comparing
from autopar.compilation import Compilation
from autopar.errors import ArgumentError
from autopar.profiling import Steps
from autopar.reporting import stepper_of
from passes.errors import PlanningError

WIDTH, ROWS = 32, 16


def step(params: Any, batch: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(jnp.tanh(batch @ p["up"]) @ p["down"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


def arguments() -> tuple[Any, jax.Array]:
    up, down, batch = (jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), 3))
    return {"up": up, "down": down}, batch[:ROWS]


def parallel(**options: Any) -> Any:
    return autopar.parallelize(step, devices=jax.devices()[:4], donate_argnums=0, **options)


def timed_as(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Lets each plan take so many seconds a step, by the first word of its name; the names that are run, in turn."""
    run: list[str] = []

    def in_turn(steppers: Any) -> dict[str, Steps]:
        run.extend(steppers)
        spent = {name: seconds[name.partition("(")[0].partition(" ")[0]] for name in steppers}
        return {name: Steps(seconds=(s, 2 * s, s), host_seconds=(0.0,) * 3) for name, s in spent.items()}

    monkeypatch.setattr(comparing, "_in_turn", in_turn)
    return run


def test_the_fastest_is_taken_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    run = timed_as(monkeypatch, its=3.0, DataParallel=2.0, Zero=4.0, Megatron=1.5)
    monkeypatch.setattr(comparing, "FAR", np.inf)
    params, batch = arguments()
    comparison = autopar.compare(parallel(), (params, batch))
    assert run == [comparing.OWN, *comparing.hand_made(comparison.plan)]
    assert set(run[1:]) == {
        "DataParallel()",
        "Zero(stage=1)",
        "Zero()",
        "Megatron(data=2, tensor=2)",
        "Megatron(data=1, tensor=4)",
    }
    assert [row.name for row in comparison.rows[:2]] == ["Megatron(data=2, tensor=2)", "Megatron(data=1, tensor=4)"]
    assert comparison.plan.shape == "data=2 x tensor=2"
    expected = jax.jit(step)(params, batch)
    found = comparison.fastest(jax.tree.map(jnp.copy, params), batch)
    assert comparison.fastest.plan(params, batch).shape == comparison.plan.shape
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    text = str(comparison)
    assert "Megatron(data=2, tensor=2)" in text
    assert "1.50 s" in text
    assert "2.67" in text  # Zero by the fastest


def test_its_own_plan_stays_if_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, its=1.0, ours=1.5)
    function = parallel()
    comparison = autopar.compare(function, arguments(), planners={"ours": autopar.Zero(3)})
    assert comparison.fastest is function
    assert [row.name for row in comparison.rows] == [comparing.OWN, "ours"]


def test_arguments_stay_the_callers_and_every_round_is_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    params, batch = arguments()
    begun: list[str] = []

    def stepper(compilation: Compilation, leaves: list[Any]) -> Any:
        begun.append(compilation.plan().shape)
        return stepper_of(compilation, leaves)

    monkeypatch.setattr(comparing, "stepper_of", stepper)
    planners = {"zero": autopar.Zero(3), "megatron": autopar.Megatron(data=2, tensor=2)}
    monkeypatch.setattr(comparing, "FAR", np.inf)
    comparison = autopar.compare(
        parallel(planner=autopar.DataParallel()), (params,), {"batch": batch}, planners=planners
    )
    one_round = ["data=4", "data=4", "data=2 x tensor=2"]
    assert begun == [*one_round, *reversed(one_round), *one_round]
    assert all(row.steps and len(row.steps.seconds) == comparing.ROUNDS * comparing.STEPS for row in comparison.rows)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))  # none was donated


def test_plans_that_are_not_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = timed_as(monkeypatch, its=1.0, slow=1.0)
    monkeypatch.setattr(comparing, "FAR", 1.0)
    comparison = autopar.compare(parallel(), arguments())
    assert run == [comparing.OWN]
    assert {row.why for row in comparison.rows[1:]} == {"predicted to take far longer"}
    planners = {"uneven": autopar.Megatron(data=3, tensor=1), "slow": autopar.Megatron(data=1, tensor=4)}
    comparison = autopar.compare(parallel(), arguments(), planners=planners)
    assert run == [comparing.OWN] * 2 + ["slow"]  # it was asked for
    assert [(row.name, bool(row.why)) for row in comparison.rows] == [
        (comparing.OWN, False),
        ("slow", False),
        ("uneven", True),
    ]
    lines = str(comparison).splitlines()
    assert lines[lines.index("not run") + 2].split()[:2] == ["uneven", "-"]


def test_a_plan_that_compiles_to_more_than_the_limit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, its=1.0, Zero=1.0)

    def ready(compilation: Compilation, leaves: list[Any]) -> None:
        if compilation.plan().shape != "data=4":
            raise PlanningError("it needs more")

    function = parallel(planner=autopar.Zero(3))
    monkeypatch.setattr(Compilation, "ready", ready)
    planners = {"Zero": autopar.Zero(1), "Megatron": autopar.Megatron(data=2, tensor=2)}
    monkeypatch.setattr(comparing, "FAR", np.inf)
    rows = autopar.compare(function, arguments(), planners=planners).rows
    assert {row.name: row.why for row in rows} == {comparing.OWN: "", "Zero": "", "Megatron": "it needs more"}
    with pytest.raises(PlanningError, match="it needs more"):
        autopar.compare(parallel(planner=autopar.Megatron(data=2, tensor=2)), arguments(), planners=planners)


def test_arguments_of_compare_that_fit_no_step_are_refused() -> None:
    params, batch = arguments()
    with pytest.raises(ArgumentError, match=r"(?s)compare\(.*pass autopar\.parallelize"):
        autopar.compare(step, (params, batch))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"(?s)args=.*compare\(train_step, \(state, batch\)\)"):
        autopar.compare(parallel(), batch)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"(?s)kwargs=5.*\{'batch': batch\}"):
        autopar.compare(parallel(), (params, batch), 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"(?s)planners=.*planners=\{'mine'"):
        autopar.compare(parallel(), (params, batch), planners=[autopar.Zero(3)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="which is always compared"):
        autopar.compare(parallel(), (params, batch), planners={comparing.OWN: autopar.Zero(3)})
    with pytest.raises(ArgumentError, match="a planner has a method plan"):
        autopar.compare(parallel(), (params, batch), planners={"three": 3})  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_stages_are_compared() -> None:
    planners = {"stages": autopar.GPipe(stages=2, microbatches=2)}
    rows = autopar.compare(parallel(), arguments(), planners=planners).rows
    assert {row.plan.shape for row in rows if row.plan and row.steps} >= {"2 stages"}


def test_modules_are_compared() -> None:
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    @autopar.parallelize(devices=jax.devices()[:4])
    def train_step(model: nnx.Linear, batch: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model), grads))
        return loss

    before, batch = jnp.array(model.kernel[...]), arguments()[1]
    comparison = autopar.compare(train_step, (model, batch), planners={"zero": autopar.Zero(3)})
    assert {row.name for row in comparison.rows if row.steps} == {comparing.OWN, "zero"}
    np.testing.assert_array_equal(model.kernel[...], before)
    assert comparison.fastest(model, batch) == pytest.approx(float(jnp.sum((batch @ before) ** 2)), rel=1e-5)
