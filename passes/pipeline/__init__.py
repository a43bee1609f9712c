"""A step in stages: prices of its blocks as stages, the table and the search over them, and the plan of a pipeline."""

from passes.pipeline.assemble import body_of, check_submeshes, pipelined, recounted
from passes.pipeline.samples import layers_of, samples_of
from passes.pipeline.search import StagedSearch
from passes.pipeline.segments import homes, piece_of
from passes.pipeline.step_blocks import Sample

__all__ = [
    "Sample",
    "StagedSearch",
    "body_of",
    "check_submeshes",
    "homes",
    "layers_of",
    "piece_of",
    "pipelined",
    "recounted",
    "samples_of",
]
