"""A program that joins batches in groups: its nodes changed as `joined_batches` says.

An array in groups has shape [groups, rows of a group, ...] in place of [rows, ...]. Batches are joined, taken apart and
padded along the second dimension, so that a device with some of the groups needs nothing of others. The changed form of
a node is written as a JAX function of its operands, and traced in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from autopar import jax_compat
from autopar.frontend.bodies import Body, Equation
from autopar.frontend.flattening import flatten
from autopar.frontend.joined_batches import Changes, NodeChange, Order, Orders
from autopar.frontend.writing import Writer
from passes.errors import InternalError
from passes.ir import Node

Arrays = Sequence[jax.Array]


def regrouped(body: Body, changes: Changes) -> Body:
    """The body with these changes; its inputs and outputs are as they were."""
    return body if changes.is_none else _Regrouping(body, changes).run()


class _Regrouping:
    """A body under construction in which some values have another order.

    Values in the program's order are `read` by the number that they have in groups; `in_order` are values in the
    program's order that exist already, by (value in groups, its orders).
    """

    def __init__(self, body: Body, changes: Changes) -> None:
        self.body, self.changes, self.program = body, changes, Writer(body)
        self.read: dict[int, int] = {}
        self.in_order: dict[tuple[int, frozenset[tuple[int, Order]]], int] = {}

    def run(self) -> Body:
        graph, changes = self.body.graph, self.changes
        for value, orders in changes.values.items():
            self.read[value] = self.program.fresh(graph.types[value])
            self._changed(to_groups, orders, value, self.read[value], graph.nodes[0])
            self.in_order[self.read[value], frozenset(orders.items())] = value
        for index, node in enumerate(graph.nodes):
            self._add(index, node, self.body.equations[index])
        ends = [self.read.get(value, value) for value in graph.outputs]
        return self.program.finish(
            [
                self._ordered(value, changes.outputs.get(position, {}), graph.nodes[-1])
                for position, value in enumerate(ends)
            ]
        )

    def _add(self, index: int, node: Node, equation: Equation) -> None:
        """Adds a node in its changed form."""
        change, program = self.changes.nodes.get(index, NodeChange()), self.program
        inputs = tuple(
            self._ordered(self.read.get(value, value), change.operands.get(position, {}), node)
            for position, value in enumerate(node.inputs)
        )
        if drawn := _drawn(node, equation, change):
            self._apply(drawn, inputs, node.outputs, node)
            return
        outputs = tuple(
            program.fresh(program.types[value]) if position in change.results else value
            for position, value in enumerate(node.outputs)
        )
        if change.along:
            self._apply(_joined(node, equation, change), inputs, outputs, node)
        else:
            bodies = tuple(
                regrouped(inner, self.changes.bodies[index, which]) if (index, which) in self.changes.bodies else inner
                for which, inner in enumerate(equation.bodies)
            )
            subgraphs = tuple(inner.graph for inner in bodies) or node.subgraphs
            made = replace(node, inputs=inputs, outputs=outputs, subgraphs=subgraphs)
            program.add(made, replace(equation, bodies=bodies))
        for position, orders in change.results.items():
            made, value = outputs[position], node.outputs[position]
            self._changed(to_groups, orders, made, value, node)
            self.in_order[value, frozenset(orders.items())] = made

    def _ordered(self, value: int, orders: Orders, node: Node) -> int:
        """A value in the program's order, made once."""
        key = value, frozenset(orders.items())
        if orders and key not in self.in_order:
            self.in_order[key] = self.program.fresh(self.program.types[value])
            self._changed(to_order, orders, value, self.in_order[key], node)
        return self.in_order[key] if orders else value

    def _changed(self, change: Callable[..., jax.Array], orders: Orders, value: int, to: int, node: Node) -> None:
        """Writes a value in another order along some of its dimensions, for a node."""

        def changed(x: jax.Array) -> list[jax.Array]:
            for dim, order in orders.items():
                x = change(x, dim, order)
            return [x]

        self._apply(changed, (value,), (to,), node)

    def _apply(self, fun: Callable[..., Arrays], inputs: Sequence[int], outputs: Sequence[int], node: Node) -> None:
        """Writes what a function computes, in place of a node."""
        types = [self.program.types[value] for value in inputs]
        structs = [jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype)) for type in types]
        with jax_compat.no_mesh():
            body = flatten(jax.make_jaxpr(fun)(*structs))
        self.program.add_in_place_of(node, body, inputs, outputs)


def _split(x: jax.Array, dim: int, *sizes: int) -> jax.Array:
    """The array with a dimension split in two, the first of that size."""
    return lax.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def _merged(x: jax.Array, dim: int, count: int = 2) -> jax.Array:
    """The array with that many dimensions merged into one."""
    return lax.reshape(x, (*x.shape[:dim], math.prod(x.shape[dim : dim + count]), *x.shape[dim + count :]))


def _swapped(x: jax.Array, dim: int) -> jax.Array:
    """The array with a dimension and the next one exchanged."""
    order = list(range(x.ndim))
    order[dim], order[dim + 1] = dim + 1, dim
    return lax.transpose(x, order)


