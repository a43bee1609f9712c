"""The rule of cuDNN's attention: which dimensions are cut, what is computed of the scores, and what stays whole."""

from __future__ import annotations

from typing import Any

import pytest

from passes.cluster import Mesh, parse_cluster
from passes.intra_op.roofline import computed_flops
from passes.ir import Graph, Node, TensorType
from passes.placement import products
from passes.rules import ShardingRule, rule_of

BATCH, HEADS, FEATURES = 8, 4, 16
LAYOUTS = {"rows first": 0, "heads first": 1}
PARAMS = {"layout": 0, "dropout_rate": 0.0, "mask_type": "NO_MASK", "sliding_window_length": None}
UNUSED = TensorType(shape=(0,), dtype="bfloat16")


def graph_of(
    name: str, *, tokens: int = 32, keys: int = 32, shared: int = 1, bias: tuple[int, ...] = (), **params: Any
) -> Graph:
    """The program of one kernel of attention, forward (`fwd`) or backward (`bwd`), with `shared` heads for a key."""
    rows_first = not params.get("layout", 0)

    def of_heads(length: int, heads: int) -> TensorType:
        inner = (length, heads) if rows_first else (heads, length)
        return TensorType(shape=(BATCH, *inner, FEATURES), dtype="bfloat16")

    query, key = of_heads(tokens, HEADS), of_heads(keys, HEADS // shared)
    sums = TensorType(shape=(BATCH, HEADS, tokens), dtype="float32")
    pages = params.pop("pages", UNUSED)
    of_bias = TensorType(shape=bias, dtype="bfloat16") if bias else UNUSED
    operands = [query, key, key, of_bias, *[UNUSED] * 4, pages, pages]
    results = [query, sums]
    if name == "bwd":
        operands += [sums, query, query]
        results = [query, key, key, *[of_bias] * bool(bias)]
    count = len(operands)
    node = Node(
        primitive=f"dot_product_attention_{name}_wrapper",
        inputs=tuple(range(count)),
        outputs=tuple(range(count, count + len(results))),
        params=PARAMS | params,
    )
    return Graph(types=(*operands, *results), nodes=(node,), inputs=node.inputs, outputs=node.outputs)


def rule(name: str, **options: Any) -> ShardingRule:
    graph = graph_of(name, **options)
    return rule_of(graph.nodes[0], graph)


def placements(rule: ShardingRule) -> dict[tuple[str, ...], list[str]]:
    """The placements of queries, keys and the results, for each on a mesh of one axis."""
    mesh = Mesh(axes=("x",), sizes=(2,), cluster=parse_cluster("2:h100"))
    by_query: dict[tuple[str, ...], list[str]] = {}
    for assignment in rule.assignments(mesh):
        operands = [rule.operand_spec(i, assignment) for i in (0, 1)]
        results = [rule.result_spec(i, assignment) for i in range(len(rule.results))]
        by_query[tuple(map(str, operands))] = [str(spec) for spec in results]
    return by_query


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_and_heads_are_cut_and_tokens_are_not(layout: str) -> None:
    heads = "[-, -, x, -]" if layout == "rows first" else "[-, x, -, -]"
    assert placements(rule("fwd", layout=LAYOUTS[layout])) == {
        ("[-, -, -, -]",) * 2: ["[-, -, -, -]", "[-, -, -]"],
        ("[x, -, -, -]",) * 2: ["[x, -, -, -]", "[x, -, -]"],
        (heads, heads): [heads, "[-, x, -]"],
    }


def test_a_bias_for_all_has_a_gradient_that_is_a_sum() -> None:
    """The other gradients are cut where that of the bias is partial."""
    by_heads = rule("bwd", bias=(1, HEADS, 32, 32))
    assert placements(by_heads)[("[x, -, -, -]",) * 2] == [*["[x, -, -, -]"] * 3, "[-, -, -, -] add@x"]
    assert placements(by_heads)[("[-, -, x, -]",) * 2] == [*["[-, -, x, -]"] * 3, "[-, x, -, -]"]
    of_each = rule("bwd", bias=(BATCH, 1, 32, 32))
    assert placements(of_each)[("[x, -, -, -]",) * 2][3] == "[x, -, -, -]"
    assert placements(of_each)[("[-, -, x, -]",) * 2][3] == "[-, -, -, -] add@x"


def test_heads_are_cut_as_the_keys_that_they_share() -> None:
    sizes = {factor.size for factor in rule("fwd", shared=2).factors}
    assert sizes == {BATCH, HEADS // 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_rate": 0.1}, "drops scores by their place"),
        ({"pages": TensorType(shape=(BATCH, 1, 4, 1), dtype="int32")}, "in pages"),
    ],
    ids=["dropout", "pages"],
)
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_attention_that_is_computed_whole_says_why(name: str, options: dict[str, Any], reason: str) -> None:
    whole = rule(name, **options)
    assert reason in whole.reason
    assert not whole.factors


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        ({"mask_type": "PADDING"}, 1.0),
        ({"mask_type": "CAUSAL"}, 1 / 2),
        ({"mask_type": "PADDING_CAUSAL", "keys": 64}, 1 / 4),
        ({"mask_type": "CAUSAL", "tokens": 64}, 3 / 4),
        ({"mask_type": "CAUSAL", "sliding_window_length": 8}, 8 / 32),
        ({"mask_type": "CAUSAL", "sliding_window_length": 100}, 1 / 2),
    ],
)
def test_scores_behind_a_mask_are_not_computed(options: dict[str, Any], share: float) -> None:
    """Model flops count attention in full, forward and twice backward; a device makes the scores again besides."""
    device = parse_cluster("8:h100").group().device
    forward, backward = (graph_of(name, **options) for name in ("fwd", "bwd"))
    (full,) = products(forward).values()
    tokens, keys = options.get("tokens", 32), options.get("keys", 32)
    assert full == 2 * 2 * BATCH * HEADS * FEATURES * tokens * keys
    assert products(backward) == {"bfloat16": 2 * full}
    assert computed_flops(rule("fwd", **options), device) == pytest.approx(share * full)
    assert computed_flops(rule("bwd", **options), device) == pytest.approx(share * 2.5 * full)
