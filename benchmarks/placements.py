"""The collectives of every resharding of an array, compiled and planned: `python -m benchmarks.placements --help`.

An array of three dimensions on a 2 x 4 mesh has 19 placements and 342 changes between them. Each is lowered in three
ways: by the planned steps as collectives (what autopar does), by a chain of sharding constraints that follows the same
steps, and by one constraint, which leaves the steps to XLA. The table counts the changes that compile to exactly the
planned collectives. Its ratio is that of the compiled bytes of all changes to the planned ones, its worst that of a
single change. XLA warns on stderr about the changes that it makes by gathering everything.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table

from autopar.checks.hlo import UNCOMBINED, collectives
from autopar.lowering import OnPieces, device_mesh
from autopar.plan import partition_spec
from benchmarks.console import stdout
from benchmarks.partitioner import OnWholes
from passes.cluster import Mesh, parse_cluster
from passes.ir import TensorType
from passes.placement import Resharding
from passes.sharding import Resharder, ShardingSpec

TYPE = TensorType(shape=(256, 512, 768), dtype="float32")
DEVICES = 8

Traffic = Counter[tuple[str, tuple[str, ...], int]]
"""How often each (kind, axes, bytes of the result on one device) is sent."""


def mesh_of(sizes: tuple[int, ...] = (2, 4), cluster: str = "8:a100-80g") -> Mesh:
    """A mesh of A100s to plan for; what is compiled runs on virtual CPU devices."""
    return Mesh(axes=("x", "y", "z")[: len(sizes)], sizes=sizes, cluster=parse_cluster(cluster))


def changes(
    mesh: Mesh, type: TensorType = TYPE, reduction: str = "add", *, partial: bool = False
) -> tuple[Resharding, ...]:
    """Every change from one placement of `type` to another, numbered; with `partial`, those that sums take part in."""
    resharder = Resharder(mesh)
    placements = resharder.placements(type.rank, reduction)
    numbered = enumerate(
        (before, after)
        for before in placements
        for after in placements
        if before != after
        and partial == bool(before.partial or after.partial)
        and math.isfinite(resharder.cost(type, before, after))
    )
    return tuple(
        Resharding(value=i, before=before, after=after, steps=resharder.steps(type, before, after), phase="forward")
        for i, (before, after) in numbered
    )


def planned(move: Resharding, mesh: Mesh, type: TensorType = TYPE) -> Traffic:
    """The traffic of the steps of a change."""
    traffic: Traffic = Counter()
    spec = move.before
    for step in move.steps:
        spec = step.apply(spec)
        if not step.is_local:
            traffic[step.kind, step.axes, spec.local_nbytes(type, mesh)] += 1
    return traffic


Lowering = Callable[[Sequence[Resharding], Mesh], jax.stages.Wrapped]
"""A jitted function of one array for each change, which makes them all."""


def by_collectives(moves: Sequence[Resharding], mesh: Mesh) -> jax.stages.Wrapped:
    """Each step of a change as a collective; partial arrays have a first dimension for the summands, one a device."""
    on_pieces = OnPieces(mesh)

    def change(array: jax.Array, move: Resharding) -> jax.Array:
        array = array[0] if move.before.partial else array
        with jax.named_scope(f"change_{move.value}"):
            array = on_pieces.move(array, move)
        return array[None] if move.after.partial else array

    grid = device_mesh(mesh, jax.devices())
    in_specs, out_specs = tuple(stacked(move.before) for move in moves), tuple(stacked(move.after) for move in moves)
    function = jax.shard_map(
        lambda *arrays: tuple(change(array, move) for array, move in zip(arrays, moves, strict=True)),
        mesh=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(
        function,
        in_shardings=tuple(NamedSharding(grid, spec) for spec in in_specs),
        out_shardings=tuple(NamedSharding(grid, spec) for spec in out_specs),
    )


def by_constraints(moves: Sequence[Resharding], mesh: Mesh) -> jax.stages.Wrapped:
    """Each step of a change as a sharding constraint."""
    on_wholes = OnWholes(device_mesh(mesh, jax.devices()), mesh)
    return _constrained(moves, mesh, on_wholes.move)


def by_one_constraint(moves: Sequence[Resharding], mesh: Mesh) -> jax.stages.Wrapped:
    """Each change as one sharding constraint, for which XLA chooses the steps."""
    grid = device_mesh(mesh, jax.devices())

    def jump(array: jax.Array, move: Resharding) -> jax.Array:
        return lax.with_sharding_constraint(array, NamedSharding(grid, partition_spec(move.after)))

    return _constrained(moves, mesh, jump)


def _constrained(
    moves: Sequence[Resharding], mesh: Mesh, change: Callable[[jax.Array, Resharding], jax.Array]
) -> jax.stages.Wrapped:
    grid = device_mesh(mesh, jax.devices())
    return jax.jit(
        lambda *arrays: tuple(change(array, move) for array, move in zip(arrays, moves, strict=True)),
        in_shardings=tuple(NamedSharding(grid, partition_spec(move.before)) for move in moves),
        out_shardings=tuple(NamedSharding(grid, partition_spec(move.after)) for move in moves),
    )


def stacked(spec: ShardingSpec) -> PartitionSpec:
    """The dimensions of `spec`, after one for its summands if it is partial."""
    return PartitionSpec(*([spec.partial] if spec.partial else []), *partition_spec(spec))


def stacked_shape(spec: ShardingSpec, mesh: Mesh, type: TensorType = TYPE) -> tuple[int, ...]:
    """The shape of `type`, after the number of its summands if it is partial."""
    summands = math.prod(mesh.axis_size(axis) for axis in spec.partial)
    return (summands, *type.shape) if spec.partial else type.shape


def sent(compiled: jax.stages.Compiled, moves: Sequence[Resharding], mesh: Mesh) -> tuple[Traffic, ...]:
    """The traffic of a compiled program for each of its changes, told apart by their scopes."""
    by_change: dict[int, Traffic] = {move.value: Counter() for move in moves}
    for collective in collectives(compiled.as_text() or "", mesh.axes, mesh.sizes):
        scope = re.search(r"change_(\d+)", collective.op_name)
        change = int(scope[1]) if scope and len(moves) > 1 else moves[0].value
        by_change[change][collective.kind, collective.axes, collective.nbytes] += collective.count
    return tuple(by_change.values())


def compiled(
    lowering: Lowering, moves: Sequence[Resharding], mesh: Mesh, type: TensorType = TYPE
) -> jax.stages.Compiled:
    """The program that makes all the changes, collectives not merged."""
    dtype = np.dtype(type.dtype)
    structs = [jax.ShapeDtypeStruct(stacked_shape(move.before, mesh, type), dtype) for move in moves]
    options = {**UNCOMBINED, "xla_backend_optimization_level": 0}
    return lowering(moves, mesh).lower(*structs).compile(compiler_options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The agreement of one lowering with the plan: changes that it follows exactly, and its bytes over the planned."""

    lowering: str
    changes: int
    exact: int
    cheaper: int
    costlier: int
    ratio: float
    worst: float


