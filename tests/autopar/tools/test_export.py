"""`autopar export`: the step runs by the module and by JAX's own format as it does under jax.jit, without autopar."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from autopar.tools.cli import main
from autopar.tools.export_command import module
from passes.plan import load_plan

PINNED = ["--pin", "up=[-, x]", "--pin", "down=[x, -]", "--pin", "batch=[y, -]", "--mesh", "x=2,y=2"]
ARGUMENTS = ["plan", "train:example", "--cluster", "4:h100", "--no-cache", *PINNED, "--out", "plan.json"]

ELSEWHERE = """\
import sys
sys.modules["autopar"] = sys.modules["passes"] = None  # not to be had

import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
from shardings import shard

def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

rng = np.random.default_rng(0)
f32 = lambda *shape: rng.normal(size=shape).astype(np.float32)
args = {"up": f32(64, 256), "down": f32(256, 64)}, f32(128, 64)
run = shard(step, devices=jax.devices())
params, loss = run(*args)
assert len({str(s.index) for s in params["up"].addressable_shards}) == 2, params["up"].sharding
again, _ = run(params, args[1])  # results are arguments as they are
expected = jax.jit(step)(*args)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (params, loss), expected)
print("the same")
"""


@pytest.fixture
def plan(train):
    assert main(ARGUMENTS) == 0
    return train / "plan.json"


def test_the_module_runs_without_autopar_and_computes_the_same_step(plan):
    assert main(["export", "plan.json", "--format", "shardings", "-o", "shardings.py"]) == 0
    Path("elsewhere.py").write_text(ELSEWHERE)
    ran = subprocess.run([sys.executable, "elsewhere.py"], capture_output=True, text=True)
    assert ran.stdout == "the same\n", ran.stderr
    assert "P(None, 'x')" in Path("shardings.py").read_text()


def test_the_program_is_exported_with_its_shardings(plan):
    assert main(["export", "plan.json", "--format", "jax-export", "-o", "step.bin"]) == 0
    program = jax.export.deserialize(bytearray(Path("step.bin").read_bytes()))
    assert program.nr_devices == 4
    assert program.platforms == ("cuda", "cpu")  # the plan's H100, and what is here
    assert_computes_the_step(program, jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")))


def test_a_state_of_a_type_that_jax_cannot_write_is_exported_as_its_leaves(plan, capsys):
    of_pairs = """
from collections import namedtuple
import train
Weights = namedtuple("Weights", ["up", "down"])
def step(weights, batch):
    new, loss = train.step({"up": weights.up, "down": weights.down}, batch)
    return Weights(new["up"], new["down"]), loss
def example():
    _, (weights, batch) = train.example()
    return step, (Weights(weights["up"], weights["down"]), batch)
