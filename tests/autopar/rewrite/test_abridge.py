"""Deep steps are searched on abridged ones, and nothing but time is lost by it."""

import functools
import math
from copy import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.frontend import trace
from autopar.rewrite import step_of
from models import gpt, llama, moe
from passes import inter_op
from passes.cluster import parse_cluster
from passes.inter_op import SCHEDULES, Submesh
from passes.intra_op import layouts
from passes.layers.repeats import in_blocks, stretches
from passes.layers.sampling import SAMPLE_BLOCKS, sample_graph
from passes.limits import Limits
from passes.pipeline import Sample, SearchOptions, StagedSearch, body_of, prefetch
from passes.pipeline import search as staged
from passes.pipeline.drafting import Drafting
from passes.pipeline.samples import finest, sampled
from passes.pipeline.stage_plans import StagePlans
from passes.pipeline.structural_hash import structural_hash
from passes.planners import Auto
from passes.progress import SearchContext
from passes.solver import SolverOptions
from passes.step import Variant
from passes.transforms.stages import cut
from tests.autopar.rewrite.traced_steps import traced_step
from tests.sample import slow

CLUSTER = parse_cluster("1x4:a100-80g")
LAYERS = 8


@functools.cache
def language_model(module, layers=LAYERS):
    config = replace(module.Config.tiny(), layers=layers)
    params = jax.eval_shape(lambda: module.init(config, jax.random.key(0)))
    batch = jax.eval_shape(lambda: module.example_batch(config, 16, jax.random.key(0)))
    loss = lambda params, batch: module.loss(config, params, batch)  # noqa: E731
    return traced_step(loss, params, batch, optax.adamw(1e-3))


def mlp(activations, *, skip=False, shared=False, statistics=False, optimizer=None):
    """Layers named so that the tenth comes second; `skip` hands the first result on to all, `shared` one weight.

    With `statistics`, the end of the step reads a vector of every layer.
    """
    struct = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    names = [f"layer_{i}" for i in range(1 if shared else len(activations))]
    params = {name: {"w": struct, "b": jax.ShapeDtypeStruct((128,), jnp.float32)} for name in names}

    def loss(params, batch):
        x, y = batch
        first = x = jnp.tanh(x)
        seen = []
        for i, activation in enumerate(activations):
            own = params[names[0 if shared else i]]
            x = activation(x @ own["w"] + own["b"])
            x = x + first if skip else x
            seen += [x.sum(1)] if statistics else []
        return jnp.mean((x - y) ** 2) + sum(jnp.mean(vector) for vector in seen)

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    return traced_step(loss, params, (x, x), optimizer or optax.sgd(0.1, momentum=0.9))


def structs_of(traced):
    types = (traced.graph.types[value] for value in traced.graph.inputs)
    return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]


def whole_step(traced, count=None):
    return step_of(traced, structs_of(traced), microbatches=count)


@functools.cache
def deep_step(module):
    """A deep language model's step, which all tests share."""
    return whole_step(language_model(module))


def in_four(module):
    """All of it in four microbatches, to be cut into four stages."""
    return deep_step(module).variant(Variant(microbatches=4, stages=4))


@functools.cache
def sample(module):
    """What its blocks in four microbatches are priced on."""
    return sampled(deep_step(module), 4, 4)


@functools.cache
def free_plan():
    """What a search on samples finds for a deep GPT where memory is no limit."""
    return searching(language_model(gpt), {4: sample(gpt)}, 4).run()


def searching(traced, samples, layers, limit=1e15):
    """The search in as many microbatches as there are samples of, and no others."""
    (count,) = samples
    options = SearchOptions(
        cluster=CLUSTER,
        stages=4,
        schedules=tuple(SCHEDULES),
        limits=Limits.equal(limit),
        solver=SolverOptions(),
        meshes=lambda n: layouts(CLUSTER, n, 2),
    )
    return StagedSearch(step=whole_step(traced, count=count), samples=dict(samples), layers=layers, options=options)


