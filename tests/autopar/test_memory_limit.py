"""Plans under a memory limit: they fit when compiled, take the same step, and say what is missing where none fits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
import passes.plan
from autopar import Plan
from autopar.errors import ArgumentError
from autopar.frontend import trace
from passes.cluster import parse_cluster
from passes.errors import OverBudgetError, PlanMismatchError, PlanningError
from passes.intra_op import MeshProblems, MeshSearch, cheapest_variant, hand_made, memory_limit, named, restrictions
from passes.limits import Limits
from passes.solver import SolverOptions, solve
from passes.step import Step
from tests.autopar.rewrite.deep_steps import arguments, momentum_step, train_step, wide
from tests.autopar.tools.test_progress import varied
from tests.closeness import assert_close

BRIEF = autopar.Auto(seconds=2.0)


def nbytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


@pytest.mark.usefixtures("as_users_compile")
def test_activations_are_recomputed_to_fit():
    with jax.enable_x64(True):
        given = arguments("float64")
        free = autopar.parallelize(train_step, devices=jax.devices()[:1]).plan(*given)
        limit = int(0.76 * free.peak_nbytes)
        step = autopar.parallelize(train_step, devices=jax.devices()[:1], memory_limit=limit)
        compiled = step.lower(*given).compile()
        plan = compiled.plan
        assert plan.peak_nbytes <= limit
        assert nbytes(compiled) <= limit
        assert plan.remat or plan.microbatches > 1
        assert plan.solution.bound <= (1 + 1e-9) * free.step_seconds < plan.step_seconds  # of all ways, not of this one
        assert_close(compiled(*given), jax.jit(train_step)(*given))


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_compile")
def test_state_is_cut_to_fit():
    with jax.enable_x64(True):
        given = wide("float64")
        free = autopar.parallelize(momentum_step, planner=autopar.DataParallel(), donate_argnums=0)
        peak = free.plan(*given).peak_nbytes
        step = autopar.parallelize(momentum_step, donate_argnums=0, memory_limit=peak // 2)
        compiled = step.lower(*given).compile()
        assert nbytes(compiled) <= peak // 2
        wanted = jax.jit(momentum_step)(*given)
        assert_close(compiled(*jax.tree.map(jnp.copy, given)), wanted)


@pytest.mark.xfail(
    jax.__version_info__ < (0, 10, 2),
    reason="XLA:CPU of jaxlib 0.10.1 has none",
    strict=True,
    raises=autopar.DeviceError,
)
def test_offloaded_state_rests_with_the_host_and_the_step_is_the_same(tmp_path: Any):
    with jax.enable_x64(True):
        given = wide("float64")
        wanted = given
        for _ in range(3):
            wanted = (jax.jit(momentum_step)(*wanted)[0], given[1])
        plan = autopar.parallelize(momentum_step, planner=autopar.DataParallel(), donate_argnums=0).plan(*given)
        idle = tuple(i for i, name in enumerate(plan.input_names) if name.startswith("state[1]") and "trace" in name)
        assert len(idle) == 2
        edited = Plan.from_json({**plan.to_json(), "offloaded": list(idle)})
        edited.save(tmp_path / "plan.json")
        step = autopar.parallelize(momentum_step, planner=autopar.Manual(tmp_path / "plan.json"), donate_argnums=0)
        state = jax.tree.map(jnp.copy, given[0])
        for _ in range(3):
            state, _ = step(state, given[1])
        assert_close(state, wanted[0])
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[1])}
        assert kinds == {"pinned_host"}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state[0])} != kinds


@functools.cache
def refused() -> OverBudgetError:
    """What a search says that finds nothing for ten kilobytes."""
    with pytest.raises(OverBudgetError) as caught:
        autopar.parallelize(momentum_step, planner=BRIEF, memory_limit=10_000, donate_argnums=0).plan(*wide())
    return caught.value


@pytest.mark.slow
def test_a_refusal_says_how_many_bytes_are_missing():
    message = str(refused())
    assert "8 devices with 9.77 KiB each" in message
    assert "the plan of least memory found needs" in message
    assert "more on each device (memory_limit=" in message


def test_nothing_is_solved_within_a_limit_that_is_seen_to_be_out_of_reach(monkeypatch: pytest.MonkeyPatch):
    """Neither hand-made plans nor programs with budgets: the least that is live says so at once."""
    state, batch = wide()
    traced = trace(momentum_step, (state, batch), {}, donate_argnums=(0,))
    problems = MeshProblems(step=Step(graph=traced.graph, state_pairs=traced.state_pairs, donated=traced.donated))
    search = MeshSearch(
        planner="auto", problems=problems, options=SolverOptions(), hand_made_plans=restrictions.hand_made_plans
    )
    search.over([named(parse_cluster("8:h100"), ("x", 8))])
    least = search.least_memory().peak_nbytes
    asked: list[object] = []
    for module in (hand_made, memory_limit):
        monkeypatch.setattr(module, "solve", lambda *given, **options: asked.append(given) or solve(*given, **options))
    with pytest.raises(OverBudgetError):
        search.cheapest_within(Limits.equal(least / 4))
    assert not asked
    assert search.cheapest_within(Limits.equal(least)).peak_nbytes <= least
    assert asked


def test_fewer_microbatches_are_tried_once_more_than_the_fewest_that_were_seen_to_fit():
    """That nothing was found for the variant of least memory in two microbatches, the third planned, is no proof."""
    search = varied(lambda _: None, {3: 0.9, 6: 0.5})
    assert cheapest_variant(search).microbatches == 2
    assert {variant.count for variant in search.planned if not variant.kept} == {1, 2, 4}


@pytest.mark.slow
def test_a_limit_above_the_least_that_is_named_does():
    needed = int(str(refused()).split("memory_limit=")[1].split(" ")[0].replace(",", ""))
    least = refused().least_memory_plan
    assert isinstance(least, passes.plan.Plan)
    assert least.peak_nbytes == needed > 10_000
    plan = autopar.parallelize(momentum_step, planner=BRIEF, memory_limit=needed, donate_argnums=0).plan(*wide())
    assert plan.peak_nbytes <= needed


def test_a_hand_made_plan_above_the_limit_is_refused():
    with pytest.raises(OverBudgetError, match=r"use planner=autopar\.Auto"):
        autopar.parallelize(momentum_step, planner=autopar.DataParallel(), memory_limit="10 kB").plan(*wide())


@pytest.mark.parametrize(("words", "size"), [("2 MiB", 2 << 20), ("1.5 GB", 1_500_000_000), ("4096", 4096)])
def test_limits_are_read_in_words(words: str, size: int):
    assert autopar.parallelize(momentum_step, memory_limit=words)._settings.memory_limit == size


@pytest.mark.parametrize("wrong", [0, -1, "much", True, "1.2.3 GiB"])
def test_a_wrong_limit_is_said(wrong: Any):
    with pytest.raises(ArgumentError, match="memory_limit="):
        autopar.parallelize(momentum_step, memory_limit=wrong)


def test_offloaded_inputs_of_a_file_are_checked():
    plan = autopar.parallelize(momentum_step, planner=autopar.DataParallel()).plan(*wide())
    with pytest.raises(PlanningError, match=r"offloaded\[0\]"):
        Plan.from_json({**plan.to_json(), "offloaded": [99]})
    edited = Plan.from_json({**plan.to_json(), "offloaded": [0, 1, 2, 3]})
    with pytest.raises(PlanMismatchError, match=r"input state\[0\].* is offloaded, and is no state"):
        autopar.parallelize(momentum_step, planner=autopar.Manual(edited)).plan(*wide())
