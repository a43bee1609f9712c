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
from autopar.frontend.bodies import Body, Equation
from autopar.frontend.constraints import constrain
from autopar.frontend.flattening import flatten
from autopar.frontend.placements import Placed, arriving, devices_of, left_to_plan
from autopar.frontend.row_loops import side_by_side
from autopar.frontend.tracing import Traced, trace
from autopar.frontend.writing import Writer

__all__ = [
    "Body",
    "Equation",
    "Names",
    "Placed",
    "Positions",
    "Signature",
    "Traced",
    "Type",
    "Writer",
    "arriving",
    "constrain",
    "devices_of",
    "flatten",
    "left_to_plan",
    "modules",
    "side_by_side",
    "signature_of",
    "structs_of",
    "trace",
    "types_of",
]
