"""Rules of gather, scatter and dynamic slices.

A dimension that the indices select single elements from can be cut: each device answers for the indices that fall into
its piece and gives zeros for the rest, so a gather comes out as a partial sum (vocabulary-parallel embedding) and a
scatter drops what is not its own.

Reference: Megatron-LM (Shoeybi et al. 2019), section 3; XLA's gather and scatter semantics.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import cast

from passes.ir import Node
from passes.rules.registry import build, moved, rule
from passes.rules.sharding_rule import ShardingRule, Types


@rule("gather")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    numbers = cast("Mapping[str, tuple[int, ...]]", node.params["dimension_numbers"])
    sizes = cast("tuple[int, ...]", node.params["slice_sizes"])
    operand, indices = operands
    source: list[Hashable] = [None] * operand.rank
    result: list[Hashable] = [None] * results[0].rank
    index: list[Hashable] = [None] * indices.rank
    batch_positions = range(indices.rank - 1)
    result_batch = [d for d in range(results[0].rank) if d not in numbers["offset_dims"]]
    for from_index, to_result in zip(batch_positions, result_batch, strict=True):
        index[from_index] = result[to_result] = f"i{from_index}"
    pairs = zip(numbers["operand_batching_dims"], numbers["start_indices_batching_dims"], strict=True)
    for in_operand, in_index in pairs:
        source[in_operand] = f"i{in_index}"
    removed = {*numbers["collapsed_slice_dims"], *numbers["operand_batching_dims"]}
    window = [d for d in range(operand.rank) if d not in removed]
    for in_operand, in_result in zip(window, numbers["offset_dims"], strict=True):
        if sizes[in_operand] == operand.shape[in_operand] and in_operand not in numbers["start_index_map"]:
            source[in_operand] = result[in_result] = f"w{in_operand}"
    summable = results[0].is_inexact or results[0].is_integer
    picked = _selected(numbers["start_index_map"], numbers["collapsed_slice_dims"])
    selected = picked if summable else {}
    for in_operand, label in selected.items():
        source[in_operand] = label
    fills = "FILL" in str(node.params["mode"])  # with a number in place of what is beyond, of each summand
    base = build(
        [(operand, source), (indices, index)],
        [(results[0], result)],
        reduce=dict.fromkeys(selected.values(), "add"),
        linear=((0,),) if summable and not fills else (),
        light=False,
        sparse=(0,),
    )
    return replace(base, localized=True, moves=tuple([(0, d, to) for d in picked for to in result_batch]))


_SCATTERS = {
    "scatter": "",
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "",
    "scatter-min": "min",
    "scatter-max": "max",
}
"""Primitive -> the reduction that joins what two devices have scattered, empty if there is none."""


@rule(*_SCATTERS)
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """Index batch dimensions reduce: each device scatters its own updates, onto a partial sum if it adds.

    Two updates of one element have no order in JAX; those that overwrite or multiply must still all be on one device.
    """
    kind = _SCATTERS[node.primitive]
    numbers = cast("Mapping[str, tuple[int, ...]]", node.params["dimension_numbers"])
    operand, indices, updates = operands
    target: list[Hashable] = [None] * operand.rank
    index: list[Hashable] = [None] * indices.rank
    update: list[Hashable] = [None] * updates.rank
    positions = [d for d in range(updates.rank) if d not in numbers["update_window_dims"]]
    batching = dict(zip(numbers["scatter_indices_batching_dims"], numbers["operand_batching_dims"], strict=True))
    reduced: dict[Hashable, str] = {}
    for from_index, in_update in enumerate(positions):
        label = f"i{from_index}"
        if from_index in batching:
            target[batching[from_index]] = label
        elif kind:
            reduced[label] = kind
        else:
            continue
        index[from_index] = update[in_update] = label
    removed = {*numbers["inserted_window_dims"], *numbers["operand_batching_dims"]}
    window = [d for d in range(operand.rank) if d not in removed]
    for in_operand, in_update in zip(window, numbers["update_window_dims"], strict=True):
        full = operand.shape[in_operand] == updates.shape[in_update]
        if full and in_operand not in numbers["scatter_dims_to_operand_dims"]:
            target[in_operand] = update[in_update] = f"w{in_operand}"
    for in_operand, label in _selected(
        numbers["scatter_dims_to_operand_dims"], numbers["inserted_window_dims"]
    ).items():
        target[in_operand] = label
    base = build(
        [(operand, target), (indices, index), (updates, update)],
        [(results[0], target)],
        reduce=reduced,
        partial=dict.fromkeys(reduced, (0,)) if kind == "add" else {},
        linear=((0, 2),) if kind == "add" else (),
        flops=float(updates.size),
        light=False,
    )
    return replace(base, localized=True)


def _selected(mapped: tuple[int, ...], collapsed: tuple[int, ...]) -> dict[int, Hashable]:
    """The labels of the operand's dimensions that the indices select single elements from."""
    return {d: f"v{d}" for d in mapped if d in collapsed}


@rule("dynamic_slice")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    pairs = list(zip(operands[0].shape, results[0].shape, strict=True))
    labels = [d if a == b else None for d, (a, b) in enumerate(pairs)]
    starts = [(t, ()) for t in operands[1:]]
    base = build([(operands[0], labels), *starts], [(results[0], labels)], linear=((0,),), flops=0.0, sparse=(0,))
    moves = moved(*(d for d, (a, b) in enumerate(pairs) if a > b > 1))
    return replace(base, localized=True, shape_parameter="slice_sizes", moves=moves)


@rule("dynamic_update_slice")
def _(node: Node, operands: Types, results: Types) -> ShardingRule:
    """A dimension that is written in part is cut as well: each device writes what falls into its piece."""
    target, update = operands[:2]
    written = [d if a == b else None for d, (a, b) in enumerate(zip(target.shape, update.shape, strict=True))]
    starts = [(t, ()) for t in operands[2:]]
    whole = range(target.rank)
    base = build([(target, whole), (update, written), *starts], [(results[0], whole)], linear=((0, 1),), flops=0.0)
    return replace(base, localized=True)
