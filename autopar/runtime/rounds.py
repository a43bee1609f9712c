"""The instructions after the loop, in rounds: each stage runs all that it can, then sends values that others need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.runtime.listing import Listing
from autopar.runtime.program import Held
from autopar.runtime.segments import Stage
from passes.errors import InternalError
from passes.ir import Graph
from passes.pipeline import value_specs
from passes.placement import is_free


def write_rounds(stages: Sequence[Stage], listing: Listing) -> None:
    """Adds rounds until nothing is left to run. Raises InternalError for outputs that no round makes."""
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
    """Whether any stage could run something; if so, that was added.

    While a stage waits for others it runs only what they wait for, so that state is updated in one segment, which can
    reuse its buffers.
    """
    graph, specs = stage.part.graph, value_specs(stage.part.graph, stage.layout)
    free = {v for i, n in enumerate(graph.nodes) if is_free(graph, i) for v in n.outputs}
    present = {v for v in specs if (stage.number, v, specs[v]) in listing.slots}
    present |= free | set(graph.literals) | set(graph.constants)
    nodes = [i for i in range(len(graph.nodes)) if i > stage.part.loop and i not in ran]
    runnable: list[int] = []
    computed: set[int] = set()
    for index in nodes:
        if all(v in present or v in computed for v in graph.nodes[index].inputs):
            runnable.append(index)
            computed.update(graph.nodes[index].outputs)
    outputs = [(v, s) for v, s in _outputs(stage) if v in computed or v in present]
    if len(runnable) < len(nodes):
        other_stages = [other for other in stages if other is not stage]
        sent = {v for v, _ in outputs if any(v in other.part.graph.inputs for other in other_stages)}
        runnable = _leading_to(graph, runnable, sent)
        computed = {v for i in runnable for v in graph.nodes[i].outputs}
        # An output that is met on the way to what is sent is kept now: no later round computes it again.
        kept = sent | computed
        outputs = [(v, s) for v, s in outputs if v in kept]
    remaining = [i for i in nodes if i not in runnable]
    read_later = {v for i in remaining for v in graph.nodes[i].inputs}
    needed: list[Held] = [*((v, specs[v]) for v in sorted(computed & read_later - free)), *outputs]
    needed = [
        value_and_spec
        for value_and_spec in dict.fromkeys(needed)
        if (stage.number, *value_and_spec) not in listing.slots
    ]
    ran.update(runnable)
    if not needed:
        return bool(runnable)
    loose = [i for i in range(len(graph.nodes)) if is_free(graph, i)]
    listing.compute(
        stage, f"after {stage.number}", stage.body, sorted({*loose, *runnable}), stage.layout, specs, needed
    )
    return True


def _outputs(stage: Stage) -> list[Held]:
    outputs = zip(stage.part.graph.outputs, stage.layout.outputs, strict=True)
    return [(v, s) for v, s in outputs if v not in stage.part.boundary_values]


def _leading_to(graph: Graph, nodes: Sequence[int], values: Iterable[int]) -> list[int]:
    """The nodes, of those given, that the values depend on."""
    live, leading = set(values), list[int]()
    for index in reversed(nodes):
        if not live.isdisjoint(graph.nodes[index].outputs):
            leading.append(index)
            live.update(graph.nodes[index].inputs)
    return leading[::-1]
