"""Rules of the user's own: planned and run like any other, and errors that say what a rule's text gets wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar
from autopar.errors import ArgumentError
from autopar.frontend import trace
from passes.errors import PlanningError
from passes.rules import rule_of

PLANNERS = {
    "auto": autopar.Auto(),
    "data_parallel": autopar.DataParallel(),
    "megatron": autopar.Megatron(data=2, tensor=2),
}
NAMES = map("custom_{}".format, itertools.count())
X, W = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(((64, 32), (32, 16))))


def primitive_of(function: Callable[..., Any], name: str = "") -> Primitive:
    """A primitive that JAX can trace and compile, and about which nothing else is known."""
    made = Primitive(name or next(NAMES))
    made.def_impl(function)
    made.def_abstract_eval(
        lambda *avals, **params: jax.core.ShapedArray(
            *(lambda s: (s.shape, s.dtype))(jax.eval_shape(lambda *xs: function(*xs, **params), *avals))
        )
    )
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def product(x: Any, w: Any) -> jax.Array:
    return jnp.tanh(x) @ w


def rule_for(made: Primitive, *args: Any) -> Any:
    traced = trace(lambda *args: made.bind(*args), args, {})
    (node,) = traced.graph.nodes
    return rule_of(node, traced.graph)


def run(function: Callable[..., Any], *args: Any, planner: Any = None) -> tuple[Any, Any]:
    """(the parallel function, its results), on four devices."""
    parallel = autopar.parallelize(function, planner=planner, devices=jax.devices()[:4])
    return parallel, parallel(*args)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_custom_primitive_runs_as_jit_does(planner: str) -> None:
    made = primitive_of(product)
    autopar.register_rule(made, "b i, i j -> b j")

    def step(x, w):
        return jnp.sum(made.bind(jnp.sin(x), w) ** 2), made.bind(x, 2 * w)

    _, found = run(step, X, W, planner=PLANNERS[planner])
    for mine, theirs in zip(found, jax.jit(step)(X, W), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5)


def test_a_large_custom_product_is_cut() -> None:
    made = primitive_of(product)
    autopar.register_rule(made, "b i, i j -> b j")
    x, w = jax.ShapeDtypeStruct((1 << 14, 1 << 12), np.float32), jax.ShapeDtypeStruct((1 << 12, 1 << 12), np.float32)
    plan = autopar.parallelize(made.bind, cluster="4:a100-80g").plan(x, w)
    (operator,) = plan.operators
    assert any(axes for spec in operator.placement.results for axes in spec.dims)


def test_a_rules_text_gives_its_factors() -> None:
    made = primitive_of(lambda x, y: jnp.einsum("bih,ij->bj", x, y))
    autopar.register_rule(made, "b i _, i j -> b j")
    rule = rule_for(made, np.ones((4, 8, 3)), np.ones((8, 1)))
    assert rule.operands == ((0, 1, -1), (1, -1))
    assert rule.results == ((0, -1),)
    assert [(f.size, f.reduction) for f in rule.factors] == [(4, ""), (8, "add")]
    assert rule.flops == 2 * 4 * 8 * 3


def test_a_function_gives_a_text_for_each_use() -> None:
    made = primitive_of(lambda x, *, axis: jnp.sort(x, axis))
    seen = []

    def rule(params, operands, results):
        seen.append((dict(params), operands, results))
        names = ["a", "b"][: operands[0].ndim]
        names[params["axis"]] = "_"
        return f"{' '.join(names)} -> {' '.join(names)}" if operands[0].dtype == np.float32 else None

    autopar.register_rule(made, rule)
    traced = trace(lambda x, y: (made.bind(x, axis=0), made.bind(y, axis=1)), (X, np.ones((4, 4), np.int32)), {})
    rules = [rule_of(node, traced.graph) for node in traced.graph.nodes]
    assert [r.operands for r in rules] == [((-1, 0),), ((-1, -1),)]
    assert rules[1].reason
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert seen[0] == ({"axis": 0}, (struct,), (struct,))


def test_a_kernel_of_blocks_runs_on_pieces() -> None:
    """The grid of a Pallas kernel counts blocks of the whole; `localize` builds the kernel again for a piece."""

    def kernel(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def doubled(x):
        block = pallas.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
        grid, out = (x.shape[0] // 8,), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=out, interpret=True)(
            x
        )

    autopar.register_rule("pallas_call", "b _ -> b _", localize=lambda params, operands, results: doubled(*operands))
    parallel, found = run(lambda x: doubled(jnp.sin(x)), X, planner=autopar.DataParallel())
    np.testing.assert_allclose(found, 2 * np.sin(X), rtol=1e-6)
    cut = [op for op in parallel.plan(X).operators if op.placement.results[0].dims[0]]
    assert len(cut) == 2


def test_a_localizer_that_breaks_its_promise_is_named() -> None:
    made = primitive_of(jnp.sin)
    for localize, words in (
        (lambda params, operands, results: operands[0][:1], r"gives float32\[1, 32\] where its rule promises"),
        (lambda params, operands, results: operands[0] @ operands[0], "does not run"),
    ):
        autopar.register_rule(made, "b _ -> b _", localize=localize)
        with pytest.raises(PlanningError, match=words) as caught:
            run(lambda x: made.bind(x), X, planner=autopar.DataParallel())
        assert "test_custom_rules.py" in str(caught.value)
        assert "localize=" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b i, i j", "one arrow"),
        ("b, i -> b -> i", "one arrow"),
        ("b i*, i j -> b j", "'i\\*' is no name"),
        ("b i -> b i, b", "'i' is no dimension of result 1"),
        ("b b -> b _", "two dimensions 'b'"),
        ("b i -> b k", r"'k' on the right is a dimension of no operand \(they have b, i\)"),
    ],
)
def test_a_text_without_sense_is_refused_when_registered(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        autopar.register_rule(next(NAMES), text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b i -> b i", r"describes 1 operand\(s\), the primitive has 2: float32\[64,32\], float32\[32,16\]"),
        ("b i, i j -> b j, b j", r"describes 2 result\(s\), the primitive has 1"),
        ("b i, i -> b _", r"operand 1 is float32\[32,16\], of rank 2, and 'i' names 1"),
        ("b i, b j -> b j", r"'b' is 64 elements in one array and 32 in another"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_with_the_line_that_uses_it(text: str, words: str) -> None:
    made = primitive_of(product)
    autopar.register_rule(made, text)
    with pytest.raises(ArgumentError, match=words) as caught:
        rule_for(made, X, W)
    what, source, remedy = str(caught.value).splitlines()
    assert repr(text) in what
    assert "test_custom_rules.py" in source
    assert remedy.strip()


@pytest.mark.parametrize(("name", "words"), [("dot_general", "built-in rule"), ("jit", "none on purpose")])
def test_a_rule_of_a_primitive_that_autopar_knows_is_refused(name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        autopar.register_rule(name, "b i, i j -> b j")


def test_operands_and_results_may_be_scalars_or_none() -> None:
    scaled = primitive_of(lambda s, x: jnp.sum(s * x))
    autopar.register_rule(scaled, ", b ->")
    rule = rule_for(scaled, np.float32(3), np.ones(8, np.float32))
    assert (rule.operands, rule.results, rule.factors[0].reduction) == (((), (0,)), ((),), "add")
    constant = primitive_of(lambda: jnp.ones(4))
    autopar.register_rule(constant, "-> _")
    assert rule_for(constant).results == ((-1,),)


def test_keys_reach_a_rule_as_keys() -> None:
    made = primitive_of(lambda key, x: x + jax.random.uniform(key, x.shape))
    autopar.register_rule(
        made, lambda params, operands, results: f", {'_' if operands[0].dtype == key.dtype else 'b'} -> _"
    )
    key = jax.random.key(0)
    assert rule_for(made, key, np.ones(8, np.float32)).operands == ((), (-1,))


def test_a_primitive_without_a_rule_for_batches_runs_in_microbatches():
    square = primitive_of(lambda x: x * x)
    autopar.register_rule(square, "b d -> b d")

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        share = square.bind(x).sum(-1)  # of the batch alone, and of all of it
        return ((x @ weights).sum(-1) * share).sum() / share.sum()

    gradient = jax.grad(loss)
    ours = autopar.parallelize(gradient, microbatches=2)(W, X)
    np.testing.assert_allclose(ours, jax.jit(gradient)(W, X), rtol=1e-5, atol=1e-5)
