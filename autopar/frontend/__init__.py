"""From a JAX function and its arguments to a traced program: call signatures, argument types, and the
planner's graph.
"""

from autopar.frontend import modules
from autopar.frontend.arguments import (
    Names,
    Positions,
    Signature,
    Type,
    signature_of,
    structs_of,
    types_of,
)
from autopar.frontend.constraints import constrain
from autopar.frontend.flattening import Body, Equation, flatten
from autopar.frontend.placements import Placed, arriving, devices_of, left_to_plan
from autopar.frontend.primitives import plain_params
from autopar.frontend.row_loops import side_by_side
from autopar.frontend.tracing import Traced, trace

__all__ = [
    "Body",
    "Equation",
    "Names",
    "Placed",
    "Positions",
    "Signature",
    "Traced",
    "Type",
    "arriving",
    "constrain",
    "devices_of",
    "flatten",
    "left_to_plan",
    "modules",
    "plain_params",
    "side_by_side",
    "signature_of",
    "structs_of",
    "trace",
    "types_of",
]
