"""The plan cache: what is planned once, what is planned anew, and what becomes of damaged and foreign entries."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import autopar
from autopar.cache import Key, PlanCache
from autopar.errors import ArgumentError
from autopar.tools.cli import main
from passes.plan import INTERRUPTED, Plan
from passes.solver import SolverOptions
from tests.autopar.rewrite.deep_steps import arguments
from tests.autopar.rewrite.deep_steps import train_step as deep_step
from tests.autopar.tools.train_module import TRAIN
from tests.closeness import assert_close
from tests.sample import slow, some

CLUSTER = "1x4:a100-80g"
GOLDEN = Path(__file__).parents[1] / "golden"


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def struct(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


GIVEN = {"up": struct(64, 256), "down": struct(256, 64)}, struct(128, 64)


def plan(cache: Any, fun: Any = train_step, given: Any = GIVEN, **options: Any) -> tuple[Any, bool]:
    """A plan, and whether it was searched for."""
    searched: list[autopar.Progress] = []
    options = {"cluster": CLUSTER, "progress": searched.append, **options}
    found = autopar.parallelize(fun, cache=cache, **options).plan(*given)
    return found, bool(searched)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def untimed(plan: Plan) -> Plan:
    """A plan without the seconds that planning took."""
    return replace(plan, solution=replace(plan.solution, phase_seconds={}))


@pytest.fixture(autouse=True)
def strict():
    """A warning that no test expects is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# What is found again.


@pytest.mark.parametrize("kind", [str, Path, PlanCache])
def test_the_second_plan_is_the_first(tmp_path: Path, kind: Any):
    first, searched = plan(kind(tmp_path / "plans"))
    assert searched
    second, searched = plan(kind(tmp_path / "plans"))
    assert not searched
    assert second == first
    assert second.shardings == first.shardings
    assert len(entries(tmp_path / "plans")) == 1


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan(None)[1]
    assert plan(None)[1]
    assert not entries(tmp_path)


CHANGES: dict[str, dict[str, Any]] = {
    "cluster": {"cluster": "2x4:a100-80g"},
    "cluster's kind": {"cluster": "1x4:h100"},
    "planner": {"planner": autopar.Zero(3)},
    "planner's field": {"planner": autopar.Auto(max_axes=1)},
    "solver": {"planner": autopar.Auto(solver=SolverOptions(gap=1e-3))},
    "memory limit": {"memory_limit": "10 GiB"},
    "microbatches": {"microbatches": 2},
    "semantics": {"microbatch_semantics": "independent"},
    "remat": {"remat": "everything"},
    "donation": {"donate_argnums": 0},
    "shapes": {"given": (GIVEN[0], struct(256, 64))},
    "names": {"fun": lambda weights, batch: train_step(weights, batch)},
}


def test_every_option_counts(tmp_path: Path):
    plan(tmp_path)
    for number, (name, change) in enumerate(CHANGES.items(), 1):
        plan(tmp_path, **change)
        assert len(entries(tmp_path)) == 1 + number, name
    for change in CHANGES.values():
        assert not plan(tmp_path, **change)[1]


def test_an_interruptible_planner_finds_the_plans_of_others(tmp_path: Path):
    plan(tmp_path)
    assert not plan(tmp_path, planner=autopar.Auto(interruptible=True))[1]


def test_a_users_rule_counts(tmp_path: Path):
    product = Primitive("product_of_the_cache_test")
    product.def_abstract_eval(lambda x, y: jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype))

    def step(x: Any, y: Any) -> Any:
        return product.bind(x, y)

    for number, rule in enumerate(
        ("b _, _ j -> b j", "b _, _ _ -> b _", lambda params, given, made: "b _, _ j -> b j")
    ):
        autopar.register_rule(product, rule)
        plan(tmp_path, step, (struct(16, 8), struct(8, 4)))
        assert len(entries(tmp_path)) == min(2, 1 + number)  # the third says what the first does


@dataclass(frozen=True)
class Own:
    """A planner that is not autopar's."""

    def plan(self, step: Any, cluster: Any, options: Any) -> Any:
        return autopar.DataParallel().plan(step, cluster, options)


def test_planners_of_others_and_saved_plans_are_not_kept(tmp_path: Path):
    found, _ = plan(None)
    for planner in (Own(), autopar.Manual(found)):
        plan(tmp_path, planner=planner)
    assert not entries(tmp_path)


