"""The programs of plans on their way to devices: one program on a mesh, or those of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from autopar.distributed import Processes
from autopar.errors import UnsupportedError, explain
from autopar.frontend import Signature, Traced
from autopar.jax_compat import Device, is_traced
from autopar.plan import PipelinePlan, Plan
from autopar.planning import Chosen
from autopar.runtime import (
    Executable,
    Limit,
    Lowered,
    LoweredPipeline,
    Pipeline,
    Prepared,
    StageStacked,
    build,
    load,
    lower,
    needed_nbytes,
    pipeline_nbytes,
    placements,
    prepare,
)
from autopar.runtime import Program as Instructions
from passes.errors import InternalError
from passes.transforms import stages

Structs = Sequence[jax.ShapeDtypeStruct]
Tightened = Callable[[int], Lowered | LoweredPipeline]
"""A function from the bytes by which a compiled program exceeded its plan to the program of a plan of that
much less.
"""


class Program(Protocol):
    """A function's planned program on its way to devices."""

    def lower(
        self, structs: Structs, statics: tuple[Any, ...], limit: Limit | None, tightened: Tightened | None
    ) -> Lowered | LoweredPipeline:
        """The lowered program, with the bytes it may need; `tightened` plans anew if the compiled program
        needs more.
        """
        ...

    def is_nested(self, leaves: list[Any]) -> bool:
        """Whether a call with these is inside another transformation. Raises UnsupportedError for a pipeline's."""
        ...

    def executable(self) -> Executable | Pipeline | StageStacked:
        """The executable program, compiled when it is called first."""
        ...

    def placements(self) -> list[Sharding]:
        """The sharding in which each of the caller's flat arguments is read; for a batch, that of its rows."""
        ...

    def compiled(self, structs: Structs, *, nested: bool) -> tuple[Executable | Pipeline | StageStacked, int] | None:
        """The executable of the program, and the bytes of a device that it needs.

        None for a call that is `nested` in another transformation: what is compiled then is not this program.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneProgram:
    """A program on one mesh."""

    plan: Plan
    chosen: Chosen
    prepared: Prepared

    def lower(
        self, structs: Structs, statics: tuple[Any, ...], limit: Limit | None, tightened: Tightened | None
    ) -> Lowered:
        lowered = lower(self.prepared, structs, statics)
        return lowered if limit is None else replace(lowered, _limit=limit, _again=tightened)

    def is_nested(self, leaves: list[Any]) -> bool:
        return any(map(is_traced, leaves))

    def executable(self) -> Executable:
        return self.prepared.executable()

    def placements(self) -> list[Sharding]:
        stacked = self.chosen.traced.stacked
        return [_rows(s) if i in stacked else s for i, s in enumerate(self.prepared.in_shardings)]

    def compiled(self, structs: Structs, *, nested: bool) -> tuple[Executable, int] | None:
        if nested:
            return None
        compiled = lower(self.prepared, structs).compile()
        return compiled.executable(), needed_nbytes(self.plan, compiled.memory_analysis())


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineProgram:
    """The programs of a pipeline's stages."""

    plan: PipelinePlan
    chosen: Chosen
    signature: Signature
    devices: tuple[Device, ...]
    called: Traced
    processes: Processes | None

    def lower(
        self, structs: Structs, statics: tuple[Any, ...], limit: Limit | None, tightened: Tightened | None
    ) -> LoweredPipeline:
        program, step = self._instructions(), (self.signature, self.called, structs, statics)

        def load(executables: tuple[Any, ...]) -> Pipeline | StageStacked:
            return self._stage_stacked(self._pipeline(program, executables))

        return LoweredPipeline.of(self.plan, step, program, load, limit)

    def is_nested(self, leaves: list[Any]) -> bool:
        if any(map(is_traced, leaves)):
            raise UnsupportedError(
                explain(
                    f"{self.signature.function} inside another transformation of JAX's",
                    "a pipeline is many programs on several submeshes, and no operation of another one",
                    self.signature.source,
                    "take jit, derivatives and batches inside the function, or use a planner without stages",
                )
            )
        return False

    def executable(self) -> Pipeline | StageStacked:
        return self._stage_stacked(self._pipeline(self._instructions()))

    def placements(self) -> list[Sharding]:
        shardings = self._shardings(self._instructions())
        return shardings if self.chosen.pieces is None else placements(self.chosen.pieces, shardings)[0]

    def _shardings(self, program: Instructions) -> list[Sharding]:
        """The shardings of the program's inputs; the caller's arrays may have several of them joined."""
        traced = self.chosen.traced
        sliced = {feed.argument for feed in program.feeds if feed.slice is not None}
        whole = program.input_shardings(len(traced.graph.inputs), SingleDeviceSharding(self.devices[0]))
        return [_rows(s) if i in traced.stacked and i not in sliced else s for i, s in enumerate(whole)]

    def compiled(self, structs: Structs, *, nested: bool) -> tuple[Pipeline | StageStacked, int]:
        pipeline = self._pipeline(self._instructions())
        return self._stage_stacked(pipeline), pipeline_nbytes(pipeline.program, pipeline.executables)

    def _instructions(self) -> Instructions:
        """The segments of all stages, and the order in which they run."""
        traced = self.chosen.traced
        cut = stages.cut(traced.graph, self.plan.firsts, traced.state_pairs)
        return build(traced, self.plan, cut, self.devices)

    def _pipeline(self, program: Instructions, executables: tuple[Any, ...] | None = None) -> Pipeline:
        """The compiled pipeline, which takes stacked arrays in pieces."""
        traced = self.chosen.traced
        rows = {i: traced.graph.types[traced.graph.inputs[i]].shape[1] for i in traced.stacked}
        return load(program, rows, traced.out_tree, traced.weak, executables, self.processes)

    def _stage_stacked(self, pipeline: Pipeline) -> Pipeline | StageStacked:
        """The compiled pipeline, which takes the caller's arrays."""
        if (pieces := self.chosen.pieces) is None:
            return pipeline
        donation = pieces.donation(pipeline.program.donation)
        _, origins = placements(pieces, self._shardings(pipeline.program))
        return StageStacked(pipeline, pieces, self.called.out_tree, donation, origins, arrivals=pipeline.arrivals)


