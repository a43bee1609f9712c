"""A step whose backward pass begins with 1, and whose gradients are multiplied by what it began with."""

from __future__ import annotations

from dataclasses import replace

import jax

from autopar import jax_compat
from autopar.frontend import Traced
from autopar.rewrite.parted_rows import Writer
from passes.ir import TensorType
from passes.layers import batch_inputs
from passes.transforms import late_factor


def with_late_factor(traced: Traced) -> Traced | None:
    """The same step with the factor of its backward pass behind it; None if it has none that the whole batch decides.

    Gradients are rounded once more than if the pass began with the factor.
    """
    graph = traced.graph
    batch = [graph.inputs[i] for i in batch_inputs(graph, traced.state_pairs, traced.named)]
    factor = late_factor(graph, batch)
    if factor is None:
        return None
    writer, multiplied = Writer(traced), dict[int, int]()
    one = writer.literal(1.0, graph.types[factor.value])
    for index, (node, equation) in enumerate(zip(graph.nodes, traced.equations, strict=True)):
        if index not in factor.nodes:
            writer.add(replace(node, inputs=tuple(multiplied.get(v, v) for v in node.inputs)), equation)
            continue
        writer.add(replace(node, inputs=tuple(one if v == factor.value else v for v in node.inputs)), equation)
        for value in set(factor.leaving).intersection(node.outputs):
            multiplied[value] = product = writer.value(graph.types[value])
            call = replace(node, inputs=(value, factor.value), outputs=(product,), params={}, subgraphs=())
            writer.add_in_place_of(call, _product(graph.types[value], graph.types[factor.value]))
    writer.same.update(multiplied)
    return writer.finish()


def _product(array: TensorType, factor: TensorType) -> jax.extend.core.ClosedJaxpr:
    """The jaxpr of an array times a number, rounded to the array's dtype."""
    structs = (jax.ShapeDtypeStruct(t.shape, jax_compat.dtype_of(t.dtype)) for t in (array, factor))
    with jax_compat.no_mesh():
        return jax.make_jaxpr(lambda x, scale: (x * scale).astype(x.dtype))(*structs)