def test_interrupted_plans_are_not_kept(tmp_path: Path):
    found, _ = plan(None)
    key = Key(data={"a": 1})
    PlanCache(tmp_path).write(key, replace(found, solution=replace(found.solution, status=INTERRUPTED)))
    assert not entries(tmp_path)


# Forms and pipelines.


@pytest.mark.parametrize("options", [{"microbatches": 4}, slow({"remat": "inputs"}), slow({"limit": 0.8})], ids=str)
def test_variants_are_made_again(tmp_path: Path, options: dict[str, Any]):
    with jax.enable_x64(True):
        given = arguments("float64")
        options = {"devices": jax.devices()[:2], **options}
        if share := options.pop("limit", None):
            peak = autopar.parallelize(deep_step, **options).plan(*given).peak_nbytes
            options["memory_limit"] = int(share * peak)
        kept = autopar.parallelize(deep_step, cache=tmp_path, **options)
        first = kept.plan(*given)
        assert first.remat or first.microbatches > 1
        kept(*given)  # where a compiled program needs more than its limit, there is a second plan
        searched: list[Any] = []
        step = autopar.parallelize(deep_step, cache=tmp_path, progress=searched.append, **options)
        assert step.plan(*given) == first
        assert_close(step(*given), jax.jit(deep_step)(*given))
        assert not searched


BY_HAND = (autopar.Pipeline(stages=2, microbatches=2), autopar.DataParallel())


@pytest.mark.parametrize("planner", some((autopar.Auto(pipeline=True, layers=2), *BY_HAND), 1))
def test_a_cached_plan_runs_as_the_step_under_jit(tmp_path: Path, planner: Any):
    with jax.enable_x64(True):
        given = arguments("float64")
        options = {"planner": planner, "devices": jax.devices()[:2], "cache": tmp_path}
        first = autopar.parallelize(deep_step, **options).plan(*given)
        before = {path: path.stat().st_mtime_ns for path in entries(tmp_path)}
        step = autopar.parallelize(deep_step, **options)
        assert step.plan(*given) == first
        assert_close(step(*given), jax.jit(deep_step)(*given))
        assert {path: path.stat().st_mtime_ns for path in entries(tmp_path)} == before


def test_a_pipeline_that_the_search_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = jax.tree.map(lambda x: struct(*x.shape), arguments("float32"))

    def found(self: Any, step: Any, cluster: Any, report: Any) -> Any:
        assert 4 in step.counts
        return autopar.Pipeline(stages=2, microbatches=4).plan(step, cluster).plan

    monkeypatch.setattr(autopar.Auto, "search", found)
    options = {"planner": autopar.Auto(pipeline=True, layers=2), "cluster": "1x2:a100-80g", "cache": tmp_path}
    first = autopar.parallelize(deep_step, **options).plan(*given)
    assert isinstance(first, autopar.PipelinePlan)
    monkeypatch.setattr(autopar.Auto, "search", None)
    assert autopar.parallelize(deep_step, **options).plan(*given) == first


# Source lines.


def written(path: Path, text: str) -> Any:
    """The function `step` of a file with this text."""
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    return names["step"]


STEP = """\
import jax, jax.numpy as jnp
def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    a, b = params["up"] - grads["up"], params["down"] - grads["down"]
    return {"up": a, "down": b}, loss
"""


def test_lines_are_those_that_the_source_has_now(tmp_path: Path):
    folder, path = tmp_path / "plans", tmp_path / "train.py"
    first, _ = plan(folder, written(path, STEP))
    moved = written(path, "# A remark.\n\n" + STEP)
    second, searched = plan(folder, moved)
    assert not searched
    assert untimed(second) == untimed(plan(None, moved)[0])
    assert second.operators != first.operators


def test_a_line_that_became_two_is_planned_anew(tmp_path: Path):
    folder, path = tmp_path / "plans", tmp_path / "train.py"
    plan(folder, written(path, STEP))
    split = written(
        path, STEP.replace('grads["up"], params', 'grads["up"], (\n        params').replace('["down"]\n', '["down"])\n')
    )
    found, searched = plan(folder, split)
    assert searched
    assert untimed(found) == untimed(plan(None, split)[0])
    assert not plan(folder, split)[1]
    assert len(entries(folder)) == 1


# Damage.


