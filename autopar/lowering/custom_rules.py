"""Users' own sharding rules, for primitives that autopar does not know: kernels, foreign calls, custom ones.

    autopar.register_rule(matmul_p, "b i, i j -> b j")

The text names the dimensions of operands and results as an einsum does, by words: dimensions of one name are sharded
together, `_` is never sharded, and a name that the right side lacks is summed over. A scalar has no words. Run on
pieces, the primitive must give the piece of its result, and a summand of it where a summed name is sharded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from autopar import jax_compat
from autopar.errors import ArgumentError, explain
from autopar.jax_compat import Primitive
from autopar.lowering.localize import Arrays, Cut, localizes, rebind
from passes.errors import PlanningError
from passes.ir import Node, TensorType
from passes.rules import WITHOUT_RULE, ShardingRule, build, define, known_primitives, replicate

__all__ = ["register_rule"]

Structs = tuple[jax.ShapeDtypeStruct, ...]
Rule = str | Callable[[Mapping[str, Any], Structs, Structs], str | None]
Localize = Callable[[Mapping[str, Any], tuple[jax.Array, ...], Structs], Any]

_NEVER = "_"
_WORD = re.compile(r"[^\W\d]\w*")


def register_rule(primitive: Primitive | str, rule: Rule, *, localize: Localize | None = None) -> None:
    """Registers how a primitive may be sharded, by `rule`: a text such as `"b i, i j -> b j"`, or a function that
    returns one.

    The function takes (parameters as plain data, operands, results) of one use; if it returns None, that use is not
    sharded. `localize` takes (JAX's parameters, pieces of the operands, types of the results' pieces) and returns the
    results, for a primitive whose parameters mention shapes. A second rule of a primitive replaces the first.

    Raises ArgumentError for a primitive that autopar handles itself, and for a text that is not valid; planning raises
    it for a text that does not fit its operands.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str):
        why = "the first argument is a primitive or its name"
        raise ArgumentError(explain(f"register_rule({primitive!r:.60})", why, "", "pass my_p, or my_p.name"))
    if not isinstance(rule, str) and not callable(rule):
        remedy = 'write, say, "b i, i j -> b j"'
        raise ArgumentError(explain(f"rule {rule!r:.60} of {name}", "a rule is a text or a function", "", remedy))
    if name in known_primitives() or name in WITHOUT_RULE:
        why = f"has none on purpose: {WITHOUT_RULE[name]}" if name in WITHOUT_RULE else "has a built-in rule"
        remedy = "wrap what you compute in a primitive of your own, and register that"
        raise ArgumentError(explain(f"register_rule({name!r})", f"{name} {why}", "", remedy))
    if isinstance(rule, str):
        _parsed(name, rule, "")
    define(name, partial(_rule, name, rule))
    localizes(name)(partial(_run, localize))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """The parsed text of a rule: the names of every operand's and result's dimensions."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    @property
    def summed(self) -> list[str]:
        """The names that the results lack."""
        of_results = {word for words in self.results for word in words}
        return [word for words in self.operands for word in words if word not in of_results and word != _NEVER]


def _parsed(name: str, text: str, source: str) -> _Description:
    """The description that a text gives. Raises ArgumentError."""
    argument = f"rule {text!r} of {name}"
    if text.count("->") != 1:
        remedy = 'write operands, an arrow, results, as in "b i, i j -> b j"'
        raise ArgumentError(explain(argument, f"a rule has one arrow, this has {text.count('->')}", source, remedy))
    operands, results = (tuple(tuple(part.split()) for part in side.split(",")) for side in text.split("->"))
    for words in (*operands, *results):
        for word in words:
            if not _WORD.fullmatch(word):
                remedy = "name dimensions by words, apart by spaces; `_` is one that is never cut"
                raise ArgumentError(explain(argument, f"{word!r} is no name of a dimension", source, remedy))
            if word != _NEVER and words.count(word) > 1:
                remedy = "name them apart, or write `_` for both"
                raise ArgumentError(explain(argument, f"one array has two dimensions {word!r}", source, remedy))
    known = {word for words in operands for word in words} | {_NEVER}
    for word in (word for words in results for word in words if word not in known):
        rule = f"{word!r} on the right is a dimension of no operand (they have {', '.join(sorted(known - {_NEVER}))})"
        raise ArgumentError(explain(argument, rule, source, "write `_` for a dimension that only a result has"))
    for word in {word for words in results for word in words} - {_NEVER}:
        if lacking := [i for i, words in enumerate(results) if word not in words]:
            rule = f"a name that results have, all have; {word!r} is no dimension of result {lacking[0]}"
            raise ArgumentError(
                explain(argument, rule, source, "write `_` for it everywhere, or make the results apart")
            )
    return _Description(operands=operands, results=results)


def _rule(
    name: str, rule: Rule, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]
) -> ShardingRule:
    """The sharding rule of one use; it counts the flops of the einsum that its text would be."""
    text = rule if isinstance(rule, str) else rule(node.params, _structs(operands), _structs(results))
    if text is not None and not isinstance(text, str):
        why = f"a rule's function gives a text or None, this gave {text!r:.60}"
        remedy = 'return, say, "b i, i j -> b j"'
        raise ArgumentError(explain(f"the rule of {name}", why, node.source, remedy))
    if text is None:
        return replicate(operands, results, "the rule registered for it keeps this use whole")
    argument, described = f"rule {text!r} of {name}", _parsed(name, text, node.source)
    given = list(_matched(argument, "operand", described.operands, operands, node.source))
    result_labels = list(_matched(argument, "result", described.results, results, node.source))
    arrays = [*given, *result_labels]
    uncut = [math.prod(n for n, w in zip(t.shape, words, strict=True) if w == _NEVER) for t, words in arrays]
    sharding_rule = build(
        [(t, _labels(words)) for t, words in given],
        [(t, _labels(words)) for t, words in result_labels],
        reduce=dict.fromkeys(described.summed, "add"),
        flops=2.0 * math.prod(_sizes(argument, arrays, node.source).values()) * max(uncut, default=1),
        light=False,
    )
    return replace(sharding_rule, localized=True)


def _labels(words: tuple[str, ...]) -> list[str | None]:
    return [None if word == _NEVER else word for word in words]


def _matched(
    argument: str, kind: str, described: tuple[tuple[str, ...], ...], types: tuple[TensorType, ...], source: str
) -> Iterator[tuple[TensorType, tuple[str, ...]]]:
    """Each type with its words. Raises ArgumentError where there are more of one than of the other."""
    described = () if described == ((),) and not types else described
    if len(described) != len(types):
        given = ", ".join(map(str, types)) or "none"
        rule = f"it describes {len(described)} {kind}(s), the primitive has {len(types)}: {given}"
        raise ArgumentError(
            explain(argument, rule, source, f"write one group of names for each {kind}, apart by commas")
        )
    for i, (type, words) in enumerate(zip(types, described, strict=True)):
        if type.rank != len(words):
            rule = f"{kind} {i} is {type}, of rank {type.rank}, and {' '.join(words)!r} names {len(words)} dimension(s)"
            remedy = "name every dimension, `_` those that are never cut; a function can give a text for each rank"
            raise ArgumentError(explain(argument, rule, source, remedy))
        yield type, words


def _sizes(argument: str, arrays: list[tuple[TensorType, tuple[str, ...]]], source: str) -> dict[str, int]:
    """The size of every name; a size of 1 is a broadcast. Raises ArgumentError for a name of two sizes."""
    sizes: dict[str, int] = {}
    for type, words in arrays:
        for size, word in zip(type.shape, words, strict=True):
            if word == _NEVER or size == 1:
                continue
            if sizes.setdefault(word, size) != size:
                rule = f"{word!r} is {sizes[word]} elements in one array and {size} in another, {type}"
                raise ArgumentError(
                    explain(argument, rule, source, "give dimensions of different sizes different names")
                )
    return sizes


def _run(localize: Localize | None, cut: Cut, operands: Arrays) -> Arrays:
    """The results of a use on pieces. Raises PlanningError unless they have the shapes that the rule promises."""
    types = tuple(TensorType(shape=cut.local_shape(i), dtype=t.dtype) for i, t in enumerate(cut.results))
    pieces = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in operands)
    argument = f"{cut.node.primitive} on pieces {pieces}"
    remedy = "correct its rule, or say how it runs on pieces with register_rule(..., localize=)"
    try:
        results = jax.tree.leaves(
            localize(cut.params, tuple(operands), _structs(types)) if localize else rebind(cut, operands)
        )
    except (TypeError, ValueError) as error:
        raise PlanningError(explain(argument, f"does not run: {error}", cut.node.source, remedy)) from error
    given = [f"{x.dtype.name}{list(x.shape)}" for x in results]
    promised = [f"{t.dtype}{list(t.shape)}" for t in types]
    if given != promised:
        rule = f"gives {', '.join(given) or 'nothing'} where its rule promises {', '.join(promised)}"
        raise PlanningError(explain(argument, rule, cut.node.source, remedy))
    return results


def _structs(types: tuple[TensorType, ...]) -> Structs:
    return tuple(jax.ShapeDtypeStruct(t.shape, jax_compat.dtype_of(t.dtype)) for t in types)
