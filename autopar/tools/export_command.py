"""`autopar export`: a plan's mesh and shardings as a module of plain JAX, without autopar; or the program itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from autopar.frontend import modules
from autopar.plan import partition_spec
from autopar.rewrite import TracedStep, function_of
from autopar.tools import fit, targets
from autopar.tools.command import DONE, Command, Output, check_writable, write
from autopar.tools.explain_command import target_of
from autopar.tools.targets import UsageError
from passes.errors import explain
from passes.memory import compiler_of
from passes.plan import AnyPlan, Plan, load_plan
from passes.text import nbytes

_HELP = """\
Take a plan elsewhere.

--format shardings writes a small Python module with the plan's mesh and the
PartitionSpec of every argument and result, for jax.jit; it needs JAX alone.
--format jax-export writes the step, cut so, with the plan's microbatches and
recomputation, in JAX's own format, for jax.export.deserialize on as many
devices of the plan's kind, or CPUs."""

_MORE = """\
example:
  autopar export plan.json --format shardings -o shardings.py

With the module, your step runs under plain jax.jit:

  from shardings import shard
  step = shard(train_step, devices=jax.devices(), donate_argnums=0)

XLA chooses what lies between: operators and collectives may be others than the
plan's. Microbatches, recomputation, offload and pipelines are not in a module.

exit status: 0 written, 2 the plan cannot be taken there."""

_MODULE = '''"""Shardings of a train step for {devices} devices, written by `autopar export`; needs JAX alone.

    step = shard(train_step, devices=jax.devices(), donate_argnums=0)

Plan {fingerprint} by {planner} for {cluster}: {seconds:.3g} s a step predicted, {peak} of a device.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {mesh!r}
"""Axes of the mesh and their sizes."""

INPUTS = {{
{inputs}}}
"""The placement of every array among the arguments, in the order of `jax.tree.leaves`; by its path."""

OUTPUTS = {{
{outputs}}}
"""The placement of every array among the results, likewise."""


def mesh(devices):
    """The mesh over the first devices."""
    size = int(np.prod(list(MESH.values()), dtype=int))
    return Mesh(np.asarray(devices[:size]).reshape(tuple(MESH.values())), tuple(MESH))


def placed(specs, tree, devices):
    """The shardings as a pytree like `tree`."""
    on = mesh(devices)
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(specs):
        raise ValueError(f"{{len(leaves)}} arrays where the plan has {{len(specs)}}")
    return jax.tree.unflatten(structure, [NamedSharding(on, spec) for spec in specs.values()])


def shard(function, devices, **options):
    """The function under jax.jit, with these shardings of arguments and results; `options` are jax.jit's."""

    def run(*args):
        if args_of.get("jitted") is None:
            ins = placed(INPUTS, args, devices)
            outs = placed(OUTPUTS, jax.eval_shape(function, *args), devices)
            args_of["jitted"] = jax.jit(function, in_shardings=ins, out_shardings=outs, **options), ins
        jitted, ins = args_of["jitted"]
        return jitted(*jax.device_put(args, ins))

    args_of = {{}}
    return run
'''


def module(plan: Plan) -> str:
    """The text of a module with the shardings of a plan of one mesh."""

    def entries(names: tuple[str, ...], specs: tuple[PartitionSpec, ...]) -> str:
        return "".join(f"    {name!r}: {_written(spec)},\n" for name, spec in zip(names, specs, strict=True))

    return _MODULE.format(
        devices=plan.n_devices,
        fingerprint=plan.fingerprint,
        planner=plan.planner,
        cluster=plan.cluster.name,
        seconds=plan.step_seconds,
        peak=nbytes(plan.peak_nbytes),
        mesh=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        inputs=entries(plan.input_names, tuple(map(partition_spec, plan.inputs))),
        outputs=entries(plan.output_names, tuple(map(partition_spec, plan.outputs))),
    )


def _written(spec: PartitionSpec) -> str:
    return f"P({', '.join(repr(entry) for entry in spec)})"


_OF_LEAVES = """
Its call takes *jax.tree.leaves(args) and returns the leaves of the results: they
have types that JAX's format cannot hold. To keep them, register these where the
step is made: jax.export.register_namedtuple_serialization and the like."""


_PLATFORMS: Mapping[str, str] = MappingProxyType({"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"})
"""The kind of a device's compiler -> JAX's name of its platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A step in JAX's own format, for devices of these `platforms`; `of_leaves` if it takes and returns leaves instead
    of the step's own trees.
    """

    data: bytes
    platforms: tuple[str, ...]
    of_leaves: bool = False


def exported(plan: Plan, target: str) -> Exported:
    """The step of a target in JAX's own format, for the plan's devices and, to be tried, for CPUs.

    Arguments and results are placed as in the plan. In as many microbatches, with what its layers keep. Leaves are all
    that can be written where a tree has a type that JAX's format does not know, as the state of an optax optimizer.
    Raises PlanMismatchError where the plan was made for another step.
    """
    example = fit.Example.of(*targets.example(target))
    function, args = _of_arrays(example, target)
    traced = fit.traced_step(example, cluster=plan.cluster)
    planned = traced.variant(plan.variant())
    plan.check(planned.graph, planned.state_pairs)
    axes = tuple(jax.sharding.AxisType.Auto for _ in plan.mesh.axes)
    on = AbstractMesh(plan.mesh.sizes, plan.mesh.axes, axis_types=axes)
    if str(plan.variant()):
        function = _rewritten(planned, plan, on)

    def placed(tree: object, specs: Sequence[PartitionSpec]) -> object:
        leaves = [NamedSharding(on, spec) for spec in specs]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    stacked = planned.traced.stacked
    specs = [partition_spec(spec) for spec in plan.inputs]
    ins = placed(args, [PartitionSpec(*spec[1:]) if i in stacked else spec for i, spec in enumerate(specs)])
    outs = placed(jax.eval_shape(function, *args), tuple(map(partition_spec, plan.outputs)))
    platforms = tuple(dict.fromkeys((_PLATFORMS[compiler_of(plan.cluster.group().device)], "cpu")))
    try:
        try:
            return _serialized(function, args, ins, outs, platforms)
        except ValueError:
            leaves, ins, outs = map(jax.tree.leaves, (args, ins, outs))
            return replace(_serialized(_of_leaves(function, args), leaves, ins, outs, platforms), of_leaves=True)
    except ImportError as error:
        raise UsageError(f"--format jax-export: {error}; pip install 'autopar[export]'") from error


