"""The JAX function and its arguments as a traced program: call signatures, argument types and the planner's graph."""

from autopar.frontend.arguments import (
    Names,
    Positions,
    Signature,
    Type,
    signature_of,
    structs_of,
    types_of,
)
from autopar.frontend.flattening import Body, Equation, flatten
from autopar.frontend.modules import Library, library_of
from autopar.frontend.primitives import plain_params
from autopar.frontend.tracing import Traced, trace

__all__ = [
    "Body",
    "Equation",
    "Library",
    "Names",
    "Positions",
    "Signature",
    "Traced",
    "Type",
    "flatten",
    "library_of",
    "plain_params",
    "signature_of",
    "structs_of",
    "trace",
    "types_of",
]