def damaged(text: str, flips: int) -> dict[str, bytes]:
    """An entry's text in many states, none of which may be believed."""
    whole, dice = text.encode(), random.Random(0)
    found = {"empty": b"", "binary": bytes(range(256)), "list": b"[]", "object": b"{}", "nested": b"[" * 100_000}
    found |= {f"first {n}": whole[:n] for n in (1, 10, len(whole) // 2, len(whole) - 2)}
    for i in range(flips):
        at = dice.randrange(len(whole))
        found[f"changed at {at} ({i})"] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    found["edited"] = text.replace('"microbatches": 1', '"microbatches": 2').encode()
    found["plain plan"] = (GOLDEN / "plan.json").read_bytes()
    return found


@pytest.mark.parametrize("flips", [3, slow(12)])
def test_damaged_and_foreign_entries_are_ignored_and_replaced(tmp_path: Path, flips: int):
    first, _ = plan(tmp_path)
    (path,) = entries(tmp_path)
    cases = damaged(path.read_text(), flips)
    plan(tmp_path, planner=autopar.DataParallel())
    (other,) = set(entries(tmp_path)) - {path}
    cases["another's"] = other.read_bytes()
    for name, content in cases.items():
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=path.name):
            again, searched = plan(tmp_path)
        assert searched, name
        assert untimed(again) == untimed(first)
        assert not plan(tmp_path)[1], name


def test_an_entry_that_is_of_another_program_is_ignored(tmp_path: Path):
    plan(tmp_path)
    (path,) = entries(tmp_path)
    head, rest = path.read_text().split("\n", 2)[:2], (GOLDEN / "plan.json").read_text().removeprefix("{\n")
    cache = json.loads(head[1].strip().removeprefix('"cache": ').rstrip(","))
    key = Key(data=cache["key"])
    PlanCache(tmp_path).write(key, Plan.load(GOLDEN / "plan.json"))
    assert rest in path.read_text()
    with pytest.warns(UserWarning, match="ignored"):
        assert plan(tmp_path)[1]
    assert not plan(tmp_path)[1]


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path):
    (tmp_path / "plans").write_text("a file")
    with pytest.warns(UserWarning, match="plans"):
        found, searched = plan(PlanCache(tmp_path / "plans"))
    assert searched
    assert untimed(found) == untimed(plan(None)[0])


@pytest.mark.parametrize("cache", [1, "", b"", object(), "file", Path("file"), "file/plans"])
def test_an_option_that_is_no_cache_is_refused(cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("of something else")
    with pytest.raises(ArgumentError, match="cache="):
        autopar.parallelize(train_step, cache=cache)


def test_commands_need_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.devnull)
    with pytest.warns(UserWarning, match="not kept"):
        assert main(["plan", "train:example", "--cluster", CLUSTER]) == 0
    sys.modules.pop("train", None)


# Many processes.

BUSY = """
import sys, warnings
warnings.simplefilter("error")
from autopar.cache import Key, PlanCache
from passes.plan import Plan
cache, keys = PlanCache(sys.argv[1]), [Key(data={"number": i}) for i in range(2)]
plans = [Plan.load(path) for path in sys.argv[2:]]
def accept(plan, how):
    assert plan in plans
    return plan
for i in range(60):
    for key, plan in zip(keys, plans):
        if i % 3 == 0:
            cache.write(key, plan)
        assert cache.read(key, accept) == plan
"""


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path: Path):
    paths = [str(GOLDEN / name) for name in ("plan.json", "plan_other.json")]
    command = [sys.executable, "-c", textwrap.dedent(BUSY), str(tmp_path / "plans"), *paths]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert [path.suffix for path in entries(tmp_path / "plans")] == [".json", ".json"]


# The command line.


def test_commands_keep_plans_in_the_users_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, command = tmp_path / "cache" / "autopar" / "plans", ["plan", "train:example", "--cluster", CLUSTER]
    assert main([*command, "--no-cache"]) == 0
    assert not entries(folder)
    assert main([*command, "--json"]) == 0
    (path,) = entries(folder)
    capsys.readouterr()
    before = path.stat().st_mtime_ns
    assert main([*command, "--json"]) == 0
    assert path.stat().st_mtime_ns == before
    assert Plan.from_json(json.loads(capsys.readouterr().out)) == Plan.load(path)
    assert main(["show", str(path)]) == 0
    sys.modules.pop("train", None)


def test_the_cache_of_commands_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch):
    from autopar.tools.command import kept_plans

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert kept_plans().folder == os.path.join("/home/somebody", ".cache", "autopar", "plans")


def test_numbers_from_the_cache_are_numbers(tmp_path: Path):
    found = [plan(tmp_path)[0] for _ in range(2)]
    assert np.isfinite(found[1].step_seconds)
    assert found[0].peak_nbytes == found[1].peak_nbytes
