"""Rules of pooling and its gradients: a dimension along which every window is one element passes through."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from passes.ir import Node
from passes.rules.registry import build, rule, size_of
from passes.rules.sharding_rule import ShardingRule, Types

_UNMOVED = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}


@rule(
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add",
)  # fmt: skip
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Scalars among the operands are what each reduction starts from."""
    params = {name: cast("tuple[object, ...]", node.params[name]) for name in _UNMOVED if name in node.params}
    labels = [
        d if all(values[d] == _UNMOVED[name] for name, values in params.items()) else None
        for d in range(results[0].rank)
    ]
    window = size_of(cast("tuple[int, ...]", node.params["window_dimensions"]))
    base = build(
        [(t, labels if t.rank else ()) for t in operands],
        [(t, labels) for t in results],
        flops=float(window * min(t.size for t in (*operands, *results) if t.rank)),
        light=False,
    )
    return replace(base, selects=node.primitive in {"select_and_scatter", "select_and_scatter_add"})
