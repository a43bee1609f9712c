"""Stages of random steps in microbatches: together they compute what the step computes, and hand on what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from passes.ir import LOOP, Graph, Node
from passes.layers.forward import forward_nodes
from passes.transforms import Part, Stages, loop_of
from passes.transforms.stages import cut, state_pairs_of
from tests.passes.transforms.random_steps import APPLY, MICROBATCHES, OF_SUMS, STACK, Writer, made, step

SEEDS = range(60)


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
    split = {
        i
        for i, n in enumerate(body.nodes)
        if n.primitive == "add_any" or n.scope == OF_SUMS or n.scope.endswith("accumulate")
    }
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


def test_state_pairs_of_a_part_are_of_its_own_positions() -> None:
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
