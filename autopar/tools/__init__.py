"""The command line and its tools: what fits, the largest model that does, progress, plots, a measured cluster."""

from autopar.tools.measurement import measure

__all__ = ["measure"]
