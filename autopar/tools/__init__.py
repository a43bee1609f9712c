"""The command line and its tools: what fits, the largest model that does, progress, plots, a measured cluster."""

from autopar.tools.measurement import measure
from autopar.tools.topologies import topology
from autopar.tools.what_if import Simulation, simulate

__all__ = ["Simulation", "measure", "simulate", "topology"]
