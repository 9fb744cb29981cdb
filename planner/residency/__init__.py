"""Residency: which tensors of a block to keep from forward to backward, and which to compute again, as a proven Pareto frontier."""

from planner.residency.frontier import Point, frontier, hull
from planner.residency.tape import Tape, record

__all__ = ["Point", "Tape", "frontier", "hull", "record"]
