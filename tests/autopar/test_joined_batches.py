"""Batches that go through one network together: data parallelism adds up gradients, and sends no rows."""

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
from autopar.frontend.joined_batches import Order, joined_batches
from autopar.frontend.regrouping import to_groups, to_order
from passes.layers import DimClasses
from tests.closeness import assert_close
from tests.sample import some

ROWS, TOKENS, WIDTH, WORDS = 16, 6, 12, 40
CLUSTER = "8:a100-80g"
DRAWS = np.random.default_rng(0)
PARAMS = {
    "words": DRAWS.normal(size=(WORDS, WIDTH)),
    "layers": 0.3 * DRAWS.normal(size=(2, WIDTH, WIDTH)),
    "out": DRAWS.normal(size=(WIDTH, WORDS)),
}
ANSWERS = tuple(DRAWS.integers(0, WORDS, size=(ROWS, TOKENS)) for _ in range(2))
IMAGES = tuple(DRAWS.normal(size=(ROWS, WIDTH)) for _ in range(3))
MORE = tuple(DRAWS.normal(size=(3 * ROWS, WIDTH)) for _ in range(2))

Params = dict[str, jax.Array]
Layer = Callable[[jax.Array, Any], jax.Array]


pytestmark = pytest.mark.usefixtures("float64")


def plain(h: jax.Array, w: jax.Array) -> jax.Array:
    return h + jnp.tanh(h @ w)


def forgetful(key: jax.Array) -> Layer:
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return h + jnp.where(jax.random.bernoulli(key, 0.8, h.shape), jnp.tanh(h @ w) / 0.8, 0)

    return layer


def attending(h: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", h @ w, h)
    return h + jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)) @ h


def through(p: Params, h: jax.Array, layer: Layer = plain) -> jax.Array:
    for w in p["layers"]:
        h = layer(h, w)
    return h


def preferred(layer: Layer = plain, *, scanned: bool = False) -> Callable[..., jax.Array]:
    """Direct preference optimization (Rafailov et al. 2023): chosen and rejected answers go through one network."""

    def loss(p: Params, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        tokens = jnp.concatenate([chosen, rejected])
        h = p["words"][tokens]
        h = lax.scan(lambda h, w: (layer(h, w), None), h, p["layers"])[0] if scanned else through(p, h, layer)
        logits = jax.nn.log_softmax((h @ p["out"])[:, :-1])
        likelihoods = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2).sum((1, 2))
        better, worse = jnp.split(likelihoods, 2)
        return -jax.nn.log_sigmoid(0.1 * (better - worse)).sum()

    return loss


def partly_labelled(p: Params, labelled: jax.Array, weak: jax.Array, strong: jax.Array) -> jax.Array:
    """FixMatch (Sohn et al. 2020): three images without a label, in two views, for each that has one."""
    logits = through(p, jnp.concatenate([labelled, weak, strong])) @ p["out"]
    guessed, other = jnp.split(logits[ROWS:], 2)
    sure = jax.nn.softmax(lax.stop_gradient(guessed))
    return (logits[:ROWS] ** 2).sum() - (sure * jax.nn.log_softmax(other)).sum()


def judged(p: Params, real: jax.Array, noise: jax.Array) -> jax.Array:
    """A critic of real images and of others, with a label for each."""
    rows = jnp.concatenate([real, jnp.tanh(noise @ p["layers"][0])])
    labels = jnp.concatenate([jnp.ones(ROWS), jnp.zeros(ROWS)])
    logits = through(p, rows) @ p["out"][:, 0]
    return (jnp.logaddexp(0.0, logits) - labels * logits).sum()


