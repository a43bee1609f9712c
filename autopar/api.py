"""`@parallelize`: an ordinary JAX function, planned for many devices at its first call and run by that plan.

The meaning of a function and of every option is `jax.jit`'s.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Literal, cast

import jax

import passes.plan
from autopar.cache import Key, PlanCache, checked_cache, key_of, relocated
from autopar.errors import ArgumentError, DeviceError, UnsupportedError, explain
from autopar.frontend import Names, Positions, Signature, Traced, Type, abstract, signature_of, trace, types_of
from autopar.jax_compat import Device, configuration, is_traced
from autopar.options import (
    checked_cluster,
    checked_coupling,
    checked_devices,
    checked_limit,
    checked_microbatches,
    checked_planner,
    checked_progress,
)
from autopar.plan import Plan
from autopar.rewrite import MOST, Family, TracedForms, in_pieces, microbatched, recomputed
from autopar.runtime import (
    Compiled,
    Executable,
    Joined,
    Limit,
    Lowered,
    Pieces,
    Pipeline,
    Prepared,
    build,
    limit_of,
    load,
    lower,
    needed_nbytes,
    pipeline_nbytes,
    prepare,
)
from passes.cluster import Cluster, local_cluster
from passes.errors import OverBudgetError
from passes.gc_pause import uncollected
from passes.intra_op import Variant, variant_of
from passes.ir import has_effect
from passes.plan import PipelinePlan, load_plan
from passes.planners import Auto, Manual, Planner
from passes.planners import infeasible as shortage
from passes.progress import Report, silent
from passes.transforms import Coupling, Kept, kept_of, layers, stages

__all__ = ["Compiled", "Lowered", "ParallelFunction", "parallelize"]

_Key = tuple[Any, tuple[Any, ...], tuple[Type | None, ...], Hashable]


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    planner: Planner | None = None,
    devices: Sequence[Device] | None = None,
    static_argnums: Positions = None,
    static_argnames: Names = None,
    donate_argnums: Positions = None,
    donate_argnames: Names = None,
    microbatches: int | None = None,
    microbatch_semantics: Coupling = "exact",
    memory_limit: int | str | None = None,
    remat: Kept | Sequence[Kept] | None = None,
    cache: str | os.PathLike[str] | PlanCache | None = None,
    progress: Report | None = None,
) -> Any:
    """`fun` as a ParallelFunction; a decorator that makes one, without `fun`.

    `cluster` is what to plan for, by description (`"8x8:a100-80g"`) or value; by default the `devices`, which are by
    default all of JAX's. `planner` chooses, `Auto()` by default. The batch is computed in `microbatches` that add up to
    the same step; where an operator couples them (batch normalisation) there is none of that, unless
    `microbatch_semantics` is `"independent"`: then each takes its own statistics, and results are averaged.

    No device may need more than `memory_limit` (bytes, or in words, `"12 GiB"`), by default the device's memory less a
    reserve. Where the step does not fit as it is, `Auto` cuts its state further, computes in more microbatches or lets
    layers compute again what they do not keep, whichever is cheapest. `remat` decides the latter instead: what each
    layer keeps for the backward pass, `"everything"`, `"matmuls"` (what products with weights make) or `"inputs"`, one
    word for all layers or one for each. Plans are kept in the folder `cache` and found there the next time; by default
    they are not. `progress` is called with an `autopar.Progress` at each step of a search. The other options are
    `jax.jit`'s.

    Raises ClusterError for a description that cannot be read, ArgumentError for what is no planner or no devices.
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }

    def decorate(fun: Callable[..., Any]) -> ParallelFunction:
        return ParallelFunction(
            fun,
            cluster=cluster,
            planner=planner,
            devices=devices,
            options=options,
            microbatches=microbatches,
            coupling=microbatch_semantics,
            memory_limit=memory_limit,
            remat=remat,
            cache=cache,
            progress=progress,
        )

    return decorate if fun is None else decorate(fun)


@dataclass(slots=True)
class _Program:
    """A function at given types: its trace; then its plan, its jitted form and what runs it, once they are wanted.

    `traced` is the form of the step that is planned, once there is a plan; `written` is what it was before.
    """

    structs: tuple[jax.ShapeDtypeStruct, ...]
    traced: Traced
    written: Traced
    plan: Plan | PipelinePlan | None = None
    prepared: Prepared | None = None
    executable: Executable | Pipeline | Joined | None = None
    pieces: Pieces | None = None
    out_tree: Any = None
    kept: tuple[Kept, ...] = ()
    statics: tuple[Any, ...] = ()


