"""Collectives behind computing: what they are, and what a step takes for them."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from benchmarks.trainings import make_state, make_step
from models import gpt
from passes.cluster import Cluster, Mesh, parse_cluster
from passes.ir import TensorType
from passes.placement import Occurrence, occurrences, resharding_plan
from passes.placement.background import Background
from passes.plan import Plan
from passes.sharding import Behind, Resharder, parse_spec
from tests.sample import slow

GPT = gpt.Config(vocab_size=1024, sequence_length=1024, hidden=1024, layers=2, heads=8)
"""Large enough for products to hide what is sent beside them."""
BATCH = 16


def cluster(overlap: float, bucket_nbytes: float = 0.0) -> Cluster:
    """Eight H100 that hide this part of collectives behind computing."""
    known = parse_cluster("8:h100")
    device = replace(known.group().device, collective_overlap=overlap, bucket_nbytes=bucket_nbytes)
    return replace(known, groups=(replace(known.group(), device=device),))


def step(scanned: bool, **options: object) -> tuple[autopar.ParallelFunction, tuple[object, ...]]:
    config, optimizer = replace(GPT, scan_layers=scanned), optax.adam(1e-2)
    state = jax.eval_shape(partial(make_state, gpt, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(gpt.example_batch, config, BATCH), jax.random.key(1))
    return autopar.parallelize(make_step(gpt, config, optimizer), donate_argnums=0, **options), (state, batch)


def moves(plan: Plan, parallel: autopar.ParallelFunction, args: tuple[object, ...]) -> list[Occurrence]:
    """The reshardings of a plan that send something."""
    graph = parallel.trace(*args).graph
    reshardings = resharding_plan(graph, plan.layout, Resharder(plan.mesh), regather=plan.regather)
    return [o for o in occurrences(graph, reshardings) if not all(s.is_local for s in o.move.steps)]


@pytest.mark.parametrize("scanned", [slow(False), True])
def test_gradients_of_weights_are_reduced_behind_computing_and_activations_are_not(scanned: bool) -> None:
    parallel, args = step(scanned, cluster="8:h100", planner=autopar.Megatron(data=2, tensor=4))
    sent = moves(parallel.plan(*args), parallel, args)
    behind = {axis for o in sent if o.behind and o.behind.combined_nbytes for s in o.move.steps for axis in s.axes}
    activations = [o for o in sent if o.type.rank == 3 and o.type.shape[0] == BATCH]
    assert "data" in behind
    assert activations
    assert all(o.behind is None for o in activations)


def test_a_loss_is_reduced_with_the_gradients() -> None:
    """XLA sends it with the first of them: a program for eight H100 has one all-reduce of all and one number more."""
    parallel, args = step(False, cluster="8:h100", planner=autopar.DataParallel())
    (loss,) = (o for o in moves(parallel.plan(*args), parallel, args) if not o.type.shape)
    assert loss.behind is not None
    assert loss.behind.combined_nbytes
    assert loss.behind.flops


def test_sums_of_microbatches_are_reduced_behind_nothing() -> None:
    parallel, args = step(False, cluster="8:h100", planner=autopar.DataParallel(), microbatches=2)
    graph = parallel.trace(*args).graph
    sums = {value for node in graph.nodes if node.subgraphs for value in node.outputs}
    background = Background.of(graph)
    assert sums
    assert all(background.behind(value) is None for value in sums)


def test_sums_of_a_loop_over_a_sequence_are_reduced_behind_later_work() -> None:
    """The gradient of the last product, in the dtype that it has when it leaves the loop."""
    width, vocabulary, parts = 512, 16_384, 4
    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"up": f32((width, 4 * width)), "down": f32((4 * width, width)), "head": f32((width, vocabulary))}
    x, y = jax.ShapeDtypeStruct((16, 1024, width), jnp.bfloat16), jax.ShapeDtypeStruct((16, 1024), jnp.int32)

    def loss(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]

        @jax.checkpoint
        def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            scores = jax.nn.log_softmax((part[0] @ p["head"]).astype(jnp.float32))
            return total - jnp.take_along_axis(scores, part[1][..., None], -1).sum(), None

        cut = (a.reshape(16, parts, -1, *a.shape[2:]).swapaxes(0, 1) for a in (x, y))
        return jax.lax.scan(add, jnp.zeros(()), tuple(cut))[0]

    parallel = autopar.parallelize(
        lambda p, x, y: jax.tree.map(lambda w, g: w - g, p, jax.grad(loss)(p, x, y)),
        cluster="8:a100-80g",
        planner=autopar.DataParallel(),
    )
    sent = moves(parallel.plan(params, x, y), parallel, (params, x, y))
    (head,) = [o for o in sent if vocabulary in o.type.shape]
    assert head.type.dtype == "bfloat16"
    assert head.behind
    assert head.behind.flops


def test_weights_of_zero_3_are_gathered_behind_computing() -> None:
    parallel, args = step(True, cluster="8:h100", planner=autopar.Zero(3))
    gathers = [o for o in moves(parallel.plan(*args), parallel, args) if o.move.steps[-1].kind == "all_gather"]
    assert {o.phase for o in gathers if o.behind and not o.behind.combined_nbytes} >= {"forward", "backward"}


def test_a_step_is_shorter_by_the_part_that_is_hidden_and_never_free() -> None:
    seconds: dict[float, float] = {}
    for overlap in (0.0, 0.5, 1.0):
        parallel, args = step(False, cluster=cluster(overlap), planner=autopar.Zero(3))
        plan = parallel.plan(*args)
        assert math.isclose(plan.solution.objective, plan.step_seconds, rel_tol=1e-9)
        assert plan.solution.bound <= plan.step_seconds * (1 + 1e-9)
        seconds[overlap] = plan.step_seconds
    assert seconds[0.0] > seconds[0.5] > seconds[1.0] > plan.seconds["compute"]
    assert seconds[0.5] >= (seconds[0.0] + seconds[1.0]) / 2 * (1 - 1e-9)  # the least of plans that each fall evenly


def test_nothing_changes_where_nothing_is_hidden_or_combined() -> None:
    parallel, args = step(False, cluster=cluster(0.0), planner=autopar.DataParallel())
    plan = parallel.plan(*args)
    launches = sum(c.count for c in plan.collectives) * plan.cluster.group().device.launch_seconds
    alone = sum(c.seconds(plan.mesh) for c in plan.collectives) + launches
    assert math.isclose(plan.seconds["all_reduce"], alone, rel_tol=1e-9)


@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scan"])
def test_sums_that_are_rounded_where_they_are_made_cost_the_search_what_they_cost_a_step(scanned: bool) -> None:
    """Gradients of norms in bfloat16 are sums in float32, reduced before they are rounded: among what hides them, in
    one bucket with others, but the search took each for a collective by itself, and shunned data parallelism."""
    scales, weight = (jax.ShapeDtypeStruct((4, *shape), "bfloat16") for shape in ((256,), (256, 256)))
    x = jax.ShapeDtypeStruct((512, 256), "bfloat16")

    def block(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        scale, weight = layer
        norm = jax.nn.standardize(x.astype(jnp.float32)) * scale.astype(jnp.float32)
        return jnp.tanh(norm.astype(x.dtype) @ weight), None

    def train(params: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
            if scanned:
                return (jax.lax.scan(block, x, params)[0].astype(jnp.float32) ** 2).mean()
            y = x
            for layer in zip(*params, strict=True):
                y, _ = block(y, layer)
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    of_planner = {
        planner: autopar.parallelize(train, cluster="2x8:a100-80g", planner=planner).plan((scales, weight), x)
        for planner in (autopar.DataParallel(), autopar.Auto())
    }
    for plan in of_planner.values():
        assert math.isclose(plan.solution.objective, plan.step_seconds, rel_tol=1e-9)
    data_parallel, auto = of_planner.values()
    assert auto.step_seconds <= data_parallel.step_seconds * (1 + 1e-9)


def test_gradients_in_a_bucket_take_as_long_as_one_array_of_their_bytes() -> None:
    resharder = Resharder(Mesh(axes=("x",), sizes=(8,), cluster=cluster(0.0, 1 << 20)))
    small, whole = (TensorType(shape=(n,), dtype="float32") for n in (1 << 10, 1 << 16))
    ends = parse_spec("[-] add@x"), parse_spec("[-]")
    each = resharder.cost(small, *ends, beside(whole.nbytes))
    launch = resharder.mesh.cluster.group().device.launch_seconds
    assert np.isclose(64 * (each - launch), resharder.cost(whole, *ends) - launch)
    assert each < resharder.cost(small, *ends, beside(0)) == resharder.cost(small, *ends)
    large = TensorType(shape=(1 << 20,), dtype="float32")
    assert resharder.cost(large, *ends, beside(4 * large.nbytes)) == resharder.cost(large, *ends)


def beside(nbytes: int, flops: float = 0.0) -> Behind:
    """What is sent in one bucket of so many bytes while products of so many flops are computed."""
    return Behind(kinds=("all_reduce",), combined_nbytes=nbytes, sent_nbytes=nbytes, flops=(("float32", flops),))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 4.0])
def test_no_more_is_hidden_than_is_computed(share: float) -> None:
    """Products that take this share of what is sent hide as much, and never more than the device's part."""
    mesh = Mesh(axes=("x",), sizes=(8,), cluster=cluster(0.5))
    resharder, array = Resharder(mesh), TensorType(shape=(1 << 24,), dtype="float32")
    ends, device = (parse_spec("[-] add@x"), parse_spec("[-]")), mesh.cluster.group().device
    sent = resharder.cost(array, *ends) - device.launch_seconds
    flops = share * sent * mesh.size * device.matmul_flops_per_second("float32")
    exposed = resharder.cost(array, *ends, beside(array.nbytes, flops)) - device.launch_seconds
    assert math.isclose(exposed, (1 - min(share, 0.5)) * sent, rel_tol=1e-9)
    gathered = parse_spec("[x]"), parse_spec("[-]")
    assert resharder.cost(array, *gathered, beside(array.nbytes, flops)) == resharder.cost(array, *gathered)
