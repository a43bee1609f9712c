"""The calls that a compiled program accepts: those with the structure, types and static values it was compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax

from autopar.errors import ArgumentError, explain
from autopar.frontend import Signature, Traced, Type, structs_of, types_of
from autopar.jax_compat import PyTreeDef

_REMEDY = "or call the function itself, which does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The arguments that a program was compiled for: the tree of (args, kwargs) without static ones, the name and type
    of each flat one, and the (name, type, value) of each static one.

    As with `jax.jit`'s compiled programs, types need not be as weak.
    """

    signature: Signature
    tree: PyTreeDef
    names: tuple[str, ...]
    types: tuple[Type | None, ...]
    statics: tuple[Any, ...]

    @classmethod
    def of(
        cls, signature: Signature, called: Traced, structs: Sequence[jax.ShapeDtypeStruct], statics: tuple[Any, ...]
    ) -> Self:
        """The arguments of a step, as `called` reads its calls, with flat arguments of these types."""
        return cls(
            signature=signature,
            tree=called.in_tree,
            names=called.graph.input_names,
            types=types_of(structs),
            statics=statics,
        )

    def leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments of a call; static ones may be left out.

        Raises ArgumentError, which names the argument, for others than the program was compiled for.
        """
        dynamic, statics = self.signature.split(tuple(args), kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if None in (types := types_of(leaves)):
            structs_of(dynamic, self.signature, len(args))  # raises, with what is no array
        self._check(tree, types)
        self._check_statics(statics)
        return leaves

    def _check(self, tree: PyTreeDef, types: tuple[Type | None, ...]) -> None:
        again, source = f"lower and compile again for these arguments, {_REMEDY}", self.signature.source
        if tree != self.tree:
            argument = f"arguments (args, kwargs) with the structure {tree}"
            raise ArgumentError(explain(argument, f"the program was compiled for {self.tree}", source, again))
        for name, given, expected in zip(self.names, types, self.types, strict=True):
            # A weak type decides promotions while a function is traced, and nothing of what is compiled.
            if given is None or expected is None or given[:2] != expected[:2]:
                rule = f"the program was compiled for {_words(expected)}"
                raise ArgumentError(explain(f"argument {name} is {_words(given)}", rule, source, again))

    def _check_statics(self, statics: tuple[Any, ...]) -> None:
        compiled_for = {name: (kind, value) for name, kind, value in self.statics}
        for name, kind, value in statics:
            if name not in compiled_for or compiled_for[name] != (kind, value):
                expected = f"{name} = {compiled_for[name][1]!r:.60}" if name in compiled_for else f"no {name}"
                remedy = f"lower and compile again for this value, {_REMEDY}"
                rule = f"the program was compiled for {expected}"
                raise ArgumentError(
                    explain(f"static argument {name} = {value!r:.60}", rule, self.signature.source, remedy)
                )


def _words(type: Type | None) -> str:
    assert type is not None, "what is no array has been refused"
    shape, dtype, _ = type
    return f"{dtype.name}[{','.join(map(str, shape))}]"
