"""Wrong calls, as the user would write them: what each is made with, the files that it reads, its text."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import autopar


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(params, batch):
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) @ p["down"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


def scaled(x, factor):
    return jax.tree.map(lambda leaf: leaf * factor, x)


def summed(x, y):
    return x + y


def tripled(x):
    return 3 * x


def printed(params, batch):
    jax.debug.print("{}", batch.sum(), ordered=True)
    return step(params, batch)


def printed_by_layers(params, batch):
    def layer(state, w):
        jax.debug.print("layer {}", state[1])
        return (jnp.tanh(state[0] @ w), state[1] + 1), None

    def loss(params):
        return jax.lax.scan(layer, (batch, 0), jnp.stack([params["up"][:, :16]] * 2))[0][0].mean()

    return jax.grad(loss)(params)


def updated(x):
    total = jax.new_ref(jnp.zeros_like(x))
    total[...] += x
    return total[...]


def mesh(*sizes: int) -> Any:
    return jax.make_mesh(sizes, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def over_one_axis(x):
    return jax.shard_map(
        jnp.sin, mesh=mesh(4, 2), in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"), axis_names={"a"}
    )(x)


def over_half_of_the_devices(x):
    return jax.shard_map(jnp.sin, mesh=mesh(2, 2), in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"))(x)


def constrained_to_8(x):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh(8), PartitionSpec("a")))


def primitive(name: str, function: Any) -> Primitive:
    """A primitive of the user's that JAX can compile."""
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda *avals: jax.core.ShapedArray(*astuple(jax.eval_shape(function, *avals))))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def astuple(made: Any) -> tuple[Any, Any]:
    return made.shape, made.dtype


_COUNT = itertools.count()


def ruled(text: Any, function: Any = jnp.dot) -> Any:
    """A function whose only operation is a primitive of this rule."""
    made = primitive(f"errors_{next(_COUNT)}", function)
    autopar.register_rule(made, text)

    def call(*operands):
        return made.bind(*operands)

    return call


CLUSTER = "8:a100-80g"
PARAMS = {"up": struct(16, 64), "down": struct(64, 8)}
BATCH = struct(32, 16)
X = struct(8, 8)
parallel = partial(autopar.parallelize, cluster=CLUSTER)
here = autopar.parallelize

DataParallel, Zero, Megatron = autopar.DataParallel, autopar.Zero, autopar.Megatron
Auto, Manual, register_rule = autopar.Auto, autopar.Manual, autopar.register_rule


def ones() -> Any:
    return jnp.ones((8, 8), np.float32)


def compiled() -> Any:
    """`step` compiled for PARAMS and BATCH."""
    return here(step, planner=DataParallel()).lower(PARAMS, BATCH).compile()


def twice(fun: Any, x: Any) -> Any:
    fun(x)
    return fun(x)


TRAIN = """\
import jax

def step(x):
    return x + 1

def example():
    return step, (jax.ShapeDtypeStruct((8,), "float32"),)

def seventeen():
    return 17
"""


def fill(folder: Path) -> None:
    """The files that the calls read, in `folder`."""
    parallel(step, planner=DataParallel()).plan(PARAMS, BATCH).save(folder / "plan.json")
    text = (folder / "plan.json").read_text()
    data = json.loads(text)
    (folder / "train.py").write_text(TRAIN)
    (folder / "words.json").write_text("no plan at all")
    (folder / "empty.json").write_text("{}")
    (folder / "cluster.json").write_text('{"name": "mine", "groups": [{"hosts": 0, "device": "h100"}]}')
    (folder / "schema.json").write_text(json.dumps({**data, "schema": 99, "autopar": "9.9"}))
    (folder / "cut_short.json").write_text(text[:1])
    (folder / "fields.json").write_text(json.dumps({k: v for k, v in data.items() if k != "operators"}))

    def edited(name: str, before: str, after: str) -> None:
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1))

    edited("operator.json", "[data, -] [-, -] -> [data, -]", "[data, -] [-, -] -> [-, -]")
    edited("axis.json", "[data, -]", "[model, -]")
    edited("twice.json", "[data, -]", "[data, data]")
    edited("spec.json", "[data, -]", "data on rows")
    edited("rank.json", "[data, -]", "[data, -, -]")


