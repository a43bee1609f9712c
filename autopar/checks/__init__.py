"""What a compiled program holds, read from its HLO, against what its plan promised."""

from autopar.checks import hlo
from autopar.checks.verification import Verification, verify

__all__ = ["Verification", "hlo", "verify"]
