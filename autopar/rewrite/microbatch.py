"""A traced step rewritten to run one microbatch at a time: nodes that run once before, a loop, nodes that run once
after.

The rewritten program is traced anew, so planning and lowering see an ordinary program with a `scan` in it. Which of the
three parts an operator belongs to was decided by `passes.transforms.microbatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import jax_compat
from autopar.frontend import Body, Traced, flatten, left_to_plan
from autopar.lowering import Arrays, Cut, body_of, localize, walk
from autopar.rewrite.equivalents import with_turns
from autopar.rewrite.marks import marked_once, restored
from autopar.rewrite.row_pieces import REDUCED, Pieces, pieces_of
from autopar.rewrite.rows_first import stacked_rows
from passes.errors import InternalError
from passes.ir import LOOP, Graph, TensorType
from passes.placement import Layout, Placement, Resharding, is_free, resharding_plan, rows_in_any_order
from passes.sharding import ShardingSpec, Step, replicated
from passes.transforms import Coupling, Split, Time, Turn, sums_up_front, whole_layout


def microbatched(
    traced: Traced, structs: Sequence[jax.ShapeDtypeStruct], count: int, coupling: Coupling = "exact"
) -> Traced:
    """The same function of the same flat arguments, whose types are `structs`, in `count` microbatches.

    Raises PlanningError where there is no batch, `count` does not divide it, or an operator couples microbatches.
    """
    pairs = traced.state_pairs
    (traced, behind), turns = with_turns(traced, count, coupling)
    body, origins = marked_once(traced)
    graph, batch = traced.graph, turns[0].stacked
    stacked = tuple(i for i in batch if i not in behind)
    structs = [_stacked(x, count) if i in stacked else x for i, x in enumerate(structs)]

    def run(*inputs: Any) -> tuple[Any, ...]:
        rows = (stacked_rows(x, count) if i in behind else x for i, x in enumerate(inputs))
        return _run_in_turn(body, turns, coupling, list(rows))

    with jax_compat.no_mesh():
        jaxpr = jax.make_jaxpr(run)(*structs)
    # A pipeline looks for the loop over microbatches, also over one.
    written = flatten(jaxpr, input_names=graph.input_names, output_names=graph.output_names, single_loops=True)
    pinned = {i: placement for i, placement in graph.pinned.items() if i not in stacked}
    named_again = replace(restored(written.graph, origins), pinned=pinned)
    return replace(
        traced,
        graph=named_again,
        equations=written.matching(named_again).equations,
        constants=written.constants,
        state_pairs=tuple(pair for pair in pairs if pair[1] not in batch),
        stacked=stacked,
        jaxpr=traced.jaxpr if coupling == "exact" else None,
    )


def function_of(traced: Traced) -> Callable[..., Arrays]:
    """The function of a rewritten program on whole arrays, whose flat arguments are the program's own."""
    body, layout, time = body_of(traced), whole_layout(traced.graph), Time(1)
    schedule, semantics = resharding_plan(traced.graph, layout, time), OnTime(time, jnp.int32(0), "exact")
    return lambda *inputs: tuple(walk(body, layout, schedule, semantics, inputs))