# The calls. Each is source text, as the user would write it.

CALLS = {
    "what jax.jit refuses": [
        "here(17)",
        "here(step, static_argnums='params')",
        "here(step, static_argnums=5)",
        "here(step, static_argnames='rate')",
        "here(step, donate_argnums=7)",
        "here(step, donate_argnums=0, static_argnums=0)",
        "here(step)(PARAMS)",
        "here(step).plan(PARAMS, BATCH, 3)",
        "here(tripled, planner=DataParallel())(X)",
        "twice(here(tripled, donate_argnums=0), ones())",
    ],
    "options": [
        "here(here(step), cluster=CLUSTER)",
        "here(step, cluster='8 fast ones')",
        "here(step, cluster='h100')",
        "here(step, cluster='8:abacus')",
        "here(step, cluster='8:a100')",
        "here(step, cluster='0:h100')",
        "here(step, cluster='absent.json')",
        "here(step, cluster='words.json')",
        "here(step, cluster='empty.json')",
        "here(step, cluster='cluster.json')",
        "here(step, cluster=8).plan(PARAMS, BATCH)",
        "here(step, devices=[]).plan(PARAMS, BATCH)",
        "here(step, devices=8)",
        "here(step, devices=['cpu:0']).plan(PARAMS, BATCH)",
        "here(step, devices=jax.devices()[:2] * 2).plan(PARAMS, BATCH)",
        "here(step, remat=True)",
        "here(step, remat='all')",
        "here(step, remat=['inputs', None])",
        "here(step, remat=['inputs'] * 9).plan(PARAMS, BATCH)",
    ],
    "planners": [
        "here(step, planner='dp').plan(PARAMS, BATCH)",
        "here(step, planner=DataParallel).plan(PARAMS, BATCH)",
        "parallel(step, planner=Auto(max_axes=0)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Auto(max_axes=-1)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Auto(max_axes='two')).plan(PARAMS, BATCH)",
        "parallel(step, cache=17)",
        "parallel(step, cache='')",
        "parallel(step, progress='loud')",
        "parallel(step, planner=DataParallel()).plan(PARAMS, struct(30, 16))",
        "parallel(summed, planner=DataParallel(), donate_argnums=(0, 1)).plan(struct(), struct())",
        "parallel(tripled, planner=DataParallel(), donate_argnums=0).plan(X)",
        "parallel(step, planner=Zero(4)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Zero('3')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Zero(3)).plan(PARAMS, struct(30, 16))",
        "parallel(step, planner=Megatron(data=3, tensor=2)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Megatron(data=0, tensor=8)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Megatron(data=-2, tensor=-4)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Megatron(data='4', tensor=2)).plan(PARAMS, BATCH)",
        "parallel(step, planner=Megatron(data=4, tensor=2)).plan(PARAMS, struct(30, 16))",
    ],
    "saved plans": [
        "parallel(step, planner=Manual('absent.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('words.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('cut_short.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('empty.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('schema.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('fields.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('spec.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('axis.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('twice.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('rank.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual('operator.json')).plan(PARAMS, BATCH)",
        "parallel(tripled, planner=Manual('plan.json')).plan(X)",
        "parallel(step, planner=Manual('plan.json')).plan(PARAMS, struct(64, 16))",
        "here(step, cluster='4:a100-80g', planner=Manual('plan.json')).plan(PARAMS, BATCH)",
        "parallel(step, planner=Manual(None)).plan(PARAMS, BATCH)",
        "autopar.Plan.load('plan.json').shardings",
        "autopar.Plan.load('plan.json').save('absent/plan.json')",
    ],
    "arguments": [
        "here(scaled)(ones(), 'twice')",
        "here(scaled)({'rows': [ones(), object]}, 2.0)",
        "here(scaled, static_argnames='factor').plan(X, [2.0])",
        "here(scaled, static_argnums=1).plan(X, np.ones(2))",
        "compiled()(PARAMS, struct(64, 16))",
        "compiled()(PARAMS, struct(32, 16, dtype=np.float16))",
        "compiled()({'up': PARAMS['up']}, BATCH)",
        "compiled()(PARAMS, batch=BATCH)",
        "compiled()(PARAMS, 'batch')",
        "(lambda x: here(summed, donate_argnums=(0, 1))(x, x))(ones())",
        "here(step, cluster='16:a100-80g', planner=DataParallel())(PARAMS, BATCH)",
        "here(step, planner=Manual('plan.json'), cluster=CLUSTER, devices=jax.devices()[:2]).lower(PARAMS, BATCH)",
    ],
    "programs": [
        "here(printed, planner=autopar.Pipeline(stages=2, microbatches=4)).plan(PARAMS, BATCH)",
        "here(printed_by_layers, microbatches=4, donate_argnums=0).plan(PARAMS, BATCH)",
        "here(step, batch_argnames='images').plan(PARAMS, BATCH)",
        "here(step, batch_argnums='batch')",
        "here(step, batch_argnums=-3).plan(PARAMS, BATCH)",
        "here(updated).plan(X)",
        "here(over_one_axis).plan(X)",
        "here(over_half_of_the_devices, cluster=CLUSTER).plan(X)",
        "here(over_half_of_the_devices, cluster=CLUSTER, planner=DataParallel()).plan(X)",
        "here(constrained_to_8, devices=jax.devices()[:4]).plan(X)",
        "here(constrained_to_8, cluster='6:a100-80g').plan(X)",
    ],
    "rules": [
        "register_rule('dot_general', 'b i, i j -> b j')",
        "register_rule('scan', 'a -> a')",
        "register_rule('mine', 'b i, i j')",
        "register_rule('mine', 'b i, i 3 -> b')",
        "register_rule('mine', 'b b -> b')",
        "register_rule('mine', 'b i -> b j')",
        "register_rule('mine', 17)",
        "register_rule(17, 'a -> a')",
        "parallel(ruled('b i -> b i')).plan(X, X)",
        "parallel(ruled('b i, i -> b')).plan(X, X)",
        "parallel(ruled('b i, b j -> i j')).plan(struct(8, 4), struct(4, 8))",
        "parallel(ruled(lambda params, operands, results: 'b i')).plan(X, X)",
        "parallel(ruled(lambda params, operands, results: 3)).plan(X, X)",
        "here(ruled('b i -> b i', lambda x: jnp.sin(x).reshape(8, 8)), planner=DataParallel())(ones())",
        "here(ruled('b i -> b i', lambda x: jnp.broadcast_to(x.sum(0), (8, 8))), planner=DataParallel())(ones())",
    ],
}

COMMANDS = [
    "autopar plan train --cluster 8:h100",
    "autopar plan absent:example --cluster 8:h100",
    "autopar plan train:absent --cluster 8:h100",
    "autopar plan train:seventeen --cluster 8:h100",
    "autopar plan train:example --cluster 8",
    "autopar plan train:example --cluster 8:h100 --planner magic",
    "autopar plan train:example --cluster 8:h100 --planner megatron:4",
    "autopar plan train:example --cluster 8:h100 --planner megatron:4x4",
    "autopar plan train:example --cluster 8:h100 --planner manual:absent.json",
    "autopar plan train:example --cluster 8:h100 --out absent/plan.json",
    "autopar show absent.json",
    "autopar show words.json",
    "autopar diff plan.json empty.json",
    "autopar diff plan.json",
]


def call(source: str) -> None:
    """The call made, with all that this module names."""
    eval(source, globals())
