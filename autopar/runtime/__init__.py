"""Planned programs at run time: one program under `jax.jit`, or the instructions of a pipeline on its stages."""

from autopar.runtime import runtime
from autopar.runtime.executable import Executable
from autopar.runtime.execution import Compiled, Lowered, Prepared, lower, prepare
from autopar.runtime.footprint import Limit, limit_of, needed_nbytes, pipeline_nbytes
from autopar.runtime.instructions import build
from autopar.runtime.lowered_pipeline import CompiledPipeline, LoweredPipeline
from autopar.runtime.program import Program
from autopar.runtime.runtime import Pipeline, load
from autopar.runtime.stage_stacked import Pieces, StageStacked, placements

__all__ = [
    "Compiled",
    "CompiledPipeline",
    "Executable",
    "Limit",
    "Lowered",
    "LoweredPipeline",
    "Pieces",
    "Pipeline",
    "Prepared",
    "Program",
    "StageStacked",
    "build",
    "limit_of",
    "load",
    "lower",
    "needed_nbytes",
    "pipeline_nbytes",
    "placements",
    "prepare",
    "runtime",
]
