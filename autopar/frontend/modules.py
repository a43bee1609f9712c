"""Modules that are more than pytrees of arrays, taken as their own library's `jit` takes them.

Equinox modules have leaves that are no arrays: these are static, in arguments and in results (`equinox.filter_jit`).
Flax NNX modules are graphs of variables that a step changes in place: they are split before the call and updated after
it (`nnx.jit`). Neither library is imported here: if modules of one are passed, it is loaded already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.tree_util import register_pytree_with_keys, register_static

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)

Entered = tuple[Any, Callable[[Any], Any]]
"""The arguments as arrays, and what makes the caller's results of those of the pure function."""


class Library(Protocol):
    """A library's way to take modules apart and to put them together again."""

    def pure(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function of arrays that computes what `fun` does with modules."""
        ...

    def entered(self, dynamic: Any) -> AbstractContextManager[Entered]:
        """The dynamic arguments (args, kwargs) of a call as the pure function takes them."""
        ...


def library_of(dynamic: Any) -> Library | None:
    """The library whose modules are among the arguments; None for pytrees of arrays alone."""
    return next((library for library in (_NNX, EQUINOX) if library.is_in(dynamic)), None)


@register_static
@dataclass(frozen=True, slots=True)
class _Static:
    """A leaf that is no array, as a node without leaves; 1, 1.0 and True are three different ones."""

    value: Any
    kind: type


class _Equinox:
    """The library Equinox, taken as `equinox.filter_jit` takes its modules."""

    def is_in(self, dynamic: Any) -> bool:
        """Whether there is an Equinox module."""
        module = getattr(sys.modules.get("equinox"), "Module", None)
        if module is None:
            return False
        return any(isinstance(x, module) for x in jax.tree.leaves(dynamic, is_leaf=lambda x: isinstance(x, module)))

    def pure(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def pure(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = with_leaves((args, kwargs))
            return _without_leaves(fun(*args, **kwargs))

        return pure

    @contextmanager
    def entered(self, dynamic: Any) -> Iterator[Entered]:
        yield _without_leaves(dynamic), with_leaves


def without_leaves(tree: Any) -> Any:
    """The tree with a static node for each leaf that is no array, where it has modules of Equinox."""
    return _without_leaves(tree) if EQUINOX.is_in(tree) else tree


def _without_leaves(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, ARRAYS) else _Static(x, type(x)), tree)


def with_leaves(tree: Any) -> Any:
    """The tree with the leaves that are no arrays again."""

    def is_static(x: object) -> bool:
        return isinstance(x, _Static)

    return jax.tree.map(lambda x: x.value if isinstance(x, _Static) else x, tree, is_leaf=is_static)


@dataclass(frozen=True, slots=True)
class _Split:
    """The variables of a graph of modules, with the caller's definition of it: both tell states apart."""

    state: Any
    graphdef: Any


class _Key:
    """The step from a graph to its state, which has no name: `model['layer'].kernel`."""

    def __str__(self) -> str:
        return ""


register_pytree_with_keys(
    _Split,
    lambda split: (((_Key(), split.state),), split.graphdef),
    lambda graphdef, children: _Split(next(iter(children)), graphdef),
)


class _Nnx:
    """The library Flax NNX, taken as `nnx.jit` takes its modules."""

    def is_in(self, dynamic: Any) -> bool:
        """Whether there is an NNX graph; a `State` that was split by hand is a pytree like any other."""
        nnx = sys.modules.get("flax.nnx")
        if nnx is None:
            return False
        graphs = (nnx.Pytree, nnx.Variable)
        leaves = jax.tree.leaves(dynamic, is_leaf=lambda x: isinstance(x, (*graphs, nnx.State)))
        return any(isinstance(x, graphs) for x in leaves)

    def pure(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def pure(*args: Any, **kwargs: Any) -> Any:
            nnx, inside = sys.modules["flax.nnx"], object()
            with nnx.update_context(inside):
                given = _splits((args, kwargs))
                args, kwargs = nnx.from_tree(_node_states((args, kwargs)), ctxtag=inside, is_inner=True)
                out = fun(*args, **kwargs)
                *changed, out = nnx.to_tree((*_graphs_alone((args, kwargs)), out), ctxtag=inside)
            after = [x.graphdef for x in _leaves_of(changed, nnx.extract.NodeStates)]
            originals = iter([split.graphdef for split in given])
            (args, kwargs), out = _split_up(tuple(changed), originals), _split_up(out)
            return *args, kwargs, out, _Static(tuple(after), tuple)  # each argument is a result, as state is

        return pure

    @contextmanager
    def entered(self, dynamic: Any) -> Iterator[Entered]:
        nnx, outside = sys.modules["flax.nnx"], object()

        def finish(result: Any) -> Any:
            *changed, out, after = result
            changed = _node_states(tuple(changed), iter(after.value))
            return nnx.from_tree((changed, _node_states(out)), ctxtag=outside, is_inner=False)[1]

        with nnx.update_context(outside):
            yield _split_up(nnx.to_tree(dynamic, ctxtag=outside)), finish


def _splits(tree: Any) -> list[_Split]:
    return _leaves_of(tree, _Split)


def _leaves_of(tree: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _split_up(tree: Any, graphdefs: Iterator[Any] | None = None) -> Any:
    """The tree with a `_Split` for each `NodeStates`, of these definitions or their own."""
    kind = sys.modules["flax.nnx"].extract.NodeStates

    def split(x: Any) -> Any:
        return _Split(x.state, next(graphdefs) if graphdefs else x.graphdef) if isinstance(x, kind) else x

    return jax.tree.map(split, tree, is_leaf=lambda x: isinstance(x, kind))


def _node_states(tree: Any, graphdefs: Iterator[Any] | None = None) -> Any:
    """The tree with NNX's `NodeStates` for each `_Split`, of these definitions or their own."""
    kind = sys.modules["flax.nnx"].extract.NodeStates

    def join(x: Any) -> Any:
        return kind.from_split(next(graphdefs) if graphdefs else x.graphdef, x.state) if isinstance(x, _Split) else x

    return jax.tree.map(join, tree, is_leaf=lambda x: isinstance(x, _Split))


def _graphs_alone(tree: Any) -> Any:
    """The tree with None for everything that is no graph of modules, and so cannot have been changed in place."""
    nnx = sys.modules["flax.nnx"]

    def is_graph(x: object) -> bool:
        return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)

    return jax.tree.map(lambda x: x if is_graph(x) else None, tree, is_leaf=is_graph)


_NNX, EQUINOX = _Nnx(), _Equinox()
