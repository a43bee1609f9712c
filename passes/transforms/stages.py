"""The cut of a step in microbatches into stages: programs that run on submeshes of their own, one after the other.

Forward operators are cut where the layers are; everything else follows. A backward operator runs where its forward
operator ran, an update where its gradient is, and nodes that depend on no stage (a step counter) on every stage that
needs them. Sums of a tied weight's gradients on several stages are accumulated separately and added once. A value that
crosses stages inside the loop is sent once a microbatch, as a *stream*; one that crosses outside it, once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.errors import PlanningError, explain
from passes.ir import Graph, Node, Scan, StatePairs, has_effect, phase
from passes.layers import forward
from passes.rules import remembered
from passes.transforms.stage_assignment import StageAssignment
from passes.transforms.stage_drafts import LoopDrafts, StepDrafts
from passes.transforms.stage_parts import Origin, Part, Stages


def state_pairs_of(part: Part, graph: Graph, state_pairs: StatePairs) -> StatePairs:
    """The (output, input) positions of a part's state, from those of the step."""
    inputs = {value: i for i, value in enumerate(part.graph.inputs)}
    outputs = {value: i for i, value in enumerate(part.graph.outputs)}
    pairs = ((graph.outputs[o], graph.inputs[i]) for o, i in state_pairs)
    return tuple((outputs[o], inputs[i]) for o, i in pairs if o in outputs and i in inputs)


def donations(part: Part, graph: Graph, donated: Sequence[bool]) -> tuple[bool, ...]:
    """Whether each input of a part is donated, from the flags of the step's inputs."""
    given = {value for value, gone in zip(graph.inputs, donated, strict=False) if gone}
    return tuple(value in given for value in part.graph.inputs)


def cut(graph: Graph, firsts: Sequence[int], state_pairs: StatePairs = ()) -> Stages:
    """The stages of a step, which begin at the body's nodes `firsts`; the first of these is 0.

    Raises PlanningError for a step with callbacks: every stage would run them, or none.
    """
    return _cut(graph, tuple(firsts), tuple(state_pairs))


@remembered
def _cut(graph: Graph, firsts: tuple[int, ...], state_pairs: StatePairs) -> Stages:
    if effect := next((node for node in graph.nodes if has_effect(node)), None):
        where = f" at {effect.source}" if effect.source else ""
        rule = "a callback runs once a step, on whole operands, which no stage of a pipeline has"
        raise PlanningError(
            explain(f"{effect.primitive}{where} in a pipeline", rule, "", "drop the callback, or plan without stages")
        )
    loop = LoopDrafts(graph, firsts)
    step = StepDrafts(loop, state_pairs)
    return Stages(
        firsts=firsts,
        parts=tuple(_part(loop, step, at) for at in range(len(firsts))),
        input_stages=step.input_stages(),
        output_stages=tuple(step.stage_of_output(v) for v in graph.outputs),
        microbatches=loop.scan.length,
    )


def stage_of(body: Graph, firsts: Sequence[int]) -> Mapping[int, int]:
    """The stage of each node of a loop's body that is cut at the nodes `firsts`; what every stage makes has none."""
    late, anywhere = forward.after_backward(body), forward.everywhere(body)
    return StageAssignment(body=body, firsts=tuple(firsts), late=late, anywhere=anywhere).stage


def _part(loop: LoopDrafts, step: StepDrafts, at: int) -> Part:
    """A stage as a program of its own."""
    inner_nodes, node = _inside(loop, at)
    return _around(loop, step, at, inner_nodes, node)


