"""The program as planning sees it: nodes over typed values; their loops and branches, effects and phases."""

from passes.ir.control import CONTROL, Body, Control, Port, PortUse, Scan, control_of, scan_of
from passes.ir.effects import CALLBACKS, has_effect, is_ordered
from passes.ir.graph import Graph, Node, StatePairs, TensorType, item_nbytes
from passes.ir.phases import LOOP, PHASES, Phase, phase

__all__ = [
    "CALLBACKS",
    "CONTROL",
    "LOOP",
    "PHASES",
    "Body",
    "Control",
    "Graph",
    "Node",
    "Phase",
    "Port",
    "PortUse",
    "Scan",
    "StatePairs",
    "TensorType",
    "control_of",
    "has_effect",
    "is_ordered",
    "item_nbytes",
    "phase",
    "scan_of",
]
