"""Rewrites of a program that compute the same: in microbatches, with recomputation, and cut into stages."""

from passes.transforms import stages
from passes.transforms.microbatch import Split, loop_of, loops_over_rows, microbatch_stacks, sums_up_front
from passes.transforms.remat import Layering, Recomputed, kept_of, layering, recompute
from passes.transforms.remat_policy import KEPT, Kept
from passes.transforms.stage_parts import Part, Stages
from passes.transforms.time_axis import Coupling, Time, whole_layout
from passes.transforms.turns import Turn, in_turn

__all__ = [
    "KEPT",
    "Coupling",
    "Kept",
    "Layering",
    "Part",
    "Recomputed",
    "Split",
    "Stages",
    "Time",
    "Turn",
    "in_turn",
    "kept_of",
    "layering",
    "loop_of",
    "loops_over_rows",
    "microbatch_stacks",
    "recompute",
    "stages",
    "sums_up_front",
    "whole_layout",
]
