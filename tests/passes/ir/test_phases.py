"""The phase of a node by its name stack, as `jax.grad` and `jax.checkpoint` write it."""

from __future__ import annotations

import pytest

from passes.ir import Node, Phase, phase


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("step/jvp(net)/dense", "forward"),
        ("step/transpose(jvp(net))/dense", "backward"),
        ("step/jvp(net)/checkpoint/rematted_computation/dense", "backward"),
        ("step/rematted_computation/dense", "backward"),
        ("step/adam", "apply"),
        ("", "apply"),
    ],
)
def test_a_name_stack_tells_the_phase(scope: str, expected: Phase) -> None:
    assert phase(Node(primitive="tanh", inputs=(0,), outputs=(1,), scope=scope)) == expected
