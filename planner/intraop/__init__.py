"""Intra-op layouts: for one block kind, where every operand of every kernel lives on the tensor-parallel axis (docs/search.md)."""

from planner.intraop.layout import BlockLayout, OpLayout, Reshard
from planner.intraop.solve import solve_layout

__all__ = ["BlockLayout", "OpLayout", "Reshard", "solve_layout"]
