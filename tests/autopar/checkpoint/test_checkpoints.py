"""Checkpoints: what is saved comes back bit for bit, in other shardings; what is damaged is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.checkpoint.digests import digest, partial_sum, pieces_of
from tests.autopar.distributed.launching import SECONDS, environment
from tests.closeness import assert_same_bits
from tests.sample import slow


def sharding(shape: tuple[int, ...], *spec: Any) -> NamedSharding:
    devices = np.asarray(jax.devices()[: int(np.prod(shape))], dtype=object).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*spec))


def state_in(*spec: Any, shape: tuple[int, ...] = (2, 2)) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    params = {
        "w": jax.device_put(draw.normal(size=(8, 12)).astype(np.float32), sharding(shape, *spec)),
        "half": jax.device_put(jnp.asarray(draw.normal(size=8), jnp.bfloat16), sharding(shape)),
    }
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "key": jax.random.key(7),
        "empty": jnp.zeros((0, 4)),
        "count": 3,
        "table": np.arange(3) * 10**12,
        "nothing": None,
        "odd": jnp.asarray([np.nan, -0.0, np.inf]) * (1 + 0j),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one state, which is donated as soon as each save returns."""
    folder, state = tmp_path_factory.mktemp("checkpoints"), state_in("x", "y")
    step = jax.jit(lambda params: jax.tree.map(lambda p: p + 1, params), donate_argnums=0)
    with autopar.Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(state) is None
        for number in (1, 2, 3):
            checkpoints.save(number, state, position={"batch": number}, rng=jax.random.key(number))
            state = {**state, "params": step(state["params"])}
    return folder


def copied(folder: Path, to: Path) -> autopar.Checkpoints:
    import shutil

    shutil.copytree(folder, to, dirs_exist_ok=True)
    return autopar.Checkpoints(to)


def test_a_state_comes_back_bit_for_bit_in_another_sharding(folder: Path):
    like = state_in("y", shape=(4, 2))
    saved = autopar.Checkpoints(folder).restore(jax.tree.map(lambda leaf: leaf, like))
    assert saved is not None
    assert (saved.step, saved.position) == (3, {"batch": 3})
    assert jax.random.key_data(saved.rng).tolist() == [0, 3]
    expected = state_in("y", shape=(4, 2))
    expected["params"] = jax.tree.map(lambda p: p + 1 + 1, expected["params"])
    assert_same_bits(saved.state, expected)
    assert saved.state["params"]["w"].sharding == like["params"]["w"].sharding


def truncate(folder: Path) -> str:
    file = max((path for path in folder.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-9])
    return "is truncated"


def corrupt(folder: Path) -> str:
    """Every byte of the largest file is changed in turn below; here one in the middle of each, as Orbax may leave files
    that nothing refers to any more.
    """
    for file in (path for path in folder.rglob("d/*") if path.is_file()):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)
    return "corrupted|cannot be read"


def forget(folder: Path) -> str:
    (folder / "autopar.json").unlink()
    return "unfinished"


def edit(folder: Path) -> str:
    page = json.loads((folder / "autopar.json").read_text())
    page["checkpoint"]["position"] = {"json": 99}
    (folder / "autopar.json").write_text(json.dumps(page))
    return "its digest is not"


def lie(folder: Path) -> str:
    """The arrays of another step under this one's page."""
    (folder / "state").rename(folder / "gone")
    (folder.parent / "step-00000001" / "state").rename(folder / "state")
    return "missing|corrupted|truncated"


@pytest.mark.parametrize("damage", [truncate, corrupt, forget, edit, lie])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(folder: Path, tmp_path: Path, damage: Any):
    checkpoints = copied(folder, tmp_path)
    reason = damage(tmp_path / "step-00000003")
    with pytest.warns(UserWarning, match=f"step-00000003: .*({reason})"):
        saved = checkpoints.restore(state_in())
    assert saved is not None
    assert saved.step == 2


