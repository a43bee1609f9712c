"""The command line and its tools: plans, memory fits, the largest model, simulations, progress, plots, measured
clusters.
"""

from autopar.tools.measurement import measure
from autopar.tools.topologies import topology
from autopar.tools.what_if import Simulation, simulate

__all__ = ["Simulation", "measure", "simulate", "topology"]
