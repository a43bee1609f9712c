"""Lower bounds on the cost of any run of layers on a number of devices, from bounds on each kind of block on
each mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from passes.cluster import Cluster, Mesh
from passes.inter_op import LowerBound, Submesh
from passes.pipeline.block_costs import BlockCosts
from passes.pipeline.blocks import Block
from passes.pipeline.step_blocks import Counted, Kinds, StepBlocks

SLACK = 1 + 1e-9
"""The factor by which seconds must differ to count as slower: sums in different orders differ by less."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBounds:
    """The lower bounds of all runs of layers [layers, layers + 1] on one number of devices, given `n_prices` prices."""

    n_prices: int
    seconds: Floats
    periods: Floats
    nbytes: Floats

    @classmethod
    def of(cls, sums: Floats, bounds: Floats, known: NDArray[np.bool_], nbytes: Floats, n_prices: int) -> Self:
        """The bounds of runs, from the least seconds and periods of kinds of blocks on meshes [2, kinds, meshes].

        `sums` [layers + 1, kinds] counts the blocks before each layer, and each block holds `nbytes` [kinds]. Where
        blocks are `known` exactly on a mesh, meshes that take longer do not count.
        """
        counts = np.maximum(sums - sums[:, None], 0.0)[:-1]
        some = (counts > 0).astype(np.float64)
        finite = np.isfinite(bounds)
        totals = counts @ np.where(finite, bounds, 0.0)[:, None]
        totals[some @ ~finite[:, None] > 0] = np.inf
        seconds, periods = totals
        best = np.where(some @ ~known > 0, np.inf, periods).min(axis=2, keepdims=True)
        chosen = np.where(periods <= best * SLACK, seconds, np.inf)
        return cls(n_prices=n_prices, seconds=chosen.min(axis=2), periods=periods.min(axis=2), nbytes=counts @ nbytes)


@dataclass(frozen=True, slots=True)
class _RunBound:
    """The lower bound of a run of blocks given `n_prices` prices, and whether all of it is priced on some mesh."""

    bound: LowerBound
    is_priced: bool
    n_prices: int


