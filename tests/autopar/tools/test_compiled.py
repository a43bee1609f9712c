"""Steps compiled by accelerators' own compilers: where those are installed, for GPUs that nobody here has."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.runtime import needed_nbytes
from autopar.tools import topologies
from autopar.tools.cli import main
from autopar.tools.compiled import judge
from autopar.tools.gpu_targets import GPU_TARGETS
from autopar.tools.topologies import EXTRAS, torus
from benchmarks.trainings import MODELS, make_state, make_step
from models import layers
from passes.cluster import parse_cluster
from passes.cluster.accelerators import TABLE
from tests.sample import slow

needs_gpu_compiler = pytest.mark.skipif(
    not topologies._is_installed(EXTRAS["gpu"][0]), reason="needs pip install 'autopar[gpu-compiler]'"
)
GPUS = parse_cluster("8:h100")
PLANNERS = {
    "dp": autopar.DataParallel(),
    "zero": autopar.Zero(3),
    "megatron": autopar.Megatron(data=2, tensor=4),
    "auto": autopar.Auto(),
}


def pooled(x: jax.Array) -> jax.Array:
    """The sum of squares of the maxima of windows."""
    windows = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (windows**2).sum()


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("group", "cluster"),
    [(2, "1:h100"), *(slow(*case) for case in ((1, "1:h100"), (1, "1:a100-80g"), (2, "1:a100-80g")))],
)
def test_attention_with_shared_keys_on_a_gpu(cluster: str, group: int) -> None:
    """Its weights lie in another order than gradients of values are summed in, so they are made again for these, and
    gradients of weights are brought into that order.
    """
    width, tokens, heads, features = 256, 256, 4, 64
    shapes = dict.fromkeys(("key", "value"), (width, heads, features)) | {"query": (width, heads, group, features)}
    weights = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    causal = np.tril(np.ones((tokens, tokens), bool))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        query = jnp.einsum("btw,whgf->bthgf", x, weights["query"])
        key, value = (jnp.einsum("btw,whf->bthf", x, weights[name]) for name in ("key", "value"))
        return jnp.sum(layers.attend(query, key, value, causal).astype(jnp.float32) ** 2)

    step = autopar.parallelize(jax.grad(loss), devices=autopar.topology(parse_cluster(cluster)), cluster=cluster)
    x = jax.ShapeDtypeStruct((16, tokens, width), "bfloat16")
    compiled = step.lower(weights, x).compile()
    needed = needed_nbytes(compiled.plan, compiled.memory_analysis())
    assert 0.95 < compiled.plan.peak_nbytes / needed < 1.05


@needs_gpu_compiler
def test_zeros_of_a_scatter_lie_where_its_output_will_on_a_gpu() -> None:
    step = autopar.parallelize(jax.grad(pooled), devices=autopar.topology(parse_cluster("1:h100")), cluster="1:h100")
    compiled = step.lower(jax.ShapeDtypeStruct((8, 64, 64, 32), "float32")).compile()
    analysis = compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert compiled.plan.peak_nbytes == pytest.approx(needed, rel=0.01)


def mlp() -> tuple[Any, tuple[Any, ...]]:
    """Two layers, plain SGD, in bfloat16."""

    def train_step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = batch
            for layer in params:
                hidden = jnp.tanh(hidden @ layer["up"]) @ layer["down"]
            return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    half = partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    return train_step, ([{"up": half((256, 1024)), "down": half((1024, 256))}] * 2, half((512, 256)))


def model(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The least size of a model of the zoo."""
    chosen, optimizer = MODELS[name], optax.sgd(0.1)
    state = jax.eval_shape(partial(make_state, chosen.module, chosen.least, optimizer), jax.random.key(0))
    batch = jax.eval_shape(partial(chosen.module.example_batch, chosen.least, chosen.least_batch), jax.random.key(1))
    return make_step(chosen.module, chosen.least, optimizer), (state, batch)


CASES = [("mlp", "megatron")]
LONG = [
    ("mlp", "dp"),
    ("mlp", "zero"),
    ("mlp", "auto"),
    ("dlrm", "auto"),
    ("gpt", "zero"),
    ("moe", "auto"),
    ("gpt-scan", "zero"),
]


@needs_gpu_compiler
@pytest.mark.parametrize(("name", "planner"), [*CASES, *(slow(*case) for case in LONG)])
def test_a_gpus_compiled_collectives_are_the_planned_ones(name: str, planner: str, as_users_compile: None):
    """Bytes by kind and axes are equal, whatever was combined; so are arguments."""
    step, args = mlp() if name == "mlp" else model(name)
    judgement = judge(step, args, {}, GPUS, {"planner": PLANNERS[planner]})
    assert judgement.fits
    (verification,) = (judgement.verifications or {}).values()
    verification.check()
    assert all(m.planned_nbytes == m.compiled_nbytes for m in verification.moved if m.planned_nbytes > 8)
    assert judgement.memory is not None
    assert judgement.memory.rows[0][-1] == "1.000"


@needs_gpu_compiler
def test_a_pipeline_is_compiled_stage_by_stage(as_users_compile: None):
    step, args = mlp()
    judgement = judge(step, args, {}, GPUS, {"planner": autopar.Pipeline(stages=2, microbatches=2)})
    assert judgement.fits
    assert set(judgement.verifications or {}) == {"stage 0", "stage 1"}
    assert judgement.memory is not None
    assert len(judgement.memory.rows) == 2
    assert judgement.needed_nbytes > 0


