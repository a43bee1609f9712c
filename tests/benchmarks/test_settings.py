"""The benchmark of settings varies what it says that it varies, and puts it back."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import settings
from benchmarks.settings import FIXED, Setting, Value, changed, scaled
from passes.layers import cuts, modules
from passes.solver import SolverOptions, search

EVERY = {str(setting): setting for setting in settings.settings()}


def test_fixed_settings_exist() -> None:
    assert set(FIXED) <= set(EVERY)


def test_every_room_of_a_setting_has_networks() -> None:
    rooms = {name.split(".")[0] for name in set(EVERY) - set(FIXED)}
    assert rooms <= set(settings.DEFAULT)
    assert {network for networks in settings.DEFAULT.values() for network in networks} <= set(settings.NETWORKS)


@pytest.mark.parametrize(
    ("value", "factor", "expected"),
    [
        (8, 0.5, 4),
        (1, 0.5, 1),
        (1e-4, 2.0, 2e-4),
        (1.1, 0.5, 1.05),
        (0.95, 2.0, 0.9),
        (4.0, 0.5, 2.0),
        (0.5, 2.0, 1.0),
        ((2, 0.5), 2.0, (4, 1.0)),
    ],
)
def test_numbers_are_halved_and_doubled(value: Value, factor: float, expected: Value) -> None:
    assert scaled(value, factor) == pytest.approx(expected)


def test_a_change_reaches_modules_that_import_the_setting_and_is_undone() -> None:
    setting = EVERY["layers.cuts.MARGIN"]
    with changed(setting, 0.5):
        assert (cuts.MARGIN, modules.MARGIN) == (0.5, 0.5)
    assert (setting.value, setting.value) == (cuts.MARGIN, modules.MARGIN)


def test_a_change_reaches_defaults_of_arguments_and_is_undone() -> None:
    setting = EVERY["solver.options.GAP"]
    with changed(setting, 0.5):
        assert (search.GAP, SolverOptions().gap) == (0.5, 0.5)
    assert SolverOptions().gap == setting.value


def test_a_change_leaves_equal_numbers_of_other_modules_alone() -> None:
    rounds = importlib.import_module("passes.intra_op.memory_limit")._ROUNDS
    with changed(EVERY["solver.coordinate_descent._ROUNDS"], 99):
        assert rounds == importlib.import_module("passes.intra_op.memory_limit")._ROUNDS


def test_a_change_is_undone_after_an_error() -> None:
    setting = Setting(module="passes.layers.cuts", name="MARGIN", value=cuts.MARGIN)
    with pytest.raises(ZeroDivisionError), changed(setting, 0.5):
        raise ZeroDivisionError
    assert setting.value == cuts.MARGIN
