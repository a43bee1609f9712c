"""The placements of one program: its sharding problem on a mesh, the search over meshes and memory limits, and the
plan.
"""

from passes.intra_op import computing, extract, pins, restrictions
from passes.intra_op.assembly import Assembly
from passes.intra_op.build_problem import assemble
from passes.intra_op.flops import product_flops, slow_dtype
from passes.intra_op.layer_costs import layer_costs
from passes.intra_op.mesh_problems import MeshProblems, Solved
from passes.intra_op.mesh_search import MeshSearch, cheapest_plan
from passes.intra_op.meshes import for_constraints, layouts, named
from passes.intra_op.offloading import away
from passes.intra_op.variant_trials import MOST_OPERATORS, VariantTrials
from passes.intra_op.variants import cheapest_variant

__all__ = [
    "MOST_OPERATORS",
    "Assembly",
    "MeshProblems",
    "MeshSearch",
    "Solved",
    "VariantTrials",
    "assemble",
    "away",
    "cheapest_plan",
    "cheapest_variant",
    "computing",
    "extract",
    "for_constraints",
    "layer_costs",
    "layouts",
    "named",
    "pins",
    "product_flops",
    "restrictions",
    "slow_dtype",
]
