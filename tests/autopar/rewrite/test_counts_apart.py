"""Losses that are computed in chunks, in one loop with the count that they are divided by: in microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.frontend import trace
from autopar.rewrite import microbatched
from autopar.rewrite.counts_apart import with_counts_apart
from passes.ir import LOOP, scan_of
from tests.closeness import assert_close
from tests.sample import each

ROWS, TIME, WIDTH, WORDS, CHUNKS = 32, 16, 8, 24, 4
DRAWS = np.random.default_rng(0)
Params = dict[str, Any]
Batch = dict[str, Any]
BATCH = {
    "x": DRAWS.integers(0, WORDS, (ROWS, TIME)),
    "y": DRAWS.integers(-8, WORDS, (ROWS, TIME)),
    "weight": DRAWS.uniform(size=(ROWS, TIME)),
}
PARAMS = {
    "words": DRAWS.normal(size=(WORDS, WIDTH)),
    "layers": DRAWS.normal(size=(4, WIDTH, WIDTH)) / 3,
    "head": DRAWS.normal(size=(WIDTH, WORDS)) / 2,
}


def network(p: Params, words: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), p["words"][words], p["layers"])[0]


def chunks(x: jax.Array) -> jax.Array:
    """[rows, time, ...] as [chunks, rows, time of a chunk, ...]."""
    return jnp.moveaxis(x.reshape(ROWS, CHUNKS, -1, *x.shape[2:]), 1, 0)


def summed(head: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the sum of losses, the number of tokens that have one)."""
    logits, has_loss = x @ head, y >= 0
    right = jnp.take_along_axis(logits, jnp.maximum(y, 0)[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(has_loss, jax.nn.logsumexp(logits, -1) - right, 0.0)), jnp.sum(has_loss)


def scanned(p: Params, b: Batch, around: Callable[..., Any] = lambda f: f, **options: Any) -> jax.Array:
    def add(sums: Any, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, summed(p["head"], *chunk)), None

    (loss, count), _ = lax.scan(around(add), (0.0, 0), (chunks(network(p, b["x"])), chunks(b["y"])), **options)
    return loss / jnp.maximum(count, 1)


def checkpointed(p: Params, b: Batch) -> jax.Array:
    return scanned(p, b, jax.checkpoint)


def in_reverse_under_jit(p: Params, b: Batch) -> jax.Array:
    return scanned(p, b, jax.jit, reverse=True, unroll=2)


def mapped(p: Params, b: Batch, around: Callable[..., Any] = lambda f: f) -> jax.Array:
    """Losses and counts are no carries but results of each chunk."""
    of_chunk = around(lambda chunk: summed(p["head"], *chunk))
    losses, counts = lax.map(of_chunk, (chunks(network(p, b["x"])), chunks(b["y"])))
    return losses.sum() / counts.sum()


def mapped_and_checkpointed(p: Params, b: Batch) -> jax.Array:
    return mapped(p, b, jax.checkpoint)


def counted_by_fori_loop(p: Params, b: Batch) -> jax.Array:
    """Slices of the time, by a counter that both sums need."""
    x = network(p, b["x"])

    def add(i: jax.Array, sums: Any) -> Any:
        part = [lax.dynamic_slice_in_dim(a, i * (TIME // CHUNKS), TIME // CHUNKS, 1) for a in (x, b["y"])]
        return jax.tree.map(jnp.add, sums, summed(p["head"], *part))

    loss, count = lax.fori_loop(0, CHUNKS, add, (0.0, 0))
    return loss / count


def weighted(p: Params, b: Batch) -> jax.Array:
    """The sum of weights, beside an accuracy that parameters decide."""

    def add(sums: Any, chunk: Any) -> tuple[Any, None]:
        x, y, weight = chunk
        logits = x @ p["head"]
        loss = -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, WORDS), -1)
        new = jnp.sum(loss * weight), jnp.sum(weight), jnp.sum((logits.argmax(-1) == y) * weight)
        return tuple(map(jnp.add, sums, new)), None

    over = tuple(map(chunks, (network(p, b["x"]), b["y"], b["weight"])))
    (loss, weight, _), _ = lax.scan(jax.checkpoint(add), (0.0, 0.0, 0.0), over)
    return loss / weight


def with_what_each_chunk_makes(p: Params, b: Batch) -> jax.Array:
    """Two counts, one of them of chunks alone, and losses of tokens that are stacked."""

    def add(sums: Any, chunk: Any) -> tuple[Any, Any]:
        x, y = chunk
        losses = jax.nn.logsumexp(x @ p["head"], -1) * (y >= 0)
        return (sums[0] + losses.sum(), sums[1] + jnp.sum(y >= 0), sums[2] + 1), losses

    (loss, count, n), losses = lax.scan(add, (0.0, 0, 0), (chunks(network(p, b["x"])), chunks(b["y"])))
    return loss / count * (n / CHUNKS) + jnp.sum(losses**2) / count


def with_gradients_inside(p: Params, b: Batch) -> jax.Array:
    """A loss whose forward pass computes its gradients in the same loop, as fused kernels do."""

    def forward(head: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        def add(sums: Any, chunk: Any) -> tuple[Any, Any]:
            of_chunk = jax.value_and_grad(lambda head, x: summed(head, x, chunk[1])[0], (0, 1))
            loss, (of_head, of_x) = of_chunk(head, chunk[0])
            return jax.tree.map(jnp.add, sums, (loss, jnp.sum(chunk[1] >= 0), of_head)), of_x

        zeros = (0.0, 0, jnp.zeros_like(head))
        (loss, count, of_head), of_x = lax.scan(add, zeros, (chunks(x), chunks(y)))
        return loss / count, (of_head / count, jnp.moveaxis(of_x, 0, 1).reshape(x.shape) / count)

    fused = jax.custom_vjp(lambda *xs: forward(*xs)[0])
    fused.defvjp(forward, lambda saved, g: (g * saved[0], g * saved[1], None))
    return fused(p["head"], network(p, b["x"]), b["y"])


def of_all_tokens_in_a_row(p: Params, b: Batch, n: int = CHUNKS) -> jax.Array:
    """Chunks of consecutive rows, so that the loop runs over the batch."""

    def add(sums: Any, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, summed(p["head"], *chunk)), None

    over = network(p, b["x"]).reshape(n, -1, WIDTH), b["y"].reshape(n, -1)
    (loss, count), _ = lax.scan(jax.checkpoint(add), (0.0, 0), over)
    return loss / count


def of_chunks_of_rows(p: Params, b: Batch) -> jax.Array:
    """Losses of tokens that a loop over chunks of rows makes, divided by a count outside of it."""
    over = network(p, b["x"]).reshape(8, 4, TIME, WIDTH)
    losses = lax.map(jax.checkpoint(lambda x: jax.nn.logsumexp(x @ p["head"], -1)), over).reshape(ROWS, TIME)
    return jnp.sum(losses * (b["y"] >= 0)) / jnp.sum(b["y"] >= 0)


LOSSES = [
    scanned,
    checkpointed,
    in_reverse_under_jit,
    mapped,
    mapped_and_checkpointed,
    counted_by_fori_loop,
    weighted,
    with_what_each_chunk_makes,
    with_gradients_inside,
    of_all_tokens_in_a_row,
    of_chunks_of_rows,
]
WAYS = [
    {"planner": autopar.DataParallel(), "microbatches": 2},
    {"planner": autopar.Pipeline(stages=2, microbatches=4)},
    {"planner": autopar.Zero(3), "microbatches": 4},
    {"planner": autopar.Megatron(data=4, tensor=2), "microbatches": 4},
    {"planner": autopar.Auto(), "microbatches": 2},
]


def step_of(loss: Callable[[Params, Batch], jax.Array]) -> Callable[..., Any]:
    def step(p: Params, b: Batch) -> tuple[Params, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(p, b)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient), value

    return step


@pytest.mark.parametrize(("loss", "way"), each(LOSSES, WAYS))
def test_the_step_is_jits(loss: Callable[..., Any], way: dict[str, Any]):
    with jax.enable_x64(True):
        assert_close(autopar.parallelize(step_of(loss), **way)(PARAMS, BATCH), jax.jit(step_of(loss))(PARAMS, BATCH))


def accumulated(p: Params, b: Batch) -> tuple[Params, jax.Array]:
    """Gradients of four parts of the batch in turn, added up by the step's own loop."""

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        made = jax.value_and_grad(lambda p: jnp.mean(network(p, part["x"]) ** 2))(p)
        return jax.tree.map(jnp.add, sums, made), None

    parts = jax.tree.map(lambda x: x.reshape(4, ROWS // 4, *x.shape[1:]), b)
    (value, gradient), _ = lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, p)), parts)
    return jax.tree.map(lambda p, g: p - 0.1 * g / 4, p, gradient), value


@pytest.mark.parametrize("way", WAYS[::2], ids=str)
def test_a_loop_that_adds_up_gradients_is_parted(way: dict[str, Any]):
    with jax.enable_x64(True):
        assert_close(autopar.parallelize(accumulated, **way)(PARAMS, BATCH), jax.jit(accumulated)(PARAMS, BATCH))


def test_a_microbatch_runs_the_iterations_of_its_rows():
    structs = jax.tree.leaves(jax.eval_shape(lambda *args: args, PARAMS, BATCH))
    graph = microbatched(trace(step_of(of_all_tokens_in_a_row), (PARAMS, BATCH), {}), structs, 2).graph
    (inside,) = [node.subgraphs[0] for node in graph.nodes if node.scope == LOOP and scan_of(node)]
    lengths = [scan.length for node in inside.nodes if (scan := scan_of(node)) is not None]
    assert lengths == [4, CHUNKS // 2, CHUNKS // 2, 4]  # layers and chunks, forward and backward


@pytest.mark.parametrize("n", [3, 2])
def test_chunks_that_microbatches_share_are_refused(n: int):
    """Of 96 tokens and 3 chunks, or 4 microbatches and 2 chunks."""
    rows = {3: 6, 2: ROWS}[n]
    batch = jax.tree.map(lambda x: x[:rows], BATCH)
    step = step_of(lambda p, b: of_all_tokens_in_a_row(p, b, n))
    with pytest.raises(autopar.PlanningError, match="needs as a whole"):
        autopar.parallelize(step, microbatches={3: 2, 2: 4}[n]).plan(PARAMS, batch)


def test_stages_refuse_iterations_that_read_the_ones_before():
    def loss(p: Params, b: Batch) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ p["layers"][0] + x), None

        return jnp.sum(lax.scan(step, jnp.zeros((TIME, WIDTH)), network(p, b["x"]))[0] ** 2)

    planner = autopar.Pipeline(stages=2, microbatches=4)
    with pytest.raises(autopar.PlanningError, match="the step runs over that in order"):
        autopar.parallelize(step_of(loss), planner=planner).plan(PARAMS, BATCH)


@pytest.mark.parametrize("loss", LOSSES[:-2])
def test_one_loop_over_microbatches_has_the_products(loss: Callable[..., Any]):
    """The count is made before that loop, by a loop that computes no product."""
    structs = jax.tree.leaves(jax.eval_shape(lambda *args: args, PARAMS, BATCH))
    graph = microbatched(trace(step_of(loss), (PARAMS, BATCH), {}), structs, 4).graph
    *before, inside = [node for node in graph.nodes if scan_of(node)]
    assert inside.scope == LOOP
    assert len(before) == 1
    assert all(node.primitive != "dot_general" for node in before[0].subgraphs[0].nodes)


def test_nodes_that_both_loops_need_are_in_each():
    traced = trace(step_of(counted_by_fori_loop), (PARAMS, BATCH), {})
    apart = with_counts_apart(traced)
    assert apart is not None
    assert apart is with_counts_apart(traced)
    _, counts, rest = (node for node in apart.graph.nodes if scan_of(node) and "transpose" not in node.scope)
    assert counts.params["num_carry"] == rest.params["num_carry"] == 2  # the counter, and a sum
    assert all(node.primitive != "dot_general" for node in counts.subgraphs[0].nodes)


def test_a_loop_of_the_batch_alone_stays_whole():
    def loss(p: Params, b: Batch) -> jax.Array:
        count, _ = lax.scan(lambda n, y: (n + jnp.sum(y >= 0), None), 0, chunks(b["y"]))
        return jnp.sum(network(p, b["x"]) ** 2) / count

    assert with_counts_apart(trace(step_of(loss), (PARAMS, BATCH), {})) is None


def test_a_count_that_parameters_decide_divides_what_the_loop_makes():
    def loss(p: Params, b: Batch) -> jax.Array:
        def add(sums: Any, x: jax.Array) -> tuple[Any, None]:
            logits = x @ p["head"]
            return (sums[0] + jnp.sum(logits**2), sums[1] + jnp.sum(logits > 0, dtype=x.dtype)), None

        (value, count), _ = lax.scan(add, (0.0, 0.0), chunks(network(p, b["x"])))
        return value / count

    with jax.enable_x64(True):
        parallel = autopar.parallelize(step_of(loss), microbatches=4)
        assert_close(parallel(PARAMS, BATCH), jax.jit(step_of(loss))(PARAMS, BATCH))
