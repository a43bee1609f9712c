"""A solver for graphs of tens of thousands of nodes with memory over time: the contest of ASPLOS 2025 (iopddl)."""
