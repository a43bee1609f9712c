"""The traced program of a function at given arguments: the planner's graph, and all else that lowering needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.frontend.arguments import Names, Positions, signature_of, traceable
from autopar.frontend.flattening import Equation, flatten
from autopar.jax_compat import PyTreeDef
from passes.gc_pause import without_gc
from passes.ir import Graph, Phase, StatePairs, TensorType, phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A function traced at given argument types; `equations` are parallel to `graph.nodes`, `constants` to
    `graph.constants`.

    `in_tree` is the tree of (args, kwargs) without static arguments. `donated` has one flag a flat input, `weak` one a
    flat output: whether `jax.jit` would return it weakly typed. `state_pairs` pairs flat outputs with the
    flat inputs that the next call takes them for, `named` says of each flat input whether the user calls it a part of
    the batch, and is empty where nothing is said. The inputs at `stacked` come as microbatches: [count, rows, ...] for
    the caller's [count * rows, ...]. `jaxpr` is what `jax.jit` would run of flat arguments, None where the graph is no
    longer that function.
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


@without_gc()
def trace(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Positions = None,
    static_argnames: Names = None,
    donate_argnums: Positions = None,
    donate_argnames: Names = None,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
) -> Traced:
    """The program of `fun(*args, **kwargs)`, from the types of its arguments alone; the options are `parallelize`'s.

    Raises ArgumentError for an argument that is no array or an unhashable static one, UnsupportedError for an operation
    that no plan can keep, and whatever `fun` or `jax.jit` raise.
    """
    signature = signature_of(fun, static_argnums, static_argnames)
    dynamic, _ = signature.split(args, kwargs)
    args, kwargs = signature.merge(traceable(dynamic, signature, len(args)), args, kwargs)
    jitted = jax.jit(
        fun,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    with jax_compat.no_mesh():
        traced = jitted.trace(*args, **kwargs)
    body = flatten(
        traced.jaxpr,
        input_names=signature.names(dynamic, len(args)),
        output_names=_output_names(traced.out_tree),
    )
    in_tree, out_tree = jax.tree.structure(dynamic), traced.out_tree
    donated = signature.donated(dynamic, signature_of(fun, donate_argnums, donate_argnames), len(args))
    return Traced(
        graph=body.graph,
        equations=body.equations,
        constants=body.constants,
        in_tree=in_tree,
        out_tree=out_tree,
        donated=donated,
        weak=tuple(bool(aval.weak_type) for aval in traced.jaxpr.out_avals),
        state_pairs=_state_pairs(body.graph, in_tree, out_tree, donated),
        named=signature.named(dynamic, body.graph.input_names, batch_argnums, batch_argnames),
        jaxpr=traced.jaxpr,
    )


def _output_names(tree: PyTreeDef) -> tuple[str, ...]:
    """The path of each result, such as `out[0].params['wte']`; its number, where a node takes nothing but arrays."""
    try:
        paths = tree_flatten_with_path(tree.unflatten(range(tree.num_leaves)))[0]
    except Exception:  # a node of the user's may raise anything
        return tuple(f"out[{index}]" for index in range(tree.num_leaves))
    return tuple("out" + keystr(path) for path, _ in paths)


@dataclass(frozen=True, slots=True)
class _Subtree:
    """Consecutive leaves of a pytree that form a tree of their own."""

    first: int
    tree: PyTreeDef

    @property
    def leaves(self) -> range:
        return range(self.first, self.first + self.tree.num_leaves)

    def children(self) -> Iterator[_Subtree]:
        first = self.first
        for child in self.tree.children():
            yield _Subtree(first, child)
            first += child.num_leaves


def _state_pairs(
    graph: Graph, in_tree: PyTreeDef, out_tree: PyTreeDef, donated: tuple[bool, ...]
) -> tuple[tuple[int, int], ...]:
    """(output, input) leaves of each argument that some part of the output repeats in structure and types.

    Donated arguments choose first, each takes the first match: the whole output, one of its parts, or a part of those.
    A lone array, which looks like any other, is taken for state only if it is donated or updated: all arguments before
    it are state, and the result is made of it and of gradients after the backward pass.
    """
    args, kwargs = _Subtree(0, in_tree).children()
    arguments = [a for a in (*args.children(), *kwargs.children()) if a.tree.num_leaves]
    result_tree = _Subtree(0, out_tree)
    parts = list(result_tree.children())
    results = [result_tree, *parts, *(inner for part in parts for inner in part.children())]

    def is_donated(argument: _Subtree) -> bool:
        return all(donated[i] for i in argument.leaves)

    def types(values: tuple[int, ...], leaves: range) -> list[TensorType]:
        return [graph.types[values[i]] for i in leaves]

    def is_state(argument: _Subtree, result: _Subtree) -> bool:
        if argument.tree.num_leaves > 1 or is_donated(argument):
            return True
        first = argument.leaves[0]
        before = all(i in paired for i in range(first))
        return before and _is_update(graph, graph.outputs[result.leaves[0]], graph.inputs[first])

    taken: set[int] = set()
    paired: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for argument in sorted(arguments, key=is_donated, reverse=True):
        input_types = types(graph.inputs, argument.leaves)
        for result in results:
            free = taken.isdisjoint(result.leaves)
            same = free and result.tree == argument.tree and types(graph.outputs, result.leaves) == input_types
            if same and is_state(argument, result):
                paired.update(argument.leaves)
                taken.update(result.leaves)
                pairs.extend(zip(result.leaves, argument.leaves, strict=True))
                break
    return tuple(sorted(pairs))


def _is_update(graph: Graph, result: int, value: int) -> bool:
    """Whether nodes of the apply phase alone make a result of a value and of something of the backward pass."""
    waiting, seen, phases = [result], {result}, set[Phase]()
    while waiting:
        producer = graph.producers.get(waiting.pop())
        if producer is None:
            continue
        node = graph.nodes[producer]
        phases.add(phase(node))
        if phase(node) == "apply":
            waiting += [v for v in node.inputs if v not in seen]
            seen.update(node.inputs)
    return value in seen and "backward" in phases
