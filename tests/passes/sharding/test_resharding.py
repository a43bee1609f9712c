"""Chains of steps against a Dijkstra search with prices of its own, and against what they do to pieces of arrays."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from passes.cluster import Cluster, Mesh, collectives, parse_cluster
from passes.errors import InternalError
from passes.ir import TensorType
from passes.sharding import Behind, Resharder, ShardingSpec, Step, parse_spec, replicated


def rearranging(cluster: Cluster) -> Cluster:
    """The cluster with devices that take time to gather along another dimension than the leading one."""
    group = cluster.group()
    device = replace(group.device, strided_bytes_per_second=group.device.memory_bytes_per_second / 8)
    return replace(cluster, groups=(replace(group, device=device),))


MESHES = [
    Mesh(axes=("x", "y"), sizes=(2, 4), cluster=rearranging(parse_cluster("2x4:a100-80g"))),
    Mesh(axes=("x",), sizes=(4,), cluster=parse_cluster("4:tpu-v5e")),
    Mesh(axes=("x", "y"), sizes=(2, 4), cluster=parse_cluster("2x4:a100-80g")),
    Mesh(axes=("x", "y"), sizes=(4, 2), cluster=parse_cluster("8:h100")),
    Mesh(axes=("x", "y", "z"), sizes=(2, 2, 2), cluster=parse_cluster("2x4:v100-16g")),
]
TWO_AXES = MESHES[2]


def tensor(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32")


def divides(spec: ShardingSpec, type: TensorType, mesh: Mesh) -> bool:
    parts = [math.prod(mesh.axis_size(axis) for axis in axes) for axes in spec.dims]
    return all(n == 1 or (size and size % n == 0) for size, n in zip(type.shape, parts, strict=True))


# The single steps that there are, and what each costs, written down once more.


def single_steps(spec: ShardingSpec, mesh: Mesh) -> list[Step]:
    """Every step that can be taken from a placement."""
    rank, found = len(spec.dims), list[Step]()
    for axis in mesh.axes:
        if axis not in spec.axes:
            found += [Step(kind="slice", axes=(axis,), to_dim=d) for d in range(rank)]
            if not spec.partial or spec.reduction == "add":
                found.append(Step(kind="keep", axes=(axis,)))
    for d, axes in enumerate(spec.dims):
        if axes:
            found.append(Step(kind="all_gather", axes=(axes[-1],), dim=d))
            found += [Step(kind="all_to_all", axes=(axes[-1],), dim=d, to_dim=to) for to in range(rank) if to != d]
    for n in range(1, len(spec.partial) + 1):
        found += [Step(kind="all_reduce", axes=some) for some in itertools.combinations(spec.partial, n)]
    if spec.reduction == "add":
        found += [Step(kind="reduce_scatter", axes=(a,), to_dim=d) for a in spec.partial for d in range(rank)]
    return found


def price(step: Step, spec: ShardingSpec, type: TensorType, mesh: Mesh) -> float:
    """Seconds of one step on the larger of what a device has before and after it; a slice reads what it keeps."""
    after, device = step.apply(spec), mesh.cluster.group().device
    sizes = [s.local_nbytes(type, mesh) for s in (spec, after)]
    nbytes = sizes[1] if step.kind == "slice" else max(sizes)
    if step.is_local:
        return device.launch_seconds / 4 + 2 * nbytes / device.memory_bytes_per_second
    seconds = device.launch_seconds + collectives.seconds(step.kind, nbytes, mesh.group(step.axes))
    return seconds + copying(step, spec, type, mesh)


def copying(step: Step, spec: ShardingSpec, type: TensorType, mesh: Mesh) -> float:
    """Seconds in which the pieces of a collective are brought into its order in memory, or out of it."""
    device = mesh.cluster.group().device
    sizes = [s.local_nbytes(type, mesh) for s in (spec, step.apply(spec))]
    local = spec.local_shape(type.shape, mesh)
    seams = len([d for d in (step.dim, step.to_dim) if d >= 0 and math.prod(local[:d]) > 1])
    if device.strided_bytes_per_second:
        return seams * max(sizes) / device.strided_bytes_per_second
    copied = max(sizes) if step.kind == "all_to_all" else min(sizes)
    return seams * 2 * copied / device.memory_bytes_per_second if device.cores else 0.0


def shortest(start: ShardingSpec, type: TensorType, mesh: Mesh) -> dict[ShardingSpec, float]:
    """Seconds to every placement that can be reached (Dijkstra)."""
    done: dict[ShardingSpec, float] = {}
    queue = [(0.0, 0, start)]
    order = itertools.count(1)
    while queue:
        seconds, _, spec = heapq.heappop(queue)
        if spec in done:
            continue
        done[spec] = seconds
        for step in single_steps(spec, mesh):
            after = step.apply(spec)
            if divides(after, type, mesh):
                heapq.heappush(queue, (seconds + price(step, spec, type, mesh), next(order), after))
    return done


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("type", [tensor(16), tensor(1024, 512), tensor(8, 6), tensor(4, 2, 8)], ids=str)
def test_no_chain_is_cheaper(mesh: Mesh, type: TensorType) -> None:
    resharder = Resharder(mesh)
    every = resharder.placements(type.rank)
    sources = [spec for spec in every if divides(spec, type, mesh)]
    sources = sources if len(sources) <= 30 else sources[:: len(sources) // 10]
    for source in sources:
        wanted = shortest(source, type, mesh)
        found = {spec: resharder.cost(type, source, spec) for spec in every}
        assert found == pytest.approx({spec: wanted.get(spec, math.inf) for spec in every}, rel=1e-12)


@pytest.mark.parametrize("cluster", ["8:a100-80g", "8:cpu"])
def test_of_two_dimensions_alike_the_first_is_gathered_at_least_cost(cluster: str) -> None:
    resharder = Resharder(Mesh(axes=("x",), sizes=(8,), cluster=parse_cluster(cluster)))
    whole, summed = replicated(3), ShardingSpec(dims=((), (), ()), partial=("x",))
    for type in (tensor(64, 64, 64), tensor(64, 1024, 64)):
        cut = [parse_spec(f"[{', '.join('x' if d == dim else '-' for d in range(3))}]") for dim in range(3)]
        gathering, scattering = (
            [resharder.cost(type, *ends) for ends in several]
            for several in ([(spec, whole) for spec in cut], [(summed, spec) for spec in cut])
        )
        assert gathering[0] < min(gathering[1:]) < 1.5 * gathering[0]
        assert scattering[0] < min(scattering[1:]) < 1.5 * scattering[0]


@pytest.mark.parametrize("reduction", ["max", "mul"])
def test_partial_results_that_are_no_sums_are_neither_made_nor_scattered(reduction: str) -> None:
    resharder, type = Resharder(TWO_AXES), tensor(8, 8)
    partial = [spec for spec in resharder.placements(2, reduction) if spec.partial]
    assert {spec.reduction for spec in partial} == {reduction}
    for spec in partial:
        assert resharder.cost(type, replicated(2), spec) == math.inf
        for whole in (s for s in resharder.placements(2) if not s.partial):
            kinds = {step.kind for step in resharder.steps(type, spec, whole)}
            assert "all_reduce" in kinds
            assert kinds <= {"all_reduce", "all_gather", "all_to_all", "slice"}
        sums = ShardingSpec(dims=spec.dims, partial=spec.partial)
        assert resharder.cost(type, spec, sums) == math.inf


@pytest.mark.parametrize(("axes", "rank"), [(1, 0), (1, 3), (2, 2), (3, 1), (3, 3)])
def test_every_placement_is_there_once(axes: int, rank: int) -> None:
    """k axes: j of them stand in a row that `rank` - 1 borders cut into dimensions, each other is idle or partial."""
    mesh = Mesh(axes=("x", "y", "z")[:axes], sizes=(2,) * axes, cluster=parse_cluster("8:h100"))
    placements_found = Resharder(mesh).placements(rank)
    rows = [math.prod(range(rank, rank + j)) for j in range(axes + 1)]
    assert len(set(placements_found)) == len(placements_found)
    assert len(placements_found) == sum(math.comb(axes, j) * rows[j] * 2 ** (axes - j) for j in range(axes + 1))
    for spec in placements_found:
        named = [axis for dims in (*spec.dims, spec.partial) for axis in dims]
        assert len(set(named)) == len(named)
        assert list(spec.partial) == sorted(spec.partial)


# What steps do to the pieces of an array.

Pieces = dict[tuple[int, ...], np.ndarray]
"""Each device's array, by its coordinates on the mesh."""