@pytest.mark.parametrize("module", [slow(gpt), slow(llama)])
def test_a_sample_has_the_blocks_of_the_step(module):
    traced, short = language_model(module), sample(module)
    whole = Sample(graph=in_four(module).graph, state_pairs=traced.state_pairs)
    assert short.left_out == (LAYERS - SAMPLE_BLOCKS,)
    assert len(short.graph.nodes) < 0.8 * len(whole.graph.nodes)
    kinds = [[block.kind for block in searching(traced, {4: one}, 4).table.step.blocks(4)] for one in (short, whole)]
    assert len(kinds[0]) == len(kinds[1]) == LAYERS + 2
    differs = [at for at, (one, other) in enumerate(zip(*kinds, strict=True)) if one != other]
    assert differs in ([], [1])  # the first block also adds up what all of them have
    assert max(map(kinds[0].count, kinds[0])) >= LAYERS - 2


@pytest.mark.slow
def test_a_search_on_samples_finds_what_one_on_the_step_does():
    traced = language_model(gpt)
    assert sample(gpt).left_out
    whole = Sample(graph=in_four(gpt).graph, state_pairs=traced.state_pairs)
    one, other = free_plan(), searching(traced, {4: whole}, 4).run()
    assert (one.firsts, one.schedule_name, one.costs) == (other.firsts, other.schedule_name, other.costs)
    assert [stage.mesh for stage in one.stages] == [stage.mesh for stage in other.stages]
    assert [stage.layout for stage in one.stages] == [stage.layout for stage in other.stages]
    assert one.step_seconds == other.step_seconds


def test_the_order_of_names_does_not_matter():
    found = sample_graph((traced := mlp([jax.nn.relu] * 12)).graph, traced.state_pairs)
    assert found is not None
    assert found.left_out == (len(stretches(traced.graph)[0]) - 1 - SAMPLE_BLOCKS,)
    state = {found.graph.types[found.graph.inputs[i]] for _, i in found.state_pairs}
    assert len(found.state_pairs) < len(traced.state_pairs)
    assert state == {traced.graph.types[traced.graph.inputs[i]] for _, i in traced.state_pairs}


def test_sums_over_all_layers_have_no_terms_of_those_left_out():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    traced = mlp([jax.nn.relu] * 12, optimizer=clipped)
    found = sample_graph(traced.graph, traced.state_pairs)
    assert found is not None
    found.graph.verify()

    def sums(graph):
        return sum(node.primitive == "add" and not graph.types[node.outputs[0]].shape for node in graph.nodes)

    assert sums(traced.graph) - sums(found.graph) == 2 * sum(found.left_out)  # of a weight and a bias


@pytest.mark.slow
@pytest.mark.parametrize("module", [gpt, llama, moe])
def test_deep_models_are_abridged_whatever_sums_they_have(module):
    """A mixture's blocks hand on the sum of their losses; the norm of all gradients is a sum over every layer."""
    config = replace(module.Config.tiny(), layers=4 * LAYERS)
    params = jax.eval_shape(lambda: module.init(config, jax.random.key(0)))
    batch = jax.eval_shape(lambda: module.example_batch(config, 16, jax.random.key(0)))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    traced = traced_step(lambda params, batch: module.loss(config, params, batch), params, batch, clipped)
    assert sampled(whole_step(traced), 4, 4).left_out


def test_the_last_layer_of_many_is_like_the_others():
    """Its neighbour reads a vector of it, which that of no other layer does."""
    traced = mlp([jax.nn.relu] * 12, statistics=True)
    short = sampled(whole_step(traced), 4, 4)
    assert short.left_out
    kinds = [block.kind for block in searching(traced, {4: short}, 4).table.step.blocks(4)]
    assert len(set(kinds[2:-1])) == 1  # without the first, and what comes before and after all layers


@pytest.mark.slow
def test_the_order_of_what_a_loop_reads_does_not_matter():
    traced, graph = language_model(gpt), in_four(gpt).graph
    for part in cut(graph, in_blocks(body_of(graph), 4).firsts, traced.state_pairs).parts:
        loop, fixed = part.graph.nodes[part.loop], part.scan.constants
        body = loop.subgraphs[0]
        turned_body = replace(body, inputs=(*body.inputs[:fixed][::-1], *body.inputs[fixed:]))
        turned = replace(loop, inputs=(*loop.inputs[:fixed][::-1], *loop.inputs[fixed:]), subgraphs=(turned_body,))
        nodes = (*part.graph.nodes[: part.loop], turned, *part.graph.nodes[part.loop + 1 :])
        assert loop.inputs[:fixed] != turned.inputs[:fixed]
        other = replace(part, graph=replace(part.graph, nodes=nodes))
        assert structural_hash(other, ()) == structural_hash(part, ())


