"""The command line and its tools: what fits, the largest model that does, progress, plots, a measured cluster."""

from autopar.tools.measurement import measure
from autopar.tools.topologies import topology

__all__ = ["measure", "topology"]
