"""A pipeline compiled ahead of time: its stages' programs lowered and compiled one by one, also for described
devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax

from autopar import jax_compat
from autopar.checks import Emitted, Verification, hlo, verify
from autopar.frontend import Signature, Traced
from autopar.phases import PhaseOf, unsaid
from autopar.runtime.accepted import Accepted
from autopar.runtime.footprint import CPU, Limit, pipeline_peaks
from autopar.runtime.program import Program, Run
from passes.plan import PipelinePlan
from passes.progress import Progress
from passes.text import Column, Table, quantities


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredPipeline:
    """The segments of a pipeline in StableHLO, for its plan's devices; `compile()` is the next step.

    `load` makes of executables the function that runs the pipeline. Equal stages have segments of their own all the
    same.
    """

    plan: PipelinePlan
    accepted: Accepted
    program: Program
    load: Callable[[tuple[Any, ...]], Callable[[list[Any]], Any]]
    limit: Limit | None = None
    phase: PhaseOf = unsaid

    @classmethod
    def of(
        cls,
        plan: PipelinePlan,
        step: tuple[Signature, Traced, Sequence[jax.ShapeDtypeStruct], tuple[Any, ...]],
        program: Program,
        load: Callable[[tuple[Any, ...]], Callable[[list[Any]], Any]],
        limit: Limit | None,
    ) -> Self:
        """The lowered pipeline of a step, for calls as `called` reads them."""
        return cls(plan=plan, accepted=Accepted.of(*step), program=program, load=load, limit=limit)

    def as_text(self) -> str:
        """The StableHLO of all segments, each under its name."""
        segments = self.program.segments
        return "\n".join(f"// {segment.name}\n{segment.lower().as_text()}" for segment in segments)

    def followed(self, phase: PhaseOf) -> LoweredPipeline:
        """The same pipeline, whose compilation is reported as a `phase`."""
        return replace(self, phase=phase)

    def unlimited(self) -> LoweredPipeline:
        """The same pipeline without a memory limit."""
        return replace(self, limit=None)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledPipeline:
        """The executables; `compiler_options` are XLA's.

        Raises OverBudgetError where a device needs more memory than it may.
        """
        compiled = CompiledPipeline(lowered=self, executables=self._executables("compile", compiler_options))
        needed = max(compiled.peaks.values(), default=0)
        if self.limit is not None and needed > self.limit.nbytes:
            raise self.limit.error(self.plan, needed)
        return compiled

    def verify(self) -> tuple[Verification, ...]:
        """Each stage's planned collectives compared with those of its programs, compiled once more to keep
        them apart.
        """
        return self._verify(self._executables("verify", dict(hlo.UNCOMBINED)))

    def _executables(self, verb: str, user_options: dict[str, Any] | None) -> tuple[Any, ...]:
        """The compiled segments; equal programs on other devices are compiled as well."""
        executables: list[Any] = []
        with self.phase(verb) as current:
            for number, segment in enumerate(self.program.segments):
                current.report(Progress(phase=segment.name, done=number, total=len(self.program.segments)))
                given = {**(segment.user_options or {}), **(user_options or {})}
                options = user_options and hlo.compiler_options(segment.platform, user_options=given)
                executables.append(jax_compat.compiled(segment.lower(), options))
        return tuple(executables)

    def _verify(self, executables: Sequence[Any]) -> tuple[Verification, ...]:
        runs = Counter(i.segment for i in self.program.instructions if isinstance(i, Run))
        verifications: list[Verification] = []
        for number, plan in enumerate(self.plan.stages):
            here = [i for i, segment in enumerate(self.program.segments) if segment.stage == number]
            emitted = [Emitted(text=executables[i].as_text(), runs=runs[i]) for i in here]
            platform = self.program.segments[here[0]].platform if here else CPU
            verifications.append(verify(plan, emitted, platform=platform))
        return tuple(verifications)


@dataclass(frozen=True, kw_only=True)
class CompiledPipeline:
    """A pipeline compiled for its plan's devices, callable with arguments of the types that it was lowered for.

    Static arguments may be left out, as with `jax.jit`; given, they are those that it was lowered for.
    """

    lowered: LoweredPipeline
    executables: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.lowered.accepted.leaves(args, kwargs))

    @property
    def plan(self) -> PipelinePlan:
        return self.lowered.plan

    @property
    def peaks(self) -> Mapping[int, int]:
        """The peak bytes of one device of each submesh over a step by XLA's account, by the submesh's number."""
        plan = self.lowered.plan
        by_device = pipeline_peaks(self.lowered.program, self.executables)
        firsts = sorted(by_device.keys() - {-1})
        return {number: by_device[first] for number, first in enumerate(firsts[: plan.groups])}

    def executable(self) -> Callable[[list[Any]], Any]:
        """The function that runs the pipeline on flat arguments."""
        return self._run

    @cached_property
    def _run(self) -> Callable[[list[Any]], Any]:
        """The pipeline of the executables, made at the first call: described devices run nothing."""
        return self.lowered.load(self.executables)

    def as_text(self) -> str:
        """The optimized HLO of all segments, each under its name."""
        return "\n".join(f"// {name}\n{executable.as_text()}" for name, executable in self._named())

    def memory_analysis(self) -> tuple[tuple[str, Any], ...]:
        """XLA's account of one device's memory for each segment, by its name."""
        return tuple((name, executable.memory_analysis()) for name, executable in self._named())

    def memory_report(self) -> str:
        """The plan's bytes of one device of each submesh beside those that follow from XLA's counts, as text."""
        return self.memory_table().format()

    def memory_table(self) -> Table:
        """The table of `memory_report`."""
        predicted = self.plan.timeline.peak_nbytes
        rows = tuple(
            (f"{number}", quantities.nbytes(ours), quantities.nbytes(xla), f"{ours / xla:.3f}" if xla else "-")
            for (number, xla), ours in zip(self.peaks.items(), predicted, strict=True)
        )
        columns = (Column(heading="submesh"), *(Column(heading=name, right=True) for name in _MEMORY))
        return Table(title="peak memory of one device", columns=columns, rows=rows)

    def verify(self) -> tuple[Verification, ...]:
        """Each stage's planned collectives compared with those of its programs."""
        if self.lowered.program.segments[0].platform == CPU:
            return self.lowered.verify()
        return self.lowered._verify(self.executables)

    def _named(self) -> Iterator[tuple[str, Any]]:
        names = (segment.name for segment in self.lowered.program.segments)
        return zip(names, self.executables, strict=True)


_MEMORY = ("predicted", "XLA", "ratio")
