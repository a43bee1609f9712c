"""A plan lowered to a program: the graph walked on local pieces inside one `jax.shard_map`, with the planned
collectives.

    walk      node by node: bring operands to where the node wants them, bind it, keep its results   `walk`
    bind      the primitive on local pieces                                       autopar/lowering/localize.py
    move      the planned steps, one `lax` collective each                        `_STEPS`

What a step does to a piece is said once, here; which steps are taken was decided by `passes.placement.reshardings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.errors import DeviceError, explain
from autopar.frontend import Body, Traced
from autopar.jax_compat import Device
from autopar.lowering import localize
from autopar.lowering.control import bind_control
from autopar.lowering.convolutions import bind_in_order
from autopar.lowering.localize import Arrays, Cut
from autopar.plan import partition_specs
from passes.cluster import CPU, Axes, Mesh
from passes.ir import Graph, Phase, TensorType, phase
from passes.placement import Layout, Pack, Placement, Resharding, ReshardingPlan, is_free, resharding_plan
from passes.plan import Plan
from passes.sharding import ANY, Resharder, ShardingSpec, Step, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A planned program: `function` takes and returns whole arrays, flat; `reshardings` are those that it runs."""

    function: Callable[..., tuple[Any, ...]]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    reshardings: ReshardingPlan


