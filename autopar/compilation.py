"""A function at given types on its way to devices: traced, planned, lowered and compiled, each when it is
first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
from jax.sharding import Sharding

from autopar.distributed import Processes, among
from autopar.errors import ArgumentError, DeviceError, explain
from autopar.following import Following, following
from autopar.frontend import Placed, Signature, Traced, Type, arriving, modules, structs_of, trace, types_of
from autopar.jax_compat import Device, configuration, is_described, is_manual
from autopar.jax_cudnn import assumed_cudnn
from autopar.module_stages import OfModules
from autopar.options import Settings
from autopar.phases import Phase, phase, unsaid
from autopar.plan import PipelinePlan, Plan
from autopar.planning import Chosen, agree, choose
from autopar.programs import Program, outermost, program_of
from autopar.recurring import Recurring
from autopar.rewrite import TracedStep, step_of
from autopar.runtime import Executable, Limit, Lowered, LoweredPipeline, Pipeline, StageStacked, limit_of
from autopar.unplanned import unplanned
from passes.cluster import Cluster, local_cluster
from passes.errors import InternalError, OverBudgetError, SeveralMeshesError
from passes.gc_pause import without_gc
from passes.plan import AnyPlan
from passes.text import quantities

_Key = tuple[Any, tuple[Any, ...], tuple[Type | None, ...], Hashable, Hashable]
_Call = tuple[Any, tuple[Any, ...], Hashable, Hashable]
_Run = Callable[[list[Any]], Any]


@dataclass(slots=True, kw_only=True)
class Compilation:
    """A function at given types: its trace; its plan, its jitted form and what runs it once they are needed.

    `structs` are its flat arguments and `statics` its static ones. `run` takes the flat arguments of a call.
    """

    signature: Signature
    settings: Settings
    structs: tuple[jax.ShapeDtypeStruct, ...]
    types: Recurring
    statics: tuple[Any, ...]
    traced: Traced
    chosen: Chosen | None = None
    planned: Program | None = None
    executable: Executable | Pipeline | StageStacked | None = None
    run: _Run | None = None
    placed: list[Sharding] | None = None

    def step(self) -> TracedStep:
        """The step as it is given to planners."""
        settings = self.settings
        return step_of(
            self.traced,
            self.structs,
            coupling=settings.microbatch_semantics,
            microbatches=settings.microbatches,
            remat=settings.remat,
        )

    def now(self) -> Traced:
        """The program as it was planned; before planning, as it is given to planners."""
        return self.chosen.traced if self.chosen else self.step().traced

    def plan(self) -> Plan | PipelinePlan:
        """The plan. Raises PlanningError where none is possible."""
        return self._chosen().plan

    def lower(self, *, again: bool = True) -> Lowered | LoweredPipeline:
        """The lowered program and the bytes that it may need; planned `again` if the compiled program needs more."""
        self._agree()
        limit, phase_of = self._limit(), self.phase if again else unsaid

        def tightened(needed: int) -> Lowered | LoweredPipeline:
            self._tighten(cast("Limit", limit), needed)
            return self.lower(again=False)

        retry = tightened if again and limit is not None and limit.searched else None
        with phase_of("lower"):
            return self.program().lower(self.structs, self.statics, limit, retry).followed(phase_of)

    def start(self, leaves: list[Any]) -> Any:
        """The results of the first call, after which `run` is set for the others."""
        with without_gc():
            self._agree()
        with self.phase("compile"):
            run = self._made(leaves)
            return self.program().executable()(leaves) if run is None else run(leaves)

    def ready(self, leaves: list[Any]) -> _Run:
        """The function that runs on such flat arguments, compiled if it was not yet."""
        if self.run is None:
            with without_gc():
                self._agree()
                with self.phase("compile"):
                    self._made(leaves)
        if (run := self.run) is None:
            raise InternalError("a report is asked for inside another transformation")
        return run

    def _made(self, leaves: list[Any]) -> _Run | None:
        """The function that runs from now on; None for a call inside another transformation."""
        executable = self._executable(again=True, nested=self.program().is_nested(leaves))
        if executable is None:
            return None
        self.executable = executable
        self.run = executable if isinstance(executable, Executable) else outermost(executable, self.program())
        return self.run

    def _chosen(self) -> Chosen:
        if self.chosen is None:
            cluster = partial(_cluster, self.settings, self._devices, processes := self._processes())
            with self.phase("plan") as current:
                settings = replace(self.settings, progress=current.report)
                self.chosen = choose(self.step(), cluster, settings, self.signature.source, processes)
                current.outcome = _outcome(self.chosen.plan)
        return self.chosen

    def phase(self, verb: str) -> AbstractContextManager[Phase]:
        """A context for a phase of the work, which is logged and reported as progress."""
        return phase(f"{verb} {self.signature.function}", self.settings.progress)

    def _processes(self) -> Processes | None:
        """The processes that run the program together; None if it is this one alone."""
        return among(self._devices()) if jax.distributed.is_initialized() else None

    def _agree(self) -> None:
        """Raises DisagreementError unless all processes have the same program and plan."""
        chosen, processes = self._chosen(), self._processes()
        if processes:
            agree(processes, self.step(), chosen.plan, self.signature.source)

    def _limit(self) -> Limit | None:
        """The memory limit of the compiled program, None where there is none to check."""
        chosen, source = self._chosen(), self.signature.source
        return limit_of(chosen.plan, self.present(), chosen.memory_limit, source, searched=chosen.searched)

    def _tighten(self, limit: Limit, needed: int) -> None:
        """Plans again within the limit less the bytes by which the compiled program exceeded its plan.

        Raises OverBudgetError, with what was compiled, where there is no such plan.
        """
        before, plan = self._chosen(), self.plan()
        less = max(1, int(limit.nbytes * plan.peak_nbytes / needed))
        tighter = replace(self, settings=replace(self.settings, memory_limit=less), chosen=None)
        try:
            chosen = tighter._chosen()
        except OverBudgetError as short:
            raise limit.error(plan, needed) from short
        self.chosen, self.planned, self.placed = replace(chosen, memory_limit=before.memory_limit), None, None

    def _executable(self, *, again: bool, nested: bool = False) -> Executable | Pipeline | StageStacked | None:
        """The compiled program, checked to need no more memory than the limit.

        None for a call that is `nested` in another transformation: what is compiled then is not this program.
        """
        plan, limit, program, processes = self.plan(), self._limit(), self.program(), self._processes()
        if limit is None and not processes:
            return program.executable()
        compiled = program.compiled(self.structs, nested=nested)
        if compiled is None:
            return None
        executable, needed = compiled
        if limit and processes:
            needed = max(map(int, processes.gather("the memory that the program needs", str(needed))))
        if limit is None or needed <= limit.nbytes:
            return executable
        if not again or not limit.searched:
            raise limit.error(plan, needed)
        self._tighten(limit, needed)
        return self._executable(again=False)

    def program(self) -> Program:
        """The program of the plan."""
        if self.planned is None:
            present, processes = self.present(), self._processes()
            made = (self._chosen(), self.signature, present, self.traced, processes)
            self.planned = program_of(self.plan(), *made)
        return self.planned

    def _devices(self) -> Sequence[Device]:
        """The devices to run on: those that the program itself names, in their order, else the user's, else all.

        Raises ArgumentError where the program names others than the user's.
        """
        given, named = self.settings.devices, self.traced.devices
        if given is not None and named is not None and not set(named) <= set(given):
            missing = [str(device) for device in named if device not in given]
            rule = f"{self.signature.function} itself places arrays on {', '.join(missing)}, which are none of them"
            remedy = "pass the devices of its meshes, or leave devices= out"
            raise ArgumentError(explain(f"devices={given!r:.60}", rule, self.signature.source, remedy))
        return named or given or jax.devices()

    def placements(self) -> list[Sharding]:
        """The sharding in which each flat argument is read; for a batch, that of its rows."""
        if self.placed is None:
            self._agree()
            self.placed = self.program().placements()
        return self.placed

    def present(self) -> tuple[Device, ...]:
        """The devices that the plan runs on. Raises DeviceError if too few are present."""
        plan, devices = self.plan(), tuple(self._devices())
        size, shape = plan.n_devices, plan.shape
        if len(devices) < size:
            kinds = ", ".join(sorted({d.device_kind for d in devices}))
            raise DeviceError(
                explain(
                    f"{self.signature.function} is planned for {size} devices ({shape}) of "
                    f"cluster {plan.cluster.name!r}",
                    f"{len(devices)} are here ({kinds})",
                    self.signature.source,
                    "run it where the cluster is, pass more devices= or leave out cluster= to plan for those that are "
                    "here, or ask only for .plan(...), which needs no devices",
                )
            )
        return devices[:size]


def _outcome(plan: AnyPlan) -> str:
    """A plan in one line."""
    step, peak = quantities.seconds(plan.step_seconds), quantities.nbytes(plan.peak_nbytes)
    return f"{plan.shape} on {plan.cluster.name}, {step} a step and {peak} of a device predicted"


def _cluster(settings: Settings, devices: Callable[[], Sequence[Device]], processes: Processes | None) -> Cluster:
    """The cluster to plan for: that of the settings, or one made of these devices and their processes' hosts."""
    cluster = settings.cluster
    if cluster is None:
        there, hosts = devices(), processes and {rank: processes.host(rank) for rank in processes.ranks}
        cluster = local_cluster(there, hosts, are_here=not any(map(is_described, there)))
    return settings.calibration.applied(cluster) if settings.calibration else cluster