def stacked(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
    """Views that are stacked, and merged with their rows."""
    h = through(p, jnp.stack([first, second]).reshape(2 * ROWS, WIDTH)).reshape(2, ROWS, WIDTH)
    return (h[0] * h[1]).sum()


def stacked_tokens(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
    """Views whose rows are merged with their tokens as well."""
    views = p["words"][jnp.stack([first, second])].reshape(-1, WIDTH)
    h = through(p, views).reshape(2, ROWS, TOKENS, WIDTH)
    return (h[0] * h[1]).sum()


def nested(p: Params, first: jax.Array, second: jax.Array, third: jax.Array) -> jax.Array:
    h = through(p, jnp.concatenate([first, jnp.concatenate([second, third])]))
    return (h[:ROWS] * h[ROWS : 2 * ROWS] * h[2 * ROWS :]).sum()


def contrasted(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
    """SimCLR (Chen et al. 2020): each row is compared with all others, by their places."""
    z = through(p, jnp.concatenate([first, second]))
    scores = jnp.where(jnp.eye(2 * ROWS, dtype=bool), -1e9, z @ z.T)
    places = jnp.concatenate([jnp.arange(ROWS) + ROWS, jnp.arange(ROWS)])
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), places[:, None], axis=1).sum()


def by_place(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
    """Rows that are weighed, sorted, added up and written by their places."""
    z = through(p, jnp.concatenate([first, second]))
    weighed = (z * (1 + jnp.arange(2.0 * ROWS))[:, None]).at[3].multiply(2.0)
    return weighed.sum() ** 2 + jnp.cumsum(z[:, 0])[5] + (jnp.sort(z, axis=0)[2] * z[jnp.argmax(z[:, 1])]).sum()


KEY = jax.random.key(3)
BY_ROW: dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
    "preferences": (preferred(), ANSWERS),
    "preferences in a scan": (preferred(scanned=True), ANSWERS),
    "preferences with attention": (preferred(attending), ANSWERS),
    "preferences with dropout": (preferred(forgetful(KEY)), ANSWERS),
    "preferences with dropout in a scan": (preferred(forgetful(KEY), scanned=True), ANSWERS),
    "preferences, computed again": (preferred(jax.checkpoint(plain)), ANSWERS),
    "partly labelled": (partly_labelled, (IMAGES[0], *MORE)),
    "real and made": (judged, IMAGES[:2]),
    "stacked": (stacked, IMAGES[:2]),
    "stacked with their tokens": (stacked_tokens, ANSWERS),
    "nested": (nested, IMAGES),
}
NOT_BY_ROW = {"contrasted": (contrasted, IMAGES[:2]), "by place": (by_place, IMAGES[:2])}


def trained(loss: Callable[..., jax.Array]) -> Callable[..., tuple[Params, jax.Array]]:
    def step(p: Params, *batch: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda x, g: x - 0.01 * g, p, grads), value

    return step


@pytest.mark.parametrize("name", BY_ROW)
def test_data_parallelism_adds_up_gradients_and_sends_no_rows(name: str):
    loss, batch = BY_ROW[name]
    step = autopar.parallelize(trained(loss), planner=autopar.DataParallel())
    assert_close(step(PARAMS, *batch), jax.jit(trained(loss))(PARAMS, *batch))
    assert {collective.kind for collective in step.plan(PARAMS, *batch).collectives} == {"all_reduce"}


@pytest.mark.parametrize("name", some(BY_ROW, 8))
def test_microbatches_have_rows_of_each_batch(name: str):
    loss, batch = BY_ROW[name]
    step = autopar.parallelize(trained(loss), microbatches=2)
    assert_close(step(PARAMS, *batch), jax.jit(trained(loss))(PARAMS, *batch))


@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_operators_that_depend_on_positions_see_the_programs_order(name: str):
    loss, batch = NOT_BY_ROW[name]
    step = autopar.parallelize(trained(loss), planner=autopar.DataParallel())
    assert_close(step(PARAMS, *batch), jax.jit(trained(loss))(PARAMS, *batch))


def test_views_of_images_are_not_sent_to_be_compared_by_their_places():
    """Places along one dimension of all pairs took the program's order for rows, which the other dimension has."""

    def loss(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
        keys = jax.random.split(KEY)
        views = [x * jax.random.normal(key, x.shape, x.dtype) for x, key in zip((first, second), keys, strict=True)]
        z = jnp.tanh(jnp.concatenate(views) @ p["down"])
        scores = jnp.where(jnp.eye(len(z), dtype=bool), -1e9, z @ z.T)
        places = jnp.roll(jnp.arange(len(z)), len(first))
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), places[:, None], axis=1).sum()

    images = (jax.ShapeDtypeStruct((512, 3072), "float32"),) * 2
    params = {"down": jax.ShapeDtypeStruct((3072, 128), "float32")}
    plan = autopar.parallelize(trained(loss), planner=autopar.DataParallel(), cluster=CLUSTER).plan(params, *images)
    assert max(c.nbytes for c in plan.collectives if c.kind == "all_gather") == 1024 * 128 * 4  # what is compared


def test_rows_leave_in_the_programs_order():
    def step(p: Params, first: jax.Array, second: jax.Array) -> jax.Array:
        return through(p, jnp.concatenate([first, second])) @ p["out"]

    parallel = autopar.parallelize(step, planner=autopar.DataParallel())
    assert_close(parallel(PARAMS, *IMAGES[:2]), jax.jit(step)(PARAMS, *IMAGES[:2]))


def test_a_join_that_saves_less_than_it_moves_stays():
    """Rows come in an order of their own beside the join, and leave in it."""

    def step(p: Params, first: jax.Array, second: jax.Array, both: jax.Array) -> tuple[jax.Array, ...]:
        return both * jnp.concatenate([first, second]), both @ p["out"]

    traced = trace(step, (PARAMS, *IMAGES[:2], np.concatenate(IMAGES[1:])), {})
    assert joined_batches(traced.graph) is None


def test_the_order_of_unequal_batches():
    step = trained(partly_labelled)
    graph = trace(step, (PARAMS, IMAGES[0], *MORE), {}).graph
    changes = joined_batches(graph, (), (False, False, False, True, True, True))
    assert changes is not None
    joins = [change for change in changes.nodes.values() if change.is_join]
    assert {change.groups for change in joins} == {ROWS}
    assert max(change.along[0] for change in joins) == 3
    assert not any(change.operands or change.results for change in changes.nodes.values())


def test_dimensions_of_a_multiple_are_apart_from_others():
    graph = trace(stacked, (PARAMS, *IMAGES[:2]), {}).graph
    dims = DimClasses(multiple=ROWS)
    firsts = dims.add(graph).firsts
    first, second = (dims.root(firsts[value]) for value in graph.inputs[-2:])
    (merged,) = {dims.root(firsts[v]) for v, type in enumerate(graph.types) if type.shape == (2 * ROWS, WIDTH)}
    assert first == second != merged


@pytest.mark.parametrize("sizes", [(16, 16), (16, 48, 48), (32, 16)])
def test_an_order_is_one_of_all_elements(sizes: tuple[int, ...]):
    x, order = jnp.arange(sum(sizes)), Order(ROWS, sizes)
    grouped = to_groups(x, 0, order)
    np.testing.assert_array_equal(to_order(grouped, 0, order), x)
    ends = np.cumsum(sizes)
    rows = np.asarray(grouped).reshape(ROWS, -1)
    for end, size in zip(ends, sizes, strict=True):
        inside = rows[(rows >= end - size) & (rows < end)].reshape(ROWS, -1)
        np.testing.assert_array_equal(inside, np.arange(end - size, end).reshape(ROWS, -1))
