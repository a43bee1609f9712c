"""The textbook ways to run a train step on many devices, by hand: plain `jax.jit` with input and output shardings.

Inside the step XLA's partitioner chooses. A baseline is a mesh and a function from an array's path and shape in the
state to its PartitionSpec; the batch is cut over the axis `data`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.one_device import Runner
from benchmarks.trainings import Training

Cut = Callable[[str, tuple[int, ...]], PartitionSpec]

Cuts = Mapping[str, int]
"""A pattern for the end of a parameter's path -> the dimension that is cut."""

TRANSFORMER: Cuts = {
    r"qkv/kernel": 2,
    r"qkv/bias": 1,
    r"query/kernel": 1,
    r"query/bias": 0,
    r"key_value/kernel": 2,
    r"key_value/bias": 1,
    r"(attention|cross)/out/kernel": 0,
    r"mlp/(up|gate)/kernel": 1,
    r"mlp/up/bias": 0,
    r"mlp/down/kernel": 0,
    r"embed(?!_segment)\w*/embedding": 0,  # two segments are too few to cut
}
"""Megatron's: columns of what enters attention and MLP, rows of what leaves them, the vocabulary of embeddings."""

MEGATRON: Mapping[str, Cuts] = {
    "gpt": TRANSFORMER,
    "llama": TRANSFORMER | {r"head/kernel": 1},
    "bert": TRANSFORMER | {r"head_bias": 0},
    "transformer": TRANSFORMER,
    "moe": TRANSFORMER | {r"experts/up": 2, r"experts/down": 1},
}
"""The models that Megatron's cuts are written for."""

EXPERTS: Cuts = {r"experts/(up|down)": 0}
TABLES: Cuts = {r"Table_\d+/embedding": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A mesh of these `sizes` by axis, and a function `cut` of an array's path and shape that places it there."""

    sizes: Mapping[str, int]
    cut: Cut

    def runner(self, training: Training) -> Runner:
        """The training's step, jitted for that placement with the state donated, and its arguments in their places."""
        mesh = Mesh(np.reshape(jax.devices(), tuple(self.sizes.values())), tuple(self.sizes))

        def place(path: Any, leaf: jax.Array) -> NamedSharding:
            return NamedSharding(mesh, self.cut(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape))

        state = jax.tree_util.tree_map_with_path(place, training.state)
        batch = NamedSharding(mesh, PartitionSpec("data" if "data" in self.sizes else None))
        return sharded(training, (state, batch), (state, NamedSharding(mesh, PartitionSpec())))


def sharded(training: Training, inputs: Any, outputs: Any) -> Runner:
    """The training's step by plain `jax.jit` under these shardings, and its arguments in their places."""
    step = jax.jit(training.step, in_shardings=inputs, out_shardings=outputs, donate_argnums=(0,))
    return Runner(step, *jax.device_put((training.state, training.batch), inputs))


def baselines(model: str, devices: int) -> Iterator[tuple[str, Baseline]]:
    """The baselines of a model by name, each over all devices."""
    data = {"data": devices}
    family = model.removesuffix("-scan")
    yield "dp", Baseline(sizes=data, cut=lambda path, shape: PartitionSpec())
    yield "fsdp", Baseline(sizes=data, cut=lambda path, shape: largest_dimension(shape, "data", devices))
    if family in MEGATRON:
        for rows in (1, 2):
            sizes = {"data": rows, "tensor": devices // rows}
            yield f"megatron {rows}x{devices // rows}", Baseline(sizes=sizes, cut=by_path(MEGATRON[family], "tensor"))
    if family == "moe":
        yield "experts", Baseline(sizes=data, cut=by_path(EXPERTS, "data"))
    if family == "dlrm":
        yield "tables", Baseline(sizes=data, cut=by_path(TABLES, "data"))


def largest_dimension(shape: tuple[int, ...], axis: str, size: int) -> PartitionSpec:
    """A spec that cuts the largest dimension that `size` divides over `axis`, or none if there is no such dimension."""
    divisible = [(n, -d) for d, n in enumerate(shape) if n % size == 0]
    return dimension(-max(divisible)[1], axis) if divisible else PartitionSpec()


def by_path(cuts: Cuts, axis: str) -> Cut:
    """A function that cuts the arrays whose paths `cuts` has over `axis`, and leaves others whole.

    Layers that are stacked for a loop have one dimension more in front.
    """

    def cut(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        matches = [d for pattern, d in cuts.items() if re.search(rf"(^|/){pattern}$", path)]
        return dimension(matches[0] + ("/Block/" in path), axis) if matches else PartitionSpec()

    return cut


def dimension(number: int, axis: str) -> PartitionSpec:
    """A spec that cuts the dimension of this number over `axis`."""
    return PartitionSpec(*[None] * number, axis)