@dataclass(slots=True, kw_only=True)
class Compilations:
    """A function's compilations: one for each combination of pytree, types, static values and configuration of JAX.

    `jit` are the options that are `jax.jit`'s.
    """

    fun: Callable[..., Any]
    signature: Signature
    jit: Mapping[str, Any]
    settings: Settings
    known: dict[_Key, Compilation] = field(default_factory=dict[_Key, Compilation])
    latest: dict[_Call, Compilation] = field(default_factory=dict)
    """The last compilation that ran for a pytree, static values and a configuration: its types are asked for first."""
    library: modules.Library | None = None
    pure: dict[modules.Library, Compilations] = field(default_factory=dict)
    """The same function of arrays alone, for each library of whose modules it was called with."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a call; inside a `shard_map` of the caller's, on one device, those of `jax.jit`."""
        if is_manual():
            return jax.jit(self.fun, **self.jit)(*args, **kwargs)
        dynamic, statics = self.signature.split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        place, configured = self._arriving(leaves), configuration()
        call = (tree, statics, place, configured)
        known = self.latest.get(call)
        if known is None or not known.types.fit(leaves):
            known = self.known.get((tree, statics, types_of(leaves), place, configured))
        if known is not None and known.run is not None:
            self.latest[call] = known
            return known.run(leaves)
        if (library := self._library(dynamic)) is not None:
            with library.entered(dynamic) as (arrays, finish):
                return finish(self._of(library).run(*self.signature.merge(arrays, args, kwargs)))
        compilation = self.of(args, kwargs)
        try:
            return compilation.start(leaves)
        except SeveralMeshesError as reason:
            jitted = jax.jit(self.fun, **self.jit)
            compilation.run = unplanned(reason, self.settings, self.signature, jitted, args, kwargs)
            return compilation.run(leaves)

    def clear(self) -> None:
        """Forgets all compilations, and JAX's traces of the function."""
        for known in (self, *self.pure.values()):
            cast("Any", jax.jit(known.fun, **known.jit)).clear_cache()
            known.known.clear()
            known.latest.clear()
        self.pure.clear()

    @property
    def last(self) -> Compilation | None:
        """The last compilation of those that run; None before the first call."""
        known = [*self.known.values(), *(pure.last for pure in self.pure.values())]
        compiled = (compilation for compilation in reversed(known) if compilation is not None)
        return next((compilation for compilation in compiled if compilation.run is not None), None)

    def about(self, value: Any, position: int = 0) -> tuple[Compilation, slice] | None:
        """(the last compilation with such an argument, its place among flat arguments), or None."""
        leaves, tree = jax.tree.flatten(value)
        types = types_of(leaves)
        every = [item for each in (*self.pure.values(), self) for item in each.known.items()]
        for (whole, _, known, _, _), compilation in reversed(every):
            arguments = whole.children()[0].children()
            first = sum(argument.num_leaves for argument in arguments[:position])
            at = slice(first, first + len(types))
            if len(arguments) > position and arguments[position] == tree and known[at] == types:
                return compilation, at
        return None

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | LoweredPipeline | OfModules:
        """The lowered program for arguments of these types; modules among them are modules for its calls too."""
        lowered, (dynamic, _) = self.of(args, kwargs).lower(), self.signature.split(args, kwargs)
        library = self._library(dynamic)
        return lowered if library is None else OfModules(lowered, library, self.signature)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compilation:
        """The compilation for arguments of these types, which may be `jax.ShapeDtypeStruct`s."""
        return self.given(args, kwargs)[0]

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compilation, list[Any]]:
        """(the compilation for these arguments, the flat arguments that it takes)."""
        dynamic, statics = self.signature.split(args, kwargs)
        if (library := self._library(dynamic)) is not None:
            with library.entered(dynamic) as (arrays, _):
                return self._of(library).given(*self.signature.merge(arrays, args, kwargs))
        structs = structs_of(dynamic, self.signature, len(args))
        place = self._arriving(leaves := jax.tree.leaves(dynamic))
        key = (jax.tree.structure(dynamic), statics, types_of(structs), place, configuration())
        follow = self._followed()
        settings = follow.settings(self.settings) if follow else self.settings
        if key not in self.known:
            with (
                phase(f"trace {self.signature.function}", settings.progress) as current,
                assumed_cudnn(settings.cluster),
            ):
                traced = trace(
                    self.fun,
                    args,
                    kwargs,
                    batch_argnums=self.settings.batch_argnums,
                    batch_argnames=self.settings.batch_argnames,
                    placed=follow.placed(self.signature, dynamic, len(args), structs, place[1]) if follow else place[1],
                    parts=settings.parts,
                    **self.jit,
                )
                current.outcome = quantities.count(len(traced.graph.nodes), "operator")
            self.known[key] = Compilation(
                signature=self.signature,
                settings=settings,
                structs=structs,
                types=Recurring(key[2]),
                statics=statics,
                traced=traced,
            )
        return self.known[key], leaves

    @property
    def planned(self) -> Compilation | None:
        """The last compilation that was planned; None before that."""
        known = [*self.known.values(), *(pure.planned for pure in self.pure.values())]
        return next((each for each in reversed(known) if each is not None and each.chosen is not None), None)

    def _followed(self) -> Following | None:
        """The plan of the function that this one follows; None if it follows none."""
        if (follow := self.settings.follow) is None:
            return None
        return following(follow.planned, follow.signature.function, self.signature.source)

    def _arriving(self, leaves: Sequence[Any]) -> tuple[Hashable, Placed]:
        """The part of a compilation's key with the plan that is followed and where arguments arrive and are to stay."""
        return (follow.key if (follow := self._followed()) else None), self._kept(leaves)

    def _kept(self, leaves: Sequence[Any]) -> Placed:
        """The sharding of each argument that arrives on a mesh and is to stay there."""
        return arriving(leaves) if self.settings.placed == "keep" else ()

    def _library(self, dynamic: Any) -> modules.Library | None:
        """The library whose modules are among the arguments; None where they were taken apart already."""
        return None if self.library else modules.library_of(dynamic)

    def _of(self, library: modules.Library) -> Compilations:
        if library not in self.pure:
            self.pure[library] = replace(
                self, fun=library.pure(self.fun), known={}, latest={}, pure={}, library=library
            )
        return self.pure[library]
