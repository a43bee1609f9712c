"""Blocks of networks that repeat themselves, found where they were put, and cut where the least crosses."""

from __future__ import annotations

import itertools
import random

import jax.numpy as jnp
import pytest

from autopar.frontend import trace
from passes.errors import PlanningError
from passes.ir import Graph, Node, TensorType
from passes.layers import in_blocks
from passes.layers.cuts import crossing_nbytes, work
from passes.layers.repeats import COVERED, FEWEST, stretches

ROWS = 16
SEEDS = range(60)


class Network:
    """A forward pass of dense layers as it is written; every weight is an input."""

    def __init__(self) -> None:
        self.types = [TensorType(shape=(ROWS, 8), dtype="float32")]
        self.inputs = [0]
        self.nodes: list[Node] = []

    def add(self, primitive: str, *operands: int, width: int) -> int:
        params = {"dimension_numbers": (((1,), (0,)), ((), ()))} if primitive == "dot_general" else {}
        self.types.append(TensorType(shape=(ROWS, width), dtype="float32"))
        made = len(self.types) - 1
        self.nodes.append(Node(primitive=primitive, inputs=operands, outputs=(made,), params=params, scope="jvp(f)"))
        return made

    def dense(self, value: int, width: int) -> int:
        self.types.append(TensorType(shape=(self.types[value].shape[1], width), dtype="float32"))
        self.inputs.append(len(self.types) - 1)
        return self.add("dot_general", value, self.inputs[-1], width=width)

    def graph(self, output: int) -> Graph:
        found = Graph(types=tuple(self.types), nodes=tuple(self.nodes), inputs=tuple(self.inputs), outputs=(output,))
        found.verify()
        return found


def repeated(seed: int, count: int) -> tuple[Graph, int, int]:
    """(a network with `count` equal blocks between other layers, the node of the first, nodes in each)."""
    r = random.Random(seed)
    net = Network()
    x = net.dense(0, 8)
    for _ in range(r.randint(0, 2)):
        x = net.add(r.choice(("tanh", "exp", "neg")), x, width=8)
    wide, kinds = r.choice((32, 64)), [r.choice(("tanh", "exp", "logistic")) for _ in range(r.randint(1, 3))]
    first = len(net.nodes)
    for _ in range(count):
        inner = net.dense(x, wide)
        for kind in kinds:
            inner = net.add(kind, inner, width=wide)
        x = net.add("add", x, net.dense(inner, 8), width=8)
    x = net.dense(net.add("sin", x, width=8), 5)
    return net.graph(x), first, len(kinds) + 3


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_are_found_where_the_least_crosses(seed: int) -> None:
    count = random.Random(seed).randint(FEWEST, 9)
    graph, first, period = repeated(seed, count)
    (found,) = stretches(graph)
    # Between blocks there is one narrow value, inside also a wide one: no other cut of this period sends as little.
    assert found == tuple(first + period * i for i in range(count + 1))
    crossing = crossing_nbytes(graph, range(len(graph.nodes)))
    for start in range(first + 1, first + period):
        assert crossing[start + period] > crossing[first + period]
    words = [(node.primitive, *(graph.types[v] for v in (*node.inputs, *node.outputs))) for node in graph.nodes]
    assert len({tuple(words[at : at + period]) for at in found[:-1]}) == 1


def test_one_block_less_is_taken_for_cuts_that_little_crosses() -> None:
    """The end of a block before the first, the beginning of one after the last: one more fits, cut where it is wide."""
    net = Network()
    x = net.dense(0, 8)
    wide = net.add("exp", net.dense(x, 64), width=64)
    x = net.add("add", x, net.dense(net.add("tanh", wide, width=64), 8), width=8)
    first = len(net.nodes)
    for _ in range(4):
        x = net.add("add", x, net.dense(net.add("tanh", net.dense(x, 64), width=64), 8), width=8)
    last = len(net.nodes)
    graph = net.graph(net.add("exp", net.dense(x, 64), width=64))
    assert stretches(graph) == (tuple(range(first, last + 1, 4)),)


@pytest.mark.parametrize("count", range(1, FEWEST))
def test_few_blocks_are_no_repetition(count: int) -> None:
    assert stretches(repeated(0, count)[0]) == ()


def test_layers_that_differ_are_no_repetition() -> None:
    net, x = Network(), 0
    for width in (8, 16, 24, 32, 40, 48):
        x = net.add("tanh", net.dense(x, width), width=width)
    assert stretches(net.graph(x)) == ()


def test_blocks_must_hold_most_of_the_work() -> None:
    def network(width: int) -> Graph:
        net, x = Network(), 0
        for _ in range(4):
            x = net.add("tanh", net.dense(x, 8), width=8)
        return net.graph(net.dense(net.dense(x, width), 3))

    small, large = network(8), network(4096)
    for graph in (small, large):
        flops = work(graph, range(len(graph.nodes)))
        assert bool(stretches(graph)) == (flops[:8].sum() >= COVERED * flops.sum())
    assert stretches(small)
    assert not stretches(large)
    assert stretches(large, covered=0.0)


@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize("n_layers", [1, 2, 3, 5])
def test_layers_are_runs_of_blocks_with_even_work(n_layers: int, left_out: int) -> None:
    graph, first, period = repeated(2, 6)
    found = in_blocks(graph, n_layers, (left_out,))
    assert found.firsts == (0, *(first + period * i for i in range(7)))
    second = found.firsts.index(first + period)
    assert found.blocks == (*range(second), *[second] * left_out, *range(second, 8))
    flops = work(graph, range(len(graph.nodes)))
    ends = [*found.firsts[1:], len(graph.nodes)]
    each = [flops[begin:end].sum() for begin, end in zip(found.firsts, ends, strict=True)]
    loads = [each[block] for block in found.blocks]
    assert found.layers[0] == 0
    assert len(found.layers) == n_layers
    cuts = [*found.layers, len(loads)]
    heaviest = max(sum(loads[a:b]) for a, b in itertools.pairwise(cuts))
    assert heaviest == pytest.approx(least_heaviest(loads, n_layers))


def least_heaviest(loads: list[float], parts: int) -> float:
    """The least that the heaviest of so many runs can be, by trying every first run."""
    if parts == 1:
        return sum(loads)
    return min(max(sum(loads[:n]), least_heaviest(loads[n:], parts - 1)) for n in range(1, len(loads) - parts + 2))


def test_blocks_after_a_transposed_input_leave_no_empty_one_before_them() -> None:
    """Every stage transposes its input, which counted as a block: of 5 stages, the first had nothing to compute."""

    def loss(weights, x):
        y = x.T
        for weight in weights:
            y = jnp.tanh(weight @ y)
        return jnp.mean(y)

    graph = trace(loss, ([jnp.ones((8, 8))] * 4, jnp.ones((ROWS, 8))), {}, donate_argnums=()).graph
    assert in_blocks(graph, 2).firsts == (0, 3, 5, 7, 9)


def test_more_layers_than_blocks_are_cut_anywhere() -> None:
    graph, _, _ = repeated(2, 4)
    found = in_blocks(graph, 7)
    assert found.blocks == found.layers == tuple(range(7))
    assert list(found.firsts) == sorted(set(found.firsts))
    with pytest.raises(PlanningError, match="places where it can be cut"):
        in_blocks(graph, 1000)