@dataclass(slots=True, kw_only=True)
class BlockBounds:
    """Lower bounds on the cost of a step's stages, by the prices of blocks that are known so far.

    A block without a price is bounded from three sides: its operators cut over the devices, without communication; the
    same block in fewer microbatches, since smaller ones save nothing; and the same block on fewer devices, since twice
    as many take at least half as long. `meshes(n)` lays out n devices.
    """

    step: StepBlocks
    cluster: Cluster
    meshes: Callable[[int], Sequence[Mesh]]
    block_costs: BlockCosts
    _by_size: dict[tuple[int, int], LayerBounds] = field(default_factory=dict[tuple[int, int], LayerBounds])
    _spent: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict[tuple[str, int], tuple[int, float]])
    _laid_out: dict[int, Sequence[Mesh]] = field(default_factory=dict[int, Sequence[Mesh]])
    _runs: dict[tuple[Kinds, int], _RunBound] = field(default_factory=dict[tuple[Kinds, int], "_RunBound"])

    @property
    def n_prices(self) -> int:
        """The number of prices found so far: a bound changes only when this does."""
        return self.block_costs.n_prices

    def of_layers(self, first: int, last: int, submesh: Submesh, microbatches: int) -> LowerBound:
        """A lower bound on the cost of these layers as a stage, on its best mesh; it rises as blocks are priced."""
        key = (submesh.n_devices, microbatches)
        if key not in self._by_size or self._by_size[key].n_prices != self.n_prices:
            self._by_size[key] = self._layer_bounds(*key)
        bounds = self._by_size[key]
        seconds, period, nbytes = (float(of[first, last]) for of in (bounds.seconds, bounds.periods, bounds.nbytes))
        return LowerBound(seconds=seconds, period=period, nbytes=nbytes)

    def of_blocks(self, begin: int, end: int, n_devices: int, microbatches: int) -> LowerBound:
        """A lower bound on the cost of some blocks as a stage, by what is known so far, in any number of microbatches.

        Without prices in that number, a step takes no less than what lies between its seconds in fewer and in more
        microbatches: every layout takes a time of its own, and one for each microbatch.
        """
        run = (begin, end, n_devices)
        if microbatches not in self.step.samples:
            return self._between(run, microbatches, list(self.step.samples))
        bound = self._of_run(run, microbatches).bound
        known = [count for count in self.step.samples if self._of_run(run, count).is_priced]
        if microbatches in known or not min(known, default=microbatches) < microbatches < max(known):
            return bound
        between = self._between(run, microbatches, known)
        return LowerBound(max(bound.seconds, between.seconds), max(bound.period, between.period), bound.nbytes)

    def is_priced(self, chosen: Sequence[Counted], mesh: Mesh) -> bool:
        return all(self.block_costs.is_known(block, mesh) for block, _ in chosen)

    def _between(self, run: tuple[int, int, int], microbatches: int, counts: Sequence[int]) -> LowerBound:
        """The bound of a run (begin, end, devices) from those in the nearest fewer and more of these `counts`."""
        fewer = max((count for count in counts if count < microbatches), default=None)
        more = min((count for count in counts if count > microbatches), default=None)
        low, high = (self._of_run(run, n).bound if n else None for n in (fewer, more))
        if not low or not fewer:
            return high or LowerBound(0.0, 0.0, 0.0)
        if not high or not more:
            share = fewer / microbatches
            return LowerBound(low.seconds * share, low.period * share, low.nbytes)
        part = (microbatches - fewer) / (more - fewer)
        seconds, period = (
            ((1 - part) * fewer * a + part * more * b) / microbatches for a, b in zip(low[:2], high[:2], strict=True)
        )
        return LowerBound(seconds, period, low.nbytes)

    def _of_run(self, run: tuple[int, int, int], microbatches: int) -> _RunBound:
        """The bound of a run (begin, end, devices) in a number of microbatches by the prices in that number."""
        begin, end, n_devices = run
        key = self.step.kinds(begin, end, microbatches), n_devices
        known = self._runs.get(key)
        if known is None or known.n_prices != self.n_prices:
            known = self._runs[key] = self._bound(self.step.counted(begin, end, microbatches), n_devices)
        return known

    def _bound(self, chosen: Sequence[Counted], n_devices: int) -> _RunBound:
        meshes = self.meshes_of(n_devices)
        each = [
            [(n * seconds, n * period) for (seconds, period), n in ((self.of_block(b, mesh), n) for b, n in chosen)]
            for mesh in meshes
        ]
        bound = LowerBound(
            seconds=min((math.fsum(seconds for seconds, _ in bounds) for bounds in each), default=math.inf),
            period=min((math.fsum(period for _, period in bounds) for bounds in each), default=math.inf),
            nbytes=math.fsum(n * self.block_costs.least(block, self.cluster, n_devices)[1] for block, n in chosen),
        )
        return _RunBound(bound, any(self.is_priced(chosen, mesh) for mesh in meshes), self.n_prices)

    def of_block(self, block: Block, mesh: Mesh) -> tuple[float, float]:
        """The bound of `BlockCosts.lower_bound`, and no less than half of the best bound on half of the devices."""
        seconds, period = self.block_costs.lower_bound(block, mesh)
        if self.block_costs.is_known(block, mesh):
            return seconds, period
        key = (block.kind, mesh.size)
        if key not in self._spent or self._spent[key][0] != self.n_prices:
            fewer = (n for n in self._laid_out if n < mesh.size and mesh.size % n == 0)
            self._spent[key] = self.n_prices, max((self._least_spent(block, n) for n in fewer), default=0.0)
        return seconds, max(period, self._spent[key][1] / mesh.size)

    def _least_spent(self, block: Block, n_devices: int) -> float:
        """Device seconds that a microbatch of a block takes at least; 0 if it cannot be on these devices."""
        least = min(
            (self.block_costs.lower_bound(block, mesh)[1] for mesh in self.meshes_of(n_devices)), default=math.inf
        )
        return n_devices * least if math.isfinite(least) else 0.0

    def _layer_bounds(self, n_devices: int, microbatches: int) -> LayerBounds:
        kinds = [block for block, _ in self.step.in_layers(0, self.step.n_layers, microbatches)]
        numbers = {block.kind: number for number, block in enumerate(kinds)}
        each = np.zeros((self.step.n_layers + 1, len(kinds)))
        for layer in range(self.step.n_layers):
            for block, n in self.step.in_layers(layer, layer + 1, microbatches):
                each[layer + 1, numbers[block.kind]] = n
        meshes = self.meshes_of(n_devices)
        bounds = np.array([[self.of_block(block, mesh) for mesh in meshes] for block in kinds])
        return LayerBounds.of(
            np.cumsum(each, axis=0),
            np.moveaxis(bounds, 2, 0),
            np.array([[self.block_costs.is_known(block, mesh) for mesh in meshes] for block in kinds]),
            np.array([self.block_costs.least(block, self.cluster, n_devices)[1] for block in kinds]),
            self.n_prices,
        )

    def meshes_of(self, n_devices: int) -> Sequence[Mesh]:
        if n_devices not in self._laid_out:
            self._laid_out[n_devices] = self.meshes(n_devices)
        return self._laid_out[n_devices]
