"""Steps in stages: the costs of blocks as stages, the search over stages by them, and the plans of pipelines."""

from passes.pipeline.assemble import PipelineOptions, body_of, check_submeshes, layered, pipelined, recounted
from passes.pipeline.part_seconds import weigh_on
from passes.pipeline.samples import layers_of, samples_of
from passes.pipeline.search import StagedSearch
from passes.pipeline.search_options import SearchOptions
from passes.pipeline.segments import reduced, subgraph_of, value_specs
from passes.pipeline.step_blocks import Sample
from passes.pipeline.variants import StagedVariants

__all__ = [
    "PipelineOptions",
    "Sample",
    "SearchOptions",
    "StagedSearch",
    "StagedVariants",
    "body_of",
    "check_submeshes",
    "layered",
    "layers_of",
    "pipelined",
    "recounted",
    "reduced",
    "samples_of",
    "subgraph_of",
    "value_specs",
    "weigh_on",
]
