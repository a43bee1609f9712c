"""The contents of a compiled program, read from its HLO, compared with what its plan promised."""

from autopar.checks import hlo, hlo_kinds
from autopar.checks.verification import Emitted, Verification, verify

__all__ = ["Emitted", "Verification", "hlo", "hlo_kinds", "verify"]
