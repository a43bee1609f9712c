"""The law of sharding rules: pieces computed by themselves, joined and reduced, equal the whole.

For every primitive with a rule and every legal way to cut it over two devices or a two by two grid: cut the operands,
bind the primitive on the pieces (autopar/lowering/localize.py), join the results along what is cut, reduce what is
partial.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.errors import UnsupportedError
from autopar.frontend import Traced, trace
from autopar.lowering import Cut, device_mesh
from autopar.lowering.localize import bind, cut_of
from autopar.lowering.localizers import positions
from autopar.lowering.lower import literal
from passes.cluster import Mesh, parse_cluster
from passes.errors import InternalError
from passes.placement import Placement
from passes.rules import known_primitives, rule_of
from passes.sharding import ANY, ShardingSpec
from tests.autopar.lowering.rule_cases.all_cases import ABSENT, cases
from tests.autopar.lowering.rule_cases.case import Case
from tests.sample import slow

SAMPLE, MANY = 2, 24
"""At most so many ways to cut a node along both axes at once, in every run and in a slow one."""

MOVEMENT = frozenset(
    "broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice gather neg pad reshape rev select_n slice "
    "sort squeeze transpose".split()
)
"""Primitives whose results are exact wherever nothing is partial."""

TOLERANCES = {8: 1e-12, 4: 1e-5, 2: 5e-2}
"""By the bytes of the narrowest float: how far sums of summands may be from the whole."""

LONG = frozenset(
    (
        *(
            "random_gamma of many keys",
            "random_gamma of one key",
            "regularized_incomplete_beta",
            "igamma",
            "igamma_grad_a",
            "igammac",
            "bessel_i0e",
            "bessel_i1e",
            "polygamma",
            "zeta",
            "erf_inv",
            "erfc",
            "sinh",
            "threefry2x32",
        ),
        *(f"random_bits of {width}" for width in ("8 bits", "16 bits", "32 bits", "64 bits", "keys in two dimensions")),
        *(
            f"conv_general_dilated {kind}, by grad"
            for kind in (
                "batch groups of one",
                "four batch groups",
                "four groups",
                "dilated",
                "depthwise, twice",
                "strided",
            )
        ),
    )
)
"""Cases for a slow run alone: they compile for seconds, and ones of the same rule and its neighbours stay."""

EACH = 3
"""Cases of one primitive for every run, the first: gathers and scatters have many, of which a slow run has all."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

REDUCTIONS = {"add": np.sum, "max": np.max, "min": np.min, "or": np.any, "and": np.all, ANY: np.any}

MESH = Mesh(axes=("x", "y"), sizes=(2, 2), cluster=parse_cluster("4:a100-80g"))

with jax.enable_x64(True):
    CASES = cases()


def sampled() -> Iterator[Any]:
    """All cases, marked as slow but for the first short ones of each primitive."""
    quick = Counter[str]()
    for case in CASES:
        quick[case.primitive] += str(case) not in LONG
        yield case if str(case) not in LONG and quick[case.primitive] <= EACH else slow(case)


@pytest.mark.parametrize("case", list(sampled()), ids=str)
@pytest.mark.parametrize("most", [SAMPLE, slow(MANY)])
def test_pieces_make_the_whole(case: Case, most: int) -> None:
    with jax.enable_x64(True):
        traced = trace(case.function, case.args, {})
        values = evaluate(traced, case.args)
        indices = [i for i, node in enumerate(traced.graph.nodes) if node.primitive == case.primitive]
        assert indices, f"the case does not use {case.primitive}:\n{traced.graph}"
        for index in indices:
            check(list(cuts(traced, index, most)), traced, values)


def test_every_rule_has_a_case() -> None:
    covered = {case.primitive for case in CASES}
    assert set(map(str, CASES)) >= LONG
    assert covered | ABSENT.keys() == known_primitives(), "add a case to tests/autopar/lowering/rule_cases"


