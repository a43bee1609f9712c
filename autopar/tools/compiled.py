"""A step compiled for described devices by their own compiler: the bytes that it needs beside those predicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import jax

from autopar.api import ParallelFunction, parallelize
from autopar.checks import Verification
from autopar.errors import DeviceError, explain
from autopar.runtime import CompiledPipeline
from autopar.tools.topologies import topology
from passes.cluster import Cluster
from passes.plan import AnyPlan
from passes.planners import allowed
from passes.text import Column, Table, quantities

Announce = Callable[[str], None]
"""A callback that is told, as text, what is being done."""

_REFUSED = "RESOURCE_EXHAUSTED"
_NEEDS = re.compile(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict of an accelerator's compiler: bytes of the fullest device, and each program's collectives and flops.

    `refused` is the compiler's message where it ran out of memory itself; there is nothing else then.
    """

    plan: AnyPlan
    limit_nbytes: float
    compiler: str
    needed_nbytes: int = 0
    memory: Table | None = None
    verifications: Mapping[str, Verification] | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the compiler made a program that keeps the limit."""
        return not self.refused and self.needed_nbytes <= self.limit_nbytes

    def tables(self) -> tuple[Table, ...]:
        """The verdict as tables."""
        facts = {
            "plan": f"{self.plan.shape} by {self.plan.planner} for {self.plan.cluster.name}",
            "compiler": self.compiler,
            "a device needs": self.refused or quantities.nbytes(self.needed_nbytes),
            "a device may need": quantities.nbytes(int(self.limit_nbytes)),
            "verdict": "it fits" if self.fits else "it does not fit",
        }
        columns = (Column(heading=""), Column(heading="", flexible=True))
        verdict = Table(title="compiled", columns=columns, rows=tuple(facts.items()))
        tables = [verdict, *([self.memory] if self.memory else [])]
        for name, verification in (self.verifications or {}).items():
            tables += [_titled(table, name) for table in verification.tables()]
        return tuple(tables)

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON data, bytes as numbers."""
        return {
            "cluster": self.plan.cluster.name,
            "planner": self.plan.planner,
            "compiler": self.compiler,
            "fits": self.fits,
            "limit_nbytes": self.limit_nbytes,
            "predicted_nbytes": self.plan.peak_nbytes,
            "compiled_nbytes": self.needed_nbytes,
            "refused": self.refused,
            "moved": [
                {"program": name, **moved.to_json()}
                for name, verification in (self.verifications or {}).items()
                for moved in verification.moved
            ],
            "flops": [
                {"program": name, "planned": v.planned_flops, "compiled": v.compiled_flops}
                for name, v in (self.verifications or {}).items()
            ],
        }


def judge(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    options: Mapping[str, Any],
    report: Announce = lambda _: None,
) -> Judgement:
    """The verdict of the compiler for a cluster's devices on a step, planned with `options` of `parallelize`.

    Raises DeviceError where that compiler is not installed or does not know such a device, and PlanningError where no
    plan is possible.
    """
    devices = topology(cluster)
    given = {**options, "cluster": cluster, "devices": devices}
    parallel = step.replan(**given) if isinstance(step, ParallelFunction) else parallelize(step, **given)
    report("planning")
    plan = parallel.plan(*args, **kwargs)
    limit, _ = allowed(plan.cluster, options.get("memory_limit"))
    compiler = f"{devices[0].device_kind}, jax {jax.__version__}, {_version(devices[0].platform)}"
    report(f"compiling for {plan.cluster.name}")
    try:
        compiled = parallel.lower(*args, **kwargs).unlimited().compile()
    except jax.errors.JaxRuntimeError as error:
        if _REFUSED not in str(error):
            rule = f"the compiler does not take it: {_words(str(error))}"
            remedy = "compile for another kind of device, or with another version of its compiler"
            raise DeviceError(explain(f"{plan.cluster.name} by {compiler}", rule, "", remedy)) from error
        return Judgement(plan=plan, limit_nbytes=limit, compiler=compiler, refused=_words(str(error)))
    report("reading what it made")
    if isinstance(compiled, CompiledPipeline):
        verifications = {f"stage {number}": v for number, v in enumerate(compiled.verify())}
        needed, memory = max(compiled.peaks.values(), default=0), compiled.memory_table()
    else:
        verifications = {"": compiled.verify()}
        needed, memory = compiled.needed_nbytes, compiled.memory_table()
    return Judgement(
        plan=plan,
        limit_nbytes=limit,
        compiler=compiler,
        needed_nbytes=needed,
        memory=memory,
        verifications=verifications,
    )


def _version(platform: str) -> str:
    """The package that holds a platform's compiler, and its version."""
    package = "jax-cuda12-pjrt" if platform == "gpu" else "libtpu"
    return f"{package} {version(package)}"


def _words(message: str) -> str:
    """The message of a compiler that ran out of memory, on one line."""
    needs = _NEEDS.search(message)
    return f"{needs[1]} of {needs[2]} (the compiler gave up)" if needs else message.split("\n")[0]


def _titled(table: Table, name: str) -> Table:
    return replace(table, title=f"{name}: {table.title}") if name else table
