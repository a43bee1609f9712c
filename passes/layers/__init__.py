"""The forward pass of a step: its batch, its layers and equal blocks, the places to cut it, and a sample with fewer
blocks.
"""

from passes.layers import forward, layer_names, modules, sampling
from passes.layers.attention import fused_attention
from passes.layers.batch import OTHERWISE, batch_inputs, loops_over_batch, rows_along, taken_for
from passes.layers.cuts import Weigh, part_flops
from passes.layers.dims import DimClasses, Numbering, split_for_loop
from passes.layers.repeats import Cuts, in_blocks, most_layers, stage_cuts
from passes.layers.time_first import row_dims

__all__ = [
    "OTHERWISE",
    "Cuts",
    "DimClasses",
    "Numbering",
    "Weigh",
    "batch_inputs",
    "forward",
    "fused_attention",
    "in_blocks",
    "layer_names",
    "loops_over_batch",
    "modules",
    "most_layers",
    "part_flops",
    "row_dims",
    "rows_along",
    "sampling",
    "split_for_loop",
    "stage_cuts",
    "taken_for",
]
