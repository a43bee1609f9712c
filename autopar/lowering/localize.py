"""One node as each device runs it: its primitive bound on local pieces, inside `jax.shard_map`.

Most primitives compute a piece of their result from pieces of their operands as they are. For others, the sharding rule
names the parameter that is the result's shape, or there is a localizer (`autopar.lowering.localizers`). Results are
checked against the shapes of the placement, so a primitive that lacks a localizer raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import jax_compat
from autopar.frontend import Equation
from passes.cluster import Axes
from passes.errors import InternalError
from passes.ir import LOOP, Graph, Node, TensorType
from passes.placement import Placement
from passes.rules import ShardingRule, rule_of

Coordinate = Callable[[str], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A node and how its `rule` cuts it; `operands` and `results` are the types of the whole values.

    `coordinate` gives the index of this device, or of this microbatch, along an axis.
    """

    node: Node
    equation: Equation
    rule: ShardingRule
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    placement: Placement
    mesh: Axes
    coordinate: Coordinate = lax.axis_index

    @property
    def is_whole(self) -> bool:
        """Whether every device runs the node on whole operands; partial ones are whole too."""
        return not any(axes for spec in (*self.placement.operands, *self.placement.results) for axes in spec.dims)

    @property
    def params(self) -> Mapping[str, Any]:
        return self.equation.params

    def local_shape(self, result: int = 0) -> tuple[int, ...]:
        """The shape of one device's piece of a result."""
        return self.placement.results[result].local_shape(self.results[result].shape, self.mesh)


Arrays = Sequence[jax.Array]
Localizer = Callable[[Cut, Arrays], Arrays]

_LOCALIZERS: dict[str, Localizer] = {}


def localizes(*primitives: str) -> Callable[[Localizer], Localizer]:
    """The decorator that registers how primitives run on pieces, by name."""

    def register(localizer: Localizer) -> Localizer:
        _LOCALIZERS.update(dict.fromkeys(primitives, localizer))
        return localizer

    return register


def cut_of(graph: Graph, index: int, equation: Equation, placement: Placement, mesh: Axes) -> Cut:
    """A node of a graph with the way in which a placement cuts it."""
    node = graph.nodes[index]
    return Cut(
        node=node,
        equation=equation,
        rule=rule_of(node, graph),
        operands=tuple(graph.types[value] for value in node.inputs),
        results=tuple(graph.types[value] for value in node.outputs),
        placement=placement,
        mesh=mesh,
    )


@contextmanager
def binding(node: Node) -> Iterator[None]:
    """The context in which a node is bound: its operations have its scope, and what `jax.debug_nans` finds its line."""
    try:
        with jax.named_scope(node.scope or node.primitive):
            yield
    except FloatingPointError as error:
        where = " at ".join(filter(None, (node.primitive, node.source)))
        if node.scope == LOOP:
            where = "a microbatch; a plan without microbatches, and jax.jit, name the operation"
        raise FloatingPointError(f"{error} It is a result of {where}.") from error


def bind(cut: Cut, operands: Arrays) -> Arrays:
    """One device's results of a node, from its pieces of the operands; partial results are one summand each.

    Raises InternalError for a primitive whose results do not have the promised shapes, and UnsupportedError for random
    bits that cannot be drawn in pieces.
    """
    try:
        results = _local(cut, operands)
    except (TypeError, ValueError) as error:
        raise InternalError(f"{_words(cut)} cannot run on pieces {[x.shape for x in operands]}: {error}") from error
    shapes = [tuple(x.shape) for x in results]
    promised = [cut.local_shape(i) for i in range(len(cut.results))]
    if shapes != promised:
        raise InternalError(f"{_words(cut)} gives pieces {shapes}, the plan wants {promised}")
    return results


def _local(cut: Cut, operands: Arrays) -> Arrays:
    """The results of a node on pieces, of whatever shapes, as its rule says."""
    if cut.is_whole and not cut.rule.pinned and not cut.rule.once:
        return rebind(cut, operands)
    if cut.rule.shape_parameter:
        return rebind(cut, operands, **{cut.rule.shape_parameter: cut.local_shape()})
    if not cut.rule.localized:
        return rebind(cut, operands)
    if cut.node.primitive not in _LOCALIZERS:
        raise InternalError(f"{_words(cut)} has a rule that says `localized`, and no localizer")
    return _LOCALIZERS[cut.node.primitive](cut, operands)


def piece_index(axes: tuple[str, ...], mesh: Axes, coordinate: Coordinate = lax.axis_index) -> jax.Array:
    """The index of this device's piece of a dimension, int32[]; the first of the axes is the major one."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * mesh.axis_size(axis) + coordinate(axis)
    return index


def _words(cut: Cut) -> str:
    where = f" at {cut.node.source}" if cut.node.source else ""
    operands = ", ".join(f"{t} {s}" for t, s in zip(cut.operands, cut.placement.operands, strict=True))
    return f"{cut.node.primitive}({operands}){where}"


def rebind(cut: Cut, operands: Arrays, **changed: Any) -> Arrays:
    """The node's primitive on these operands, with some parameters changed and without those that say where
    values are.
    """
    if cut.rule.constrained:
        return operands  # a constraint, which the plan has met
    params = dict(cut.params) | changed
    params |= {name: None for name in ("sharding", "out_sharding") if name in params}
    params |= {name: (None,) * len(params[name]) for name in cut.rule.places}
    primitive = cut.equation.primitive
    results = primitive.bind(*operands, **jax_compat.bind_params(cut.equation, params))
    return results if primitive.multiple_results else (results,)


def offset(cut: Cut, axes: tuple[str, ...], extent: int, dtype: Any = np.int32) -> jax.Array:
    """The index at which this device's piece of a dimension begins, given the piece's extent."""
    return piece_index(axes, cut.mesh, cut.coordinate).astype(dtype) * np.asarray(extent, dtype)
