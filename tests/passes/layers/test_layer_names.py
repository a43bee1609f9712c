"""The names of layers, by name stacks and source lines."""

from __future__ import annotations

import pytest

from passes.layers.layer_names import UPDATE, layer_of, modules


@pytest.mark.parametrize(
    ("scope", "source", "name"),
    [
        ("jvp(GPT)/Block_3/mlp/up", "a.py:1 (f)", "Block_3"),
        ("transpose(jvp(GPT))/decoder/layers_12/norm", "", "layers_12"),
        ("jvp(GPT)/embed", "", "embed"),
        ("jvp(GPT)/checkpoint/rematted_computation/Block_1", "", "Block_1"),
        ("jvp(GPT)/bqhd,bkhd->bhqk", "", "GPT"),
        ("jvp()", "train.py:8 (loss.<locals>.inner)", "loss.inner"),
        ("jvp()", "", "step"),
        ("", "train.py:9 (step)", UPDATE),
    ],
)
def test_a_layer_is_the_numbered_module_else_the_first_else_the_function(scope: str, source: str, name: str) -> None:
    assert layer_of(scope, source) == name


def test_jaxs_own_parts_of_a_scope_are_no_modules() -> None:
    assert modules("transpose(jvp(GPT))/while/body/checkpoint/Block_0/pjit/mlp") == ["Block_0", "mlp"]
