"""Seconds and bytes of a program by the compiler of an accelerator that need not be here.

XLA:TPU writes the cycles that it estimates for each fusion into the program. XLA:GPU writes seconds "at the speed of
light" where it is asked to: products as a table that ships with it has them for the kind of GPU (NVIDIA's 9.0 and 10.0,
in jaxlib 0.10.2), the rest as the data sheet's bandwidth. Nothing runs. Checked with the versions of `topologies`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from autopar.checks import hlo
from autopar.errors import DeviceError, explain
from autopar.jax_compat import Device
from autopar.runtime import needed_nbytes
from passes.plan import Plan

CLOCK_HZ: Mapping[str, float] = MappingProxyType(
    {"tpu-v3": 0.94e9, "tpu-v4": 1.05e9, "tpu-v5e": 1.5e9, "tpu-v5p": 1.75e9, "tpu-v6e": 1.75e9}
)
"""Clocks of TPU cores: the peak of bfloat16 by what the matrix units multiply in a cycle (jax-ml/scaling-book).
Those of v3 and v4 are also published (Jouppi et al., "TPU v4", ISCA 2023); we know of no publication of TPU7x's."""

GPU_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"xla_gpu_collect_cost_model_stats": True, "xla_gpu_enable_triton_gemm": False}
)
"""Estimates are written at all; and products are cuBLAS's, since tiles of Triton's are chosen by timing them, and those
taken without a GPU are up to forty times as slow."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LIGHT = re.compile(r'"exec_time_us":([\d.eE+-]+)[^{}]*"name":"sol"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The seconds of a program and the bytes that it needs of its device, by the device's compiler."""

    seconds: float
    nbytes: int


def cycles(hlo_text: str) -> int:
    """The cycles that XLA:TPU estimates for a program, loops as often as they run."""
    return sum(runs * int(estimate) for line, runs in hlo.instructions(hlo_text) for estimate in _CYCLES.findall(line))


def light_seconds(hlo_text: str) -> float:
    """The seconds that XLA:GPU estimates for a program at the speed of light, loops as often as they run."""
    lines = hlo.instructions(hlo_text)
    return sum(runs * float(estimate) for line, runs in lines for estimate in _LIGHT.findall(line)) * 1e-6


def seconds_of(hlo_text: str, name: str) -> float:
    """The seconds of a program for a device of this name. Raises DeviceError where its compiler estimates none."""
    if name.startswith("tpu-"):
        if name not in CLOCK_HZ:
            rule = "its compiler counts cycles, and we know of no publication of its clock"
            raise _no_estimate(name, rule)
        spent = cycles(hlo_text) / CLOCK_HZ[name]
    else:
        spent = light_seconds(hlo_text)
    if not spent:
        raise _no_estimate(name, f"its compiler (jax {jax.__version__}) wrote no estimate into the program")
    return spent


def estimate(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str, device: Device, plan: Plan
) -> Estimate:
    """The estimate for a function of arrays, compiled for one device of the kind that the function's plan is for.

    Raises DeviceError where the compiler has none for such a device.
    """
    name = plan.cluster.group().device.name
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    options = None if name.startswith("tpu-") else dict(GPU_OPTIONS)
    try:
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).split("\n")[0]
        raise _no_estimate(name, f"its compiler has no estimates for it: {reason}") from error
    seconds = seconds_of(compiled.as_text() or "", name)
    return Estimate(seconds=seconds, nbytes=needed_nbytes(plan, compiled.memory_analysis()))


def _no_estimate(name: str, rule: str) -> DeviceError:
    remedy = f"plan with the data sheet's numbers (--cluster 8:{name}), or run autopar measure on such devices"
    return DeviceError(explain(f"estimates for {name}", rule, "", remedy))