@pytest.mark.slow
def test_prices_found_ahead_are_those_found_one_by_one():
    traced = language_model(gpt)
    tables = [searching(traced, {4: sample(gpt)}, 4).table for _ in range(2)]
    ends = len(tables[0].step.blocks(4))
    stages = [(0, ends // 2, 2), (ends // 2, ends, 2)]
    prefetch.price_stages(tables[0], [(stage, math.inf) for stage in stages], 4)
    solved = tables[0].block_costs.solved
    found, expected = ([table.stage(*stage, 4, math.inf) for stage in stages] for table in tables)
    assert (found, tables[0].block_costs.solved) == (expected, solved)
    prefetch.price_near(tables[0], stages, 4)
    assert [tables[0].near(*stage, 4) for stage in stages] == [tables[1].near(*stage, 4) for stage in stages]


@pytest.mark.slow
def test_state_is_cut_where_the_devices_divide_it():
    table = searching(language_model(gpt), {4: sample(gpt)}, 4).table
    blocks_of_step = table.step.blocks(4)
    whole, halves, elevenths = (sum(table.block_costs.state_nbytes(b, n) for b in blocks_of_step) for n in (1, 2, 11))
    assert halves < whole / 2 * 1.01
    assert elevenths == whole  # no dimension of a tiny GPT is a multiple of 11


def test_one_block_that_differs_is_enough():
    uneven = [jax.nn.relu] * 12
    uneven[6] = jax.nn.silu
    traced = mlp(uneven)
    assert sample_graph(traced.graph, traced.state_pairs) is None


def test_weights_that_are_shared_are_not_left_out():
    traced = mlp([jax.nn.relu] * 12, shared=True)
    assert sample_graph(traced.graph, traced.state_pairs) is None


def test_a_value_that_all_blocks_read_stays():
    traced = mlp([jax.nn.relu] * 12, skip=True)
    found = sample_graph(traced.graph, traced.state_pairs)
    assert found is not None
    assert found.left_out == (12 - SAMPLE_BLOCKS,)
    assert len(traced.graph.inputs) - len(found.inputs) == 4 * (12 - SAMPLE_BLOCKS)  # weight, bias, and their moments
    found.graph.verify()


@pytest.mark.slow
def test_stages_of_an_interrupted_search_are_planned_and_marked(monkeypatch):
    """Ctrl-C once there are stages: while others are looked for, hand-made and not, and while others are planned."""
    worth, plan = Drafting.worth, StagePlans.plan
    planned = []

    def twice(self, *args):
        first = worth(self, *args)[0]
        return [first, replace(first, table=copy(first.table), seconds=0.0)]

    def interrupt(*_):
        raise KeyboardInterrupt

    def pressed(self, *args):
        if planned:
            raise KeyboardInterrupt
        planned.append(plan(self, *args))
        return planned[-1]

    traced = language_model(gpt)
    search = searching(traced, {4: sample(gpt)}, 4)

    def run(*, interruptible=True):
        """What a search finds that was not interrupted before."""
        search.context = search.plans.context = SearchContext(interruptible=interruptible)
        return search.run()

    uninterrupted = free_plan()
    assert not uninterrupted.is_interrupted
    with monkeypatch.context() as patch:
        patch.setattr(Drafting, "worth", twice)
        patch.setattr(StagePlans, "plan", pressed)
        patch.setattr(staged, "MOST_PLANNED_NODES", 10**9)
        with pytest.raises(KeyboardInterrupt):
            run(interruptible=False)
        planned.clear()
        found = run()
        assert found.is_interrupted
        assert found.firsts == uninterrupted.firsts
    looked_for = Drafting._partition
    monkeypatch.setattr(Drafting, "_partition", interrupt)
    found = run()
    assert found.is_interrupted
    assert found.firsts == uninterrupted.firsts
    with pytest.raises(KeyboardInterrupt):
        run(interruptible=False)
    partition = inter_op.partitions.partition

    def pressed_with_a_partition(*args, context, **options):
        best = partition(*args, context=context, **options)
        with context.ending_early():
            raise KeyboardInterrupt
        return best

    monkeypatch.setattr(Drafting, "_partition", looked_for)
    monkeypatch.setattr(Drafting, "_draft_hand_made", lambda *_: None)
    monkeypatch.setattr(inter_op.partitions, "partition", pressed_with_a_partition)
    found = run()
    assert found.is_interrupted
    assert len(found.stages) > 1


@pytest.mark.slow
def test_no_mesh_is_taken_that_is_too_slow():
    traced = language_model(gpt)
    search = searching(traced, {4: sample(gpt)}, 4)
    whole = Submesh(hosts=1, devices_per_host=4)
    found = search.table.candidate(0, 4, whole, 4)
    period = found.forward_seconds + found.backward_seconds + found.finish_seconds / 4
    assert search.table.candidate(0, 4, whole, 4, cutoff=0.99 * period) is None
    assert search.table.candidate(0, 4, whole, 4, cutoff=1.01 * period) == found


def test_few_layers_are_not_abridged():
    traced = language_model(gpt, layers=3)
    assert sample_graph(traced.graph, traced.state_pairs) is None
    assert sampled(whole_step(traced), 4, 4).left_out == ()


def test_layers_are_runs_of_blocks():
    body = body_of(in_four(gpt).graph)
    (firsts,) = stretches(body)
    assert len(firsts) == LAYERS + 1
    cuts = in_blocks(body, 4)
    assert set(firsts) <= set(cuts.firsts)
    assert cuts.layers[0] == 0
    assert len(cuts.layers) == 4
    assert in_blocks(body, 12).layers == tuple(range(12))  # more layers than blocks: cut where little crosses


def test_a_mask_is_made_where_it_is_read():
    traced = language_model(gpt)
    graph = in_four(gpt).graph
    body = body_of(graph)
    parts = cut(graph, in_blocks(body, 4).firsts, traced.state_pairs).parts
    sent = {body.types[inner].dtype for part in parts for inner in part.boundary_values.values()}
    assert "bool" not in sent


def test_deep_models_have_more_layers():
    graph = mlp([jax.nn.relu] * 2).graph
    deep, shallow = (Sample(graph=graph, state_pairs=(), left_out=n) for n in ((44,), ()))
    assert finest(deep, 8) == 24
    assert finest(shallow, 8) == 8


@pytest.mark.slow
def test_stages_that_do_not_fit_are_chosen_again():
    traced = language_model(gpt)
    free = free_plan()
    kept = searching(traced, {4: sample(gpt)}, 4, 0.9 * free.peak_nbytes).run()
    assert kept.peak_nbytes <= 0.9 * free.peak_nbytes
    assert kept.step_seconds >= free.step_seconds


def deep_mlp():
    """(loss, parameters, batch) of residual layers so wide that stages pay."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [(jax.random.normal(key, (1024, 1024)) / 32, jnp.zeros(1024)) for key in keys]

    def loss(params, batch):
        for weight, bias in params:
            batch = batch + jnp.tanh(batch @ weight + bias)
        return jnp.mean(batch**2)

    return loss, params, jax.random.normal(jax.random.key(1), (16, 1024))


def deep_gpt():
    config = replace(gpt.Config.tiny(), layers=LAYERS, dtype="float64", param_dtype="float64")
    batch = gpt.example_batch(config, 16, jax.random.key(1))
    return lambda params, batch: gpt.loss(config, params, batch), gpt.init(config, jax.random.key(0)), batch


@pytest.mark.parametrize(("make", "options"), [slow(deep_mlp, {"microbatches": 4}), slow(deep_gpt, {})])
def test_stages_of_a_deep_step_do_what_jit_does(make, options):
    with jax.enable_x64(True):
        loss, params, batch = make()
        optimizer = optax.sgd(0.1, momentum=0.9)

        def step(state, batch):
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        state = params, optimizer.init(params)
        traced = trace(step, (state, batch), {})
        assert sample_graph(traced.graph, traced.state_pairs) is not None
        parallel = autopar.parallelize(step, planner=Auto(pipeline=True), cluster="4x1:v100-16g", **options)
        assert isinstance(parallel.plan(state, batch), autopar.PipelinePlan)
        found, expected = parallel(state, batch), jax.jit(step)(state, batch)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert jnp.abs(jnp.asarray(jax.device_get(one)) - other).max() <= 1e-10 * (1 + jnp.abs(other).max())
