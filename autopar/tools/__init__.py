"""The command line and what it shows: what fits, the largest that does, progress, plots, a measured cluster."""

from autopar.tools.measurement import measure

__all__ = ["measure"]
