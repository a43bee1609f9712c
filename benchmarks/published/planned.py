"""The plan of a configuration that somebody measured, by a hand-made planner.

What `autopar.parallelize(step, cluster=, planner=).plan(shapes)` does is done here part by part, so that rows share
what they have in common: the trace of a model at a batch size, and the same in microbatches. No memory limit is
checked, as plans that do not fit are predictions, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax

from autopar.frontend import Traced, trace
from autopar.rewrite import step_of
from benchmarks.published.alike import DeepMegatron
from benchmarks.published.rows import Answer
from passes.cluster import Cluster
from passes.gc_pause import without_gc
from passes.plan import AnyPlan, PipelinePlan
from passes.planners import Auto, Planner, PlanOptions, Zero
from passes.step import Step, Variant

Precision = Literal["master copy", "float32 gradients", "single"]
"""Where a model computes in half precision: what the optimizer updates is a copy in float32 beside parameters in half
precision (Megatron-LM), of which gradients are added up in float32 too (nanotron). `single` has one precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training: a model and its configuration, the sequences of a step, the precision of its state, its optimizer."""

    module: ModuleType
    config: Any
    batch: int
    precision: Precision
    optimizer: Literal["adam", "rmsprop"] = "adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A job on a cluster: `data` x `tensor` devices for each of `pipeline` groups, which have `interleave` stages each.

    Stages have equally many layers; or, with `by_work`, numbers of layers that make their work as even as can be; or,
    with `ends_count`, equally many where the embedding and the head count as a layer each; or those of `layers`
    [stages]. With `sequence`, what layers save for the backward pass is cut along the sequence over tensor devices.
    `zero` is the stage of ZeRO over `data`, 0 for none. With `total`, the answer's bytes are the sum over the groups of
    their fullest device's, else those of the fullest device.
    """

    job: Job
    cluster: Cluster
    microbatches: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    schedule: str = "1f1b"
    by_work: bool = False
    ends_count: bool = False
    layers: tuple[int, ...] = ()
    sequence: bool = False
    zero: int = 0
    total: bool = False

    def answer(self) -> Answer:
        """Seconds of a step and peak bytes as planned. Raises PlanningError where there is no such plan."""
        plan = self.plan()
        nbytes = plan.peak_nbytes
        if self.total and plan.timeline is not None:
            nbytes = sum(plan.timeline.peak_nbytes)
        limit = Auto().limit(self.cluster)
        return Answer(seconds=plan.step_seconds, nbytes=nbytes, limit_nbytes=limit)

    def plan(self) -> AnyPlan:
        """The plan. Schedules with the same number of stages share one, as stages cost the same under each of them."""
        if self.interleave > 1 or self.pipeline == 1:
            return _plan(self)
        return replace(cast("PipelinePlan", _plan(replace(self, schedule="1f1b"))), schedule_name=self.schedule)


@lru_cache(maxsize=4)
def _plan(config: Configuration) -> AnyPlan:
    count, stages = config.microbatches, config.pipeline * config.interleave
    with without_gc():
        return (
            planner(config)
            .plan(step(config.job, count, stages, by_layer=_is_cut_by_layer(config)), config.cluster, PlanOptions())
            .plan
        )


def _is_cut_by_layer(config: Configuration) -> bool:
    return config.by_work or config.ends_count or bool(config.layers)


def planner(config: Configuration) -> Planner:
    """The hand-made planner of a configuration."""
    if config.zero and config.tensor * config.pipeline == 1:
        return Zero(config.zero)
    return DeepMegatron(
        data=config.data,
        tensor=config.tensor,
        pipeline=config.pipeline,
        interleave=config.interleave,
        microbatches=config.microbatches,
        schedule=config.schedule,
        zero=config.zero,
        ends_count=config.ends_count,
        layers=config.layers,
        sequence=config.sequence,
    )


@lru_cache(maxsize=2)
def traced(job: Job) -> Traced:
    """The job's train step, from shapes alone."""
    state, batch = shapes(job)
    return trace(make_step(job), (state, batch), {}, donate_argnums=(0,))


@lru_cache(maxsize=2)
def step(job: Job, microbatches: int, stages: int, *, by_layer: bool) -> Step:
    """The job's train step in microbatches, its loop over layers in a chunk a stage or, `by_layer`, in a chunk a layer.

    Gradients in half precision are rounded once a microbatch, which is not exactly the step; the sources do so too.
    """
    written = step_of(traced(job), jax.tree.leaves(shapes(job)), coupling="independent")
    chunks = job.config.layers if by_layer else stages
    return written.variant(Variant(microbatches=microbatches, stages=chunks if stages > 1 else 0))


def shapes(job: Job) -> tuple[Any, Any]:
    """The shapes of the state and of a batch."""
    state = jax.eval_shape(partial(_make_state, job), jax.random.key(0))
    return state, jax.eval_shape(partial(job.module.example_batch, job.config, job.batch), jax.random.key(1))


def _optimizer(job: Job) -> optax.GradientTransformation:
    if job.optimizer == "rmsprop":
        return optax.rmsprop(1e-4)
    apart = [optax.stateless(lambda updates, _: _written(updates))] if job.precision == "master copy" else []
    return optax.chain(optax.clip_by_global_norm(1.0), *apart, optax.adamw(1e-4, b2=0.95, weight_decay=0.1))


def _make_state(job: Job, key: jax.Array) -> Any:
    params = job.module.init(job.config, key)
    master = None if job.precision == "single" else _cast(params, "float32")
    return params, master, _optimizer(job).init(params if master is None else master)


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


_BACKWARD = "transpose(jvp(hooks))"
"""The scope of what hooks do with a gradient as soon as it is there: a part of the backward pass, microbatch by
microbatch."""


LOSS_SCALE = 1024.0
"""What gradients in half precision are multiples of; any number costs the same."""


def _unscaled(gradients: Any) -> Any:
    """The gradients divided by the scale of the loss as Megatron-LM does it: by kernels that copy them to float32, then
    divide the copy; the norm and the clipping follow, and the update after those, by kernels of their own.
    """
    return _written(jax.tree.map(lambda x: x * (1 / LOSS_SCALE), _written(_cast(gradients, "float32"))))


def _written(tree: Any) -> Any:
    """The arrays behind a barrier each, so that no kernel makes them for another."""
    return jax.tree.map(jax.lax.optimization_barrier, tree)


def make_step(job: Job) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """An ordinary train step (state, batch) -> (state, loss); state is (parameters, copy or None, optimizer's own)."""

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, master, moments = state
        loss, gradients = jax.value_and_grad(lambda p: job.module.loss(job.config, p, batch))(params)
        if job.precision == "float32 gradients":
            with jax.named_scope(_BACKWARD):
                gradients = _cast(gradients, "float32")
        if master is None:
            updates, moments = _optimizer(job).update(gradients, moments, params)
            return (optax.apply_updates(params, updates), None, moments), loss
        gradients = _unscaled(gradients) if job.precision == "master copy" else gradients
        updates, moments = _optimizer(job).update(gradients, moments, master)
        master = jax.tree.map(jnp.add, master, updates)
        return (_cast(master, job.config.param_dtype), master, moments), loss

    return train_step
