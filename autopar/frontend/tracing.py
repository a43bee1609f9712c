"""The traced program of a function at given arguments: the planner's graph, and everything else that lowering needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.errors import UnsupportedError, explain
from autopar.frontend.arguments import Names, Positions, Signature, signature_of, traceable
from autopar.frontend.bodies import Body, Equation
from autopar.frontend.devices import named_devices
from autopar.frontend.flattening import flatten
from autopar.frontend.joined_batches import joined_batches
from autopar.frontend.late_casts import with_late_casts
from autopar.frontend.placements import Devices, Placed, placement_of, specified
from autopar.frontend.primitives import type_of, without_dead_code
from autopar.frontend.regrouping import regrouped
from autopar.frontend.row_loops import RowLoops
from autopar.frontend.state_pairing import state_pairs
from autopar.jax_compat import PyTreeDef
from passes.gc_pause import without_gc
from passes.ir import Graph, StatePairs
from passes.layers import loops_over_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class JitOptions:
    """The options of `jax.jit` about compilation: whether unread inputs are kept, whether it is inlined, and
    XLA's own.
    """

    keep_unused: bool = False
    inline: bool = False
    compiler_options: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A function traced at given argument types; `equations` are parallel to `graph.nodes`, `constants` to
    `graph.constants`.

    `in_tree` is the tree of (args, kwargs) without static arguments. `donated` has one flag a flat input, `weak` one a
    flat output: whether `jax.jit` would return it weakly typed. `state_pairs` pairs flat outputs with the
    flat inputs that the next call takes them for, `named` says of each flat input whether the user calls it a part of
    the batch, and is empty where nothing is said. The inputs at `stacked` come as microbatches: [count, rows, ...] for
    the caller's [count * rows, ...]. `jaxpr` is what `jax.jit` would run of flat arguments, None where the graph is no
    longer that function; of its inputs it reads those of which `read` says so, for all that the graph may do without.
    `shardings` are those that the user gives the flat inputs and outputs; `devices` are what they
    and the program's own are on, None where nothing says so. `options` are how the caller wants it compiled.
    """

    graph: Graph
    equations: tuple[Equation, ...]
    constants: tuple[Any, ...]
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    donated: tuple[bool, ...]
    weak: tuple[bool, ...]
    state_pairs: StatePairs
    named: tuple[bool, ...] = ()
    stacked: tuple[int, ...] = ()
    jaxpr: Any = None
    read: tuple[bool, ...] = ()
    shardings: tuple[Placed, Placed] = ((), ())
    devices: Devices | None = None
    options: JitOptions = JitOptions()


@without_gc()
def trace(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
    placed: Placed = (),
    parts: Callable[[], int] = lambda: 1,
    **jit: Any,
) -> Traced:
    """The program of `fun(*args, **kwargs)`, from the types of its arguments alone; the options are those of
    `parallelize` and, in `jit`, of `jax.jit`.

    Flat arguments arrive in the shardings `placed` where nothing else is said of them. A loop over independent rows of
    the batch runs `parts` parts of them at once; if there are several, joined batches are in groups.

    Raises ArgumentError for an argument that is no array or an unhashable static one, UnsupportedError for an operation
    that no plan can keep, and whatever `fun` or `jax.jit` raise.
    """
    signature = signature_of(fun, jit.get("static_argnums"), jit.get("static_argnames"))
    dynamic, _ = signature.split(args, kwargs)
    args, kwargs = signature.merge(traceable(dynamic, signature, len(args)), args, kwargs)
    with jax_compat.planned_mesh() as mesh:
        traced = jax.jit(fun, **jit).trace(*args, **kwargs)
    in_tree, out_tree = jax.tree.structure(dynamic), traced.out_tree
    _check_closed(traced.jaxpr.in_avals, in_tree.num_leaves, signature)
    to_donate = signature_of(fun, jit.get("donate_argnums"), jit.get("donate_argnames"))
    donated = signature.donated(dynamic, to_donate, len(args))
    inputs, outputs = map(specified, jax_compat.traced_shardings(traced, in_tree.num_leaves))
    inputs = tuple(given or there for given, there in zip_longest(inputs, placed))
    names = signature.names(dynamic, len(args))
    named = signature.named(names, batch_argnums, batch_argnames, len(args))
    live, read = without_dead_code(with_late_casts(traced.jaxpr))
    flattened = partial(flatten, live, input_names=names, output_names=_output_names(out_tree), out_shardings=outputs)
    body = flattened()
    pairs = state_pairs(body.graph, in_tree, out_tree, donated)
    body = _by_rows(body, flattened, pairs, named, parts)
    graph, kept_pairs = _pinned(body.graph, pairs, inputs, outputs, signature.source)
    _warn_of_nothing(graph, signature)
    around = [
        *((s, f"argument {name}") for s, name in zip(inputs, graph.input_names, strict=True) if s),
        *((s, f"result {name}") for s, name in zip(outputs, graph.output_names, strict=True) if s),
    ]
    return Traced(
        graph=graph,
        equations=body.equations,
        constants=body.constants,
        in_tree=in_tree,
        out_tree=out_tree,
        donated=donated,
        weak=tuple(bool(aval.weak_type) for aval in traced.jaxpr.out_avals),
        state_pairs=kept_pairs,
        named=named,
        jaxpr=traced.jaxpr,
        read=read,
        shardings=(inputs, outputs),
        devices=named_devices(traced.jaxpr, around, mesh, signature.source),
        options=JitOptions(**{field.name: jit[field.name] for field in fields(JitOptions) if field.name in jit}),
    )


