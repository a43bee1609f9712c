"""Hand-made plans send what their textbook says and nothing else: no activation where the batch alone is cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.checks import verify
from autopar.checks.hlo import UNCOMBINED, collectives
from benchmarks.trainings import MODELS, QUICK, Model, make_state, make_step
from passes.intra_op import build_problem, computing
from passes.ir import TensorType
from passes.planners.manual import most_parts, zero_sizes

METRICS_NBYTES = 64
"""What a loss, its parts and a count of tokens take."""

RECOMPUTING = ("plain", "jax.checkpoint", "remat=inputs", "remat=matmuls")


def planned(model: Model, planner: Any, *, recomputing: str = "plain", dtype: str = "float32", **options: Any) -> Any:
    """(the plan of a model's `least` training, for 8 GPUs by default, the shapes of its parameters)."""
    options = {"cluster": "8:a100-80g", **options}
    config = replace(model.least, dtype=dtype, **({"remat": True} if recomputing == "jax.checkpoint" else {}))
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(partial(make_state, model.module, config, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(model.module.example_batch, config, model.least_batch), jax.random.key(1))
    if recomputing.startswith("remat="):
        options["remat"] = recomputing.removeprefix("remat=")
    step = make_step(model.module, config, optimizer)
    function = autopar.parallelize(step, planner=planner, donate_argnums=(0,), **options)
    return function.plan(state, batch), state[0]


def nbytes(arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def sent(plan: Any, *kinds: str, over: str = "data") -> int:
    """Bytes that come out of the collectives of some kinds along an axis."""
    return sum(c.nbytes * c.count for c in plan.collectives if c.kind in kinds and over in c.axes)


def kinds(plan: Any, over: str = "data") -> set[str]:
    return {c.kind for c in plan.collectives if over in c.axes}


def with_recomputation(names: Any, ways: tuple[str, ...] = RECOMPUTING) -> list[Any]:
    """Models as they are and recomputed in each way that they have; a sixth of it in every run."""
    return [
        pytest.param(name, recomputing, id=f"{name}-{recomputing}", marks=[pytest.mark.slow] * ((i + way) % 6 > 0))
        for i, name in enumerate(names)
        for way, recomputing in enumerate(ways)
        if recomputing != "jax.checkpoint" or hasattr(MODELS[name].least, "remat")
    ]


NORMALISED_BY_BATCH = "wide-resnet"
PER_NORM = 5
"""Reductions of a batch norm: two moments forward, two gradients, and one more for what the moments pass back."""


@pytest.mark.parametrize(("name", "recomputing"), with_recomputation(n for n in MODELS if n != NORMALISED_BY_BATCH))
def test_data_parallelism_reduces_each_gradient_once_and_sends_nothing_else(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.DataParallel(), recomputing=recomputing, dtype="bfloat16")
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES
    repeats = MODELS[name].least.layers if name.endswith("-scan") else 1
    assert sum(c.count for c in plan.collectives if c.nbytes > 4) <= len(jax.tree.leaves(params)) * repeats


@pytest.mark.parametrize(
    ("name", "recomputing"),
    with_recomputation(["gpt", "gpt-scan", "llama", "llama-scan", "moe", "bert"], RECOMPUTING[:2]),
)
def test_data_parallelism_reduces_after_the_last_microbatch(name: str, recomputing: str):
    model = replace(MODELS[name], least_batch=16)
    plan, params = planned(model, autopar.DataParallel(), recomputing=recomputing, microbatches=2)
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES


@pytest.mark.parametrize(("name", "recomputing"), with_recomputation(["gpt", "llama-scan", "moe"]))
def test_zero_fetches_weights_and_no_activation(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.Zero(3), recomputing=recomputing)
    assert kinds(plan) <= {"all_gather", "all_reduce", "reduce_scatter"}
    embedding = max(nbytes(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim == 2)  # looked up, and multiplied by
    assert sent(plan, "all_gather") <= 2 * nbytes(params) + embedding
    assert sent(plan, "all_reduce") + 8 * sent(plan, "reduce_scatter") <= nbytes(params) + METRICS_NBYTES


@pytest.mark.parametrize(("name", "recomputing"), with_recomputation(["gpt", "llama-scan"], RECOMPUTING[:2]))
def test_zero_fetches_half_precision_weights_once_forward_and_once_backward(name: str, recomputing: str):
    """Casts are cut as what they are made of: gathered in 2 bytes of 4, and not kept whole for the backward pass."""
    plan, params = planned(MODELS[name], autopar.Zero(3), recomputing=recomputing, dtype="bfloat16")
    embeddings = nbytes([leaf for leaf in jax.tree.leaves(params) if leaf.shape == (16, 16)])
    matrices = nbytes([leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1])
    gathered = sum(c.nbytes * c.count for c in plan.collectives if (c.kind, c.dtype) == ("all_gather", "bfloat16"))
    assert 0.9 * (matrices - embeddings) <= gathered <= matrices + embeddings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_zero_transposes_the_copy_that_is_fetched_and_keeps_no_transpose_whole(tied: bool, dtype: str):
    """A table looked up and multiplied by its transpose is fetched once forward; transposed alone, for each pass."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        table = params["table"].astype(dtype)
        head = table if tied else params["head"].astype(dtype)
        return jnp.mean(jnp.tanh(jnp.tanh(table[tokens] @ head.T)).astype("float32") ** 2)

    def step(params: Any, tokens: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, tokens))

    table = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    function = autopar.parallelize(step, cluster="8:a100-80g", planner=autopar.Zero(3), donate_argnums=(0,))
    plan = function.plan({"table": table} | ({} if tied else {"head": table}), tokens)
    assert sent(plan, "all_gather") == (1 if tied else 3) * table.size * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("name", "recomputing"), with_recomputation(["gpt", "llama-scan", "moe"]))
def test_megatron_sends_gradients_alone_along_data(name: str, recomputing: str):
    plan, params = planned(MODELS[name], autopar.Megatron(data=2, tensor=4), recomputing=recomputing)
    assert kinds(plan) == {"all_reduce"}
    assert sent(plan, "all_reduce") <= nbytes(params) + METRICS_NBYTES


def norms(params: Any) -> int:
    return sum("scale" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


@pytest.mark.slow
def test_each_moment_of_a_batch_norm_is_reduced_once():
    plan, params = planned(MODELS[NORMALISED_BY_BATCH], autopar.DataParallel())
    weights = len(jax.tree.leaves(params)) - 2 * norms(params)
    assert kinds(plan) == {"all_reduce"}
    assert sum(c.count for c in plan.collectives) <= PER_NORM * norms(params) + weights + 1


class Normalised(nn.Module):
    """Two dense layers with batch norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 8):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(width, use_bias=False)(x)))
        return x


def normalised_step(variables: Any, batch: jax.Array) -> Any:
    def loss(params: Any) -> Any:
        made, new = Normalised().apply({**variables, "params": params}, batch, mutable="batch_stats")
        return jnp.mean(made**2), new

    (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return {**new, "params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients)}, value


def test_a_batch_norm_reduces_no_more_than_jit_with_the_same_placements():
    batch = jax.random.normal(jax.random.key(0), (64, 8))
    variables = jax.jit(Normalised().init, compiler_options=QUICK)(jax.random.key(1), batch)
    compiled = autopar.parallelize(normalised_step, planner=autopar.DataParallel()).lower(variables, batch)
    compiled = compiled.compile({**UNCOMBINED, **QUICK})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    plain = jax.jit(normalised_step, in_shardings=(whole, cut), out_shardings=whole).lower(variables, batch)
    theirs = collectives(plain.compile({**UNCOMBINED, **QUICK}).as_text(), ("data",), (8,))
    assert sum(c.count for c in compiled.plan.collectives) <= sum(c.count for c in theirs)
    verify(compiled.plan, compiled.as_text()).check()
    for ours, expected in zip(
        jax.tree.leaves(compiled(variables, batch)),
        jax.tree.leaves(jax.jit(normalised_step, compiler_options=QUICK)(variables, batch)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


LARGE = {"sequence_length": 1024, "hidden": 2048, "heads": 16, "layers": 4}
"""So large that operators take long beside what it takes to launch them, of which a loop has more or fewer."""


@pytest.mark.parametrize(
    ("microbatches", "recomputing"),
    [(1, "plain"), (4, "jax.checkpoint"), (1, "jax.checkpoint"), (4, "plain")],
)
@pytest.mark.parametrize("cluster", ["8:a100-80g", "8:tpu-v5p"])
@pytest.mark.slow
def test_a_loop_over_layers_costs_what_they_cost_written_out(microbatches: int, recomputing: str, cluster: str):
    """Without the copies of slices, that is: of all that is kept they are up to a quarter of a step."""
    options = {"microbatches": microbatches} if microbatches > 1 else {}

    def plan(scan_layers: bool, cluster: str, dtype: str = "bfloat16") -> Any:
        config = replace(MODELS["gpt"].least, **LARGE, scan_layers=scan_layers)
        model = replace(MODELS["gpt"], least=config, least_batch=128)
        given = {"recomputing": recomputing, "dtype": dtype, "cluster": cluster, **options}
        return planned(model, autopar.DataParallel(), **given)[0]

    loop, written_out = plan(True, cluster), plan(False, cluster)
    with pytest.MonkeyPatch.context() as patch:
        for module in (build_problem, computing):
            patch.setattr(module, "copies", lambda control, groupings: {})
        assert plan(True, cluster).step_seconds == pytest.approx(written_out.step_seconds, rel=0.05)
    # For as many flops libtpu 0.0.42 counts 1.5 to 1.8 times the cycles for a GPT in a loop that keeps everything.
    assert 1 < loop.step_seconds / written_out.step_seconds < (1.05 if recomputing == "jax.checkpoint" else 1.3)
    # A compiler fuses within an iteration alone: XLA:GPU needs 1.26 times for a loop of GPT's layers (compilers.json),
    # XLA:CPU 1.48 times for four of 256 wide.
    loop, written_out = plan(True, "8:cpu", "float32"), plan(False, "8:cpu", "float32")
    assert 0.85 * written_out.peak_nbytes < loop.peak_nbytes < 1.5 * written_out.peak_nbytes


@pytest.mark.slow
def test_a_loop_over_layers_in_microbatches_equals_jit():
    with jax.enable_x64(True):
        training = MODELS["gpt-scan"].training("float64", least=True)
        lowered = autopar.parallelize(training.step, planner=autopar.DataParallel(), microbatches=2)
        batch = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), training.batch)
        compiled = lowered.lower(training.state, batch).compile({**UNCOMBINED, **QUICK})
        verify(compiled.plan, compiled.as_text()).check()
        theirs = jax.jit(training.step, compiler_options=QUICK)(training.state, batch)
        for x, y in zip(jax.tree.leaves(compiled(training.state, batch)), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def dense_step(state: Any, batch: jax.Array) -> Any:
    """A step of Adam on two dense layers."""

    def loss(params: Any) -> jax.Array:
        up, bias, down = params
        return jnp.mean((jnp.tanh(batch @ up + bias) @ down) ** 2)

    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optax.adam(1e-2).update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def dense_state(inner: int, outer: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    params = (jax.random.normal(keys[0], (inner, outer)), jnp.zeros(outer), jax.random.normal(keys[1], (outer, inner)))
    return params, optax.adam(1e-2).init(params)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("cluster", "shape", "parts"),
    [("3x8:a100-80g", (64, 128), 8), ("5x7:h100", (28, 56), 7), ("6:a100-80g", (64, 30), 6)],
)
def test_zero_cuts_over_some_of_the_devices_where_all_divide_nothing(
    cluster: str, shape: tuple[int, int], parts: int, stage: int
):
    """24 devices divide no dimension and 8 of them do, 35 none and 7 do; 64 by 30 is cut in 2 by 3."""
    state = dense_state(*shape)
    step = autopar.parallelize(dense_step, cluster=cluster, planner=autopar.Zero(stage))
    plan = step.plan(state, jnp.zeros((840, shape[0])))
    params, moments = nbytes(state[0]), nbytes(state[1])
    held = sum(
        spec.local_nbytes(type, plan.mesh)
        for name, spec, type in zip(plan.input_names, plan.inputs, plan.input_types, strict=True)
        if name.startswith("state")
    )
    cut, whole = (moments + params, 0) if stage == 3 else (moments, params)
    biases = 3 * 4 * shape[1]  # a bias of 30 is cut in 3, not in 6
    assert held <= cut / parts + whole + biases
    assert any(c.kind == "all_gather" for c in plan.collectives)


def test_zero_on_two_axes_equals_jit():
    state, batch = dense_state(16, 8), jax.random.normal(jax.random.key(2), (12, 16))
    step = autopar.parallelize(dense_step, planner=autopar.Zero(3), devices=jax.devices()[:6])
    compiled = step.lower(state, batch).compile({**UNCOMBINED, **QUICK})
    assert compiled.plan.mesh.sizes == (3, 2)
    verify(compiled.plan, compiled.as_text()).check()
    theirs = jax.jit(dense_step, compiler_options=QUICK)(state, batch)
    for x, y in zip(jax.tree.leaves(compiled(state, batch)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


PLANNERS = (autopar.DataParallel(), autopar.Zero(1), autopar.Zero(3), autopar.Megatron(data=2, tensor=4))


@pytest.mark.parametrize("planner", PLANNERS, ids=repr)
def test_state_that_is_one_array_is_planned_whether_it_is_donated_or_not(planner: Any):
    """Without the flag, the weights were taken for a batch: cut over `data`, and gathered in every step."""

    def step(weights: jax.Array, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(weights)
        return weights - 0.1 * gradient, value

    given = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (32, 16))
    kept, donated = (autopar.parallelize(step, planner=planner, donate_argnums=own) for own in ((), (0,)))
    plan, known = kept.plan(*given), donated.plan(*given)
    assert (plan.inputs, plan.outputs, plan.collectives) == (known.inputs, known.outputs, known.collectives)
    compiled = kept.lower(*given).compile({**UNCOMBINED, **QUICK})
    verify(compiled.plan, compiled.as_text()).check()
    for x, y in zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_zero_says_what_it_cannot_cut():
    step = autopar.parallelize(dense_step, cluster="8:a100-80g", planner=autopar.Zero(3))
    with pytest.warns(UserWarning, match=r"stay whole on every device.*float32\[7,9\]"):
        step.plan(dense_state(7, 9), jnp.zeros((16, 7)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 24), min_size=0, max_size=3),
    st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=0, max_size=2),
)
def test_the_most_parts_are_those_of_the_best_placement(shape: list[int], sizes: list[int]):
    def parts(seats: tuple[int | None, ...]) -> int:
        cut = [math.prod(s for s, seat in zip(sizes, seats, strict=True) if seat == d) for d in range(len(shape))]
        divides = all(size % by == 0 for size, by in zip(shape, cut, strict=True))
        return math.prod(cut) if divides else 1

    assert most_parts(shape, sizes) == max(map(parts, itertools.product((None, *range(len(shape))), repeat=len(sizes))))


def test_a_second_axis_is_there_for_what_one_does_not_divide():
    matrix = TensorType(shape=(20480, 61440), dtype="float32")
    assert zero_sizes([matrix], 1024) == (1024,)
    assert zero_sizes([matrix, TensorType(shape=(7,), dtype="float32")], 1024) == (1024,)
    assert math.prod(zero_sizes([matrix], 1120)) == 1120
    assert most_parts(matrix.shape, zero_sizes([matrix], 1120)) == 160
    assert zero_sizes([TensorType(shape=(7, 9), dtype="float32")], 8) == (8,)
    assert zero_sizes([], 12) == (12,)


def recomputed_step(params: Any, batch: jax.Array) -> Any:
    """A step on a product by columns, one by rows, and a block that is recomputed from its sums."""

    def loss(params: Any) -> jax.Array:
        up, down, out = params
        block = jax.checkpoint(lambda x, weight: jnp.tanh(jnp.sin(x) @ weight))
        return jnp.mean(block(jnp.tanh(batch @ up) @ down, out) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def test_recomputation_reads_sums_that_the_forward_pass_reduced():
    """A barrier stands before the recomputation: it lets the sums through reduced, or they are reduced once more."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, [(8, 16), (16, 8), (8, 16)], strict=False))
    batch = jax.random.normal(keys[3], (4, 8))
    step = autopar.parallelize(recomputed_step, planner=autopar.Megatron(data=2, tensor=4))
    compiled = step.lower(params, batch).compile({**UNCOMBINED, **QUICK})
    sums = [c for c in compiled.plan.collectives if c.axes == ("tensor",) and c.nbytes == 2 * 8 * 4]
    assert sum(c.count for c in sums) == 2  # the sums, and the gradient of the block's input
    verify(compiled.plan, compiled.as_text()).check()
    theirs = jax.jit(recomputed_step, compiler_options=QUICK)(params, batch)
    for x, y in zip(jax.tree.leaves(compiled(params, batch)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_elements_of_a_batch_gather_none_of_it():
    """Neither a row nor an element is on more than one device, or in more than one microbatch."""

    def step(state: Any, batch: Any) -> Any:
        state, loss = dense_step(state, batch)
        return state, (loss, batch[5, 3], batch[-1])

    state, batch = dense_state(16, 8), jax.random.normal(jax.random.key(2), (16, 16))
    theirs = jax.jit(step, compiler_options=QUICK)(state, batch)
    for options in ({"planner": autopar.Zero(3)}, {"planner": autopar.DataParallel(), "microbatches": 2}):
        parallel = autopar.parallelize(step, compiler_options=QUICK, **options)
        rows = {c.nbytes for c in parallel.plan(state, batch).collectives if c.kind != "all_reduce"}
        assert batch.nbytes not in rows
        for x, y in zip(jax.tree.leaves(parallel(state, batch)), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_loop_over_parts_of_the_batch_has_rows_of_each_on_every_device():
    """As where gradients are added up by hand: data parallelism computed all rows on all devices."""

    def step(state: Any, batch: Any) -> Any:
        return jax.lax.scan(dense_step, state, batch.reshape(4, -1, *batch.shape[1:]))

    state, batch = dense_state(16, 8), jax.random.normal(jax.random.key(2), (32, 16))
    theirs = jax.jit(step, compiler_options=QUICK)(state, batch)
    parallel = autopar.parallelize(step, compiler_options=QUICK, planner=autopar.DataParallel())
    (loop,) = (o.placement for o in parallel.plan(state, batch).operators if o.primitive == "scan")
    assert [str(spec) for spec in loop.operands][-1] == "[-, data, -]"
    for x, y in zip(jax.tree.leaves(parallel(state, batch)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
