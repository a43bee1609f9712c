"""Model states of ZeRO's tables, collectives, and the largest matrix products: what is no step of a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks import collectives, memory
from benchmarks.published.rows import Answer, Fields, Row, Source, number, whole
from passes.cluster.devices import host_spec

DEVICES = {
    "A100 SXM4 40GB": "a100-40g",
    "A100 SXM4 80GB": "a100-80g",
    "B200 SXM": "b200",
    "GB200 SXM (per GPU)": "gb200",
    "TPU v6e (Trillium)": "tpu-v6e",
}
"""The table's devices whose matrix products were measured, by the name in the file."""

IN_TRAININGS = ("H100 SXM5", "H200 SXM")
"""Devices whose products are slower in trainings than by themselves (`accelerators.HOPPER_MATMULS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of model state that one of so many devices holds under a stage of ZeRO."""

    stage: int
    devices: int
    billions: float

    def answer(self) -> Answer:
        """The bytes as planned."""
        return Answer(nbytes=memory.state_nbytes(self.stage, self.devices, self.billions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A collective on machines that were measured."""

    system: collectives.System
    measurement: collectives.Measurement

    def answer(self) -> Answer:
        """Its seconds."""
        return Answer(seconds=self.system.predict(self.measurement))


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplied:
    """10^12 flops of large products in bfloat16 on a device of the table."""

    device: str

    def answer(self) -> Answer:
        """Their seconds."""
        return Answer(seconds=1e12 / host_spec(self.device).device.matmul_flops_per_second("bfloat16"))


def _zero(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        scheme, devices, degree = fields["stage_or_scheme"], whole(fields, "dp_degree"), whole(fields, "mp_degree")
        table, stage = fields["table"].split(" (")[0], memory.STAGES.get(fields["stage_or_scheme"])
        row = Row(source="zero", sweep=f"{table}, {scheme}", name=f"{table} {scheme}, {devices} x {degree} devices")
        why = "" if stage is not None else "gradients stay whole: Zero(1) scatters them as soon as they are summed"
        if table == "Table 1":
            billions, printed = float(fields["model_params_billion"]), fields["model_state_memory_GB_per_device"]
            row = replace(row, name=f"{row.name}, {billions:g}B", nbytes=float(printed) * 1e9)
        else:
            printed = fields["theoretical_max_params_billion"]
            billions = float(printed) / degree  # model parallelism cuts all state by its degree
            row = replace(row, name=f"{row.name}, largest in theory", nbytes=memory.V100_NBYTES)
            if fields["measured_max_params_billion"]:
                reason = "its layers and hidden size are not given"
                yield replace(row, name=row.name.replace("in theory", "that was trained"), nbytes=None, why=reason)
        rounding = memory.rounding_of(printed, degree) / float(printed)
        question = None if stage is None else States(stage=stage, devices=devices, billions=billions)
        yield replace(row, question=question, why=why, rounding=rounding)


def _collectives(lines: Sequence[Fields]) -> Iterator[Row]:
    systems = collectives.systems(lines)
    for system in systems:
        for m in system.measurements:
            yield Row(
                source="collectives",
                sweep=f"{system.name}, {m.kind} of {m.ranks}",
                name=f"{system.name}: {m.kind} of {m.ranks} on {m.hosts}, {m.nbytes} bytes",
                question=Sent(system=system, measurement=m),
                seconds=m.seconds,
                work=m.nbytes,
                unit="bytes/s",
                fitted=True,
            )
    used = {m for system in systems for m in system.measurements}
    for line, fields in enumerate(lines, 2):
        measured = collectives.measurement(fields)
        if measured is None or measured not in used:
            why = "no collective with a payload" if measured is None else "the table has no such device"
            words = "hardware", "collective", "payload_bytes"
            label = " ".join(fields[word] for word in words).strip()
            yield Row(source="collectives", sweep=fields["system"], name=f"line {line}: {label}", why=why)


def _hardware(lines: Sequence[Fields]) -> Iterator[Row]:
    for fields in lines:
        name, tflops = fields["device"], number(fields, "measured_max_matmul_tflops_bf16")
        row = Row(source="matmul", sweep="matmul", name=name, fitted=True, work=1.0, unit="TFLOP/s")
        if tflops is None:
            yield replace(row, why="a data sheet alone, nothing measured")
        elif name in IN_TRAININGS:
            yield replace(row, why="the table has what products reach in trainings, not by themselves")
        elif name not in DEVICES:
            yield replace(row, why="no device of the table has this name")
        else:
            yield replace(row, question=Multiplied(device=DEVICES[name]), seconds=1 / tflops)


ZERO = Source(
    names=("zero",),
    columns=frozenset({"stage_or_scheme", "dp_degree", "model_state_memory_GB_per_device"}),
    read=_zero,
)
COLLECTIVES = Source(
    names=("collectives",),
    columns=frozenset({"system", "collective", "payload_bytes", "busbw_GB_per_s", "placement"}),
    read=_collectives,
)
HARDWARE = Source(
    names=("matmul",),
    columns=frozenset({"device", "measured_max_matmul_tflops_bf16", "hbm_GB_per_s"}),
    read=_hardware,
)
