"""A package that extends autopar by entry points: a worked example, found as an installed one is."""

from importlib import invalidate_caches
from pathlib import Path

import jax
import pytest

import autopar
from autopar import extensions
from autopar.tools.command_options import planner_of
from autopar.tools.targets import UsageError
from passes.cluster import known

PACKAGE = """\
import autopar

def register():
    device = autopar.DeviceSpec(
        name="made-up-9000",
        flops_per_second={"bfloat16": 1e15, "float32": 5e14},
        matmul_efficiency=0.7,
        memory_nbytes=2**37,
        memory_bytes_per_second=2e12,
        launch_seconds=3e-6,
        source="an example",
    )
    link = autopar.Link(alpha_seconds=5e-6, bytes_per_second=1e11)
    autopar.register_device(autopar.HostSpec(device=device, devices_per_host=8, intra=link, inter=link))

def fails():
    raise ValueError("this extension is broken")

class Halves:
    def __init__(self, parts="2"):
        self.parts = int(parts)

    def plan(self, step, cluster, options):
        return autopar.Zero(3).plan(step, cluster, options)
"""

ENTRY_POINTS = """\
[autopar.extensions]
devices = autopar_example:register
broken = autopar_example:fails

[autopar.planners]
halves = autopar_example:Halves
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as if it were installed; a device of its own is registered once and stays."""
    (tmp_path / "autopar_example.py").write_text(PACKAGE)
    info = tmp_path / "autopar_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autopar-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()


def test_declared_extensions_are_loaded_and_broken_ones_named(package: None) -> None:
    with pytest.warns(RuntimeWarning, match=r"autopar-example: its extension broken = .* was left out: .*is broken"):
        assert extensions.load() == ["devices"]
    assert "made-up-9000" in known()


def test_a_planner_of_another_package_goes_by_its_name(package: None) -> None:
    assert planner_of("halves").parts == 2  # pyright: ignore
    planner = planner_of("halves:4")
    assert planner.parts == 4  # pyright: ignore
    with pytest.raises(UsageError, match=r"halves +of another package"):
        planner_of("thirds")
    with pytest.raises(UsageError, match=r"'halves:x': another package's, which fails: ValueError\(.*\n  write what"):
        planner_of("halves:x")
    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    plan = autopar.parallelize(lambda w, x: x @ w, cluster="8:h100", planner=planner).plan(*shapes)
    assert plan.planner == "zero-3"


def test_without_such_packages_nothing_is_loaded() -> None:
    assert extensions.load() == []
    assert extensions.planner("nobody", "") is None
