"""The cache on a graph: entries are computed once, and again when a user has added a rule."""

import pytest

from passes.ir import Graph, TensorType
from passes.rules import define, registry, remembered, replicate, sum_of

calls: list[tuple[Graph, int]] = []


@remembered
def counted(graph: Graph, times: int = 1) -> list[int]:
    calls.append((graph, times))
    return [len(graph.nodes)] * times


@pytest.fixture
def graph() -> Graph:
    calls.clear()
    node = sum_of(0, 1, 2, source="", scope="")
    return Graph(types=(TensorType(shape=(4,), dtype="float32"),) * 3, nodes=(node,), inputs=(0, 1), outputs=(2,))


def test_a_result_is_computed_once_for_the_same_arguments(graph: Graph) -> None:
    assert counted(graph) is counted(graph)
    assert counted(graph, times=2) == [1, 1]
    assert calls == [(graph, 1), (graph, 2)]


def test_a_rule_of_the_user_makes_results_anew(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_USER_RULES", {})
    before = counted(graph)
    define("mine", lambda node, operands, results: replicate(operands, results, "mine"))
    assert counted(graph) is not before
    assert len(calls) == 2
