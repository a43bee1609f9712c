"""Quantities with their units and tables as text, for people who read plans, diffs and errors."""

from passes.text import quantities
from passes.text.quantities import count, nbytes, parse_nbytes, plain_integer
from passes.text.tables import GAP, Column, Table, wrap

__all__ = ["GAP", "Column", "Table", "count", "nbytes", "parse_nbytes", "plain_integer", "quantities", "wrap"]