def _by_rows(
    body: Body, flattened: Callable[..., Body], pairs: StatePairs, named: Sequence[bool], parts: Callable[[], int]
) -> Body:
    """The program with the rows of the batch arranged so that each device needs only its own.

    Loops over rows are flattened anew, with rows side by side, and batches are joined in groups.
    """
    if row_loops := loops_over_batch(body.graph, pairs, named, parts()):
        loops = tuple((body.equations[i].params, unchanged) for i, unchanged in row_loops.items())
        body = flattened(row_loops=RowLoops(loops, parts()))
    changes = joined_batches(body.graph, pairs, named) if parts() > 1 else None
    return regrouped(body, changes) if changes else body


def _pinned(graph: Graph, pairs: StatePairs, inputs: Placed, outputs: Placed, source: str) -> tuple[Graph, StatePairs]:
    """(the graph with its inputs where they arrive, the pairs of state that comes back to where it was).

    If only the result of a state is placed, its input arrives there.
    """
    arriving = {
        i: placement_of(s, graph.types[graph.inputs[i]].shape, source=source) for i, s in enumerate(inputs) if s
    }
    leaving = {o: placement_of(s, graph.types[graph.outputs[o]].shape) for o, s in enumerate(outputs) if s}
    kept: list[tuple[int, int]] = []
    for o, i in pairs:
        if o in leaving and arriving.setdefault(i, leaving[o]) != leaving[o]:
            continue
        kept.append((o, i))
    return (replace(graph, pinned=arriving) if arriving else graph), tuple(kept)


def _output_names(tree: PyTreeDef) -> tuple[str, ...]:
    """The path of each result, such as `out[0].params['wte']`; its number, where a pytree node accepts only arrays."""
    try:
        paths = tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0]
    except Exception:  # a node of the user's may raise anything
        return tuple(f"out[{index}]" for index in range(tree.num_leaves))
    return tuple("out" + keystr(path) for path, _ in paths)


def _check_closed(avals: Sequence[Any], count: int, signature: Signature) -> None:
    """Raises UnsupportedError for a function with more than its `count` flat arguments: it closes over values of a
    trace.

    JAX passes those as arguments in front of the others, and they are other values in each call.
    """
    if len(avals) > count:
        types = ", ".join(str(type_of(aval)) for aval in avals[: len(avals) - count])
        rule = f"it closes over what is being traced around it ({types}), and a plan is for a function of its arguments"
        remedy = "pass it as an argument, or call jax.jit, jax.grad or jax.vmap inside of the function"
        raise UnsupportedError(explain(signature.function, rule, signature.source, remedy))


def _warn_of_nothing(graph: Graph, signature: Signature) -> None:
    """Warns of a function without results: what it changes in place is lost, as under `jax.jit`."""
    if not graph.outputs and not graph.nodes:
        rule = "it returns no array and has no effect, so nothing of it is computed"
        remedy = "return what it updates, such as the new state; what is changed in place inside is lost"
        warnings.warn(explain(signature.function, rule, signature.source, remedy), stacklevel=7)