def _stacked(struct: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    """The type of a batch stacked as microbatches, of consecutive rows each."""
    rows, *inner_shape = struct.shape
    return jax.ShapeDtypeStruct((count, rows // count, *inner_shape), struct.dtype, weak_type=struct.weak_type)


def _run_in_turn(body: Body, turns: Sequence[Turn], coupling: Coupling, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a body, from its inputs, with the batch as microbatches; traced, it is the rewritten program."""
    graph = body.graph
    if len(turns) == 1:
        return _run(body, turns[0].split, coupling, inputs, graph.memo)
    known: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    for turn in turns:
        part = Body(
            graph=graph.part(turn.nodes, turn.inputs, turn.outputs),
            equations=tuple(body.equations[i] for i in turn.nodes),
            constants=_constants(body, turn.nodes, turn.outputs),
        )
        results = _run(part, turn.split, coupling, [known[v] for v in turn.inputs], {})
        known.update(zip(turn.outputs, results, strict=True))
    known |= {v: lax.reshape(known[v], graph.types[v].shape) for v in (graph.inputs[i] for i in turns[0].stacked)}
    return tuple(known[v] if v in known else _lone(body, v) for v in graph.outputs)


def _run(
    body: Body, chosen: Split, coupling: Coupling, inputs: Sequence[Any], memo: dict[object, object]
) -> tuple[Any, ...]:
    """The outputs of a body with one loop, from its inputs, with the batch as microbatches.

    `memo` caches what is traced once for all numbers of microbatches.
    """
    graph = body.graph
    stacks = {graph.inputs[i]: inputs[i] for i in chosen.batch}
    known: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
    known |= {v: lax.reshape(stack, graph.types[v].shape) for v, stack in stacks.items()}
    made_inside = {v for i in chosen.loop for v in graph.nodes[i].outputs}
    needed = (_read_by(graph, chosen.loop) - made_inside) | _read_by(graph, chosen.after) | set(graph.outputs)
    computed = [v for i in chosen.before if not is_free(graph, i) for v in graph.nodes[i].outputs if v in needed]
    rows = {v: Pieces(stack, 0) for v, stack in stacks.items()}
    known.update(_up_front(body, chosen.before, chosen.count, computed, known, rows))

    entering, run_microbatch = _one_microbatch(body, chosen, coupling, known, stacks)
    leaving = [value for value, _ in chosen.carried]
    sums = [bool(spec.partial) for _, spec in chosen.carried]

    def step(totals: tuple[Any, ...], sliced: tuple[Any, tuple[Any, ...]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = run_microbatch(*sliced)
        with jax.named_scope("accumulate"):
            added = tuple(map(_add, totals, (_bits(x) for x, is_sum in zip(results, sums, strict=True) if is_sum)))
        return added, tuple(x for x, is_sum in zip(results, sums, strict=True) if not is_sum)

    stacked = tuple(stacks[v] for v in entering)
    zeros = tuple(_zeros(graph.types[v]) for v, is_sum in zip(leaving, sums, strict=True) if is_sum)
    with jax.named_scope(LOOP):
        totals, joined = lax.scan(step, zeros, (jnp.arange(chosen.count, dtype=np.int32), stacked))
    summed, joined_pieces = iter(totals), iter(joined)
    for (value, spec), is_sum in zip(chosen.carried, sums, strict=True):
        if is_sum:
            known[value] = _of_bits(next(summed), graph.types[value])
        else:
            (cut,) = (d for d, axes in enumerate(spec.dims) if axes)
            rows[value] = Pieces(next(joined_pieces), cut)
            known[value] = rows[value].in_order()
    late = [v for v in dict.fromkeys(graph.outputs) if v not in known and v not in graph.literals]
    if rows.keys() & _read_by(graph, chosen.after):
        known.update(_up_front(body, chosen.after, chosen.count, late, known, rows))
    else:
        known.update(_whole_once(body, chosen.after, late, known, memo))
    return tuple(known[v] if v in known else _lone(body, v) for v in graph.outputs)


def _one_microbatch(
    body: Body, chosen: Split, coupling: Coupling, known: Mapping[int, Any], stacks: Mapping[int, Any]
) -> tuple[list[int], Callable[[Any, Arrays], tuple[Any, ...]]]:
    """(the stacks that the loop reads, the function from a microbatch's number and batch to the values that leave the
    loop).
    """
    graph = body.graph
    inside = {v for i in chosen.loop for v in graph.nodes[i].outputs}
    entering = sorted(v for v in _read_by(graph, chosen.loop) - inside if v in known)
    leaving = [value for value, _ in chosen.carried]
    part = Body(
        graph=graph.part(chosen.loop, entering, leaving),
        equations=tuple(body.equations[i] for i in chosen.loop),
        constants=_constants(body, chosen.loop, leaving),
    )
    time = Time(chosen.count)
    layout = Layout(
        inputs=tuple(_spec(graph.types[v].rank, time.axes if v in stacks else ()) for v in entering),
        placements=tuple(chosen.placements.get(i) or _unplaced(graph, i) for i in chosen.loop),
        outputs=tuple(spec for _, spec in chosen.carried),
    )
    schedule = resharding_plan(part.graph, layout, time)

    def run(index: Any, cut: Arrays) -> tuple[Any, ...]:
        given = iter(cut)
        values = [next(given) if v in stacks else known[v] for v in entering]
        return tuple(walk(part, layout, schedule, OnTime(time, index, coupling), values))

    return [v for v in entering if v in stacks], run


def _up_front(
    body: Body,
    nodes: Sequence[int],
    count: int,
    outputs: Sequence[int],
    values: Mapping[int, Any],
    rows: Mapping[int, Pieces],
) -> dict[int, Any]:
    """The values of the whole batch that these nodes compute, before or after the loop.

    Values made of the stacks alone are reduced over these as they are; then those that are reduced of them in turn,
    such as a variance of its mean. What else does not need the order of `rows` computes with those of each device side
    by side.
    """
    part, inputs = _part(body, nodes, outputs, values)
    batch = tuple(i for i, v in enumerate(inputs) if v in rows and not rows[v].dim)
    early = sums_up_front(part.graph, count, batch) if batch else None
    if early is None:
        return _in_any_order(body, nodes, count, outputs, values, {v: rows[v] for v in inputs if v in rows})
    given, ours = {v: values[v] for v in inputs}, {inputs[i]: rows[inputs[i]].stack for i in batch}
    unchanged = [v for i in early.before if not is_free(part.graph, i) for v in part.graph.nodes[i].outputs]
    given.update(_whole(part, early.before, unchanged, given))
    entering, run_microbatch = _one_microbatch(part, early, "exact", given, ours)
    numbers, batches = jnp.arange(count, dtype=np.int32), tuple(ours[v] for v in entering)
    try:
        pieces = jax.vmap(run_microbatch)(numbers, batches)
    except NotImplementedError:  # a primitive of the user's that has no rule for batches
        pieces = jax.lax.map(lambda microbatch: run_microbatch(*microbatch), (numbers, batches))
    for (value, spec), piece in zip(early.carried, pieces, strict=True):
        given[value] = REDUCED[spec.reduction](piece)
    late = [v for v in outputs if v not in given]
    given.update(_up_front(part, early.after, count, late, given, {v: rows[v] for v in inputs if v in rows}))
    return {v: given[v] for v in outputs}


def _in_any_order(
    body: Body,
    nodes: Sequence[int],
    count: int,
    outputs: Sequence[int],
    values: Mapping[int, Any],
    rows: Mapping[int, Pieces],
) -> dict[int, Any]:
    """The values that some nodes compute from whole values, with the rows side by side where their order does not
    matter, and no more of them come out than go in.
    """
    graph = body.graph
    part, inputs = _part(body, nodes, outputs, values)
    sizes = {graph.types[v].shape[pieces.dim] for v, pieces in rows.items()}
    dims = {v: pieces.dim for v, pieces in rows.items()}
    made = rows_in_any_order(part.graph, dims, sizes.pop()) if len(sizes) == 1 else None
    nbytes = [sum(graph.types[v].nbytes for v in each) for each in (made or (), rows)]
    if made is None or nbytes[0] > nbytes[1]:
        return _whole(body, nodes, outputs, values)
    whole = {v: rows[v].side_by_side() if v in rows else values[v] for v in inputs}
    results = _whole(body, nodes, outputs, whole)
    return results | {v: pieces_of(results[v], dim, count).in_order() for v, dim in made.items()}


def _whole(body: Body, nodes: Sequence[int], outputs: Sequence[int], values: Mapping[int, Any]) -> dict[int, Any]:
    """The values that some nodes compute from whole values."""
    part, inputs = _part(body, nodes, outputs, values)
    layout, time = whole_layout(part.graph), Time(1)
    semantics = OnTime(time, jnp.int32(0), "exact")
    results = walk(part, layout, resharding_plan(part.graph, layout, time), semantics, [values[v] for v in inputs])
    return dict(zip(outputs, results, strict=True))


def _whole_once(
    body: Body, nodes: tuple[int, ...], outputs: Sequence[int], values: Mapping[int, Any], memo: dict[object, object]
) -> dict[int, Any]:
    """The values of `_whole` for nodes that are the same in any number of microbatches: JAX keeps their trace."""
    _, inputs = _part(body, nodes, outputs, values)
    key = _whole_once, nodes, tuple(outputs), tuple(inputs)
    if key not in memo:
        memo[key] = jax.jit(lambda *arrays: _whole(body, nodes, outputs, dict(zip(inputs, arrays, strict=True))))
    return cast("Callable[..., dict[int, Any]]", memo[key])(*[values[v] for v in inputs])


def _part(
    body: Body, nodes: Sequence[int], outputs: Sequence[int], values: Mapping[int, Any]
) -> tuple[Body, list[int]]:
    """(the body of some nodes alone, the known values that are its inputs)."""
    graph = body.graph
    produced = {v for i in nodes for v in graph.nodes[i].outputs}
    inputs = sorted(v for v in _read_by(graph, nodes) | set(outputs) if v in values and v not in produced)
    part = Body(
        graph=graph.part(nodes, inputs, outputs),
        equations=tuple(body.equations[i] for i in nodes),
        constants=_constants(body, nodes, outputs),
    )
    return part, inputs


@dataclass(frozen=True, slots=True)
class OnTime:
    """The semantics of microbatches: arrays are one microbatch's pieces, of microbatch `index` (int32[])."""

    planned: Time
    index: jax.Array
    coupling: Coupling

    def bind(self, cut: Cut, operands: Arrays) -> Arrays:
        if cut.rule.once:
            return localize.rebind(cut, operands)  # to be run once a step, wherever the plan has it
        if cut.rule.constrained:
            return (lax.with_sharding_constraint(operands[0], left_to_plan(cut.params["sharding"])),)
        return localize.bind(replace(cut, coordinate=lambda axis: self.index), operands)

    def move(self, array: jax.Array, move: Resharding) -> jax.Array:
        for step in move.steps:
            array = self._take(step, array)
        return array

    def share(self, array: jax.Array, spec: ShardingSpec) -> jax.Array:
        return self._once(array) if spec.partial else array

    def _take(self, step: Step, array: jax.Array) -> jax.Array:
        match step.kind:
            case "slice":
                extent = array.shape[step.to_dim] // self.planned.count
                return lax.dynamic_slice_in_dim(array, self.index * extent, extent, step.to_dim)
            case "keep":
                return self._once(array)
            case "all_reduce":
                # Independent microbatches: each stands for all of them.
                return lax.mul(array, np.asarray(self.planned.count, array.dtype))
            case _:
                raise InternalError(f"{step} between microbatches")

    def _once(self, array: jax.Array) -> jax.Array:
        """A summand of `array`: all of it in the first microbatch, or equal shares if microbatches are independent."""
        if self.coupling == "independent" and jnp.issubdtype(array.dtype, np.inexact):
            return lax.div(array, np.asarray(self.planned.count, array.dtype))
        return lax.select(lax.eq(self.index, np.int32(0)), array, jnp.zeros_like(array))


def _add(total: jax.Array, summand: jax.Array) -> jax.Array:
    return lax.bitwise_or(total, summand) if total.dtype == np.bool_ else lax.add(total, summand)


def _bits(summand: jax.Array) -> jax.Array:
    """The array that is added up for a value: of keys, which have no sum, their bits."""
    return jax.random.key_data(summand) if jnp.issubdtype(summand.dtype, jax.dtypes.prng_key) else summand


def _of_bits(total: jax.Array, type: TensorType) -> jax.Array:
    """The value of a type whose summands' bits add up to `total`."""
    if not type.is_key:
        return total
    return jax.random.wrap_key_data(total, impl=jax_compat.key_implementation(jax_compat.dtype_of(type.dtype)))


def _zeros(type: TensorType) -> jax.Array:
    """The zero that summands of a value of this type are added to."""
    total = jax.eval_shape(_bits, jax.ShapeDtypeStruct(type.shape, jax_compat.dtype_of(type.dtype)))
    return jnp.zeros(total.shape, total.dtype)


def _read_by(graph: Graph, nodes: Sequence[int]) -> set[int]:
    return {v for i in nodes for v in graph.nodes[i].inputs if v not in graph.literals and v not in graph.constants}


def _constants(body: Body, nodes: Sequence[int], outputs: Sequence[int]) -> tuple[Any, ...]:
    read = {v for i in nodes for v in body.graph.nodes[i].inputs}.union(outputs)
    numbered = zip(body.graph.constants, body.constants, strict=True)
    return tuple(array for value, array in numbered if value in read)


def _lone(body: Body, value: int) -> Any:
    """The value of an output that no node makes: a constant or a literal."""
    return _whole(body, (), (value,), {})[value]


def _spec(rank: int, first: tuple[str, ...]) -> ShardingSpec:
    """The placement of a value whose first dimension these axes cut."""
    return ShardingSpec(dims=(first, *[()] * (rank - 1))) if first else replicated(rank)


def _unplaced(graph: Graph, index: int) -> Placement:
    node = graph.nodes[index]
    specs = (tuple(replicated(graph.types[v].rank) for v in values) for values in (node.inputs, node.outputs))
    operands, results = specs
    return Placement(operands=operands, results=results)
