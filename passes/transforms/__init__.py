"""Rewrites of a program that compute the same: in microbatches, with recomputation, and cut into stages."""

from passes.transforms import stages
from passes.transforms.microbatch import Split, loop_of, microbatch_stacks, split, sums_up_front
from passes.transforms.remat import are_loops, kept_of, layers, recompute
from passes.transforms.remat_loops import BodyOrigins
from passes.transforms.remat_policy import KEPT, Kept
from passes.transforms.stage_parts import Part, Stages
from passes.transforms.stages import cut
from passes.transforms.time_axis import AXIS, Coupling, Time, whole_layout

__all__ = [
    "AXIS",
    "KEPT",
    "BodyOrigins",
    "Coupling",
    "Kept",
    "Part",
    "Split",
    "Stages",
    "Time",
    "are_loops",
    "cut",
    "kept_of",
    "layers",
    "loop_of",
    "microbatch_stacks",
    "recompute",
    "split",
    "stages",
    "sums_up_front",
    "whole_layout",
]