def build(traced: Traced, plan: Plan, devices: Sequence[Device]) -> Program:
    """The program that a plan describes, on the first devices; on one device it is the traced program itself.

    Raises UnsupportedError where JAX is configured so that random bits cannot be drawn in pieces.
    """
    reshardings = reshardings_of(traced, plan)
    run = partial(walk, body_of(traced), plan.layout, reshardings, OnPieces(plan.mesh))
    function: Callable[..., tuple[Any, ...]] = lambda *inputs: run(inputs)  # noqa: E731
    if plan.mesh.axes:
        mesh = device_mesh(plan.mesh, devices)
        in_specs, out_specs = partition_specs(plan.inputs), partition_specs(plan.outputs)
        has_empty = any(0 in traced.graph.types[value].shape for value in traced.graph.inputs)
        mapped = _mapped_with_number if has_empty else jax.shard_map
        function = mapped(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    program = Program(
        function=function,
        in_shardings=shardings(plan.inputs, plan.mesh, devices),
        out_shardings=shardings(plan.outputs, plan.mesh, devices),
        reshardings=reshardings,
    )
    return _offloading(program, traced, plan)


def _mapped_with_number(function: Callable[..., tuple[Any, ...]], **mapping: Any) -> Callable[..., tuple[Any, ...]]:
    """`jax.shard_map` of the function, with a number among its operands and results.

    XLA's Shardy export loses empty operands, and fails where a program reads no others (jaxlib 0.10.2).
    """
    for side in ("in_specs", "out_specs"):
        mapping[side] = (PartitionSpec(), *mapping[side])
    mapped = jax.shard_map(lambda number, *inputs: (number, *function(*inputs)), **mapping)
    return lambda *inputs: tuple(lax.optimization_barrier(mapped(jnp.zeros(()), *inputs))[1:])


def shardings(specs: Sequence[ShardingSpec], mesh: Mesh, devices: Sequence[Device]) -> tuple[Sharding, ...]:
    """The JAX shardings of these placements on the first devices."""
    if not mesh.axes:
        return (SingleDeviceSharding(devices[0]),) * len(specs)
    jax_mesh = device_mesh(mesh, devices)
    return tuple(NamedSharding(jax_mesh, spec) for spec in partition_specs(specs))


def _offloading(program: Program, traced: Traced, plan: Plan) -> Program:
    """The program with the plan's offloaded inputs, and their new values, in the host's memory.

    Raises DeviceError where JAX cannot keep them there.
    """
    if not plan.offloaded:
        return program
    if plan.mesh.size > 1 and not _keeps_at_hosts(program.in_shardings):
        rule = f"jax {jax.__version__} cannot keep arrays of several CPU devices in their host's memory"
        remedy = "install jax 0.10.2 or newer, or give the devices a larger memory_limit="
        raise DeviceError(explain("state offloaded to the host", rule, "", remedy))
    back = {o: i for o, i in traced.state_pairs if i in plan.offloaded}
    inner, inputs, outputs = program.function, program.in_shardings, program.out_shardings

    def function(*given: Any) -> tuple[Any, ...]:
        arguments = [jax.device_put(x, inputs[i]) if i in plan.offloaded else x for i, x in enumerate(given)]
        results = inner(*arguments)
        return tuple(jax.device_put(x, _at_host(outputs[o])) if o in back else x for o, x in enumerate(results))

    return replace(
        program,
        function=function,
        in_shardings=tuple(_at_host(s) if i in plan.offloaded else s for i, s in enumerate(inputs)),
        out_shardings=tuple(_at_host(s) if o in back else s for o, s in enumerate(outputs)),
    )


def _keeps_at_hosts(shardings: Sequence[Sharding]) -> bool:
    """Whether arrays of several devices can be in their host's memory, not so with XLA:CPU of jaxlib 0.10.1."""
    on_cpus = all(device.platform == "cpu" for sharding in shardings for device in sharding.device_set)
    return not on_cpus or jax.__version_info__ >= (0, 10, 2)


def _at_host(sharding: Sharding) -> Sharding:
    """The same sharding, in the memory of the devices' host."""
    return sharding.with_memory_kind("pinned_host")


def reshardings_of(traced: Traced, plan: Plan) -> ReshardingPlan:
    """The reshardings of a plan, before each node and after the last."""
    return resharding_plan(traced.graph, plan.layout, Resharder(plan.mesh), regather=plan.regather)


def body_of(traced: Traced) -> Body:
    """A traced program as the body that `walk` takes."""
    return Body(graph=traced.graph, equations=traced.equations, constants=traced.constants)


def device_mesh(mesh: Mesh, devices: Sequence[Device]) -> jax.sharding.Mesh:
    """JAX's mesh over the first devices, row-major like the planner's."""
    grid = np.asarray(devices[: mesh.size], dtype=object).reshape(mesh.sizes)
    return jax.sharding.Mesh(grid, mesh.axes, axis_types=(AxisType.Auto,) * len(mesh.axes))


class Semantics(Protocol):
    """The meaning of the operations of `walk` on arrays: `OnPieces` binds them on local shards."""

    @property
    def planned(self) -> Axes:
        """The mesh axes that the plan's placements name."""
        ...

    def bind(self, cut: Cut, operands: Arrays) -> Arrays:
        """The results of a node."""
        ...

    def move(self, array: jax.Array, move: Resharding) -> jax.Array:
        """A value in another placement."""
        ...

    def share(self, array: jax.Array, spec: ShardingSpec) -> jax.Array:
        """A value that every device can make by itself, so that its sum over the partial axes of `spec` has it once."""
        ...


@dataclass(frozen=True, slots=True)
class OnPieces:
    """The semantics of one device's pieces inside a `shard_map` over `mesh`: reshardings are collectives."""

    planned: Mesh

    def bind(self, cut: Cut, operands: Arrays) -> Arrays:
        if "add" in cut.rule.joins and not cut.is_whole:
            return (_sum(cut, operands[0]),)
        if cut.rule.convolves and self.planned.cluster.group().device.name == CPU:
            return bind_in_order(cut, operands)
        if cut.rule.in_rows and self.planned.cluster.group().device.name == CPU:
            return tuple(map(_in_rows, localize.bind(cut, tuple(map(_in_rows, operands)))))
        return localize.bind(cut, operands)

    def move(self, array: jax.Array, move: Resharding) -> jax.Array:
        for step in move.steps:
            array = take(step, array, move, self.planned)
        return array

    def share(self, array: jax.Array, spec: ShardingSpec) -> jax.Array:
        return _keep(array, spec.partial, self.planned) if spec.partial else array


def _in_rows(array: jax.Array) -> jax.Array:
    """The array, row-major in memory.

    XLA:CPU (jaxlib 0.10.2) gives a Fourier transform the order that a collective beside it has, and then refuses to run
    it: "IsMonotonicWithDim0Major" in fft_thunk.cc.
    """
    return lax.optimization_barrier(array.reshape(-1)).reshape(array.shape)


def _sum(cut: Cut, piece: jax.Array) -> jax.Array:
    """The sum, taken also over dimensions of which the piece has one element, which changes nothing.

    XLA:CPU (jaxlib 0.10.2) takes ten times as long for a sum of products that keeps such a dimension, like the batch
    where a device has one sequence: `python -m benchmarks.single_rows`.
    """
    single = {d for d, extent in enumerate(piece.shape) if extent == 1}
    (total,) = localize.rebind(cut, (piece,), axes=tuple(sorted(single.union(cut.params["axes"]))))
    return total.reshape(cut.local_shape())


def walk(
    body: Body, layout: Layout, reshardings: ReshardingPlan, semantics: Semantics, inputs: Arrays
) -> tuple[Any, ...]:
    """A body's outputs in their planned placements, from its inputs in theirs."""
    state = _State(body, layout, semantics, inputs, reshardings.same)
    for index, node in enumerate(body.graph.nodes):
        state.pack(reshardings.packs.get(index, ()))
        state.bring((*reshardings.early.get(index, ()), *reshardings.before[index]))
        if is_free(body.graph, index):
            state.free.update(dict.fromkeys(node.outputs, index))
        else:
            state.run(index, layout.placements[index], reshardings.bodies.get(index, ()))
    state.pack(reshardings.packs.get(len(body.graph.nodes), ()))
    state.bring(reshardings.before[-1])
    outputs = zip(body.graph.outputs, layout.outputs, strict=True)
    return tuple(state.read(value, spec, "forward") for value, spec in outputs)


class _State:
    """The arrays of a walk: every value in the placement its node made it in, and in those it was resharded to.

    The keys of `moved` are those by which `passes.placement.reshardings` decides that a resharding was made before.
    """

    def __init__(
        self, body: Body, layout: Layout, semantics: Semantics, inputs: Arrays, same: Mapping[int, int]
    ) -> None:
        self.body = body
        self.same = same
        self.graph: Graph = body.graph
        self.semantics = semantics
        self.arrays: dict[int, Any] = dict(zip(self.graph.inputs, inputs, strict=True))
        self.arrays |= zip(self.graph.constants, body.constants, strict=True)
        self.home: dict[int, ShardingSpec] = dict(zip(self.graph.inputs, layout.inputs, strict=True))
        self.home |= {value: replicated(self.graph.types[value].rank) for value in self.graph.constants}
        self.moved: dict[tuple[int, ShardingSpec, Phase], Any] = {}
        self.free: dict[int, int] = {}
        self.made: dict[tuple[int, ShardingSpec], Any] = {}

    def pack(self, packs: Sequence[Pack]) -> None:
        """Runs the reductions of each pack as one, on an array in which they lie side by side."""
        for pack in packs:
            arrays = [self.read(move.value, move.before, move.phase) for move in pack.reductions]
            ends = np.cumsum([array.size for array in arrays])[:-1].tolist()
            with jax.named_scope(f"move_{pack.reductions[0].value}"):
                beside = jnp.concatenate([array.reshape(-1) for array in arrays])
                parts = jnp.split(self.semantics.move(beside, pack.reductions[0]), ends)
            for move, array, part in zip(pack.reductions, arrays, parts, strict=True):
                self.moved[move.value, move.after, move.phase] = part.reshape(array.shape)

    def bring(self, reshardings: Sequence[Resharding]) -> None:
        """Runs the reshardings that are in no pack, from the value's first placement or what it was reduced to."""
        for move in reshardings:
            if (move.value, move.after, move.phase) in self.moved:
                continue
            array = self.read(move.value, move.before, move.phase)
            with jax.named_scope(f"move_{move.value}"):
                if move.after_value is not None:
                    # Without a barrier XLA would merge this gather with the forward pass's and keep the weight whole.
                    array, self.arrays[move.after_value] = lax.optimization_barrier(
                        (array, self.arrays[move.after_value])
                    )
                self.moved[move.value, move.after, move.phase] = self.semantics.move(array, move)

    def run(self, index: int, placement: Placement, inside: tuple[ReshardingPlan, ...]) -> None:
        """Binds a node and keeps its results; a loop or branch walks its bodies, with the reshardings `inside`."""
        node = self.graph.nodes[index]
        when = phase(node)
        operands = [self.read(v, spec, when) for v, spec in zip(node.inputs, placement.operands, strict=True)]
        if inside:
            results = self._bind_control(index, placement, inside, operands)
        else:
            results = self._bind(index, placement, operands)
        self.arrays.update(zip(node.outputs, results, strict=True))
        self.home.update(zip(node.outputs, placement.results, strict=True))

    def read(self, value: int, spec: ShardingSpec, when: Phase) -> Any:
        """A value in the placement that its reader needs; literals and free values are made for each placement."""
        if value in self.graph.literals or value in self.free:
            return self._make(value, spec)
        if self.home[value] == spec:
            return self.arrays[value]
        value = self.same.get(value, value)
        again = (value, spec, "backward")
        return self.moved[again] if when == "backward" and again in self.moved else self.moved[value, spec, "forward"]

    def _make(self, value: int, spec: ShardingSpec) -> Any:
        if (value, spec) not in self.made:
            whole = self._whole(value, spec)
            self.made[value, spec] = whole if self._is_zero(value) else self.semantics.share(whole, spec)
        return self.made[value, spec]

    def _is_zero(self, value: int) -> bool:
        """Whether a literal or free value is zero, which counts as often as one likes."""
        if value in self.graph.literals:
            return bool(np.all(np.equal(self.graph.literals[value], 0)))
        sources = self.graph.nodes[self.free[value]].inputs
        return bool(sources) and all(map(self._is_zero, sources))

    def _whole(self, value: int, spec: ShardingSpec) -> Any:
        """A literal, or a free value on the dimensions of `spec`."""
        if value in self.graph.literals:
            return literal(self.graph.literals[value], self.graph.types[value])
        index = self.free[value]
        operands = tuple(replicated(0) for _ in self.graph.nodes[index].inputs)
        scalars = [self.read(v, replicated(0), "forward") for v in self.graph.nodes[index].inputs]
        unshared = ShardingSpec(dims=spec.dims)
        return self._bind(index, Placement(operands=operands, results=(unshared,)), scalars)[0]

    def _bind(self, index: int, placement: Placement, operands: Arrays) -> Arrays:
        cut = localize.cut_of(self.graph, index, self.body.equations[index], placement, self.semantics.planned)
        with localize.binding(cut.node):
            return self.semantics.bind(cut, operands)

    def _bind_control(
        self, index: int, placement: Placement, inside: tuple[ReshardingPlan, ...], operands: Arrays
    ) -> Arrays:
        node, equation = self.graph.nodes[index], self.body.equations[index]
        bodies = tuple(
            partial(_walk_flat, body, layout, reshardings, self.semantics)
            for body, layout, reshardings in zip(equation.bodies, placement.bodies, inside, strict=True)
        )
        with localize.binding(node):
            return bind_control(node.primitive, equation.params, bodies, operands)


def _walk_flat(
    body: Body, layout: Layout, reshardings: ReshardingPlan, semantics: Semantics, *inputs: jax.Array
) -> tuple[Any, ...]:
    return walk(body, layout, reshardings, semantics, inputs)


def literal(value: Any, type: TensorType) -> jax.Array:
    """A scalar that planning knows, as an array."""
    return jnp.asarray(value, dtype=jnp.dtype(type.dtype))


def take(step: Step, array: jax.Array, move: Resharding, mesh: Mesh) -> jax.Array:
    """One device's piece after a step of a resharding."""
    return _STEPS[step.kind](array, step, move.before.reduction if move.before.partial else "add", mesh)


def _slice(array: jax.Array, step: Step, reduction: str, mesh: Mesh) -> jax.Array:
    local = array.shape[step.to_dim] // mesh.axis_size(step.axes[0])
    begin = localize.piece_index(step.axes, mesh) * local
    return lax.dynamic_slice_in_dim(array, begin, local, step.to_dim)


def _keep(array: jax.Array, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The array on the first of the devices along `axes`, zeros on the others."""
    return jnp.where(localize.piece_index(axes, mesh) == 0, array, jnp.zeros_like(array))


def _all_gather(array: jax.Array, step: Step, reduction: str, mesh: Mesh) -> jax.Array:
    return lax.all_gather(array, step.axes[0], axis=step.dim, tiled=True)


def _all_to_all(array: jax.Array, step: Step, reduction: str, mesh: Mesh) -> jax.Array:
    return lax.all_to_all(array, step.axes[0], split_axis=step.to_dim, concat_axis=step.dim, tiled=True)


def _all_reduce(array: jax.Array, step: Step, reduction: str, mesh: Mesh) -> jax.Array:
    if array.dtype == np.bool_:
        # Collectives have no logic: any is a maximum, all a minimum.
        return _REDUCTIONS[reduction](array.astype(np.int32), step.axes).astype(np.bool_)
    return _REDUCTIONS[reduction](array, step.axes)


def _reduce_scatter(array: jax.Array, step: Step, reduction: str, mesh: Mesh) -> jax.Array:
    if array.dtype == np.bool_:
        return _reduce_scatter(array.astype(np.int32), step, reduction, mesh).astype(np.bool_)
    return lax.psum_scatter(array, step.axes[0], scatter_dimension=step.to_dim, tiled=True)


_REDUCTIONS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {"add": lax.psum, "max": lax.pmax, "min": lax.pmin, "or": lax.pmax, "and": lax.pmin, ANY: lax.pmax}
)

_STEPS: Mapping[str, Callable[[jax.Array, Step, str, Mesh], jax.Array]] = MappingProxyType(
    {
        "slice": _slice,
        "keep": lambda array, step, reduction, mesh: _keep(array, step.axes, mesh),
        "all_gather": _all_gather,
        "all_to_all": _all_to_all,
        "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
    }
)