def _rows(sharding: Sharding) -> Sharding:
    """The sharding of a batch's rows, given that of its stacked microbatches."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def outermost(run: Callable[[list[Any]], Any], program: Program) -> Callable[[list[Any]], Any]:
    """The function that runs a pipeline, which raises UnsupportedError inside another transformation."""

    def checked(leaves: list[Any]) -> Any:
        program.is_nested(leaves)
        return run(leaves)

    return checked


@singledispatch
def program_of(
    plan: object,
    chosen: Chosen,
    signature: Signature,
    devices: tuple[Device, ...],
    called: Traced,
    processes: Processes | None,
) -> Program:
    """The program of a plan on these devices, for calls as `called` reads them."""
    raise InternalError(f"a {type(plan).__name__} has no program")


@program_of.register
def _(
    plan: Plan,
    chosen: Chosen,
    signature: Signature,
    devices: tuple[Device, ...],
    called: Traced,
    processes: Processes | None,
) -> _OneProgram:
    return _OneProgram(plan=plan, chosen=chosen, prepared=prepare(signature, chosen.traced, plan, devices, processes))


@program_of.register
def _(
    plan: PipelinePlan,
    chosen: Chosen,
    signature: Signature,
    devices: tuple[Device, ...],
    called: Traced,
    processes: Processes | None,
) -> _PipelineProgram:
    return _PipelineProgram(
        plan=plan, chosen=chosen, signature=signature, devices=devices, called=called, processes=processes
    )
