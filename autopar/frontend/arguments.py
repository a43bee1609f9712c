"""The arguments of a call: which of them are static, the paths and the types of the others.

Static arguments follow `jax.jit`'s own rules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from autopar import jax_compat
from autopar.errors import ArgumentError, explain

Positions = int | Sequence[int] | None
Names = str | Iterable[str] | None
Type = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype and whether the dtype is weak: what tells two traces apart."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TYPE = attrgetter("shape", "dtype", "weak_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function, by which its calls are read.

    `function` is its name and `source` where it starts. `parameters` are the names of positional parameters, of which
    those in `either_way` may be given by name too; `rest` is the name of `*args`.
    """

    function: str
    parameters: tuple[str, ...]
    either_way: frozenset[str]
    rest: str
    static_positions: tuple[int, ...]
    static_names: tuple[str, ...]
    source: str

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """((dynamic args, dynamic kwargs), static values as a key). Raises ArgumentError for an unhashable static
        argument.
        """
        if not (self.static_positions or self.static_names):
            return (args, kwargs), ()
        positions = self._positions(len(args))
        statics = [(self.name(i), args[i]) for i in positions]
        statics += [(name, kwargs[name]) for name in self.static_names if name in kwargs]
        for name, value in statics:
            self._check_hashable(name, value)
        dynamic = tuple(value for i, value in enumerate(args) if i not in positions)
        named = {name: value for name, value in kwargs.items() if name not in self.static_names}
        return (dynamic, named), tuple((name, type(value), value) for name, value in statics)

    def merge(self, dynamic: tuple[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """(args, kwargs) with the dynamic arguments replaced by those of `dynamic`."""
        static = self._positions(len(args))
        replaced = iter(dynamic[0])
        return tuple(a if i in static else next(replaced) for i, a in enumerate(args)), {**kwargs, **dynamic[1]}

    def name(self, position: int) -> str:
        """The user's name of the argument at `position`."""
        if position < len(self.parameters):
            return self.parameters[position]
        return f"{self.rest or 'args'}[{position - len(self.parameters)}]"

    def names(self, dynamic: tuple[tuple[Any, ...], Mapping[str, Any]], n_args: int) -> tuple[str, ...]:
        """The path of each leaf of the dynamic arguments, such as `state.params['wte']`.

        `n_args` counts the call's positional arguments, static ones included.
        """
        positions = self._dynamic_positions(n_args)
        paths: list[str] = []
        for path, _ in tree_flatten_with_path(dynamic)[0]:
            side, argument, *inner = cast("tuple[Any, ...]", path)
            argument_name = self.name(positions[argument.idx]) if side.idx == 0 else argument.key
            paths.append(argument_name + keystr(tuple(inner)))
        return tuple(paths)

    def as_static(self, dynamic: tuple[tuple[Any, ...], Mapping[str, Any]], n_args: int, index: int) -> str:
        """Instructions, as text for an error, to make the argument of this leaf static."""
        side, argument, *inner = cast("tuple[Any, ...]", tree_flatten_with_path(dynamic)[0][index][0])
        position = self._dynamic_positions(n_args)[argument.idx] if side.idx == 0 else None
        name = argument.key if position is None else self.name(position)
        if inner:
            return f"take it out of {name}, into an argument that static_argnames names"
        if position is None or name in self.either_way:
            return f"name {name} in static_argnames"
        return f"count it in static_argnums={position}"

    def donated(self, dynamic: Any, donation: Signature, n_args: int) -> tuple[bool, ...]:
        """Whether each leaf of the dynamic arguments belongs to an argument in `donation`, which is given as static
        ones are.

        Positions from the end donate nothing, as under `jax.jit`.
        """
        positions = self._dynamic_positions(n_args)
        flags: list[bool] = []
        for path, _ in tree_flatten_with_path(dynamic)[0]:
            side, argument, *_ = cast("tuple[Any, ...]", path)
            named = (
                argument.key in donation.static_names
                if side.idx
                else positions[argument.idx] in donation.static_positions
            )
            flags.append(named)
        return tuple(flags)

    def named(self, paths: Sequence[str], positions: Positions, names: Names, n_args: int) -> tuple[bool, ...]:
        """Whether each leaf, at these paths, belongs to an argument at `positions` or to something that a name stands
        for.

        Positions below 0 count from the end of the call's `n_args` positional arguments, as static ones do. Empty where
        nothing is named. Raises ArgumentError for a name or position that is no argument of the call.
        """
        counted = [(i, i if i >= 0 else n_args + i) for i in _tuple(positions, int)]
        listed = [(f"batch_argnums={i}", self.name(at) if at >= 0 else None) for i, at in counted]
        listed += [(f"batch_argnames={name!r}", name) for name in _tuple(names, str)]
        whole = [[name is not None and _is_part(path, name) for path in paths] for _, name in listed]
        for (option, _), flags in zip(listed, whole, strict=True):
            if not any(flags):
                arguments = ", ".join(dict.fromkeys(re.split(r"[.\[]", path)[0] for path in paths)) or "none"
                rule = f"it names no array of this call, whose arguments are {arguments}"
                remedy = "write an argument, or the path of a part of one: batch_argnames=\"data['images']\""
                raise ArgumentError(explain(option, rule, self.source, remedy))
        return tuple(map(any, zip(*whole, strict=True)))

    def unusable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> str:
        """The first argument that may have caused this error of a call, and why; empty if there is none."""
        try:
            dynamic, _ = self.split(args, kwargs)
        except ArgumentError:  # a static one that has no hash is what the call ended in
            return ""
        for index, leaf in enumerate(jax.tree.leaves(dynamic)):
            if (rule := _refusal(leaf)) and (rule != _DELETED or "deleted" in str(error)):
                return f"argument {self.names(dynamic, len(args))[index]}: {rule}"
        return ""

    def check_usable(self, names: Sequence[str], leaves: Sequence[Any], use: str) -> None:
        """Raises ArgumentError, which names it, for a flat argument that no call takes: a type, or a deleted array.

        `use` says what the arguments are for.
        """
        for name, leaf in zip(names, leaves, strict=True):
            if rule := _refusal(leaf):
                remedy = f"pass what {self.function} is called with"
                raise ArgumentError(explain(f"argument {name} of {use}", rule, self.source, remedy))

    def _dynamic_positions(self, n_args: int) -> list[int]:
        static = self._positions(n_args)
        return [i for i in range(n_args) if i not in static]

    def _positions(self, n_args: int) -> tuple[int, ...]:
        counted = (i if i >= 0 else n_args + i for i in self.static_positions)
        return tuple(i for i in counted if 0 <= i < n_args)

    def _check_hashable(self, name: str, value: Any) -> None:
        try:
            hash(value)
        except TypeError as error:
            raise ArgumentError(
                explain(
                    f"static argument {name} = {_short(value)} of type {type(value).__name__}",
                    f"a static argument must be hashable, to tell one compiled program from another ({error})",
                    self.source,
                    "pass a hashable value (a tuple for a list, a frozen dataclass for a dict), or take "
                    f"{name} off static_argnums and static_argnames if it holds arrays",
                )
            ) from error


def signature_of(fun: Callable[..., Any], static_argnums: Positions, static_argnames: Names) -> Signature:
    """The signature of `fun`, with each of the two ways to name static arguments completed from the other."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        parameters = []
    positions = _tuple(static_argnums, int)
    names = _tuple(static_argnames, str)
    either_way = [(i, p.name) for i, p in enumerate(parameters) if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if static_argnums is None:
        positions = tuple(i for i, name in either_way if name in names)
    elif static_argnames is None:
        names = tuple(name for i, name in either_way if i in positions)
    return Signature(
        function=getattr(fun, "__name__", type(fun).__name__),
        parameters=tuple(p.name for p in parameters if p.kind in _POSITIONAL),
        either_way=frozenset(name for _, name in either_way),
        rest=next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), ""),
        static_positions=positions,
        static_names=names,
        source=_source(fun),
    )


def types_of(leaves: Sequence[Any]) -> tuple[Type | None, ...]:
    """The type of each leaf, as `jax.jit` tells types apart; None for a leaf that is no array.

    Fast for arrays, which are most of what a step takes: JAX keeps the type of one.
    """
    known = [getattr(leaf, "aval", None) for leaf in leaves]
    try:
        pairs = zip(leaves, known, strict=True)
        return tuple([_type_of(leaf) if aval is None else _TYPE(aval) for leaf, aval in pairs])
    except AttributeError:  # the type of something that is no array
        return tuple(map(_type_of, leaves))


def structs_of(dynamic: Any, signature: Signature, n_args: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The type of each leaf of the dynamic arguments: shape, dtype and weakness, without a sharding.

    Raises ArgumentError, with the argument's path, for a leaf that is no array.
    """
    leaves = jax.tree.leaves(dynamic)
    structs: list[jax.ShapeDtypeStruct] = []
    for index, leaf in enumerate(leaves):
        aval = _typeof(leaf)
        if aval is None:
            name = signature.names(dynamic, n_args)[index]
            rule = "an argument is a pytree of arrays, NumPy arrays, numbers and jax.ShapeDtypeStructs"
            as_static = signature.as_static(dynamic, n_args, index)
            remedy = f"pass an array, or {as_static} if {name} is an option of the program"
            if isinstance(leaf, int):
                limits = np.iinfo(jax.dtypes.canonicalize_dtype(int))
                rule = f"a Python int is {limits.dtype} here, from {limits.min:,} to {limits.max:,}"
                remedy = f"set jax_enable_x64, count in larger units, or {as_static}"
            what = f"argument {name} = {_short(leaf)} of type {type(leaf).__name__}"
            raise ArgumentError(explain(what, rule, signature.source, remedy))
        structs.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type))
    return tuple(structs)


