"""Loops and branches in plans: what is brought in before them, what is sent inside, how often, how it is written."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from models import gpt, llama
from passes.errors import PlanMismatchError
from passes.plan import json as plan_json
from tests.sample import slow

LAYERS, BATCH, WIDTH = 4, 16, 32
GPT = gpt.Config(vocab_size=64, sequence_length=16, hidden=32, layers=3, heads=4, scan_layers=True, remat=True)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 8, jnp.float32)


def layers(params, x):
    def layer(hidden, weights):
        up, down = weights
        return hidden + jnp.tanh(hidden @ up) @ down, None

    return jax.lax.scan(layer, x, params)[0]


def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(layers(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


ARGS = ((array(LAYERS, WIDTH, 64), array(LAYERS, 64, WIDTH)), array(BATCH, WIDTH))


def scans(plan):
    return [operator for operator in plan.operators if operator.primitive == "scan"]


@pytest.mark.parametrize(
    "planner",
    [slow(autopar.Auto()), slow(autopar.DataParallel()), autopar.Zero(3), autopar.Megatron(data=2, tensor=4)],
    ids=["auto", "dp", "zero3", "megatron"],
)
@pytest.mark.parametrize("model", ["layers", slow("gpt"), slow("llama")])
def test_scanned_layers_equal_jit_under_every_planner(model, planner):
    if model == "layers":
        fun, args = step, ARGS
    else:
        module = {"gpt": gpt, "llama": llama}[model]
        config = GPT if model == "gpt" else replace(llama.Config.preset("tiny"), scan_layers=True, layers=2)

        def fun(params, batch):
            loss, grads = jax.value_and_grad(lambda p: module.loss(config, p, batch))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        args = (module.init(config, jax.random.key(0)), module.example_batch(config, 8, jax.random.key(1)))
    parallel = autopar.parallelize(fun, planner=planner)
    got, wanted = parallel(*args), jax.jit(fun)(*args)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(theirs))))
    parallel.lower(*args).verify().check()
    assert len(scans(parallel.plan(*args))) >= 2


def test_collectives_inside_a_loop_count_once_an_iteration():
    """Megatron: two sums a layer forward, one backward (the first layer's input needs no gradient, but a scan's body is
    one program), each as often as the loop runs.
    """
    plan = autopar.parallelize(step, planner=autopar.Megatron(data=1, tensor=8)).plan(*ARGS)
    counted = sum(c.count for c in plan.collectives if c.kind == "all_reduce")
    assert counted == 2 * LAYERS
    assert all(c.count % LAYERS == 0 for c in plan.collectives)


def test_data_parallelism_reduces_a_loop_s_gradients():
    plan = autopar.parallelize(step, planner=autopar.DataParallel()).plan(*ARGS)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    nbytes = sum(c.count * c.nbytes for c in plan.collectives)
    assert nbytes == sum(p.nbytes for p in ARGS[0]) + 4


def test_accumulated_gradients_are_reduced_once_after_the_loop():
    """A sum over microbatches may stay a sum over devices too: the carry is partial."""

    def accumulated(weights, batches):
        def loss(weights, batch):
            return jnp.sum(jnp.tanh(jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

        def one(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, batch)), None

        total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batches)
        return jax.tree.map(jnp.subtract, weights, total)

    wide = (jax.ShapeDtypeStruct((1024, 1024), "float32"),) * 2
    batches = jax.ShapeDtypeStruct((8, 8192, 1024), "float32")
    step = autopar.parallelize(accumulated, cluster="8:a100-80g", planner=autopar.Auto(max_axes=1), donate_argnums=0)
    plan = step.plan(wide, batches)
    sums = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert sum(c.count for c in sums) == 2, sums
    (scan,) = scans(plan)
    assert any(spec.partial for spec in scan.placement.results)


def now_and_then(weights, turn, x):
    """A loss that has a second part in one step of four, and nothing of it in the others."""

    def layers(weights, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    def loss(weights):
        return layers(weights, x) + jax.lax.cond(turn % 4 == 0, lambda w: layers(w, -x), lambda _: 0.0, weights)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights)), turn + 1


def test_gradients_of_a_branch_are_reduced_with_the_others():
    """They were reduced in the branch, and those of the rest of the loss once more."""
    wide = (jax.ShapeDtypeStruct((1024, 1024), "float32"),) * 2
    given = wide, jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((4096, 1024), "float32")
    step = autopar.parallelize(now_and_then, cluster="8:a100-80g", planner=autopar.DataParallel(), donate_argnums=0)
    assert [(c.kind, c.nbytes, c.count) for c in step.plan(*given).collectives] == [("all_reduce", 2**22, 2)]


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    "planner", [autopar.DataParallel(), slow(autopar.Zero(3)), slow(autopar.Megatron(data=4, tensor=2))]
)
def test_a_branch_with_sums_is_jits(planner, turn):
    given = (array(WIDTH, WIDTH), array(WIDTH, WIDTH)), jnp.int32(turn), array(BATCH, WIDTH)
    got, wanted = autopar.parallelize(now_and_then, planner=planner)(*given), jax.jit(now_and_then)(*given)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_loop_costs_its_trips():
    def loop(length):
        def fun(x):
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=length)[0]

        return autopar.parallelize(fun, cluster="8:a100-80g").plan(jax.ShapeDtypeStruct((4096, 4096), "bfloat16"))

    assert loop(40).seconds["compute"] == pytest.approx(10 * loop(4).seconds["compute"], rel=1e-6)


def test_plans_of_loops_are_written_and_read():
    parallel = autopar.parallelize(step, planner=autopar.Zero(3))
    plan = parallel.plan(*ARGS)
    again = autopar.Plan.from_json(json.loads(plan_json.text(plan.to_json())))
    assert again == plan
    replayed = autopar.parallelize(step, planner=autopar.Manual(again))
    for mine, theirs in zip(jax.tree.leaves(replayed(*ARGS)), jax.tree.leaves(parallel(*ARGS)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    text = plan.format(operators=True, width=100)
    assert "dot_general" in text
    assert not plan.diff(again).operators


def test_edited_loops_must_hold_together():
    """What enters a loop, what its body finds and leaves, and what comes out are one placement."""
    parallel = autopar.parallelize(step, planner=autopar.Zero(3))
    graph, plan = parallel.trace(*ARGS).graph, parallel.plan(*ARGS)
    index = next(i for i, operator in enumerate(plan.operators) if operator.primitive == "scan")
    scan = plan.operators[index]
    (body,) = scan.placement.bodies

    def edited(**changes):
        placement = replace(scan.placement, **changes)
        operators = [*plan.operators]
        operators[index] = replace(scan, placement=placement)
        return replace(plan, operators=tuple(operators))

    plan.check(graph)
    turned = tuple(replace(s, dims=tuple(reversed(s.dims))) for s in body.inputs)
    assert turned != body.inputs
    with pytest.raises(PlanMismatchError, match="one placement"):
        edited(bodies=(replace(body, inputs=turned),)).check(graph)
    with pytest.raises(PlanMismatchError, match="1 body"):
        edited(bodies=()).check(graph)
    cut = (*scan.placement.operands[:-1], replace(scan.placement.operands[-1], dims=(("data",), (), ())))
    with pytest.raises(PlanMismatchError, match=r"cuts dimension 0|never cut"):
        edited(operands=cut).check(graph)
