"""Stages of random steps in microbatches: together they compute what the step computes, and hand on what they say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest

from passes.ir import LOOP, Graph, Node, TensorType
from passes.layers.forward import forward_nodes
from passes.transforms import Part, Stages, cut, loop_of
from passes.transforms.stages import state_pairs_of

SEEDS = range(60)
SIDE, MICROBATCHES = 3, 3
SQUARE = TensorType(shape=(SIDE, SIDE), dtype="float64")
STACK = TensorType(shape=(MICROBATCHES, SIDE, SIDE), dtype="float64")

APPLY = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "tanh": np.tanh,
    "neg": np.negative,
    "dot_general": np.matmul,
}

PARAMS: Mapping[str, Mapping[str, object]] = {"dot_general": {"dimension_numbers": (((1,), (0,)), ((), ()))}}


class Writer:
    """A graph as it is written; every value is a square unless said otherwise."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.nodes: list[Node] = []

    def value(self, type: TensorType = SQUARE) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def add(self, primitive: str, *operands: int, scope: str = "") -> int:
        made = self.value()
        params = PARAMS.get(primitive, {})
        self.nodes.append(Node(primitive=primitive, inputs=operands, outputs=(made,), params=params, scope=scope))
        return made

    def graph(self, inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
        names = tuple(f"in {v}" for v in inputs)
        graph = Graph(
            types=tuple(self.types),
            nodes=tuple(self.nodes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            input_names=names,
            output_names=tuple(f"out {v}" for v in outputs),
        )
        graph.verify()
        return graph


def microbatch(r: random.Random, n_layers: int) -> Graph:
    """A random network: layers that read earlier ones, a weight that two of them share, random gradients."""
    body = Writer()
    weights = [body.value() for _ in range(n_layers)]
    sums = [body.value() for _ in range(n_layers)]
    first = body.value()
    target = body.value()
    shared = {n_layers - 1: 0} if r.random() < 0.5 else {}
    hidden = [first]
    for k in range(n_layers):
        scope = f"jvp(net)/layer_{k}"
        read = hidden[-1] if r.random() < 0.7 else r.choice(hidden)
        made = body.add("dot_general", read, weights[shared.get(k, k)], scope=scope)
        made = body.add("tanh", made, scope=scope)
        if r.random() < 0.4:
            made = body.add("add", made, r.choice(hidden), scope=scope)
        hidden.append(made)
    error = body.add("sub", hidden[-1], target, scope="jvp(net)/loss")
    gradient = body.add("mul", error, error, scope="transpose(jvp(net))/loss")
    gradients, summands = [gradient], dict[int, list[int]]()
    for k in reversed(range(n_layers)):
        own = f"transpose(jvp(net))/layer_{k}"
        scope = own if r.random() < 0.7 else "transpose(jvp(net))/elsewhere"
        if r.random() < 0.4:
            gradient = body.add("add", gradient, r.choice(gradients), scope=scope)
        gradient = body.add("mul", gradient, hidden[k + 1], scope=scope)
        summands.setdefault(shared.get(k, k), []).append(body.add("dot_general", hidden[k], gradient, scope=own))
        if k:
            gradient = body.add("dot_general", gradient, weights[shared.get(k, k)], scope=scope)
            gradients.append(gradient)
    norm = body.add("neg", gradients[r.randrange(len(gradients))], scope="norm")
    leaving = []
    for k, total in enumerate(sums):
        parts = summands.get(k, [norm])
        while len(parts) > 1:
            parts = [body.add("add_any", *parts[:2], scope=f"transpose(jvp(net))/layer_{k}"), *parts[2:]]
        leaving.append(body.add("add", total, parts[0], scope=f"{LOOP}/accumulate"))
    return body.graph([*weights, *sums, first, target], [*leaving, *([hidden[-1]] if r.random() < 0.5 else [])])


def step(seed: int) -> Graph:
    """A step that adds up the gradients of a random network over microbatches, and the update after the loop."""
    r = random.Random(seed)
    n_layers = r.randint(4, 7)
    inner, outer = microbatch(r, n_layers), Writer()
    state = [outer.value() for _ in range(n_layers)]
    moment = outer.value()
    batch = [outer.value(STACK), outer.value(STACK)]
    scaled = [outer.add("neg", w, scope="before") if r.random() < 0.3 else w for w in state]
    zeros = [outer.add("sub", w, w) for w in state]
    results = [outer.value() for _ in range(n_layers)]
    rows = [outer.value(STACK) for _ in inner.outputs[n_layers:]]
    outer.nodes.append(
        Node(
            primitive="scan",
            inputs=(*scaled, *zeros, *batch),
            outputs=(*results, *rows),
            params={
                "length": MICROBATCHES,
                "num_carry": n_layers,
                "num_consts": n_layers,
                "reverse": False,
                "unroll": 1,
            },
            subgraphs=(inner,),
            scope=LOOP,
        )
    )
    norm = results[0]
    for g in results[1:]:
        norm = outer.add("add", norm, g)
    updated = [outer.add("sub", w, outer.add("mul", g, norm)) for w, g in zip(state, results, strict=True)]
    return outer.graph([*state, moment, *batch], [*updated, norm, outer.add("neg", moment), *rows])


def whole(graph: Graph, given: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Every value of a step, run as it was written."""
    known = dict(given)
    for node in graph.nodes:
        operands = [known[v] for v in node.inputs]
        if node.primitive != "scan":
            known[node.outputs[0]] = APPLY[node.primitive](*operands)
            continue
        inner, n = node.subgraphs[0], node.params["num_consts"]
        assert isinstance(n, int)
        carries, rows = operands[n : 2 * n], []
        for m in range(MICROBATCHES):
            entering = (*operands[:n], *carries, *(stack[m] for stack in operands[2 * n :]))
            inside = whole(inner, dict(zip(inner.inputs, entering, strict=True)))
            leaving = [inside[v] for v in inner.outputs]
            carries = leaving[:n]
            rows.append(leaving[n:])
        known.update(zip(node.outputs, (*carries, *map(np.stack, zip(*rows, strict=True))), strict=True))
    return known


class Together:
    """The stages, each run by itself; `got` says who had which stream or value of whom."""

    def __init__(self, graph: Graph, stages: Stages, given: Mapping[int, np.ndarray]) -> None:
        self.graph, self.parts, self.given = graph, stages.parts, given
        self.got: Counter[tuple[str, int, int, int]] = Counter()
        self.outside = cache(self._outside)
        self.inside = cache(self._inside)

    def _maker(self, value: int, asking: int) -> int:
        (maker,) = (k for k, part in enumerate(self.parts) if value in part.graph.outputs and k != asking)
        return maker

    def _outside(self, at: int, value: int) -> np.ndarray:
        graph, loop = self.parts[at].graph, self.parts[at].loop
        node = graph.producers.get(value)
        if node is None:
            assert value in graph.inputs
            if value in self.given:
                return self.given[value]
            maker = self._maker(value, at)
            self.got["value", maker, at, value] += 1
            return self.outside(maker, value)
        if node != loop:
            made = graph.nodes[node]
            return APPLY[made.primitive](*(self.outside(at, v) for v in made.inputs))
        position = graph.nodes[loop].outputs.index(value)
        leaving = self.parts[at].body.outputs[position]
        if position < graph.nodes[loop].params["num_carry"]:
            return self.inside(at, MICROBATCHES - 1, leaving)
        return np.stack([self.inside(at, m, leaving) for m in range(MICROBATCHES)])

    def _inside(self, at: int, microbatch: int, value: int) -> np.ndarray:
        part, body = self.parts[at], self.parts[at].body
        node = body.producers.get(value)
        if node is not None:
            made = body.nodes[node]
            return APPLY[made.primitive](*(self.inside(at, microbatch, v) for v in made.inputs))
        loop, position = part.graph.nodes[part.loop], body.inputs.index(value)
        n_constants, n_carries = loop.params["num_consts"], loop.params["num_carry"]
        outer = loop.inputs[position]
        if position < n_constants:
            return self.outside(at, outer)
        if position < n_constants + n_carries:
            before = body.outputs[position - n_constants]
            return self.inside(at, microbatch - 1, before) if microbatch else self.outside(at, outer)
        if outer not in part.boundary_values:
            return self.outside(at, outer)[microbatch]
        maker = self._maker(outer, at)
        self.got["stream", maker, at, outer] += 1
        sent = self.parts[maker].graph.nodes[self.parts[maker].loop].outputs.index(outer)
        return self.inside(maker, microbatch, self.parts[maker].body.outputs[sent])


@cache
def made(seed: int) -> tuple[Graph, Graph, tuple[int, ...], Stages]:
    """(step, body of its loop, where stages begin, stages)."""
    graph, r = step(seed), random.Random(-seed)
    index = loop_of(graph)
    assert index is not None
    body = graph.nodes[index].subgraphs[0]
    places = [i for i in forward_nodes(body) if i]
    firsts = (0, *sorted(r.sample(places, r.randint(1, 3))))
    return graph, body, firsts, cut(graph, firsts)


@pytest.mark.parametrize("seed", SEEDS)
def test_stages_compute_what_the_step_computes(seed: int) -> None:
    graph, _, _, stages = made(seed)
    rng = np.random.default_rng(seed)
    given = {v: rng.normal(size=graph.types[v].shape) / 2 for v in graph.inputs}
    wanted, together = whole(graph, given), Together(graph, stages, given)
    for value, owner in zip(graph.outputs, stages.output_stages, strict=True):
        assert value in stages.parts[owner].graph.outputs
        np.testing.assert_allclose(together.outside(owner, value), wanted[value], rtol=1e-9)
    # What a stage asks for it uses, once in every microbatch, and nothing is sent that nobody asks for.
    received = {
        ("stream" if v in part.boundary_values else "value", v, k)
        for k, part in enumerate(stages.parts)
        for v in part.graph.inputs
        if v not in given
    }
    assert {(kind, value, to) for kind, _, to, value in together.got} == received
    assert all(count == MICROBATCHES for (kind, *_), count in together.got.items() if kind == "stream")


@pytest.mark.parametrize("seed", SEEDS)
def test_forward_operators_are_cut_where_stages_begin_and_all_run_once(seed: int) -> None:
    _, body, firsts, stages = made(seed)
    places = forward_nodes(body)
    split = {i for i, n in enumerate(body.nodes) if n.primitive == "add_any" or n.scope.endswith("accumulate")}
    times = Counter(index for part in stages.parts for kind, index in part.inside if kind == "loop")
    assert {i: times[i] for i in range(len(body.nodes)) if i not in split} == {
        i: 1 for i in range(len(body.nodes)) if i not in split
    }
    for k, part in enumerate(stages.parts):
        here = {index for _, index in part.inside} & set(places)
        assert here == {i for i in places if sum(first <= i for first in firsts) == k + 1}
        assert {part.inside[i][1] for i in part.forward} - split == here


@pytest.mark.parametrize("seed", SEEDS)
def test_results_flow_on_and_gradients_back(seed: int) -> None:
    """What the forward pass makes goes to later stages, what the backward pass makes to earlier ones."""
    _, _, _, stages = made(seed)
    streams = 0
    for k, part in enumerate(stages.parts):
        early = {v for i in part.forward for v in part.body.nodes[i].outputs}
        sent = [(stream, inner) for stream, inner in part.boundary_values.items() if stream in part.graph.outputs]
        for stream, inner in sent:
            readers = [at for at, other in enumerate(stages.parts) if stream in other.graph.inputs]
            assert readers
            assert all((at > k) == (inner in early) and at != k for at in readers)
            streams += 1
    assert streams >= len(stages.parts) - 1


@pytest.mark.parametrize("seed", range(30))
def test_an_input_is_at_home_where_it_is_read(seed: int) -> None:
    graph, _, _, stages = made(seed)
    assert stages.microbatches == MICROBATCHES
    for value, home in zip(graph.inputs, stages.input_stages, strict=True):
        assert value in stages.parts[home].graph.inputs
    last = dict(zip(graph.inputs, stages.input_stages, strict=True))
    batch = [v for v in graph.inputs if graph.types[v] == STACK]
    assert last[batch[0]] == 0
    assert last[batch[1]] == len(stages.parts) - 1


def test_a_gradient_of_no_layer_is_computed_where_what_it_needs_was_kept() -> None:
    """Of a backward operator whose forward operator is not found, the largest that was saved decides."""
    body = Writer()
    weight, total, x, y = (body.value() for _ in range(4))
    early = body.add("tanh", body.add("dot_general", x, weight, scope="jvp(f)/a"), scope="jvp(f)/a")
    late = body.add("mul", early, y, scope="jvp(f)/b")
    last = body.add("mul", late, y, scope="jvp(f)/c")
    gradient = body.add("neg", last, scope="transpose(jvp(f))/c")
    gradient = body.add("mul", gradient, early, scope="transpose(jvp(f))/unknown")
    leaving = body.add("add", total, gradient, scope=f"{LOOP}/accumulate")
    graph = _around(body.graph([weight, total, x, y], [leaving]))
    stages = cut(graph, (0, 2, 3))
    places = {index: k for k, part in enumerate(stages.parts) for _, index in part.inside}
    assert [places[i] for i in range(6)] == [0, 0, 1, 2, 2, 1]  # stage 1 read `early` last


def _around(inner: Graph) -> Graph:
    """A step whose loop has the body: one constant, one sum, and two stacks."""
    outer = Writer()
    weight, zero = outer.value(), outer.value()
    batch, result = [outer.value(STACK), outer.value(STACK)], outer.value()
    params = {"length": MICROBATCHES, "num_carry": 1, "num_consts": 1, "reverse": False, "unroll": 1}
    outer.nodes.append(
        Node(
            primitive="scan",
            inputs=(weight, zero, *batch),
            outputs=(result,),
            params=params,
            subgraphs=(inner,),
            scope=LOOP,
        )
    )
    return outer.graph([weight, zero, *batch], [result])


def test_ties_are_those_of_the_parts_own_positions() -> None:
    graph, _, _, stages = made(3)
    pairs = tuple((i, i) for i in range(len(graph.inputs) - 3))  # every weight and its update
    found = [
        (part.graph.outputs[o], part.graph.inputs[i])
        for part in stages.parts
        for o, i in state_pairs_of(part, graph, pairs)
    ]
    wanted = {(graph.outputs[o], graph.inputs[i]) for o, i in pairs}
    assert set(found) <= wanted
    together = [p for p in wanted if any(p[0] in s.graph.outputs and p[1] in s.graph.inputs for s in stages.parts)]
    assert sorted(found) == sorted(together)
    assert found


def test_of_a_weight_that_two_stages_share_each_adds_up_its_own_gradients() -> None:
    """Two running sums, added once after the loop."""
    shared = next(s for s in range(50) if any(n.primitive == "add_any" for n in _body(step(s)).nodes))
    graph = step(shared)
    body = _body(graph)
    places = [i for i in forward_nodes(body) if i]
    stages = cut(graph, (0, places[len(places) // 2]))
    total = Counter(node.scope for part in stages.parts for node in part.graph.nodes)
    assert total["microbatches/stages"] == 1
    assert not any(n.primitive == "add_any" for part in stages.parts for n in part.body.nodes)
    carries = [part.graph.nodes[part.loop].params["num_carry"] for part in stages.parts]
    index = loop_of(graph)
    assert index is not None
    assert sum(carries) == graph.nodes[index].params["num_carry"] + 1


def _body(graph: Graph) -> Graph:
    index = loop_of(graph)
    assert index is not None
    return graph.nodes[index].subgraphs[0]


def test_one_stage_is_the_step() -> None:
    graph = step(1)
    (part,) = cut(graph, (0,)).parts
    assert isinstance(part, Part)
    assert not part.boundary_values
    assert {n.primitive for n in part.graph.nodes} == {n.primitive for n in graph.nodes}
    assert [n.primitive for n in part.body.nodes] == [n.primitive for n in _body(graph).nodes]
