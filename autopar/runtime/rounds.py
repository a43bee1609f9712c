"""What stages compute after the loop, in rounds: each runs all that it can, then what others wait for is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.runtime.listing import Listing
from autopar.runtime.program import Held
from autopar.runtime.segments import Stage
from passes.errors import InternalError
from passes.ir import Graph
from passes.pipeline import homes
from passes.placement import is_free


def write_rounds(stages: Sequence[Stage], listing: Listing) -> None:
    """Writes rounds until nothing is left to run. Raises InternalError for outputs that no round makes."""
    ran: dict[int, set[int]] = {stage.number: set() for stage in stages}
    progress = True
    while progress:
        listing.exchange(stages)
        progress = False
        for stage in stages:
            progress |= _write_round(stage, stages, listing, ran[stage.number])
    for stage in stages:
        missing = [v for v, s in _outputs(stage) if (stage.number, v, s) not in listing.slots]
        if missing:
            raise InternalError(f"stage {stage.number} never makes {missing}")


def _write_round(stage: Stage, stages: Sequence[Stage], listing: Listing, ran: set[int]) -> bool:
    """Whether anything could run, which by then is written.

    While a stage waits for others it runs what they wait for and no more, so that state is updated in one segment,
    which has a use for its buffers.
    """
    graph, home = stage.part.graph, homes(stage.part.graph, stage.layout)
    free = {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
    here = {v for v in home if (stage.number, v, home[v]) in listing.slots}
    here |= free | set(graph.literals) | set(graph.constants)
    nodes = [i for i in range(len(graph.nodes)) if i > stage.part.loop and i not in ran]
    can: list[int] = []
    made: set[int] = set()
    for index in nodes:
        if all(v in here or v in made for v in graph.nodes[index].inputs):
            can.append(index)
            made.update(graph.nodes[index].outputs)
    outputs = [(v, s) for v, s in _outputs(stage) if v in made or v in here]
    if len(can) < len(nodes):
        others = [other for other in stages if other is not stage]
        outputs = [(v, s) for v, s in outputs if any(v in other.part.graph.inputs for other in others)]
        can = _leading_to(graph, can, [v for v, _ in outputs])
        made = {v for i in can for v in graph.nodes[i].outputs}
    left = [i for i in nodes if i not in can]
    read_later = {v for i in left for v in graph.nodes[i].inputs}
    wanted: list[Held] = [*((v, home[v]) for v in sorted(made & read_later - free)), *outputs]
    wanted = [held for held in dict.fromkeys(wanted) if (stage.number, *held) not in listing.slots]
    ran.update(can)
    if not wanted:
        return bool(can)
    loose = [i for i in range(len(graph.nodes)) if is_free(graph, i)]
    listing.compute(stage, f"after {stage.number}", stage.body, sorted({*loose, *can}), stage.layout, home, wanted)
    return True


def _outputs(stage: Stage) -> list[Held]:
    outputs = zip(stage.part.graph.outputs, stage.layout.outputs, strict=True)
    return [(v, s) for v, s in outputs if v not in stage.part.streams]


def _leading_to(graph: Graph, nodes: Sequence[int], values: Iterable[int]) -> list[int]:
    """Those of the nodes that the values are made of."""
    live, found = set(values), list[int]()
    for index in reversed(nodes):
        if not live.isdisjoint(graph.nodes[index].outputs):
            found.append(index)
            live.update(graph.nodes[index].inputs)
    return found[::-1]
