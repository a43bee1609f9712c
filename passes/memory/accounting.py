"""The peak bytes of one device under a plan, by cause: what persists, and temporaries by a compiler's model.

Arguments and outputs stay for the whole step, whatever compiles it; outputs that replace donated arguments take no
room. Everything else is for the compiler to decide. `peak` takes a model of one: any function of `Model`'s type. There
are those of XLA's CPU compiler (passes/memory/xla_cpu.py), of its GPU compiler (passes/memory/xla_gpu.py) and of its
TPU compiler (passes/memory/xla_tpu.py). On TPUs arguments and outputs lie in tiles as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from passes.cluster import DeviceSpec, Mesh
from passes.gc_pause import without_gc
from passes.ir import Graph, StatePairs, item_nbytes, phase
from passes.memory import tpu_layouts, xla_cpu, xla_gpu, xla_tpu
from passes.memory.compilers import compiler_of
from passes.memory.holders import CAUSES, HOLDERS, Holder, Memory, Temporaries
from passes.memory.split_products import weights_of
from passes.memory.tpu_chips import is_tpu
from passes.placement import Grouping, Layout, ReshardingPlan
from passes.sharding import ShardingSpec

GPU_MARGIN = 0.08
TPU_MARGINS: Mapping[str, float] = MappingProxyType({"tpu-v5e": 0.15, "tpu-v6e": 0.29, "tpu-v5p": 0.1})
"""The shares by which compiled peaks are above predicted ones, at most, in 95 % of the steps of 100 MB and more that
`python -m benchmarks.compilers` compiled, which fails where they are more: what a plan on paper leaves free of its
limit. TPUs for which nothing was compiled leave as much as the worst of those. On CPUs a program is compiled before it
runs, and planned again where it needs more."""


class Model(Protocol):
    """A model of a compiler: the memory that it needs for a planned program."""

    def __call__(
        self,
        graph: Graph,
        grouping: Grouping,
        mesh: Mesh,
        layout: Layout,
        reshardings: ReshardingPlan,
        in_place: Mapping[int, int],
        /,
    ) -> Temporaries:
        """The temporaries of a step, beside arguments and outputs; output o takes the place of input `in_place[o]`."""
        ...


def model_of(device: DeviceSpec) -> Model:
    """The model of the compiler that a device has, of the CPU's where there is none."""
    if is_tpu(device):
        return xla_tpu.model(device)
    weights = weights_of(device.name)
    return xla_cpu.temporaries if weights is None else xla_gpu.model(weights)


def margin_of(device: DeviceSpec) -> float:
    """The share by which the compiled peak of a step on a device may be above its prediction."""
    tpu_margin = TPU_MARGINS.get(device.name, max(TPU_MARGINS.values()))
    return {"tpu": tpu_margin, "gpu": GPU_MARGIN, "cpu": 0.0}[compiler_of(device)]


def nbytes_in(device: DeviceSpec, shape: tuple[int, ...], dtype: str) -> int:
    """The bytes of an array in a device's memory."""
    return tpu_layouts.nbytes(shape, dtype) if is_tpu(device) else math.prod(shape) * item_nbytes(dtype)


@without_gc()
def peak(
    graph: Graph,
    grouping: Grouping,
    mesh: Mesh,
    layout: Layout,
    reshardings: ReshardingPlan,
    state_pairs: StatePairs,
    donated: Sequence[bool],
    *,
    model: Model | None = None,
) -> Memory:
    """The bytes of one device of `mesh` at the busiest moment of a step, by cause.

    `layout` says where the arrays of `graph` lie, `grouping` which rules cut its nodes, and `reshardings` the moves
    between them. `state_pairs` are the (output, input) positions of its state; an output takes no room where its input
    is `donated`, by input position. `model` says what comes and goes between arguments and outputs, by default that of
    the device's compiler.
    """
    device = mesh.cluster.group().device

    def stored(value: int, spec: ShardingSpec) -> int:
        """The bytes of an array on one device, where it lies for the whole step."""
        type = graph.types[value]
        return nbytes_in(device, spec.local_shape(type.shape, mesh), type.dtype)

    forward = _read_forward(graph, grouping)
    state = {i for _, i in state_pairs}
    holders: list[Holder] = []
    for position, (value, spec) in enumerate(zip(graph.inputs, layout.inputs, strict=True)):
        cause = "other arguments"
        if position in state:
            cause = "parameters" if value in forward else "optimizer state"
        name = graph.input_names[position] if graph.input_names else f"argument {position}"
        holders.append(Holder(name=name, nbytes=stored(value, spec), cause=cause))
    in_place = {o: i for o, i in state_pairs if donated[i]}
    for position, (value, spec) in enumerate(zip(graph.outputs, layout.outputs, strict=True)):
        if position not in in_place:
            name = graph.output_names[position] if graph.output_names else f"output {position}"
            holders.append(Holder(name=name, nbytes=stored(value, spec), cause="outputs"))
    model = model or model_of(device)
    predicted = model(graph, grouping, mesh, layout, reshardings, in_place)
    gaps = Holder(name="gaps between buffers", nbytes=predicted.gaps_nbytes, cause="transients")
    everything = (*holders, *predicted.holders, *((gaps,) if gaps.nbytes else ()))
    resident = sum(holder.nbytes for holder in (*holders, gaps))
    nbytes = {cause: sum(h.nbytes for h in everything if h.cause == cause) for cause in CAUSES}
    return Memory(
        nbytes=MappingProxyType(nbytes),
        where=predicted.where,
        holders=tuple(sorted(everything, key=lambda holder: -holder.nbytes)[:HOLDERS]),
        over_time=tuple(resident + live for live in predicted.over_time),
        layers=_by_layer(predicted.holders),
    )


def _by_layer(holders: Sequence[Holder]) -> Mapping[str, int]:
    """The bytes of temporaries by layer."""
    nbytes: dict[str, int] = {}
    for holder in holders:
        nbytes[holder.layer] = nbytes.get(holder.layer, 0) + holder.nbytes
    return MappingProxyType(nbytes)


def _read_forward(graph: Graph, grouping: Grouping) -> set[int]:
    """The values that the forward pass reads, inside loops and branches too."""
    return set(_forward_reads(graph, grouping))


def _forward_reads(graph: Graph, grouping: Grouping) -> Iterator[int]:
    for index, node in enumerate(graph.nodes):
        if phase(node) == "forward":
            yield from node.inputs
        elif index in grouping.controls:
            control, ports = grouping.controls[index], set[int]()
            for body, inner in zip(control.bodies, grouping.bodies[index], strict=True):
                read = _read_forward(body.graph, inner)
                ports.update(s for v, s in zip(body.graph.inputs, body.inputs, strict=True) if v in read)
            yield from (v for v, port_use in zip(node.inputs, control.operands, strict=True) if port_use.port in ports)
