"""Loops and branches as planning sees them: bodies joined to the program around them by *ports*.

A port is a value that lives as long as its node: a constant of a loop, a carry, a slice of a stacked operand, a result
of a branch. It has one placement, chosen once, in which every body finds it and to which every body brings it back, so
carries are at a fixed point by construction. A stacked operand holds one slice an iteration along dimension 0, which
is never cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from passes.errors import InternalError
from passes.ir.effects import is_ordered
from passes.ir.graph import Graph, Node, TensorType
from passes.ir.phases import phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A value that the bodies of a control node share with the program around it.

    A `carry` may stay a partial sum from one iteration to the next; so may slices that are `stacked`, and a `branched`
    result, which whichever branch runs makes. `whole` ports are never cut.
    """

    type: TensorType
    carry: bool = False
    stacked: bool = False
    branched: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """The port of an operand or result of the control node; a `stacked` one holds its slices along dimension 0."""

    port: int
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A graph with the ports of its inputs and outputs; it runs `trips` times, or once with probability `share`."""

    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    trips: int = 1
    share: float = 1.0

    @property
    def runs(self) -> float:
        """The average number of times that it runs whenever its node does; a loop of no iterations counts as one of
        one.
        """
        return max(self.trips, 1) * self.share

    @property
    def is_step(self) -> bool:
        """Whether it has a forward and a backward pass, as the body of a loop over microbatches has."""
        return {phase(node) for node in self.graph.nodes}.issuperset(("forward", "backward"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A loop or branch: its ports, the ports of its operands and results, and its bodies.

    The port `choice` says which of the bodies runs, where only one does.
    """

    ports: tuple[Port, ...]
    operands: tuple[PortUse, ...]
    results: tuple[PortUse, ...]
    bodies: tuple[Body, ...]
    choice: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A loop of known `length` over slices: its operands are `constants`, then `carries`, then the stacked arrays that
    are sliced.
    """

    constants: int
    carries: int
    length: int

    @property
    def fixed(self) -> int:
        """The number of operands that are not sliced."""
        return self.constants + self.carries

    def params(self) -> Mapping[str, object]:
        """The parameters of a node that is this loop."""
        return {"length": self.length, "num_carry": self.carries, "num_consts": self.constants}

    def node(self, body: Graph, inputs: tuple[int, ...], outputs: tuple[int, ...], *, source: str, scope: str) -> Node:
        """The given node as this loop, running from its first slices to its last."""
        return Node(
            primitive="scan",
            inputs=inputs,
            outputs=outputs,
            params={**self.params(), "reverse": False, "unroll": 1},
            subgraphs=(body,),
            source=source,
            scope=scope,
        )


def scan_of(node: Node) -> Scan | None:
    """The loop that a node is, if its length is known; None for any other node."""
    if node.primitive != "scan" or not node.subgraphs:
        return None
    constants, carries, length = (cast("int", node.params[name]) for name in ("num_consts", "num_carry", "length"))
    return Scan(constants=constants, carries=carries, length=length)


def control_of(node: Node, graph: Graph) -> Control | None:
    """The ports and bodies of a node that is a loop or branch; None for an ordinary operator."""
    if node.primitive not in _READERS or not node.subgraphs:
        return None
    return _READERS[node.primitive](node, graph)


def _scan(node: Node, graph: Graph) -> Control:
    """The ports and bodies of a `scan`: constants, carries, and slices of its stacked operands and results."""
    (body,), scan = node.subgraphs, scan_of(node)
    if scan is None:
        raise InternalError(f"{node.primitive} is read as a loop of known length")
    entering, fixed = len(body.inputs), scan.fixed
    ports = [Port(type=body.types[v], carry=scan.constants <= i < fixed) for i, v in enumerate(body.inputs)]
    ports += [Port(type=body.types[v], stacked=True) for v in body.outputs[scan.carries :]]
    leaving = (*range(scan.constants, fixed), *range(entering, len(ports)))
    return Control(
        ports=tuple(ports),
        operands=tuple(PortUse(port=s, stacked=s >= fixed) for s in range(entering)),
        results=tuple(PortUse(port=s, stacked=s >= entering) for s in leaving),
        bodies=(Body(graph=body, inputs=tuple(range(entering)), outputs=leaving, trips=scan.length),),
    )


def _while(node: Node, graph: Graph) -> Control:
    """The ports and bodies of a `while`; its number of iterations is unknown, and counts as one, as in XLA.

    Under `vmap` the test has a truth value for each row, and rows that are done keep their carries: then nothing is
    cut.
    """
    test, body = node.subgraphs
    for_test, for_body = cast("int", node.params["cond_nconsts"]), cast("int", node.params["body_nconsts"])
    fixed, count = for_test + for_body, len(node.inputs)
    # JAX runs a test with ordered effects once before the loop and then at the end of its body.
    tests = 2 if any(map(is_ordered, test.nodes)) else 1
    truth = test.types[test.outputs[0]]
    whole_carries = truth.rank > 0
    ports = [
        Port(type=graph.types[v], carry=i >= fixed and not whole_carries, whole=i >= fixed and whole_carries)
        for i, v in enumerate(node.inputs)
    ]
    ports.append(Port(type=truth, whole=True))
    carries = tuple(range(fixed, count))
    return Control(
        ports=tuple(ports),
        operands=tuple(PortUse(port=s) for s in range(count)),
        results=tuple(PortUse(port=s) for s in carries),
        bodies=(
            Body(graph=test, inputs=(*range(for_test), *carries), outputs=(count,), trips=tests),
            Body(graph=body, inputs=(*range(for_test, fixed), *carries), outputs=carries),
        ),
    )


def _cond(node: Node, graph: Graph) -> Control:
    """The ports and bodies of a `cond`, whose branches are taken equally often."""
    count = len(node.inputs)
    ports = [Port(type=graph.types[v]) for v in node.inputs]
    ports += [Port(type=graph.types[v], branched=True) for v in node.outputs]
    leaving = tuple(range(count, len(ports)))
    return Control(
        ports=tuple(ports),
        operands=tuple(PortUse(port=s) for s in range(count)),
        results=tuple(PortUse(port=s) for s in leaving),
        bodies=tuple(
            Body(graph=branch, inputs=tuple(range(1, count)), outputs=leaving, share=1 / len(node.subgraphs))
            for branch in node.subgraphs
        ),
        choice=0,
    )


_READERS = {"scan": _scan, "while": _while, "cond": _cond}

CONTROL = frozenset(_READERS)
"""Primitives that run bodies of their own."""
