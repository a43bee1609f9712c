"""Plans lowered to programs of local pieces: nodes bound on pieces, collectives between them, and users' own rules."""

from autopar.lowering import localize
from autopar.lowering.custom_rules import register_rule
from autopar.lowering.localize import Arrays, Cut
from autopar.lowering.localizers import USERS_OWN
from autopar.lowering.lower import OnPieces, body_of, build, device_mesh, shardings, walk

__all__ = [
    "USERS_OWN",
    "Arrays",
    "Cut",
    "OnPieces",
    "body_of",
    "build",
    "device_mesh",
    "localize",
    "register_rule",
    "shardings",
    "walk",
]
