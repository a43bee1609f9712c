"""The contents of a compiled program, read from its HLO, compared with what its plan promised."""

from autopar.checks import hlo
from autopar.checks.verification import Verification, verify

__all__ = ["Verification", "hlo", "verify"]