def traceable(dynamic: Any, signature: Signature, n_args: int) -> Any:
    """The dynamic arguments as `jax.jit` can trace them, with leaves whose types have only shape, dtype and weakness.

    Arrays stay in the pytree that the caller built, whose nodes may accept nothing else. If a leaf belongs to a
    transformation or is on an explicit mesh, all become plain `jax.ShapeDtypeStruct`s. Raises ArgumentError for leaves
    that are no arrays.
    """
    structs = structs_of(dynamic, signature, n_args)
    leaves, tree = jax.tree.flatten(dynamic)
    return dynamic if all(map(jax_compat.has_plain_type, leaves)) else jax.tree.unflatten(tree, structs)


def _typeof(leaf: Any) -> Any:
    """JAX's type of an array or of anything that JAX takes for one; None for anything else."""
    try:
        aval = jax.typeof(leaf)
    except (TypeError, OverflowError):  # an int may have more bits than JAX's
        return None
    return aval if jax_compat.is_array_type(aval) else None


def _type_of(leaf: Any) -> Type | None:
    aval = _typeof(leaf)
    return None if aval is None else (aval.shape, aval.dtype, aval.weak_type)


_DELETED = "it has been deleted, or donated to an earlier call, whose result takes its place"


def _refusal(leaf: Any) -> str:
    """The reason why no call takes a leaf: it is a type, or a deleted array; empty for any other."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "a jax.ShapeDtypeStruct is enough for plan() and lower(), and a call takes arrays"
    return _DELETED if jax_compat.is_concrete(leaf) and leaf.is_deleted() else ""


def _tuple(given: Any, single: type) -> tuple[Any, ...]:
    return () if given is None else (given,) if isinstance(given, single) else tuple(given)


def _is_part(path: str, name: str) -> bool:
    """Whether a path leads to what a name stands for, or to a part of it."""
    return re.match(rf"{re.escape(name)}(?![\w])", path) is not None


def _source(fun: Callable[..., Any]) -> str:
    """`file:line (function)` of the user's function, empty for one without source."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
