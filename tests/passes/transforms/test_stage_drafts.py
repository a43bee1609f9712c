"""The stage of each node of a random step's loop, and the values that stages read of each other."""

import pytest

from passes.layers import forward
from passes.sharding import parse_spec
from passes.transforms.stage_assignment import StageAssignment
from passes.transforms.stage_drafts import LoopDrafts, StepDrafts
from passes.transforms.time_axis import AXIS, Time, whole_layout
from tests.passes.transforms.random_steps import made

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cotangent_never_waits_for_a_later_stage(seed: int) -> None:
    _, body, firsts, _ = made(seed)
    late, anywhere = forward.after_backward(body), forward.everywhere(body)
    found = StageAssignment(body=body, firsts=firsts, late=late, anywhere=anywhere)
    assert found.stage.keys() == set(range(len(body.nodes))) - anywhere
    for index, at in found.stage.items():
        node = body.nodes[index]
        assert 0 <= at < len(firsts)
        assert all(found.made[v] == at for v in node.outputs)
        if forward.adds_up(node):
            continue
        if index not in late:
            assert firsts[at] <= index
            assert at == len(firsts) - 1 or index < firsts[at + 1]
        else:
            cotangents = [found.made[v] for v in node.inputs if body.producers.get(v) in late and v in found.made]
            assert at <= min(cotangents, default=len(firsts) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_values_that_a_stage_receives_are_sent_by_one_other(seed: int) -> None:
    graph, _, firsts, stages = made(seed)
    loop = LoopDrafts(graph, firsts)
    for at, draft in enumerate(loop.drafts):
        for value in draft.received:
            assert [other for other, sender in enumerate(loop.drafts) if value in sender.sent] == [loop.made[value]]
            assert loop.made[value] != at
    sent = set().union(*(draft.sent for draft in loop.drafts))
    assert sent == set().union(*(draft.received for draft in loop.drafts)) == loop.stream_of.keys()
    step = StepDrafts(loop, ())
    assert step.input_stages() == stages.input_stages
    assert tuple(map(step.stage_of_output, graph.outputs)) == stages.output_stages


def test_layouts_are_whole_at_first_and_what_is_cut_in_time_has_the_rows_of_a_microbatch() -> None:
    graph = made(0)[0]
    layout, time = whole_layout(graph), Time(4)
    assert time.axes == (AXIS,)
    assert parse_spec(f"[{AXIS}, -]").local_shape((8, 3), time) == (2, 3)
    for value, spec in zip(graph.inputs, layout.inputs, strict=True):
        assert not any(spec.dims)
        assert spec.local_shape(graph.types[value].shape, time) == graph.types[value].shape
    for node, placement in zip(graph.nodes, layout.placements, strict=True):
        assert len(placement.bodies) == len(node.subgraphs)
        assert [len(spec.dims) for spec in placement.results] == [graph.types[v].rank for v in node.outputs]