def test_a_rule_that_says_that_pieces_are_more_needs_a_way_to_run_them() -> None:
    """And one that does not is run as it is: what the law above compares is what rules say of pieces."""
    traced = trace(lambda x: jnp.sin(x), (np.zeros(8, np.float32),), {})
    along = ShardingSpec(dims=(("x",),))
    cut = cut_of(traced.graph, 0, traced.equations[0], Placement(operands=(along,), results=(along,)), MESH)
    assert bind(cut, [jnp.ones(4)])[0].shape == (4,)
    with pytest.raises(InternalError, match=r"sin\(float32\[8\] \[x\]\).* no localizer"):
        bind(replace(cut, rule=replace(cut.rule, localized=True)), [jnp.ones(4)])


def test_partial_results_are_found() -> None:
    """The law above is not empty: it meets reductions, split vocabularies and partial operands."""
    met: set[tuple[str, str]] = set()
    with jax.enable_x64(True):
        for case in CASES:
            if case.primitive in ("dot_general", "gather", "scatter-add", "reduce_max", "add"):
                traced = trace(case.function, case.args, {})
                for index, node in enumerate(traced.graph.nodes):
                    for cut in cuts(traced, index) if node.primitive == case.primitive else ():
                        met |= {(node.primitive, s.reduction) for s in cut.placement.results if s.partial}
    assert met == {
        ("dot_general", "add"),
        ("gather", "add"),
        ("scatter-add", "add"),
        ("reduce_max", "max"),
        ("add", "add"),
    }


def test_a_primitive_that_gives_other_shapes_is_refused() -> None:
    traced = trace(lambda x: jnp.sort(x), (np.zeros(8, np.float32),), {})
    whole, cut = ShardingSpec(dims=((),)), ShardingSpec(dims=(("x",),))
    wrong = cut_of(traced.graph, 0, traced.equations[0], Placement(operands=(whole,), results=(cut,)), MESH)
    with pytest.raises(InternalError, match=r"sort\(float32\[8\] \[-\]\) at .*test_soundness.*gives pieces .*\(8,\)"):
        bind(wrong, [jnp.zeros(8)])


def test_bits_in_pieces_need_partitionable_threefry() -> None:
    traced = trace(lambda key: jax.random.bits(key, (8,)), (jax.random.key(0),), {})
    index = next(i for i, node in enumerate(traced.graph.nodes) if node.primitive == "random_bits")
    before = jax.config.jax_threefry_partitionable
    cut = next(c for c in cuts(traced, index) if not c.is_whole)
    jax.config.update("jax_threefry_partitionable", False)
    try:
        with pytest.raises(UnsupportedError, match="jax_threefry_partitionable"):
            bind(cut, [jax.random.key(0)])
    finally:
        jax.config.update("jax_threefry_partitionable", before)


def test_positions_beyond_32_bits() -> None:
    """Corners of an array too large to make, against NumPy's 64-bit integers."""
    shape, extents = (5, 3, (1 << 20) + 1, (1 << 18) + 7), (2, 2, 2, 3)
    for begins in ((0, 0, 0, 0), (3, 1, (1 << 20) - 1, (1 << 18) + 4), (1, 0, 1 << 14, (1 << 18) - 2)):
        block = [range(begin, begin + extent) for begin, extent in zip(begins, extents, strict=True)]
        wanted = np.ravel_multi_index(np.meshgrid(*block, indexing="ij"), shape)
        high, low = map(np.asarray, positions(shape, [jnp.uint32(begin) for begin in begins], extents))
        np.testing.assert_array_equal(high.astype(np.int64) << 32 | low, wanted)


def evaluate(traced: Traced, args: tuple[object, ...]) -> dict[int, jax.Array]:
    """Every value of a graph, on one device."""
    graph = traced.graph
    values = dict(zip(graph.inputs, map(jnp.asarray, jax.tree.leaves(args)), strict=True))
    values |= zip(graph.constants, traced.constants, strict=True)
    values |= {value: literal(number, graph.types[value]) for value, number in graph.literals.items()}
    for index, node in enumerate(graph.nodes):
        rule = rule_of(node, graph)
        uncut = Placement.of(rule, ())
        results = bind(cut_of(graph, index, traced.equations[index], uncut, MESH), [values[v] for v in node.inputs])
        values |= zip(node.outputs, results, strict=True)
    return values


