"""A mixed-integer program as rows and columns, and HiGHS's answer: single-threaded, seeded, proven (relative gap 1e-9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

_GAP_FRAC = 1e-9
# HiGHS's tolerances are absolute: the objective is in microseconds, the size of a kernel.
_UNIT = 1e6


class IntegerProgram:
    """minimise cost . x with lower <= A x <= upper, x >= 0; binary columns are 0 or 1. A row that lacks a side is None there. Costs are seconds."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.binary: list[bool] = []
        self.starts: list[int] = []
        self.indices: list[int] = []
        self.values: list[float] = []
        self.lower: list[float | None] = []
        self.upper: list[float | None] = []

    def column(self, cost: float, *, binary: bool = False) -> int:
        """A new column; returns its index."""
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def row(self, entries: Mapping[int, float], lower: float | None, upper: float | None) -> None:
        """A new row."""
        self.starts.append(len(self.indices))
        self.indices.extend(entries)
        self.values.extend(entries.values())
        self.lower.append(lower)
        self.upper.append(upper)

    @property
    def num_columns(self) -> int:
        """Variables."""
        return len(self.costs)

    @property
    def num_rows(self) -> int:
        """Constraints."""
        return len(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The binary columns that are 1, the objective, and the bound that HiGHS proved."""

    chosen: frozenset[int]
    objective_s: float
    bound_s: float


class _Quiet(highspy.Highs):
    """HiGHS without the callbacks of its Python class, whose set-up prints a banner that no option silences (highspy 1.16)."""

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()


def minimise(program: IntegerProgram, time_limit_s: float | None = None) -> Solution | None:
    """The best solution, or None when there is none (or none was found before the time limit)."""
    infinity = highspy.kHighsInf
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = program.num_columns, program.num_rows
    lp.col_cost_ = _UNIT * np.array(program.costs)
    lp.col_lower_ = np.zeros(program.num_columns)
    lp.col_upper_ = np.array([1.0 if binary else infinity for binary in program.binary])
    lp.integrality_ = [highspy.HighsVarType.kInteger if binary else highspy.HighsVarType.kContinuous for binary in program.binary]
    lp.row_lower_ = np.array([-infinity if side is None else side for side in program.lower])
    lp.row_upper_ = np.array([infinity if side is None else side for side in program.upper])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array([*program.starts, len(program.indices)])
    lp.a_matrix_.index_ = np.array(program.indices)
    lp.a_matrix_.value_ = np.array(program.values)
    solver = _Quiet()
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0), ("mip_rel_gap", _GAP_FRAC), ("mip_abs_gap", _GAP_FRAC)):
        solver.setOptionValue(name, value)
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", time_limit_s)
    solver.passModel(lp)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = solver.getSolution().col_value
    return Solution(
        chosen=frozenset(column for column, binary in enumerate(program.binary) if binary and values[column] > 0.5),
        objective_s=float(info.objective_function_value) / _UNIT,
        bound_s=float(info.mip_dual_bound) / _UNIT,
    )
