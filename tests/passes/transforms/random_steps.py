"""Random training steps of square matrices in microbatches, for tests of their stages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from passes.ir import LOOP, Graph, Node, TensorType
from passes.layers.forward import forward_nodes
from passes.transforms import Stages, loop_of
from passes.transforms.stages import cut

SIDE, MICROBATCHES = 3, 3

SQUARE = TensorType(shape=(SIDE, SIDE), dtype="float64")

STACK = TensorType(shape=(MICROBATCHES, SIDE, SIDE), dtype="float64")

OF_SUMS = "transpose(jvp(net))/weights"
"""The scope of what the backward pass makes of the sum of a weight's cotangents."""

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
        for linear in ("neg", "mul")[: r.choice((0, 0, 1, 2))]:
            factors = (weights[k],) if linear == "mul" else ()
            parts = [body.add(linear, *parts, *factors, scope=OF_SUMS)]
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
