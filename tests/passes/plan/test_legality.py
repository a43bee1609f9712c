"""The quick test of one placement against the list of all that a rule allows."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as Devices
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from passes.cluster import Mesh, parse_cluster
from passes.errors import PlanMismatchError
from passes.ir import TensorType
from passes.placement import Placement
from passes.plan import Plan
from passes.plan.legality import is_legal, placements
from passes.rules import ShardingRule, build

CLUSTER = parse_cluster("1x8:a100-80g")
MESHES = [
    Mesh(axes=("x",), sizes=(4,), cluster=CLUSTER),
    Mesh(axes=("x", "y"), sizes=(2, 4), cluster=CLUSTER),
    Mesh(axes=("x", "y", "z"), sizes=(2, 2, 2), cluster=CLUSTER),
]
SIZES = {"b": 8, "i": 16, "j": 4, "k": 6}


def rule(text: str, **options: object) -> ShardingRule:
    """The rule of an einsum, whose summed dimensions leave partial sums; `_` is never cut."""
    sides = [[part.split() for part in side.split(",")] for side in text.split("->")]
    summed = {word for words in sides[0] for word in words} - {word for words in sides[1] for word in words} - {"_"}

    def described(words: list[str]) -> tuple[TensorType, list[str | None]]:
        shape = tuple(SIZES.get(word, 5) for word in words)
        return TensorType(shape=shape, dtype="float32"), [None if word == "_" else word for word in words]

    operands, results = ([described(words) for words in side] for side in sides)
    return build(operands, results, reduce=dict.fromkeys(sorted(summed), "add"), flops=1.0, light=False)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "text", ["b i, i j -> b j", "b i -> i b", "b k, k -> b", "b _ -> b _", "i, i -> i", "b i -> b, i"]
)
def test_the_quick_test_agrees_with_the_list(text: str, mesh: Mesh):
    parsed_rule = rule(text)
    legal = sorted(placements(parsed_rule, mesh), key=repr)
    assert all(is_legal(placement, parsed_rule, mesh) for placement in legal)
    operands = [sorted({p.operands[i] for p in legal}, key=repr) for i in range(len(parsed_rule.operands))]
    results = [sorted({p.results[i] for p in legal}, key=repr) for i in range(len(parsed_rule.results))]
    mixed = [
        Placement(operands=tuple(specs[: len(operands)]), results=tuple(specs[len(operands) :]))
        for specs in itertools.islice(itertools.product(*operands, *results), 20_000)
    ]
    mixed = random.Random(0).sample(mixed, min(300, len(mixed)))
    assert [is_legal(p, parsed_rule, mesh) for p in mixed] == [p in set(legal) for p in mixed]


def test_a_mesh_on_which_a_constraint_cannot_be_met_is_refused():
    """There was no nearest legal placement to name: the error was a ValueError of min()."""
    halves = NamedSharding(Devices(np.array(jax.devices()).reshape(2, 4), ("x", "y")), PartitionSpec("x"))
    args = (jnp.ones((64, 64)),)
    parallel = autopar.parallelize(lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), halves), cluster="8:cpu")
    edited = Plan.from_json({**parallel.plan(*args).to_json(), "mesh": {"x": 8}})
    with pytest.raises(PlanMismatchError, match="mesh x=8 has no axes for the cut that the function asks for"):
        edited.check(parallel.step(*args).graph)
