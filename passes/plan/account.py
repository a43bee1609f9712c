"""The records of how a plan was found, and of what each layer costs, as JSON and back."""

from __future__ import annotations

from collections.abc import Sequence

from passes.inter_op import StageCost, Transfer
from passes.plan.json import Fields, as_object, number
from passes.plan.parts import Alternative, LayerCost, Solution


def solution_to_json(solution: Solution) -> dict[str, object]:
    """The record of how the plan was found, as JSON; field names say that numbers are seconds."""
    return {
        "planner": solution.planner,
        "status": solution.status,
        "objective_seconds": number(solution.objective),
        "bound_seconds": number(solution.bound),
        "phase_seconds": {name: number(seconds) for name, seconds in solution.phase_seconds.items()},
        **alternatives_to_json(solution.alternatives),
    }


def solution_from_json(data: Fields) -> Solution:
    """The record of how the plan was found, from JSON."""
    phases = data.object("phase_seconds")
    return Solution(
        planner=data.text("planner"),
        status=data.text("status"),
        objective=data.float("objective_seconds"),
        bound=data.float("bound_seconds"),
        phase_seconds={name: phases.float(name) for name in phases.data},
        alternatives=alternatives_from_json(data),
    )


def alternatives_to_json(alternatives: Sequence[Alternative]) -> dict[str, object]:
    """The field of alternatives that were met and not taken; empty if there are none."""
    entries = [
        {
            "name": alternative.name,
            "seconds": number(alternative.seconds),
            "why": alternative.why,
            **({} if alternative.peak_nbytes is None else {"peak_nbytes": alternative.peak_nbytes}),
        }
        for alternative in alternatives
    ]
    return {"alternatives": entries} if entries else {}


def alternatives_from_json(data: Fields) -> tuple[Alternative, ...]:
    """The alternatives that were met and not taken; empty for a file without the field."""
    entries = data.list("alternatives") if "alternatives" in data.data else ()
    fields = [as_object(entry, data.place(f"alternatives[{i}]")) for i, entry in enumerate(entries)]
    return tuple(
        Alternative(
            name=f.text("name"),
            seconds=f.float("seconds"),
            why=f.text("why"),
            peak_nbytes=f.int("peak_nbytes") if "peak_nbytes" in f.data else None,
        )
        for f in fields
    )


def layers_to_json(layers: Sequence[LayerCost]) -> list[object]:
    """The costs of layers, a JSON object each."""
    return [
        {
            "name": layer.name,
            "compute_seconds": number(layer.compute_seconds),
            "moving_seconds": number(layer.moving_seconds),
            "state_nbytes": layer.state_nbytes,
            "live_nbytes": layer.live_nbytes,
        }
        for layer in layers
    ]


def layers_from_json(entries: Sequence[object]) -> tuple[LayerCost, ...]:
    """The costs of layers that `layers_to_json` described. Raises PlanningError for anything else."""
    fields = [as_object(entry, f"layers[{i}]") for i, entry in enumerate(entries)]
    return tuple(
        LayerCost(
            name=layer.text("name"),
            compute_seconds=layer.float("compute_seconds"),
            moving_seconds=layer.float("moving_seconds"),
            state_nbytes=layer.int("state_nbytes"),
            live_nbytes=layer.int("live_nbytes"),
        )
        for layer in fields
    )


def stage_costs_from_json(entries: Sequence[object]) -> tuple[StageCost, ...]:
    """The costs of a pipeline's stages that JSON data describe."""
    return tuple(_stage_cost(as_object(entry, f"costs[{i}]")) for i, entry in enumerate(entries))


def _stage_cost(fields: Fields) -> StageCost:
    def half(name: str) -> float | None:
        return None if fields.of(name) is None else fields.float(name)

    return StageCost(
        forward_seconds=fields.float("forward_seconds"),
        backward_seconds=fields.float("backward_seconds"),
        input_gradient_seconds=half("input_gradient_seconds"),
        weight_gradient_seconds=half("weight_gradient_seconds"),
        finish_seconds=fields.float("finish_seconds"),
        in_flight_nbytes=fields.int("in_flight_nbytes"),
        persistent_nbytes=fields.int("persistent_nbytes"),
        working_nbytes=fields.int("working_nbytes"),
        finish_nbytes=fields.int("finish_nbytes"),
    )


def transfers_from_json(entries: Sequence[object]) -> tuple[Transfer, ...]:
    """The seconds between a pipeline's stages that JSON data describe."""
    read = [as_object(entry, f"transfers[{i}]") for i, entry in enumerate(entries)]
    return tuple(
        Transfer(forward_seconds=fields.float("forward_seconds"), backward_seconds=fields.float("backward_seconds"))
        for fields in read
    )