def cut(whole: np.ndarray, spec: ShardingSpec, mesh: Mesh, place: tuple[int, ...]) -> np.ndarray:
    """A device's piece of what is not partial."""
    for d, axes in enumerate(spec.dims):
        for axis in axes:  # major first
            whole = np.split(whole, mesh.axis_size(axis), axis=d)[place[mesh.axes.index(axis)]]
    return whole


def run(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    """The pieces after a step, each made of those of the devices along its axes alone."""
    found: Pieces = {}
    along = [mesh.axes.index(axis) for axis in step.axes]
    for place in pieces:
        peers = [p for p in sorted(pieces) if all(p[i] == place[i] for i in range(len(place)) if i not in along)]
        rank = peers.index(place)
        mine = [pieces[p] for p in peers]
        match step.kind:
            case "slice":
                found[place] = np.split(pieces[place], len(peers), step.to_dim)[rank]
            case "keep":
                found[place] = pieces[place] if rank == 0 else np.zeros_like(pieces[place])
            case "all_gather":
                found[place] = np.concatenate(mine, step.dim)
            case "all_to_all":
                found[place] = np.split(np.concatenate(mine, step.dim), len(peers), step.to_dim)[rank]
            case "all_reduce":
                found[place] = np.sum(mine, 0)
            case "reduce_scatter":
                found[place] = np.split(np.sum(mine, 0), len(peers), step.to_dim)[rank]
    return found


def summed(pieces: Pieces, spec: ShardingSpec, mesh: Mesh) -> Pieces:
    """What the pieces stand for: those of devices along partial axes added up."""
    step = Step(kind="all_reduce", axes=spec.partial)
    return run(step, pieces, mesh) if spec.partial else pieces


@pytest.mark.parametrize("mesh", MESHES[2:], ids=str)
def test_chains_bring_every_piece_where_it_belongs(mesh: Mesh) -> None:
    type, rng = tensor(8, 16), np.random.default_rng(0)
    resharder = Resharder(mesh)
    whole = rng.integers(-99, 99, type.shape)
    devices = list(itertools.product(*map(range, mesh.sizes)))
    every = [spec for spec in resharder.placements(2) if divides(spec, type, mesh)]
    pairs = list(itertools.product(every, every))
    for number in rng.permutation(len(pairs))[:600]:
        before, after = pairs[number]
        pieces = {place: cut(whole, before, mesh, place) for place in devices}
        for i, axis in enumerate(mesh.axes):
            if (
                axis in before.partial
            ):  # summands: those of the devices further along are arbitrary, the first has the rest
                others = {p: rng.integers(-9, 9, a.shape) if p[i] else a for p, a in pieces.items()}
                first = {
                    p: sum(others[q] for q in devices if q[i] and q[:i] + q[i + 1 :] == p[:i] + p[i + 1 :])
                    for p in devices
                }
                pieces = {p: a if p[i] else a - first[p] for p, a in others.items()}
        spec = before
        for step in resharder.steps(type, before, after):
            pieces, spec = run(step, pieces, mesh), step.apply(spec)
            assert {a.shape for a in pieces.values()} == {spec.local_shape(type.shape, mesh)}
        assert spec == after
        for place, found in summed(pieces, after, mesh).items():
            np.testing.assert_array_equal(found, cut(whole, after, mesh, place), err_msg=f"{before} -> {after}")


def test_chains_cost_what_is_said_and_matrices_agree() -> None:
    resharder, type = Resharder(TWO_AXES), tensor(64, 32)
    every = resharder.placements(2)
    matrix = resharder.matrix(type, every, every)
    assert (np.diag(matrix) == 0).all()
    assert (matrix[~np.eye(len(every), dtype=bool)] > 0).all()
    for i, before in enumerate(every):
        for j, after in enumerate(every):
            spec, seconds = before, 0.0
            for step in resharder.steps(type, before, after):
                seconds += price(step, spec, type, TWO_AXES)
                spec = step.apply(spec)
            assert spec == after
            assert seconds == pytest.approx(matrix[i, j], rel=1e-9)
            assert matrix[i, j] == resharder.cost(type, before, after)


@pytest.mark.parametrize("kinds", [("all_gather",), ("all_reduce", "reduce_scatter")])
def test_behind_computing_the_chain_that_runs_is_priced(kinds: tuple[collectives.Kind, ...]) -> None:
    """What a program waits for is priced of the chain that it runs, not of one that hides better."""
    resharder, type = Resharder(TWO_AXES), tensor(1024, 4096)
    behind = Behind(kinds=kinds, combined_nbytes=0, sent_nbytes=type.nbytes, flops=(("float32", 1e15),))
    less = 0
    for before, after in itertools.product(resharder.placements(2), repeat=2):
        spec, seconds = before, 0.0
        for step in resharder.steps(type, before, after):
            before_step, spec, single = spec, step.apply(spec), price(step, spec, type, TWO_AXES)
            hidden = TWO_AXES.cluster.group().device.collective_overlap if step.kind in kinds else 0.0
            launch = TWO_AXES.cluster.group().device.launch_seconds
            beside = launch + copying(step, before_step, type, TWO_AXES)
            seconds += single - hidden * (single - beside)
        assert resharder.cost(type, before, after, behind) == pytest.approx(seconds, rel=1e-9)
        less += seconds < resharder.cost(type, before, after) * (1 - 1e-9)
    assert less > 20


def test_an_axis_that_does_not_divide_is_no_way() -> None:
    resharder, type = Resharder(TWO_AXES), tensor(6, 8)
    cut_by_four, cut_by_two = ShardingSpec(dims=(("y",), ())), ShardingSpec(dims=(("x",), ()))
    assert resharder.cost(type, replicated(2), cut_by_four) == math.inf
    assert resharder.cost(type, replicated(2), cut_by_two) < math.inf
    with pytest.raises(InternalError, match="no chain of steps takes"):
        resharder.steps(type, replicated(2), cut_by_four)


def test_arrays_without_elements_are_never_cut() -> None:
    resharder, type = Resharder(TWO_AXES), tensor(0, 8)
    reached = [s for s in resharder.placements(2) if resharder.cost(type, replicated(2), s) < math.inf]
    assert reached
    assert all(not any(spec.dims) for spec in reached)


def test_only_the_minor_axis_is_gathered() -> None:
    both = ShardingSpec(dims=(("x", "y"), ()))
    assert Step(kind="all_gather", axes=("y",), dim=0).apply(both).dims == (("x",), ())
    with pytest.raises(InternalError, match="not the minor one"):
        Step(kind="all_gather", axes=("x",), dim=0).apply(both)


def test_values_that_others_keep_with_a_resharder_are_made_once() -> None:
    made: list[Resharder] = []

    def make(resharder: Resharder) -> int:
        made.append(resharder)
        return 7

    resharder = Resharder(TWO_AXES)
    assert (resharder.kept(make), resharder.kept(make)) == (7, 7)
    assert made == [resharder]


@pytest.mark.parametrize("text", ["[-,x]", "[ -, x ]", "[-, x]"])
def test_a_spec_is_read_with_and_without_spaces(text: str) -> None:
    assert parse_spec(text) == parse_spec("[-, x]")
    assert parse_spec("[-,x]").dims == ((), ("x",))