@pytest.mark.parametrize("at", [slow("begin"), "save", slow("delete")])
def test_a_run_that_ended_while_it_saved_for_the_first_time_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
):
    """The program ends in the middle of a save: before Orbax, with half of the files there, and deleting those."""
    state = {"w": jnp.arange(4.0)}

    def ends(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if at == "begin":
            patched.setattr("autopar.checkpoint.arrays.Arrays.save", ends)
        elif at == "save":
            patched.setattr("autopar.checkpoint.manifest.Manifest.write", ends)
        else:
            (tmp_path / "step-00000005" / "state").mkdir(parents=True)
            (tmp_path / "step-00000005" / "autopar.json").touch()
            patched.setattr("shutil.rmtree", ends)
        checkpoints = autopar.Checkpoints(tmp_path)
        checkpoints.save(5, state)
        with pytest.raises(autopar.CheckpointError, match="KeyboardInterrupt"):
            checkpoints.wait()
    with pytest.warns(UserWarning, match=r"step-00000005: there is no autopar\.json: it is unfinished"):
        assert checkpoints.restore(state) is None
    checkpoints.save(5, state)
    saved = checkpoints.restore(state)
    assert saved is not None
    assert saved.step == 5


HASTY = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
import autopar

folder = Path(sys.argv[1])
state = {str(number): jnp.full((1 << 20,), number) for number in range(4)}
checkpoints = autopar.Checkpoints(folder)
checkpoints.save(1, state)
policies = set()
while not (folder / "step-00000001" / "autopar.json").exists():
    for thread in os.listdir("/proc/self/task"):
        try:
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith("ts_pool"):
                policies.add(os.sched_getscheduler(int(thread)))
        except OSError:
            continue
print(policies == {os.SCHED_IDLE}, os.sched_getscheduler(0) == os.SCHED_IDLE)
checkpoints.save(2, state)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is a process's")
def test_writing_gives_way_to_steps_and_ends_before_the_program_does(tmp_path: Path):
    (tmp_path / "script.py").write_text(HASTY)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "run"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True False\n"  # Orbax's own threads, and what computes steps
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    saved = checkpoints.restore({str(number): jnp.zeros(1 << 20, jnp.int32) for number in range(4)})
    assert saved is not None
    assert saved.step == 2


def test_another_programs_checkpoints_are_refused(folder: Path):
    like = state_in()
    like["params"]["w"] = jnp.zeros((8, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            autopar.CheckpointError, match=r"\['w'\] is float32\[8,12\] there, and float32\[8,13\] here"
        ):
            autopar.Checkpoints(folder).restore(like)


def test_the_step_behind_a_save_takes_the_buffers_that_are_donated_to_it(tmp_path: Path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.jit(lambda x: x + 1)(jax.device_put(np.zeros((64, 64)), sharding((2, 2), "x")))  # of JAX's own memory

    def places(array: jax.Array) -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

    with autopar.Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2):
            before = places(state)
            checkpoints.save(number, {"w": state})
            state = step(state)
            assert places(state) == before  # a new one would have to be made, in memory touched for the first time
        saved = checkpoints.restore({"w": state})
    assert saved is not None
    np.testing.assert_array_equal(saved.state["w"], np.full((64, 64), 2.0))


@pytest.mark.slow
def test_the_last_good_ones_stay(tmp_path: Path):
    state = {"w": jnp.arange(4.0)}
    (tmp_path / "step-00000002").mkdir()
    with autopar.Checkpoints(tmp_path, keep=2) as checkpoints:
        for number in (1, 3, 4):
            checkpoints.save(number, state)
    assert checkpoints.steps() == [4, 3]
    with pytest.raises(autopar.ArgumentError, match="no plain data"):
        checkpoints.save(5, state, position=object())


def test_a_number_to_keep_that_cannot_be_is_refused(tmp_path: Path):
    for keep in (0, 1.5, "3", None):
        with pytest.raises(autopar.ArgumentError, match=f"keep={keep!r}"):
            autopar.Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize(
    ("before", "below", "kept"), [((200,), (10,), [200]), slow((100, 200, 300), (10, 20), [300, 200])]
)
def test_a_step_that_is_saved_below_later_ones_stays_and_they_are_named(
    tmp_path: Path, before: tuple[int, ...], below: tuple[int, ...], kept: list[int]
):
    state = {"w": jnp.arange(4.0)}
    with autopar.Checkpoints(tmp_path, keep=len(kept)) as checkpoints:
        for number in before:
            checkpoints.save(number, state)
    with autopar.Checkpoints(tmp_path, keep=len(kept)) as checkpoints:
        for number in below:
            later = ", ".join(map(str, kept))
            with pytest.warns(UserWarning, match=rf"save\(step={number}\): .* of later steps \({later}\)"):
                checkpoints.save(number, state)
            checkpoints.wait()
            assert checkpoints.steps() == [*kept, number]
        checkpoints.save(400, state)
    assert checkpoints.steps() == [400, *kept][: len(kept)]


def test_folders_that_are_no_checkpoints_are_neither_deleted_nor_written_to(tmp_path: Path):
    state = {"w": jnp.arange(4.0)}
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "results.csv").write_text("of another program")
    with autopar.Checkpoints(tmp_path, keep=1) as checkpoints:
        for number in (2, 3):
            checkpoints.save(number, state)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 1]
        with pytest.raises(autopar.ArgumentError, match=r"step-00000001 is not empty, and has neither autopar\.json"):
            checkpoints.save(1, state)
    assert (tmp_path / "step-00000001" / "results.csv").read_text() == "of another program"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8", "complex64"])
