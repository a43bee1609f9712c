"""The fields of a plan of one mesh, read from JSON data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.plan import account
from passes.plan import json as plan_json

SCHEMA = 1
"""The version of a plan's file that is written, and the newest that is read."""

Read = TypeVar("Read")


def read_plan(data: object, make: Callable[..., Read]) -> Read:
    """The plan that JSON data describe, by the class that `make`s it. Raises PlanningError, with the place."""
    read = plan_json.as_object(data, "the plan")
    if not {"schema", "fingerprint"} <= read.data.keys():
        raise PlanningError("this is not a plan: it has no schema or no fingerprint; `autopar plan` writes plans")
    if "pipeline" in read.data:
        raise PlanningError("this is the plan of a pipeline; autopar.PipelinePlan.load reads it")
    check_schema(read)
    cluster = Cluster.from_json(read.object("cluster").data)
    mesh = plan_json.mesh_from_json(read.object("mesh"), cluster)
    inputs = plan_json.values_from_json(read.list("inputs"), mesh, "input")
    outputs = plan_json.values_from_json(read.list("outputs"), mesh, "output")
    seconds, nbytes = read.object("seconds"), read.object("nbytes")
    collectives, replicated = read.list("collectives"), read.list("replicated")
    remat = read.list("remat") if "remat" in read.data else ()
    offloaded = read.list("offloaded") if "offloaded" in read.data else ()
    if (microbatches := read.int("microbatches")) < 1:
        raise PlanningError(f"the plan.microbatches should be a whole number from 1, and is {microbatches}")
    return make(
        fingerprint=read.text("fingerprint"),
        cluster=cluster,
        mesh=mesh,
        operators=plan_json.operators_from_json(read.list("operators"), mesh),
        inputs=inputs.specs,
        outputs=outputs.specs,
        input_names=inputs.names,
        output_names=outputs.names,
        collectives=tuple(
            plan_json.collective_from_json(plan_json.as_object(entry, f"collectives[{i}]"))
            for i, entry in enumerate(collectives)
        ),
        seconds={cause: seconds.float(cause) for cause in seconds.data},
        nbytes={cause: nbytes.int(cause) for cause in nbytes.data},
        solution=account.solution_from_json(read.object("solution")),
        replicated=tuple(plan_json.as_text(entry, f"replicated[{i}]") for i, entry in enumerate(replicated)),
        microbatches=microbatches,
        input_types=inputs.types,
        output_types=outputs.types,
        phases=_floats(read, "phases"),
        computing=_floats(read, "computing"),
        flops=_floats(read, "flops"),
        regather=read.data.get("regather", read.data.get("refetch", True)) is True,  # its name until 2026-11
        offloaded=plan_json.positions(offloaded, len(inputs.specs), "offloaded"),
        memory=plan_json.memory_from_json(read.object("memory")) if "memory" in read.data else None,
        layers=account.layers_from_json(read.list("layers")) if "layers" in read.data else (),
        remat=tuple(plan_json.as_text(entry, f"remat[{i}]") for i, entry in enumerate(remat)),
        counted_for=read.text("placed") if "placed" in read.data else "",  # files have it since 2026-11
    )


def check_schema(read: plan_json.Fields) -> None:
    """Raises PlanningError for the file of an autopar that writes another schema."""
    if read.of("schema") != SCHEMA:
        writer = read.data.get("autopar", "(unknown)")
        raise PlanningError(
            f"the plan has schema {read.of('schema')!r}, written by autopar {writer}; this is autopar "
            f"{plan_json.version()}, which reads schema {SCHEMA}. Plan again, or use that autopar"
        )


def _floats(read: plan_json.Fields, name: str) -> dict[str, float]:
    """The numbers of a field by name; none where a file does not have it."""
    values = read.object(name) if name in read.data else None
    return {key: values.float(key) for key in values.data} if values else {}