def _inside(loop: LoopDrafts, at: int) -> tuple[list[tuple[Origin, Node]], Node]:
    """The loop of one stage, and the nodes of its body with their origins."""
    body, draft = loop.body, loop.drafts[at]
    read = {v for _, inner in draft.body_nodes for v in inner.inputs} | {v for v, _ in draft.rows}
    read |= {v for _, inner in loop.made_anywhere(read) for v in inner.inputs}
    pairs = list(zip(body.inputs, loop.node.inputs, strict=True))
    constants = [(inner, outer) for inner, outer in pairs[: loop.scan.constants] if inner in read]
    stacks = [(inner, outer) for inner, outer in pairs[loop.scan.fixed :] if inner in read]
    stacks += [(v, loop.stream_of[v]) for v in sorted(draft.received)]
    carries, sent = draft.carries, sorted(draft.sent)
    nodes = [*loop.made_anywhere(read | set(sent)), *draft.body_nodes]
    nodes.sort(key=lambda numbered: (numbered[0][1], numbered[1].outputs))
    read |= {v for _, inner in nodes for v in inner.inputs}
    inner = Graph(
        types=tuple(loop.body_types),
        nodes=tuple(n for _, n in nodes),
        inputs=(*(v for v, _ in constants), *(c[1] for c in carries), *(v for v, _ in stacks)),
        outputs=(*(c[2] for c in carries), *(v for v, _ in draft.rows), *sent),
        constants=tuple(v for v in body.constants if v in read),
        literals={v: x for v, x in body.literals.items() if v in read},
    )
    inner.verify()
    node = Scan(constants=len(constants), carries=len(carries), length=loop.scan.length).node(
        inner,
        inputs=(*(v for _, v in constants), *(c[0] for c in carries), *(v for _, v in stacks)),
        outputs=(*(c[3] for c in carries), *(v for _, v in draft.rows), *(loop.stream_of[v] for v in sent)),
        source=loop.node.source,
        scope=loop.node.scope,
    )
    return nodes, node


def _around(
    loop: LoopDrafts, step: StepDrafts, at: int, inner_nodes: Sequence[tuple[Origin, Node]], node: Node
) -> Part:
    """The program around a stage's loop."""
    graph, draft, stream_of = loop.graph, loop.drafts[at], loop.stream_of
    numbers = sorted(draft.nodes, key=step.place.__getitem__)
    before = [n for n in numbers if n < loop.loop and step.stage_of.keys().isdisjoint(draft.nodes[n][1].outputs)]
    early = set(before)
    after = [n for n in numbers if n not in early]
    picked = [draft.nodes[n] for n in before] + [(("step", loop.loop), node)] + [draft.nodes[n] for n in after]
    boundary_values = {stream_of[v]: v for v in sorted(draft.received | draft.sent)}
    read = {v for _, n in picked for v in n.inputs}
    owned = [v for v in dict.fromkeys(graph.outputs) if step.stage_of_output(v) == at]
    outputs = tuple(dict.fromkeys((*owned, *sorted(draft.given), *(stream_of[v] for v in sorted(draft.sent)))))
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    labels = dict(zip(graph.outputs, graph.output_names, strict=False))
    inputs = (*sorted(draft.needed), *(stream_of[v] for v in sorted(draft.received)))
    step_graph = Graph(
        types=tuple(loop.types),
        nodes=tuple(n for _, n in picked),
        inputs=inputs,
        outputs=outputs,
        constants=tuple(v for v in graph.constants if v in read or v in owned),
        literals={v: x for v, x in graph.literals.items() if v in read or v in outputs},
        input_names=tuple(names.get(v, f"{'stream' if v in boundary_values else 'value'} {v}") for v in inputs),
        output_names=tuple(labels.get(v, f"{'stream' if v in boundary_values else 'value'} {v}") for v in outputs),
    )
    step_graph.verify()
    return Part(
        graph=step_graph,
        origins=tuple(origin for origin, _ in picked),
        inside=tuple(origin for origin, _ in inner_nodes),
        forward=_forward(loop, inner_nodes),
        boundary_values=boundary_values,
        rows={stream_of[v]: 1 + loop.rows[v] for v in sorted(draft.received) if v in loop.rows},
    )


def _forward(loop: LoopDrafts, nodes: Sequence[tuple[Origin, Node]]) -> frozenset[int]:
    """The nodes of a stage's body that need nothing of the backward pass."""
    late, forward = set[int](), set[int]()
    for position, (_, node) in enumerate(nodes):
        if phase(node) == "backward" or not (late.isdisjoint(node.inputs) and loop.made_late.isdisjoint(node.inputs)):
            late.update(node.outputs)
        else:
            forward.add(position)
    return frozenset(forward)
