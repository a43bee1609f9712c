"""The contents of a compiled program, read from its HLO, compared with what its plan promised."""

from autopar.checks import hlo
from autopar.checks.verification import Emitted, Verification, verify

__all__ = ["Emitted", "Verification", "hlo", "verify"]