@needs_gpu_compiler
def test_the_command_says_whether_it_fits(tmp_path: Any, monkeypatch: Any, capsys: Any):
    (tmp_path / "compiled_example.py").write_text(
        "import jax\ndef example():\n    return (lambda x: x @ x), (jax.ShapeDtypeStruct((512, 512), 'float32'),)\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["compile", "compiled_example:example", "--cluster", "2:a100-80g", "--planner", "dp"]
    assert main([*command, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["fits"]
    assert verdict["compiled_nbytes"] >= 2 * 512 * 512 * 4
    assert main([*command, "--memory-limit", "1 GiB"]) == 0
    assert "it fits" in capsys.readouterr().out


@needs_gpu_compiler
@pytest.mark.parametrize("kind", GPU_TARGETS)
def test_every_gpu_has_devices_under_its_own_name(kind: str):
    devices = autopar.topology(f"2x4:{kind}")
    assert len(devices) == 8
    assert {device.device_kind for device in devices} == {GPU_TARGETS[kind].description}
    cluster = parse_cluster(f"4:{kind}").group().device
    assert abs(GPU_TARGETS[kind].memory_nbytes / cluster.memory_nbytes - 1) < 0.08
    assert abs(GPU_TARGETS[kind].memory_bytes_per_second / cluster.memory_bytes_per_second - 1) < 0.05


@needs_gpu_compiler
@pytest.mark.parametrize("cluster", [*(f"2x2:{kind}" for kind in GPU_TARGETS), "4:h100"])
def test_devices_that_are_not_here_are_planned_for_without_their_cluster(cluster: str):
    """Their allocators were asked for memory, which JAX refuses."""
    step = autopar.parallelize(jnp.sum, devices=autopar.topology(cluster), planner=autopar.DataParallel())
    there = step.plan(jnp.ones(8)).cluster
    (group,), (described,) = there.groups, parse_cluster(cluster).groups
    assert (group.hosts, there.n_devices, group.device) == (described.hosts, 4, described.device)


@needs_gpu_compiler
@pytest.mark.parametrize("planner", [None, autopar.Pipeline(stages=2, microbatches=2)])
def test_a_call_on_devices_that_are_not_here_is_an_error(planner: Any):
    """JAX ended the process (SIGSEGV) where an array was to be moved there."""

    def step(weight: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(batch @ w) @ w)))(weight)

    devices = autopar.topology("2:h100")
    parallel = autopar.parallelize(step, cluster="2:h100", devices=devices, planner=planner)
    given = jnp.ones((8, 8)), jnp.ones((4, 8))
    compiled = parallel.lower(*given).compile()
    for called in (
        lambda: parallel(*given),
        lambda: compiled(*given),
        lambda: parallel.init(lambda: jnp.ones((8, 8))),
        lambda: parallel.init(lambda key: jax.random.normal(key, (8, 8)), jax.random.key(0)),
        lambda: list(parallel.batches([given[1]] * 2)),
    ):
        with pytest.raises(autopar.DeviceError, match="it is described, and nothing runs there"):
            called()


def test_every_known_device_but_the_cpu_has_a_compiler():
    devices = {host.device.name for host in TABLE}
    assert devices - {"cpu"} == {*GPU_TARGETS, *topologies._TPUS}


@pytest.mark.parametrize(("cluster", "packages"), [("8:h100", "jax-cuda12-pjrt"), ("8:tpu-v5e", "libtpu")])
def test_a_compiler_that_is_not_installed_is_named(cluster: str, packages: str, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(topologies, "_is_installed", lambda module: False)
    with pytest.raises(autopar.DeviceError, match=rf"(?s){packages}.*pip install 'autopar\[.*-compiler\]'"):
        autopar.topology(cluster)


def test_a_compiler_that_jax_did_not_load_is_no_matter_of_sizes(monkeypatch: pytest.MonkeyPatch):
    """Where no platform is named and no driver is there, JAX goes on without a plugin that is installed."""

    def not_loaded(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "_is_installed", lambda module: True)
    monkeypatch.setattr(topologies.topologies, "get_topology_desc", not_loaded)
    with pytest.raises(autopar.DeviceError, match=r"(?s)started without XLA's GPU compiler.*set JAX_PLATFORMS=cpu"):
        autopar.topology("8:h100")


def test_devices_that_no_compiler_knows_are_refused():
    with pytest.raises(autopar.DeviceError, match="no compiler here knows cpu"):
        autopar.topology("8:cpu")
    with pytest.raises(autopar.ClusterError, match="cluster=8: a cluster is a description"):
        autopar.topology(8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("chips", "rank", "extents"),
    [(1, 2, (1, 1)), (4, 2, (2, 2)), (8, 2, (2, 4)), (256, 2, (16, 16)), (4, 3, (2, 2, 1)), (8, 3, (2, 2, 2))],
)
def test_slices_are_squares_and_cubes_or_nearly(chips: int, rank: int, extents: tuple[int, ...]):
    assert torus(chips, rank) == extents


def test_no_slice_has_three_chips():
    with pytest.raises(ValueError, match="power of two of chips, not 3"):
        torus(3, 2)
