"""Files that commands write: never over one that they read, never in part, and no option is dropped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.tools import compiled
from autopar.tools.cli import main
from passes.cluster import parse_cluster

TRAIN = """
import jax

def example():
    return (lambda x: x @ x), (jax.ShapeDtypeStruct((16, 16), "float32"),)
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The plan plan.json of lost_files_step.py and its pipeline's pipe.json, in the current folder."""
    (tmp_path / "lost_files_step.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    example = jnp.ones((16, 16))
    autopar.parallelize(lambda x: x @ x, cluster="2:h100", planner=autopar.DataParallel()).plan(example).save(
        "plan.json"
    )
    (tmp_path / "cluster.json").write_text(json.dumps(parse_cluster("2:h100").to_json()))
    yield tmp_path / "plan.json"
    sys.modules.pop("lost_files_step", None)


@pytest.mark.parametrize(
    "command",
    [
        ["report", "plan.json", "-o", "plan.json"],
        ["report", "plan.html"],  # whose page is called so by default
        ["report", "plan.json", "--measured", "steps.json", "-o", "steps.json"],
        ["export", "plan.json", "--format", "shardings", "-o", "./plan.json"],
        ["export", "plan.json", "--format", "jax-export", "-o", "link.json", "--target", "lost_files_step:example"],
        ["show", "plan.json", "--trace", "plan.json"],
        ["plan", "lost_files_step:example", "--cluster", "cluster.json", "--out", "cluster.json"],
    ],
)
def test_nothing_is_written_over_what_is_read(plan: Path, capsys: Any, command: list[str]):
    for name in ("plan.html", "steps.json"):
        plan.with_name(name).write_bytes(plan.read_bytes())
    plan.with_name("link.json").symlink_to(plan)
    before = {path.name: path.read_bytes() for path in plan.parent.iterdir() if path.is_file()}
    assert main(command) == 2
    assert "would be written over what is read from there; name another file" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in plan.parent.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    "command",
    [
        ["report", "plan.json", "-o", "out.png"],
        ["export", "plan.json", "--format", "shardings", "-o", "out.png"],
        ["show", "plan.json", "--plot", "out.png"],
        ["plan", "lost_files_step:example", "--cluster", "2:h100", "--out", "out.png", "--no-cache"],
    ],
)
def test_a_file_keeps_its_contents_where_the_disk_is_full(
    plan: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    pytest.importorskip("matplotlib")
    plan.with_name("out.png").write_bytes(b"old")

    def half(part: Path, contents: bytes) -> int:
        with part.open("wb") as file:
            file.write(contents[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    assert main(command) == 2
    assert "out.png: the" in (written := capsys.readouterr().err)
    assert "cannot be written: No space left on device" in written
    assert plan.with_name("out.png").read_bytes() == b"old"
    assert not list(plan.parent.glob("*.part"))


@pytest.mark.parametrize("kept_in", ["file/plans", "file"])
def test_a_report_that_cannot_be_kept_is_there_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_in: str
):
    """Its steps have been measured, which takes a while."""
    step = autopar.parallelize(lambda x: x @ x, planner=autopar.DataParallel(), cache=tmp_path / kept_in)
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the report is not kept: .*file"):
        report = step.report(jnp.ones((16, 16)))
    assert report.kept_in == ""
    for write in (report.write, report.save):
        with pytest.raises(autopar.PlanningError, match="file"):
            write(tmp_path / "file" / "report.json")


@pytest.mark.parametrize(
    "options",
    [["--cluster", "2:h100", "--cluster", "4:h100"], ["--cluster", "2:h100", "--planner", "dp", "--planner", "zero1"]],
)
def test_an_option_that_is_given_twice_is_refused(plan: Path, capsys: Any, options: list[str]):
    with pytest.raises(SystemExit) as end:
        main(["plan", "lost_files_step:example", *options])
    assert end.value.code == 2
    assert f"argument {options[-2]}: is given twice, as {options[-3]!r} and {options[-1]!r}" in capsys.readouterr().err


def test_a_function_is_guessed(plan: Path, capsys: Any):
    assert main(["plan", "lost_files_step:exampl", "--cluster", "2:h100"]) == 2
    assert "has no function 'exampl'\n  did you mean 'example'?" in capsys.readouterr().err


def test_a_batch_of_more_rows_than_jax_can_count_is_refused(plan: Path, capsys: Any):
    assert main(["simulate", "lost_files_step:example", "--cluster", "2:h100", "--batch", "1e30"]) == 2
    assert "--batch '1e30': these are not all whole numbers from 1 to 2,147,483,647" in capsys.readouterr().err


def test_more_virtual_devices_than_a_process_bears_are_refused(plan: Path, capsys: Any):
    with pytest.raises(SystemExit):
        main(["measure", "--devices", "99999999", "--out", "here.json"])
    assert "'99999999' should be a whole number from 1 to 4096" in capsys.readouterr().err


def test_a_device_that_its_compiler_does_not_take_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: ptxas too old\nmore of it")

    monkeypatch.setattr(compiled, "topology", lambda cluster: jax.devices()[:2])
    monkeypatch.setattr(compiled, "_version", lambda platform: "a compiler")
    monkeypatch.setattr("autopar.runtime.Lowered.compile", refuse)
    cluster = parse_cluster("2:h100")
    with pytest.raises(autopar.DeviceError, match="does not take it: UNIMPLEMENTED: ptxas too old\n  compile for"):
        compiled.judge(lambda x: x @ x, (jnp.ones((16, 16)),), {}, cluster, {"planner": autopar.DataParallel()})