def to_groups(x: jax.Array, dim: int, order: Order) -> jax.Array:
    """An array in the program's order, rearranged in groups."""
    groups, sizes = order.groups, order.sizes
    if len(set(sizes)) == 1:
        return _merged(_swapped(_split(x, dim, len(sizes), groups, sizes[0] // groups), dim), dim, 3)
    parts = lax.split(x, sizes, dim)
    return _merged(
        lax.concatenate([_split(part, dim, groups, part.shape[dim] // groups) for part in parts], dim + 1), dim
    )


def to_order(x: jax.Array, dim: int, order: Order) -> jax.Array:
    """An array in groups, rearranged in the program's order."""
    groups, sizes = order.groups, order.sizes
    if len(set(sizes)) == 1:
        return _merged(_swapped(_split(x, dim, groups, len(sizes), sizes[0] // groups), dim), dim, 3)
    parts = lax.split(_split(x, dim, groups, x.shape[dim] // groups), [size // groups for size in sizes], dim + 1)
    return lax.concatenate([_merged(part, dim) for part in parts], dim)


def _drawn(node: Node, equation: Equation, change: NodeChange) -> Callable[..., Arrays] | None:
    """The function that draws random bits in groups, from counters in the program's order; None for any other node, and
    for pieces of different sizes.

    Bits depend on their position among all, not on the shape: those of [pieces, groups] are transposed to [groups,
    pieces].
    """
    orders = dict(change.results.get(0, {}))
    if node.primitive != "random_bits" or not orders or any(len(set(order.sizes)) > 1 for order in orders.values()):
        return None

    def draw(keys: jax.Array) -> list[jax.Array]:
        shape = [*keys.shape, *equation.params["shape"]]
        for dim, order in sorted(orders.items(), reverse=True):
            shape[dim : dim + 1] = [len(order.sizes), order.groups, order.sizes[0] // order.groups]
        bits = equation.primitive.bind(keys, **{**equation.params, "shape": tuple(shape[keys.ndim :])})
        for dim in sorted(orders):
            bits = _merged(_swapped(bits, dim), dim, 3)
        return [bits]

    return draw


def _joined(node: Node, equation: Equation, change: NodeChange) -> Callable[..., Arrays]:
    """The function of a node that joins batches, or takes them apart, in groups."""
    params: Mapping[str, Any] = equation.params
    along, groups = sorted(change.along), change.groups

    def split(x: jax.Array) -> jax.Array:
        for dim in reversed(along):
            x = _split(x, dim, groups, x.shape[dim] // groups)
        return x

    def merged(x: jax.Array) -> jax.Array:
        for dim in along:
            x = _merged(x, dim)
        return x

    def wide(numbers: Sequence[Any], first: Callable[[int], Any], rest: Callable[[Any], Any]) -> list[Any]:
        """The numbers of each dimension, with those of its groups before those of a group's rows."""
        return [n for d, x in enumerate(numbers) for n in ((first(d), rest(x)) if d in along else (x,))]

    def joined(*xs: jax.Array) -> list[jax.Array]:
        match node.primitive:
            case "concatenate":
                return [merged(lax.concatenate(list(map(split, xs)), along[0] + 1))]
            case "split":
                sizes = [size // groups for size in params["sizes"]]
                return list(map(merged, lax.split(split(xs[0]), sizes, along[0] + 1)))
            case "slice":
                begins = wide(params["start_indices"], lambda _: 0, lambda n: n // groups)
                ends = wide(params["limit_indices"], lambda _: groups, lambda n: n // groups)
                strides = wide(params["strides"] or [1] * xs[0].ndim, lambda _: 1, lambda n: n)
                return [merged(lax.slice(split(xs[0]), begins, ends, strides))]
            case "pad":
                low, high, between = zip(*params["padding_config"], strict=True)
                sides = (wide(side, lambda _: 0, lambda n: n // groups) for side in (low, high, between))
                return [merged(lax.pad(split(xs[0]), xs[1], list(zip(*sides, strict=True))))]
            case "reshape" if change.is_join:
                return [_merged_pieces(xs[0], params["new_sizes"], change)]
            case "reshape":
                return [lax.reshape(_split_pieces(xs[0], change), params["new_sizes"])]
            case _:
                raise InternalError(f"{node.primitive} joins no batches")

    return joined


def _merged_pieces(x: jax.Array, shape: Sequence[int], change: NodeChange) -> jax.Array:
    """An array in a shape in which dimensions of pieces are merged with those of their rows, in groups."""
    sizes = list(shape)
    for dim, count in sorted(change.along.items(), reverse=True):
        sizes[dim : dim + 1] = [count, change.groups, shape[dim] // (count * change.groups)]
    x = lax.reshape(x, sizes)
    for dim in sorted(change.along):
        x = _merged(_swapped(x, dim), dim, 3)
    return x


def _split_pieces(x: jax.Array, change: NodeChange) -> jax.Array:
    """An array in groups with a dimension of pieces before those of their rows."""
    for dim, count in sorted(change.along.items(), reverse=True):
        x = _swapped(_split(x, dim, change.groups, count, x.shape[dim] // (count * change.groups)), dim)
    return x