class ParallelFunction:
    """A function that plans itself for a cluster; made by `parallelize`.

    It keeps one program for each pytree, set of types, static values and configuration of JAX that it meets, as
    `jax.jit` does.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        cluster: str | os.PathLike[str] | Cluster | None,
        planner: Planner | None,
        devices: Sequence[Device] | None,
        options: dict[str, Any],
        microbatches: int | None = None,
        coupling: Coupling = "exact",
        memory_limit: int | str | None = None,
        remat: Kept | Sequence[Kept] | None = None,
        cache: str | os.PathLike[str] | PlanCache | Literal[False] | None = None,
        progress: Report | None = None,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._cluster = checked_cluster(cluster)
        self._planner = Auto() if planner is None else checked_planner(planner)
        self._memory_limit = checked_limit(memory_limit)
        self._remat: Kept | Sequence[Kept] | None = remat
        if self._memory_limit is not None and isinstance(self._planner, Auto):
            self._planner = replace(self._planner, memory_limit=self._memory_limit)
        self._devices = None if devices is None else checked_devices(devices)
        self._options = options
        self._microbatches = checked_microbatches(microbatches)
        self._coupling: Coupling = checked_coupling(coupling)
        self._cache = checked_cache(cache)
        self._report: Report = silent if progress is None else checked_progress(progress)
        self._signature: Signature = signature_of(fun, options["static_argnums"], options["static_argnames"])
        self._programs: dict[_Key, _Program] = {}
        jax.jit(fun, **options)  # an option that jit refuses is refused here and now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._fun(*args, **kwargs)
        dynamic, statics = self._signature.split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        program = self._programs.get((tree, statics, types_of(leaves), configuration()))
        if program is None or program.executable is None:
            with uncollected():
                program = self._program(args, kwargs)
                self._planned(program)
            executable = self._executable(program, again=True, nested=any(map(is_traced, leaves)))
            if executable is None:
                return self._prepared(program).executable()(leaves)
            program.executable = executable
        if not isinstance(program.executable, Executable) and any(map(is_traced, leaves)):
            raise UnsupportedError(
                explain(
                    f"{self._signature.function} inside another transformation of JAX's",
                    "a pipeline is many programs on several submeshes, and no operation of another one",
                    self._signature.source,
                    "take jit, derivatives and batches inside the function, or use a planner without stages",
                )
            )
        return program.executable(leaves)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The program of `fun(*args, **kwargs)` as planning sees it, in the form chosen once there is a plan."""
        program = self._program(args, kwargs)
        if isinstance(self._planner, Auto) and program.plan is None and self._microbatches is not None:
            return self._forms(program).program(Variant(microbatches=self._microbatches))
        return program.traced

    def plan(self, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """How `fun(*args, **kwargs)` will run; `jax.ShapeDtypeStruct`s are enough. No device is touched.

        Without a `cluster`, JAX is asked which devices there are. Raises PlanningError where no plan is possible.
        """
        with uncollected():
            return self._planned(self._program(args, kwargs))

    def replan(
        self,
        *,
        cluster: str | Cluster | None = None,
        planner: Planner | None = None,
        microbatches: int | None = None,
        memory_limit: int | str | None = None,
        cache: str | os.PathLike[str] | PlanCache | Literal[False] | None = None,
        progress: Report | None = None,
    ) -> ParallelFunction:
        """The same function with the same jit options, for another cluster, by another planner or otherwise cut.

        `cache=False` is none.
        """
        return ParallelFunction(
            self._fun,
            cluster=self._cluster if cluster is None else cluster,
            planner=self._planner if planner is None else planner,
            devices=self._devices,
            options=self._options,
            microbatches=self._microbatches if microbatches is None else microbatches,
            coupling=self._coupling,
            memory_limit=self._memory_limit if memory_limit is None else memory_limit,
            remat=self._remat,
            cache=self._cache if cache is None else cache,
            progress=self._report if progress is None else progress,
        )

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """`fun(*args, **kwargs)` lowered for the plan's devices, which must be here; `.compile()` comes next."""
        return self._lowered(self._program(args, kwargs), again=True)

    def _lowered(self, program: _Program, *, again: bool) -> Lowered:
        """The program lowered, with what it may need; it is planned `again` if the compiled program needs more."""
        lowered = lower(self._prepared(program), program.structs, program.statics)
        limit = self._limit(program)
        if limit is None:
            return lowered

        def tightened(needed: int) -> Lowered:
            before = self._planned(program)
            self._tighten(program, limit, needed)
            if isinstance(program.plan, PipelinePlan):  # which has no lowered form
                raise limit.error(before, needed)
            return self._lowered(program, again=False)

        return replace(lowered, _limit=limit, _again=tightened if again and limit.searched else None)

    def _limit(self, program: _Program) -> Limit | None:
        """What the compiled program may need on a device, None for all that there is."""
        plan, planner = self._planned(program), self._planner
        asked = self._memory_limit or (planner.memory_limit if isinstance(planner, Auto) else None)
        source, searched = self._signature.source, isinstance(planner, Auto)
        return limit_of(plan, self._present(plan), asked, source, searched=searched)

    def _tighten(self, program: _Program, limit: Limit, needed: int) -> None:
        """Plans again, for as much less than the limit as the compiled program needed more than was planned.

        Raises OverBudgetError, with what was compiled, where there is no such plan.
        """
        plan = self._planned(program)
        tighter = self.replan(memory_limit=max(1, int(limit.nbytes * plan.peak_nbytes / needed)))
        found = _Program(
            program.structs, program.written, program.written, out_tree=program.out_tree, kept=program.kept
        )
        try:
            tighter._planned(found)
        except OverBudgetError as short:
            raise limit.error(plan, needed) from short
        program.traced, program.plan, program.pieces = found.traced, found.plan, found.pieces
        program.prepared = None

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        dynamic, statics = self._signature.split(args, kwargs)
        leaves, tree = jax.tree.flatten(abstract(dynamic, self._signature, len(args)))
        key = (tree, statics, types_of(leaves), configuration())
        if key not in self._programs:
            traced, pieces = trace(self._fun, args, kwargs, **self._options), None
            out_tree = traced.out_tree
            if kept := self._kept(traced):
                traced = recomputed(traced, kept)
            if not isinstance(self._planner, Auto) and (
                self._count() > 1 or getattr(self._planner, "pipelined", False)
            ):
                traced, pieces = self._in_microbatches(traced, leaves)
            self._programs[key] = _Program(
                tuple(leaves), traced, traced, pieces=pieces, out_tree=out_tree, kept=kept, statics=statics
            )
        return self._programs[key]

    def _kept(self, traced: Traced) -> tuple[Kept, ...]:
        """What each layer keeps: as asked for, else as a saved plan says, else nothing is said."""
        planned: tuple[Kept, ...] = getattr(self._planner, "remat", ())
        if self._remat is None:
            return planned
        named = (self._remat,) * len(layers(traced.graph)) if isinstance(self._remat, str) else self._remat
        return kept_of(named)

    def _in_microbatches(self, traced: Traced, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Traced, Pieces | None]:
        """The program in microbatches; for a pipeline its loops over layers are in pieces, as a saved plan has them."""
        planner, count = self._planner, self._count()
        if not getattr(planner, "pipelined", False):
            return microbatched(traced, structs, count, self._coupling), None
        saved = planner.source if isinstance(planner, Manual) else None
        saved = load_plan(saved) if isinstance(saved, str | os.PathLike) else saved
        stages = len(saved.stages) if isinstance(saved, PipelinePlan) else getattr(planner, "stages", 1)
        found: dict[Pieces | None, Traced] = {}
        for number in (stages, *range(1, MOST + 1)) if saved else (stages,):
            cut, pieces = in_pieces(traced, number)
            if pieces not in found:
                inputs = pieces.structs(structs) if pieces else structs
                found[pieces] = microbatched(cut, inputs, count, self._coupling)
            if saved is None or found[pieces].graph.fingerprint == saved.fingerprint:
                return found[pieces], pieces
        pieces, program = next(iter(found.items()))
        return program, pieces

    def _count(self) -> int:
        """How many microbatches: as asked for, else as a saved plan says, else one. Raises ArgumentError."""
        planned: int | None = getattr(self._planner, "microbatches", None)
        if planned and self._microbatches and planned != self._microbatches:
            rule = f"the plan was made for {planned}"
            raise ArgumentError(
                explain(f"microbatches={self._microbatches}", rule, "", "leave microbatches out, or plan again")
            )
        return self._microbatches or planned or 1

    def _executable(
        self, program: _Program, *, again: bool, nested: bool = False
    ) -> Executable | Pipeline | Joined | None:
        """What runs the program, checked to need no more memory than it may.

        None for a call that is `nested` in another transformation: what is compiled then is not this program.
        """
        plan, limit = self._planned(program), self._limit(program)
        if isinstance(plan, PipelinePlan):
            pipeline = self._pipeline(program, plan)
            needed = pipeline_nbytes(pipeline.program, pipeline.executables) if limit else 0
            found = pipeline
            if (pieces := program.pieces) is not None:
                found = Joined(pipeline, pieces, program.out_tree, pieces.donation(pipeline.program.donation))
        elif limit is None:
            return self._prepared(program).executable()
        elif nested:
            return None
        else:
            compiled = lower(self._prepared(program), program.structs).compile()
            needed, found = needed_nbytes(plan, compiled.memory_analysis()), compiled.executable()
        if limit is None or needed <= limit.nbytes:
            return found
        if not again or not limit.searched:
            raise limit.error(plan, needed)
        self._tighten(program, limit, needed)
        return self._executable(program, again=False)

    def _pipeline(self, program: _Program, plan: PipelinePlan) -> Pipeline:
        """A pipeline's program, compiled."""
        traced = program.traced
        cut = stages.cut(traced.graph, plan.firsts, traced.state_pairs)
        written = build(traced, plan, cut, self._present(plan))
        rows = {i: traced.graph.types[traced.graph.inputs[i]].shape[1] for i in traced.stacked}
        return load(written, rows, traced.out_tree, traced.weak)

    def _planned(self, program: _Program) -> Plan | PipelinePlan:
        if program.plan is not None:
            return program.plan
        cluster, cache = self._cluster_here(), self._cache
        key = self._key(program, cluster) if cache else None
        if cache is None or key is None:
            return self._made(program, cluster)
        plan = cache.read(key, partial(self._restored, program))
        if plan is None:
            plan = self._made(program, cluster)
            cache.write(key, plan)
        return plan

    def _made(self, program: _Program, cluster: Cluster) -> Plan | PipelinePlan:
        """The planner's plan."""
        if self._searches(program):
            return self._searched(program, cluster)
        if isinstance(self._planner, Auto):
            return self._chosen(program, self._planner, cluster)
        traced = program.traced
        plan = self._planner.plan(traced.graph, cluster, state_pairs=traced.state_pairs, donated=traced.donated)
        shortage.check(plan, cluster, self._memory_limit, _at(self._signature.source))
        if isinstance(plan, PipelinePlan):
            program.plan = plan
            return plan
        plan = replace(plan, microbatches=self._count(), remat=program.kept)
        program.plan = Plan.bind(plan, traced.in_tree, traced.out_tree)
        return program.plan

    def _key(self, program: _Program, cluster: Cluster) -> Key | None:
        """What the plan of a program that is not planned yet follows from."""
        options = {
            "microbatches": self._microbatches,
            "microbatch_semantics": self._coupling,
            "memory_limit": self._memory_limit,
            "remat": program.kept,
        }
        return key_of(program.traced, cluster, self._planner, options)

    def _restored(self, program: _Program, plan: passes.plan.Plan | PipelinePlan) -> Plan | PipelinePlan | None:
        """A plan from the cache as the program's own; the program becomes the form of the step that it is of.

        None where lines of the source have changed so that the plan cannot name them. Raises PlanningError for a plan
        of something else.
        """
        traced, pieces = program.traced, program.pieces
        if isinstance(plan, PipelinePlan):
            if isinstance(self._planner, Auto):
                traced, pieces = in_pieces(traced, self._planner.pieces)
                structs = pieces.structs(program.structs) if pieces else program.structs
                traced = microbatched(traced, structs, plan.microbatches, self._coupling)
            plan.check(traced.graph, traced.state_pairs)
        else:
            if isinstance(self._planner, Auto):
                traced = self._forms(program).program(variant_of(replace(plan, remat=()) if program.kept else plan))
            plan.check(traced.graph)
        found = relocated(plan, traced)
        if found is None:
            return None
        found = found if isinstance(found, PipelinePlan) else Plan.bind(found, traced.in_tree, traced.out_tree)
        program.traced, program.pieces, program.plan = traced, pieces, found
        return found

    def _chosen(self, program: _Program, planner: Auto, cluster: Cluster) -> Plan:
        """The plan of the cheapest form of the step that fits; the program becomes that form."""
        forms = self._forms(program)
        return self._formed(program, forms, planner.choose(forms, cluster, self._report))

    def _formed(self, program: _Program, forms: TracedForms, plan: passes.plan.Plan) -> Plan:
        """A plan of one form of the step; the program becomes that form."""
        plan = replace(plan, remat=program.kept or plan.remat)
        variant = variant_of(replace(plan, remat=()) if program.kept else plan)
        program.traced = forms.program(variant)
        program.plan = Plan.bind(plan, program.traced.in_tree, program.traced.out_tree)
        return program.plan

    def _forms(self, program: _Program) -> TracedForms:
        return TracedForms(
            traced=program.traced,
            structs=program.structs,
            coupling=self._coupling,
            count=self._microbatches,
            fixed=bool(program.kept),
        )

    def _cluster_here(self) -> Cluster:
        return self._cluster or local_cluster(self._present_devices())

    def _searches(self, program: _Program) -> bool:
        """Whether the planner looks for stages, and so for a number of microbatches too; stages have no callbacks."""
        if not isinstance(self._planner, Auto) or any(map(has_effect, program.traced.graph.nodes)):
            return False
        return self._planner.searches(self._cluster_here())

    def _searched(self, program: _Program, cluster: Cluster) -> Plan | PipelinePlan:
        """The plan of a search over stages and microbatches; the program becomes the one that it is of.

        Stages are searched with loops over layers in pieces, a plan without stages is of whole ones.
        """
        planner = cast("Auto", self._planner)
        cut, pieces = in_pieces(program.traced, planner.pieces)
        structs = pieces.structs(program.structs) if pieces else program.structs
        family = Family(
            traced=cut, structs=structs, coupling=self._coupling, layers=planner.pieces, count=self._microbatches
        )
        forms = self._forms(program)
        plan = planner.search(forms, cluster, family, self._report)
        if not isinstance(plan, PipelinePlan):
            return self._formed(program, forms, plan)
        program.traced, program.plan, program.pieces = family.member(plan.microbatches), plan, pieces
        return plan

    def _prepared(self, program: _Program) -> Prepared:
        if program.prepared is None:
            plan = self._planned(program)
            if isinstance(plan, PipelinePlan):
                raise UnsupportedError(
                    explain(
                        "lower() of a pipeline",
                        "a pipeline is many programs on several submeshes",
                        self._signature.source,
                        "call the function itself, which compiles and runs them all",
                    )
                )
            program.prepared = prepare(self._signature, program.traced, plan, self._present(plan))
        return program.prepared

    def _present_devices(self) -> Sequence[Device]:
        return jax.devices() if self._devices is None else self._devices

    def _present(self, plan: Plan | PipelinePlan) -> tuple[Device, ...]:
        """The devices that a plan runs on. Raises DeviceError if there are too few."""
        devices = tuple(self._present_devices())
        size, shape = _extent(plan)
        if len(devices) < size:
            kinds = ", ".join(sorted({d.device_kind for d in devices}))
            raise DeviceError(
                explain(
                    f"{self._signature.function} is planned for {size} devices ({shape}) of "
                    f"cluster {plan.cluster.name!r}",
                    f"{len(devices)} are here ({kinds})",
                    self._signature.source,
                    "run it where the cluster is, pass more devices= or leave out cluster= to plan for those that are "
                    "here, or ask only for .plan(...), which needs no devices",
                )
            )
        return devices[:size]


def _at(source: str) -> str:
    return f"at {source}" if source else ""


def _extent(plan: Plan | PipelinePlan) -> tuple[int, str]:
    """(devices, in words) of a plan."""
    if isinstance(plan, PipelinePlan):
        return plan.n_devices, f"{len(plan.stages)} stages"
    return plan.mesh.size, str(plan.mesh)