"""
    Path("pairs.py").write_text(of_pairs)
    assert main(["plan", "pairs:example", "--cluster", "4:h100", "--no-cache", "--out", "pairs.json"]) == 0
    assert main(["export", "pairs.json", "--format", "jax-export", "-o", "step.bin"]) == 0
    assert "takes *jax.tree.leaves(args)" in capsys.readouterr().out
    program = jax.export.deserialize(bytearray(Path("step.bin").read_bytes()))
    assert jax.tree.structure(((*[0] * 3,), {})) == program.in_tree
    assert len(program.out_avals) == 3


def assert_computes_the_step(program, mesh):
    rng = np.random.default_rng(0)
    shapes = [(256, 64), (64, 256), (128, 64)]
    down, up, batch = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    args = {"up": up, "down": down}, batch
    leaves = zip(jax.tree.leaves(args), program.in_shardings_jax(mesh), strict=True)
    placed = jax.tree.unflatten(jax.tree.structure(args), [jax.device_put(a, s) for a, s in leaves])
    import train as module_of_user

    got, expected = jax.jit(program.call)(*placed), jax.jit(module_of_user.step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_a_step_that_the_plan_was_not_made_for_is_refused(plan, capsys):
    source = Path("train.py").read_text().replace("jnp.tanh", "jnp.sin")
    Path("another.py").write_text(source)
    command = ["export", "plan.json", "--format", "jax-export", "--target", "another:example", "-o", "step.bin"]
    assert main(command) == 2
    assert "a plan belongs to one function" in capsys.readouterr().err
    assert not Path("step.bin").exists()


@pytest.mark.parametrize(
    ("planner", "format", "message"),
    [
        (["pipeline:2x2"], "shardings", "and this plan has 2 stages, 2 microbatches"),
        (["dp", "--microbatches", "2"], "shardings", "and this plan has 2 microbatches\n  take --format jax-export"),
        (["pipeline:2x2"], "jax-export", "it is one program on one mesh, whose arrays are on devices, and this plan"),
    ],
)
def test_a_plan_with_more_than_a_format_says_is_refused(train, capsys, planner, format, message):
    base = ["plan", "train:example", "--cluster", "4:h100", "--no-cache", "--planner"]
    assert main([*base, *planner, "--out", "p.json"]) == 0
    assert main(["export", "p.json", "--format", format, "-o", "s.py"]) == 2
    told = capsys.readouterr().err
    assert f"--format {format} of p.json" in told
    assert message in told
    assert "planner=Manual('p.json')" in told
    assert not Path("s.py").exists()


def test_microbatches_are_exported_in_the_format_of_jax(train):
    command = ["plan", "train:example", "--cluster", "4:h100", "--no-cache", "--planner", "zero3"]
    assert main([*command, "--microbatches", "4", "--out", "plan.json"]) == 0
    assert main(["export", "plan.json", "--format", "jax-export", "-o", "step.bin"]) == 0
    program = jax.export.deserialize(bytearray(Path("step.bin").read_bytes()))
    assert "stablehlo.while" in program.mlir_module()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    assert_computes_the_step(program, mesh)


def test_a_module_is_small_and_readable(plan):
    (program,) = load_plan(plan).programs
    text = module(program)
    compile(text, "shardings.py", "exec")
    assert len(text.splitlines()) < 70
    assert "MESH = {'x': 2, 'y': 2}" in text


@pytest.mark.parametrize(("cluster", "platforms"), [("2:tpu-v5e", ("tpu", "cpu")), ("2:cpu", ("cpu",))])
def test_a_program_is_for_the_devices_that_it_was_planned_for(train, capsys, cluster, platforms):
    assert main(["plan", "train:example", "--cluster", cluster, "--no-cache", "--out", "plan.json"]) == 0
    assert main(["export", "plan.json", "--format", "jax-export", "-o", "step.bin"]) == 0
    assert f"for jax.export.deserialize on {' or '.join(platforms)}" in capsys.readouterr().out
    assert jax.export.deserialize(bytearray(Path("step.bin").read_bytes())).platforms == platforms


def test_static_arguments_are_those_of_the_target(train):
    command = ["plan", "train:parallel_example", "--cluster", "4:h100", "--planner", "zero3", "--no-cache"]
    assert main([*command, "--out", "plan.json"]) == 0
    assert main(["export", "plan.json", "--format", "jax-export", "-o", "step.bin"]) == 0
    program = jax.export.deserialize(bytearray(Path("step.bin").read_bytes()))
    params, loss = program.out_avals[:2], program.out_avals[2]
    assert ([p.shape for p in params], loss.shape) == ([(256, 64), (64, 256)], ())


MODULES = """
import jax.numpy as jnp
from flax import nnx

def step(net, batch):
    return jnp.mean(net(batch))

def example():
    return step, (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 8)))

def by_name():
    import train
    step, (params, batch) = train.example()
    return step, (params,), {"batch": batch}
"""


@pytest.mark.parametrize(("name", "words"), [("example", "modules are not exported"), ("by_name", "arguments by name")])
def test_a_step_of_modules_or_named_arguments_is_refused(train, capsys, name, words):
    Path("nets.py").write_text(MODULES)
    target = f"nets:{name}"
    assert main(["plan", target, "--cluster", "4:h100", "--planner", "dp", "--no-cache", "--out", "p.json"]) == 0
    assert main(["export", "p.json", "--format", "jax-export", "-o", "step.bin"]) == 2
    assert f"--format jax-export of {target}: {words}" in capsys.readouterr().err
