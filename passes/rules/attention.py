"""Rules of cuDNN's fused attention, which `jax.nn.dot_product_attention(..., implementation="cudnn")` calls.

Sequences of a batch and heads are independent; one sequence stays whole, as a mask counts places from its begin.

Reference: jax/_src/cudnn/fused_attention_stablehlo.py (`_infer_fwd_output_sharding` allows the same cuts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from passes.ir import Node, TensorType
from passes.rules.registry import build, replicate, rule
from passes.rules.sharding_rule import ShardingRule, Types

Labels = tuple[str | None, ...]

LAYOUTS: dict[int, Labels] = {0: ("batch", None, "heads", None), 1: ("batch", "heads", None, None)}
"""JAX's `AttentionLayout` -> the labels of queries, keys and values: tokens with heads inside, or the reverse."""

CAUSAL = frozenset({"CAUSAL", "PADDING_CAUSAL"})
"""The names of JAX's `MaskType` by which a token sees none behind it: half of the scores are not computed."""

FORWARD, BACKWARD = 2, 4
"""Products that a pass is of, each of as many flops as the scores take: scores, and what they mix; four gradients."""

AGAIN = 1
"""The products that the backward pass's kernel computes besides: scores, which no array holds.

Reference: Dao et al., "FlashAttention" (2022), section 3.1 and appendix B.
"""


@rule("dot_product_attention_fwd_wrapper")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The results are what is mixed and, in training, the logarithm of each token's sum of exponentials."""
    if reason := _whole(node, operands):
        return replicate(operands, results, reason)
    labels = LAYOUTS[_layout(node)]
    sums: list[Labels] = [("batch", "heads", None)]
    return _attention(
        node, operands, _inputs(node, operands), [(results[0], labels), *zip(results[1:], sums, strict=False)], FORWARD
    )


@rule("dot_product_attention_bwd_wrapper")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """The results are the gradients of queries, keys and values, and that of a bias, a sum over what the bias lacks."""
    if reason := _whole(node, operands):
        return replicate(operands, results, reason)
    labels, inputs = LAYOUTS[_layout(node)], _inputs(node, operands)
    gradients = zip(results, [labels, labels, labels, inputs[3]], strict=False)
    return _attention(node, operands, [*inputs, ("batch", "heads", None), labels, labels], list(gradients), BACKWARD)


def _attention(
    node: Node,
    operands: Types,
    inputs: Sequence[Labels],
    results: Sequence[tuple[TensorType, Labels]],
    products: int,
) -> ShardingRule:
    """The rule of as many products of scores; heads may share keys and values, and are cut as those are."""
    layout = _layout(node)
    heads = LAYOUTS[layout].index("heads")
    queries, keys = (operand.shape[2 if layout else 1] for operand in operands[:2])
    base = build(
        list(zip(operands, inputs, strict=True)),
        results,
        reduce={label: "add" for label in ("batch", "heads") if any(label not in labels for _, labels in results)},
        sizes={"heads": math.gcd(operands[0].shape[heads], operands[1].shape[heads]), "batch": operands[0].shape[0]},
        flops=2.0 * products * operands[0].size * keys,
        light=False,
    )
    again = AGAIN if products == BACKWARD else 0
    return replace(base, attends=_share_seen(node, queries, keys) * (products + again) / products)


def _share_seen(node: Node, queries: int, keys: int) -> float:
    """The share of the scores that a kernel computes: a causal mask leaves half, a window no more than is inside."""
    causal = queries / (2 * keys) if queries <= keys else 1 - keys / (2 * queries)
    seen = causal if node.params["mask_type"] in CAUSAL else 1.0
    window = cast("int | None", node.params["sliding_window_length"])
    return min(seen, window / keys) if window else seen


def _inputs(node: Node, operands: Types) -> list[Labels]:
    """The labels of queries, keys, values, a bias, lengths of sequences, their offsets, and tables of pages; those that
    are not used have no element.
    """
    labels = LAYOUTS[_layout(node)]
    bias = operands[3]
    of_bias: Labels = ("batch", "heads", None, None) if bias.rank == 4 else (None,) * bias.rank
    of_bias = tuple(None if size == 1 else label for size, label in zip(bias.shape, of_bias, strict=True))
    lengths: list[Labels] = [("batch", *(None,) * (t.rank - 1)) if t.size else (None,) * t.rank for t in operands[4:8]]
    return [labels, labels, labels, of_bias, *lengths, *((None,) * t.rank for t in operands[8:10])]


def _layout(node: Node) -> int:
    return cast("int", node.params["layout"])


def _whole(node: Node, operands: Types) -> str:
    """The reason for which an attention is computed whole; "" for any that may be cut."""
    if cast("float", node.params["dropout_rate"]) > 0:
        return "cuDNN drops scores by their place, so each device would drop others"
    return "keys and values in pages are one pool for the whole batch" if operands[8].rank == 4 else ""
