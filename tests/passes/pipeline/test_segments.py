"""Pieces of random programs make what the whole makes, and stages are alike whatever their names and order."""

import random
from dataclasses import replace

import numpy as np
import pytest

from passes.pipeline.segments import subgraph_of, value_specs
from passes.pipeline.structural_hash import structural_hash
from passes.transforms.stages import state_pairs_of
from passes.transforms.time_axis import whole_layout
from tests.passes.transforms.random_steps import APPLY, SIDE, made


@pytest.mark.parametrize("seed", range(12))
def test_a_piece_makes_what_the_whole_makes(seed: int) -> None:
    body, r, rng = made(seed)[1], random.Random(seed), np.random.default_rng(seed)
    layout = whole_layout(body)
    values = {v: rng.normal(size=(SIDE, SIDE)) for v in body.inputs}
    for node in body.nodes:
        values[node.outputs[0]] = APPLY[node.primitive](*(values[v] for v in node.inputs))
    nodes = sorted(r.sample(range(len(body.nodes)), r.randint(1, len(body.nodes))))
    made_there, home = [body.nodes[i].outputs[0] for i in nodes], value_specs(body, layout)
    wanted = r.sample(made_there, r.randint(1, len(made_there)))
    piece = subgraph_of(body, nodes, layout, home, [(v, home[v]) for v in wanted])
    assert set(piece.nodes) <= set(nodes)
    assert len(piece.layout.placements) == len(piece.graph.nodes)
    known = {v: values[v] for v in piece.graph.inputs}
    for node in piece.graph.nodes:
        known[node.outputs[0]] = APPLY[node.primitive](*(known[v] for v in node.inputs))
    for value in wanted:
        np.testing.assert_array_equal(known[value], values[value])
    read = {v for node in piece.graph.nodes for v in node.inputs}
    assert set(piece.graph.inputs) <= read  # nothing is asked for that is not read


@pytest.mark.parametrize("seed", range(12))
def test_stages_are_alike_up_to_names_and_order(seed: int) -> None:
    graph, body, _, stages = made(seed)
    assert any(node.primitive == "tanh" for node in body.nodes)
    for part in stages.parts:
        pairs = state_pairs_of(part, graph, ())
        inputs = part.graph.inputs
        turned = replace(
            part, graph=replace(part.graph, inputs=inputs[::-1], input_names=tuple(f"other {v}" for v in inputs))
        )
        assert structural_hash(turned, pairs) == structural_hash(part, pairs)
        loop = part.graph.nodes[part.loop]
        body = loop.subgraphs[0]
        for index, node in enumerate(body.nodes):
            if node.primitive != "tanh":
                continue
            nodes = (*body.nodes[:index], replace(node, primitive="neg"), *body.nodes[index + 1 :])
            changed = replace(loop, subgraphs=(replace(body, nodes=nodes),))
            outer = (*part.graph.nodes[: part.loop], changed, *part.graph.nodes[part.loop + 1 :])
            assert structural_hash(replace(part, graph=replace(part.graph, nodes=outer)), pairs) != structural_hash(
                part, pairs
            )
