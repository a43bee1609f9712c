"""The program of one device under a plan as a value, and how that of a body meets what is around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.ir import Body, Control
from passes.memory.operations import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProgram:
    """The operations in order, with those that are inputs, constants and outputs.

    `hoisted` are those that do not change from one iteration to the next, which XLA moves out of the loop, `sending`
    the loops in whose bodies there are collectives, and `pending` the outputs that stack what the next iteration sends:
    the last output of all waits for what is carried on.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    constants: tuple[int, ...]
    outputs: tuple[int, ...]
    hoisted: tuple[int, ...] = ()
    sending: frozenset[int] = frozenset()
    pending: tuple[int, ...] = ()

    @property
    def entering(self) -> tuple[int, ...]:
        """The inputs that hold what the iteration before made to be sent, which are the last."""
        return self.inputs[len(self.inputs) - len(self.pending) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The relation of a body's inputs and outputs to the values around it, by position.

    Inputs `sliced` are slices of a stack, outputs `stacked` are written into one, `numbers` are what inputs hold in
    every element, output o takes the place of input `carried[o]`. In a body that is `repeated`, inputs `fixed` are the
    same in every iteration.
    """

    sliced: frozenset[int] = frozenset()
    stacked: tuple[int, ...] = ()
    numbers: Mapping[int, object] = field(default_factory=dict[int, object])
    fixed: tuple[int, ...] = ()
    carried: Mapping[int, int] = field(default_factory=dict[int, int])
    repeated: bool = False


WHOLE = Interface()
"""The interface of a program that is no body."""


def interface_of(body: Body, control: Control, known: Mapping[int, object]) -> Interface:
    """The interface of a body, given the known contents of its ports."""
    sliced = {port_use.port for port_use in control.operands if port_use.stacked}
    stacked = {port_use.port for port_use in control.results if port_use.stacked}
    entering = {port: position for position, port in enumerate(body.inputs)}
    fixed = entering.keys() - sliced - known.keys() - set(body.outputs)
    return Interface(
        sliced=frozenset(entering[port] for port in sliced if port in entering),
        stacked=tuple(position for position, port in enumerate(body.outputs) if port in stacked),
        numbers={entering[port]: number for port, number in known.items() if port in entering},
        fixed=tuple(sorted(entering[port] for port in fixed)),
        carried={position: entering[port] for position, port in enumerate(body.outputs) if port in entering},
        repeated=body.share == 1,
    )