def test_a_digest_is_of_the_contents_alone(dtype: str):
    values = np.random.default_rng(1).integers(0, 2, (4, 6)).astype(jnp.dtype(dtype))
    cuts = [sharding((1,)), sharding((2, 2), "x", "y"), sharding((4,), "x"), sharding((2, 2), None, ("y", "x"))]
    cuts = [cut if cut.spec != PartitionSpec(None, ("y", "x")) else sharding((2, 3), "x", "y") for cut in cuts]

    def of(array: np.ndarray, cut: Any) -> str:
        return digest([partial_sum(pieces_of(jax.device_put(array, cut), is_global=True), array.shape)])

    digests = {of(values, cut) for cut in cuts}
    assert len(digests) == 1
    changed = values.copy()
    changed[2, 3] = 1 - changed[2, 3] if dtype != "bool" else not changed[2, 3]
    assert of(changed, cuts[1]) not in digests
    assert of(values[::-1].copy(), cuts[0]) not in digests


def test_a_state_whose_leaves_are_not_in_the_order_of_their_names_is_restored(tmp_path: Path):
    state = TrainState.create(apply_fn=jnp.tanh, params={"w": jnp.arange(8.0)}, tx=optax.adam(1e-3))
    state = state.apply_gradients(grads={"w": jnp.ones(8)})
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        saved = checkpoints.restore(state)
    assert saved is not None
    assert_same_bits(saved.state, state)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(70_000, dtype=np.float32).reshape(7, 100, 100), "89a403fc97c71504"),
        (np.arange(12) * 10**12, "6b2cd917f60de5bd"),
        (np.asarray(2.5), "03735549a852df3f"),
        (np.arange(6) * (1 + 2j), "7ea5730420288ba8"),
    ],
    ids=["many", "int64", "scalar", "complex"],
)
def test_digests_are_those_of_earlier_checkpoints(values: np.ndarray, expected: str):
    assert digest([partial_sum(pieces_of(values, is_global=False), values.shape)]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": -1}, r"save\(step=-1\): should be a whole number from 0"),
        ({"step": 1.5}, r"save\(step=1.5\): should be a whole number from 0"),
        ({"step": 1, "position": {"seen": {3: 4}}}, "a dict has the key 3, which is no text"),
        ({"step": 1, "position": object()}, "it is no plain data"),
    ],
)
def test_a_step_or_position_that_could_not_be_restored_is_refused(tmp_path: Path, given: dict[str, Any], message: str):
    with autopar.Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(autopar.ArgumentError, match=message):
            checkpoints.save(state={"w": jnp.ones(3)}, **given)
        assert checkpoints.steps() == []
        checkpoints.save(2, {"w": jnp.ones(3)})
    assert checkpoints.steps() == [2]


@pytest.mark.parametrize("step", [np.int64(3), np.int32(3), jnp.int32(3)])
def test_a_step_counted_by_a_library_is_a_number(tmp_path: Path, step: Any):
    state = {"w": jnp.ones(3)}
    with autopar.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, state)
    saved = checkpoints.restore(state)
    assert saved is not None
    assert (saved.step, type(saved.step)) == (3, int)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(autopar.ArgumentError, match="it is a file"):
        autopar.Checkpoints(tmp_path / "file")
    with pytest.raises(autopar.ArgumentError, match="file is a file, and checkpoints are in a folder"):
        autopar.Checkpoints(tmp_path / "file" / "run")
    (tmp_path / "step-00000001").touch()
    assert autopar.Checkpoints(tmp_path).steps() == []
    assert autopar.Checkpoints(tmp_path).restore({"w": jnp.ones(3)}) is None


UNREAD = """
import sys
import jax.numpy as jnp
import autopar

checkpoints = autopar.Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": jnp.ones(3)})
print("saved")
"""


def test_an_error_of_the_last_save_that_nobody_waits_for_is_printed(tmp_path: Path):
    (tmp_path / "script.py").write_text(UNREAD)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-00000001").touch()  # in the way
    command = [sys.executable, str(tmp_path / "script.py"), str(run)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)
    assert ran.stdout == "saved\n"
    assert f"autopar: the checkpoint {run}/step-00000001: it could not be written: FileExistsError" in ran.stderr