def measure(name: str, lowering: Lowering, moves: Sequence[Resharding], mesh: Mesh) -> Row:
    """The row of a lowering; every change is compiled by itself."""
    sent_moves = [sent(compiled(lowering, [move], mesh), [move], mesh)[0] for move in moves]
    planned_moves = [planned(move, mesh) for move in moves]
    nbytes = [(moved(ours), moved(plan)) for ours, plan in zip(sent_moves, planned_moves, strict=True)]
    return Row(
        lowering=name,
        changes=len(moves),
        exact=sum(ours == plan for ours, plan in zip(sent_moves, planned_moves, strict=True)),
        cheaper=sum(ours < plan for ours, plan in nbytes),
        costlier=sum(ours > plan for ours, plan in nbytes),
        ratio=sum(ours for ours, _ in nbytes) / sum(plan for _, plan in nbytes),
        worst=max((ours / plan for ours, plan in nbytes if plan), default=1.0),
    )


def moved(traffic: Traffic) -> int:
    """Bytes of the results of all collectives, on one device."""
    return sum(nbytes * count for (_, _, nbytes), count in traffic.items())


def table(rows: Sequence[Row], mesh: Mesh) -> Table:
    """The agreement of each lowering with the plan, a lowering a row."""
    table = Table(title=f"every placement change of {TYPE} on a mesh of {mesh}")
    for column in ("lowering", "changes", "exact", "fewer bytes", "more bytes", "bytes / planned", "worst"):
        table.add_column(column, justify="left" if column == "lowering" else "right", no_wrap=True)
    for row in rows:
        counts = map(str, (row.changes, row.exact, row.cheaper, row.costlier))
        table.add_row(row.lowering, *counts, f"{row.ratio:.3f}", f"{row.worst:.2f}")
    return table


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.placements",
        description="Compile every placement change of an array and compare its collectives with the planned ones.",
    ).parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = mesh_of()
    lowerings: dict[str, Lowering] = {
        "collectives": by_collectives,
        "constraints": by_constraints,
        "one constraint": by_one_constraint,
    }
    rows = [measure(name, lowering, changes(mesh), mesh) for name, lowering in lowerings.items()]
    stdout().print(table(rows, mesh))


if __name__ == "__main__":
    main()
