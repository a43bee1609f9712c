"""A planned pipeline ready to run, the seconds of its steps and instructions, and the activations it keeps alive."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import autopar
from autopar.runtime import build, runtime
from autopar.runtime.program import Free, Program, Run, Send
from benchmarks.trainings import Training
from passes.plan import PipelinePlan
from passes.transforms import stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A planned pipeline ready to run, and the flat arguments of a step, all but the batch where they are read."""

    plan: PipelinePlan
    pipeline: runtime.Pipeline
    leaves: list[Any]

    @property
    def program(self) -> Program:
        return self.pipeline.program

    def seconds(self) -> float:
        """Seconds of a step, to its last result."""
        start = time.perf_counter()
        jax.block_until_ready(self.pipeline(self.leaves))
        return time.perf_counter() - start

    def serial_seconds(self) -> float:
        """Seconds of all that the stages compute in a step, one after the other."""
        results, times = self.pipeline.timed(self.leaves, wait=True)
        jax.block_until_ready(results)
        pairs = zip(self.program.instructions, times.done, strict=True)
        return sum(seconds for instruction, seconds in pairs if isinstance(instruction, Run))

    def host_seconds(self, *, alone: bool) -> dict[str, list[float]]:
        """Seconds of the host for each instruction of a step by its kind; `alone` if nothing else runs meanwhile."""
        results, times = self.pipeline.timed(self.leaves, wait=alone)
        jax.block_until_ready(results)
        seconds_by_kind: dict[str, list[float]] = {"feed": [times.feed]}
        for instruction, seconds in zip(self.program.instructions, times.host, strict=True):
            seconds_by_kind.setdefault(type(instruction).__name__, []).append(seconds)
        return seconds_by_kind


def mlp(layers: int, width: int, rows: int) -> Training:
    """A perceptron of equal layers, trained by SGD with momentum on `rows` of random numbers."""
    keys = jax.random.split(jax.random.key(0), layers + 2)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:layers]]
    batch = {name: jax.random.normal(key, (rows, width)) for name, key in zip("xy", keys[layers:], strict=True)}
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Training(step=train_step, state=(params, optimizer.init(params)), batch=batch)


def load(training: Training, planner: autopar.Pipeline) -> Loaded:
    """The training as a pipeline on the first devices, after one step. Raises PlanningError where there is no plan."""
    devices = jax.devices()[: sum(planner.submeshes)]
    parallel = autopar.parallelize(training.step, planner=planner, devices=devices)
    arguments = training.state, training.batch
    plan, traced = cast("PipelinePlan", parallel.plan(*arguments)), parallel.trace(*arguments)
    cut = stages.cut(traced.graph, plan.firsts, traced.state_pairs)
    rows = {i: traced.graph.types[traced.graph.inputs[i]].shape[1] for i in traced.stacked}
    pipeline = runtime.load(build(traced, plan, cut, devices), rows, traced.out_tree, traced.weak)
    state, _ = pipeline(jax.tree.leaves((arguments, {})))
    return Loaded(plan=plan, pipeline=pipeline, leaves=jax.tree.leaves(((state, training.batch), {})))


def live_activations(program: Program, n_stages: int) -> tuple[int, ...]:
    """The most microbatches whose activations, made forward and read backward, each stage keeps at once [stages]."""
    read = {
        (slot, i.task.stage, i.task.microbatch)
        for i in program.instructions
        if isinstance(i, Run) and i.task is not None and i.task.kind != "forward"
        for slot in i.inputs
    }
    owner: dict[int, tuple[int, int]] = {}
    live: Counter[tuple[int, int]] = Counter()
    peak = [0] * n_stages
    for instruction in program.instructions:
        gone: tuple[int, ...] = ()
        match instruction:
            case Run(task=task, outputs=outputs) if task is not None and task.kind == "forward":
                key = (task.stage, task.microbatch)
                saved = [slot for slot in outputs if (slot, *key) in read]
                owner |= dict.fromkeys(saved, key)
                live[key] += len(saved)
                peak[task.stage] = max(peak[task.stage], sum(n > 0 for (k, _), n in live.items() if k == task.stage))
            case Run(segment=segment, inputs=inputs):
                gone = tuple(inputs[i] for i in program.segments[segment].donated)
            case Free(slots=slots):
                gone = slots
            case Send():
                pass
        for slot in gone:
            if slot in owner:
                live[owner.pop(slot)] -= 1
    return tuple(peak)