def _of_arrays(example: fit.Example, target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(the function of the arrays among an example's arguments, with its static ones bound, those arrays). Raises
    UsageError for arrays by name and for modules.
    """
    function, signature = getattr(example.step, "__wrapped__", example.step), example.function.signature
    (args, named), statics = signature.split(example.args, example.kwargs)
    if named or modules.library_of(args) is not None:
        rule = "arguments by name are not exported" if named else "modules are not exported, but functions of arrays"
        remedy = "return (step, args)" if named else "return a step of the arrays that the modules are split into"
        raise UsageError(explain(f"--format jax-export of {target}", rule, "", remedy))

    def of_arrays(*arrays: Any) -> Any:
        given, others = signature.merge((arrays, {}), example.args, example.kwargs)
        return function(*given, **others)

    return of_arrays if statics else function, args


def _serialized(
    function: Callable[..., Any], args: Sequence[Any], ins: Any, outs: Any, platforms: tuple[str, ...]
) -> Exported:
    """The function in JAX's own format, for the first platform alone where the others lack one of its operations.

    Raises ValueError for a type among arguments or results that the format cannot hold.
    """
    jitted = jax.jit(function, in_shardings=tuple(ins), out_shardings=outs)
    try:
        program = jax.export.export(jitted, platforms=platforms)(*args)
    except (NotImplementedError, ValueError):  # a kernel for one kind of accelerator
        platforms = platforms[:1]
        program = jax.export.export(jitted, platforms=platforms)(*args)
    return Exported(data=bytes(program.serialize()), platforms=platforms)


def _of_leaves(function: Callable[..., Any], args: Any) -> Callable[..., list[Any]]:
    """The function of the leaves of its arguments, which returns the leaves of its result."""
    structure = jax.tree.structure(args)
    return lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))


def _rewritten(planned: TracedStep, plan: Plan, on: AbstractMesh) -> Callable[..., Any]:
    """The function of a variant of a step, of the user's own arguments: rows of its batch become microbatches."""
    traced, run = planned.traced, function_of(planned.traced)
    types = [traced.graph.types[value] for value in traced.graph.inputs]

    def function(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        for i in traced.stacked:
            microbatches = leaves[i].reshape(types[i].shape)
            placement = NamedSharding(on, partition_spec(plan.inputs[i]))
            leaves[i] = jax.lax.with_sharding_constraint(microbatches, placement)
        return jax.tree.unflatten(traced.out_tree, run(*leaves))

    return function


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    parser.add_argument("--format", choices=("shardings", "jax-export"), required=True, help="what is written")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="PATH", help="the file")
    parser.add_argument("--target", metavar="MODULE:FUNCTION", help="the step to export (default: as noted in PLAN)")


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    plan = load_plan(arguments.plan)
    _check(plan, arguments.format, arguments.plan)
    (program,) = plan.programs
    check_writable(arguments.out, "the program", arguments.plan)
    if arguments.format == "shardings":
        write(arguments.out, module(program), "the module")
        return f"{arguments.out}: {len(program.inputs)} arrays on mesh {program.mesh}", DONE
    target = arguments.target or target_of(arguments.plan)
    if not target:
        raise UsageError("--format jax-export needs the step: --target MODULE:FUNCTION")
    jax.config.update("jax_platforms", "cpu")
    with Console(stderr=True, highlight=False).status("tracing"):
        step = exported(program, target)
    write(arguments.out, step.data, "the program")
    note, on = _OF_LEAVES if step.of_leaves else "", " or ".join(step.platforms)
    return f"{arguments.out}: {nbytes(len(step.data))}, for jax.export.deserialize on {on}{note}", DONE


def _check(plan: AnyPlan, format: str, path: Path) -> None:
    """Raises UsageError for a plan that is more than a format can say."""
    variant, stages = plan.variant(), plan.shape if plan.variant().stages else ""
    with_autopar = f"run it with autopar: parallelize(train_step, planner=Manual({str(path)!r}))"
    if format == "shardings" and (chosen := ", ".join(filter(None, (stages, str(variant))))):
        rule = f"shardings alone do not say stages, microbatches, recomputation or offload, and this plan has {chosen}"
        remedy = with_autopar if stages or variant.offload else f"take --format jax-export, or {with_autopar}"
        raise UsageError(explain(f"--format shardings of {path}", rule, "", remedy))
    if more := ", ".join(filter(None, (stages, "state offloaded" if variant.offload else ""))):
        rule = f"it is one program on one mesh, whose arrays are on devices, and this plan has {more}"
        raise UsageError(explain(f"--format jax-export of {path}", rule, "", with_autopar))


COMMAND = Command(
    name="export",
    summary="take a plan to plain JAX",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