def cuts(traced: Traced, index: int, most: int = SAMPLE) -> Iterator[Cut]:
    """The legal ways to cut a node: all along one axis, which are those of a mesh of two, and a sample along both."""
    node = traced.graph.nodes[index]
    rule = rule_of(node, traced.graph)
    found = rule.assignments(MESH)
    along_x = [a for a in found if all(axis == "x" for axis, _ in a)]
    along_both = [a for a in found if len(a) == 2]
    count = min(most, len(along_both))
    picked = np.random.default_rng(0).choice(len(along_both), count, replace=False) if count else []
    for assignment in (*along_x, *(along_both[i] for i in picked)):
        yield cut_of(traced.graph, index, traced.equations[index], Placement.of(rule, assignment), MESH)


def check(cuts: list[Cut], traced: Traced, values: dict[int, jax.Array]) -> None:
    """Runs every cut of a node in one program and compares."""
    node = cuts[0].node
    operands = [
        [parts(values[v], spec) for v, spec in zip(node.inputs, cut.placement.operands, strict=True)] for cut in cuts
    ]
    program = jax.shard_map(
        lambda pieces: [run(cut, given) for cut, given in zip(cuts, pieces, strict=True)],
        mesh=device_mesh(MESH, jax.devices()),
        in_specs=([list(map(stacked_spec, cut.placement.operands)) for cut in cuts],),
        out_specs=[list(map(stacked_spec, cut.placement.results)) for cut in cuts],
        check_vma=False,
    )
    found = jax.jit(program, compiler_options=QUICK)(operands)
    for cut, results in zip(cuts, found, strict=True):
        for result, value, spec in zip(results, node.outputs, cut.placement.results, strict=True):
            compare(joined(result, spec), values[value], cut)


def run(cut: Cut, stacked: list[jax.Array]) -> list[jax.Array]:
    """The results of a cut node on one device; summands have a dimension of their own in front."""
    operands = [x[0] if s.partial else x for x, s in zip(stacked, cut.placement.operands, strict=True)]
    results = bind(cut, operands)
    return [x[None] if s.partial else x for x, s in zip(results, cut.placement.results, strict=True)]


def stacked_spec(spec: ShardingSpec) -> PartitionSpec:
    return PartitionSpec(*([spec.partial] if spec.partial else []), *(axes or None for axes in spec.dims))


def parts(value: jax.Array, spec: ShardingSpec) -> jax.Array | np.ndarray:
    """The value, or summands of it stacked in front for each device along its partial axes."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    whole = np.asarray(value)
    if not spec.partial:
        return whole
    count = math.prod(MESH.axis_size(axis) for axis in spec.partial)
    others = np.random.default_rng(1).uniform(-4, 4, (count - 1, *whole.shape)).astype(whole.dtype)
    return np.concatenate([(whole - others.sum(0, dtype=whole.dtype))[None], others])


def joined(result: jax.Array, spec: ShardingSpec) -> jax.Array | np.ndarray:
    if not spec.partial:
        return result
    stacked = np.asarray(result)
    return REDUCTIONS[spec.reduction](stacked, axis=0, **({"dtype": stacked.dtype} if spec.reduction == "add" else {}))


def compare(found: jax.Array | np.ndarray, wanted: jax.Array, cut: Cut) -> None:
    assert found.dtype == wanted.dtype, cut.placement
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    specs = (*cut.placement.operands, *cut.placement.results)
    is_exact = cut.node.primitive in MOVEMENT and not any(spec.partial for spec in specs)
    if is_exact or not jnp.issubdtype(wanted.dtype, np.inexact):
        np.testing.assert_array_equal(found, wanted, err_msg=str(cut.placement))
    else:
        types = [
            t.dtype
            for t in (*cut.operands, *cut.results)
            if not t.dtype.startswith("key") and jnp.issubdtype(jnp.dtype(t.dtype), np.inexact)
        ]
        rtol = TOLERANCES[min(8, *(jnp.dtype(dtype).itemsize for dtype in types))]
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol, err_msg=str(cut.placement))
