"""Calibration to measured runs: the few constants in which a user's stack differs from the shipped model, fitted to a handful of steps.

A priced step splits into causes (costmodel.estimate): compute c, exposed communication k, hidden communication v, copies, host, bubble b, optimizer o. With
busy = c + k + copies + host, the calibrated step is

    step' = (busy'/busy) (busy + b) + o + overhead        busy' = compute_frac c + communication_frac k + exposed_frac v + copies + host

(`calibrated` applies it to an Estimate; the bubble scales with what fills the slots.) Memory: tensors' = memory_frac x tensors + offset.

    constant            meaning                                                         prior (median, log sd)
    compute_frac        kernels slower than the tables: clocks, unfused or missing       1, 0.25
    communication_frac  links and protocol slower than the tables                       1, 0.5
    exposed_frac        share of hidden traffic that delays compute after all           0.03, 1.5
    overhead_s          per step: logging, data, synchronisation                        2 ms, 1.5
    memory_frac         tensors that nobody lists, in proportion                        1, 0.1
    offset_bytes        workspaces of libraries that nobody lists                       0, sd 1 GiB (not in log)

Fit: Gauss-Newton with damping on log(predicted / measured), noise sd NOISE_FRAC, Huber weights beyond 1.5 sd (runs repeat within 5-25 % and some hang), plus
the priors above: with few runs a constant that they do not determine stays at its prior. numpy only; deterministic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.estimate import Estimate, Line, StageMemory

Array = NDArray[np.float64]

FORMAT = "autoplan/calibration"
NOISE_FRAC = 0.05
HUBER = 1.5
GIB = 2.0**30
# (prior median, prior sd of the logarithm): compute_frac, communication_frac, exposed_frac, overhead_s
TIME_PRIORS = ((1.0, 0.25), (1.0, 0.5), (0.03, 1.5), (2e-3, 1.5))
MEMORY_FACTOR_SD, OFFSET_SD_BYTES = 0.1, 1.0 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of one stack, the number of runs behind them, and the errors that remain: leave-one-out |predicted / measured - 1| (None without runs)."""

    engine: str
    compute_frac: float = 1.0
    communication_frac: float = 1.0
    exposed_frac: float = 0.0
    overhead_s: float = 0.0
    memory_frac: float = 1.0
    offset_bytes: float = 0.0
    num_time_runs: int = 0
    num_memory_runs: int = 0
    time_median_frac: float | None = None
    time_worst_frac: float | None = None
    memory_median_frac: float | None = None
    memory_worst_frac: float | None = None


def calibrate(engine: str, steps: Sequence[tuple[Estimate, float]], peaks: Sequence[tuple[float, float, float]]) -> Calibration:
    """Fit to `steps` (estimate, measured seconds) and `peaks` (predicted bytes of tensors, predicted bytes that the
    measurement counts besides, measured bytes of both).

    Raises InputError when there is nothing to fit or a measured figure is not positive.
    """
    if not steps and not peaks:
        raise InputError("there is no measured run", where="calibrate", remedy="give runs with a step time or a memory peak")
    if any(measured <= 0.0 for _, measured in steps) or any(peak[2] <= 0.0 for peak in peaks):
        raise InputError("a measured figure is not positive", where="calibrate", remedy="leave failed runs out")
    parts = np.array([_causes(estimate) for estimate, _ in steps]).reshape(-1, 7)
    seconds = np.array([measured for _, measured in steps])
    bytes_ = np.array(peaks, dtype=float).reshape(-1, 3)
    time, time_errors = _cross_validated(
        len(steps), lambda rows: _fit_time(parts[rows], seconds[rows]), lambda x: _step_s(x, parts) / seconds - 1.0
    )
    memory, memory_errors = _cross_validated(
        len(peaks), lambda rows: _fit_memory(bytes_[rows]), lambda x: _peak_bytes(x, bytes_) / bytes_[:, 2] - 1.0
    )
    constants = {"compute_frac": 1.0, "communication_frac": 1.0, "exposed_frac": 0.0, "overhead_s": 0.0}
    if steps:
        constants = dict(zip(constants, map(float, time), strict=True))
    return Calibration(
        engine=engine, **constants, memory_frac=float(memory[0]) if peaks else 1.0, offset_bytes=float(memory[1]) if peaks else 0.0,
        num_time_runs=len(steps), num_memory_runs=len(peaks), time_median_frac=_median(time_errors), time_worst_frac=_worst(time_errors),
        memory_median_frac=_median(memory_errors), memory_worst_frac=_worst(memory_errors),
    )  # fmt: skip


def calibrated(estimate: Estimate, calibration: Calibration) -> Estimate:
    """The estimate under the calibration; its notes say so."""
    x = np.array([calibration.compute_frac, calibration.communication_frac, calibration.exposed_frac, calibration.overhead_s])
    compute, communication, hidden, copies, host, bubble, _ = _causes(estimate)
    busy = compute + communication + copies + host
    exposed = calibration.communication_frac * communication + calibration.exposed_frac * hidden
    ratio = (calibration.compute_frac * compute + exposed + copies + host) / busy if busy > 0.0 else 1.0
    amounts = {
        "compute": calibration.compute_frac * compute, "exposed_communication": exposed, "bubble": bubble * ratio, "host": host + calibration.overhead_s,
    }  # fmt: skip
    step_s = float(_step_s(x, np.array([_causes(estimate)]))[0])
    faster = estimate.step_s / step_s
    axes = exposed / communication if communication > 0.0 else 1.0
    note = f"calibrated on {calibration.num_time_runs} timed and {calibration.num_memory_runs} measured memory runs"
    return replace(
        estimate, step_s=step_s, time=tuple(replace(line, amount=amounts.get(line.name, line.amount)) for line in estimate.time),
        compute_by_class=_scaled(estimate.compute_by_class, calibration.compute_frac),
        communication_by_axis=_scaled(estimate.communication_by_axis, axes),
        hidden_communication_s=max(0.0, hidden * (1.0 - calibration.exposed_frac)), tokens_per_s=estimate.tokens_per_s * faster,
        tokens_per_s_per_device=estimate.tokens_per_s_per_device * faster, mfu_frac=estimate.mfu_frac * faster, hfu_frac=estimate.hfu_frac * faster,
        stages=tuple(_stage(stage, calibration) for stage in estimate.stages), notes=(*estimate.notes, note),
    )  # fmt: skip


def profile_text(calibration: Calibration) -> str:
    """The calibration as a profile file: JSON with its format, version, constants and residuals."""
    return json.dumps({"format": FORMAT, "format_version": 1, **asdict(calibration)}, indent=2) + "\n"


def read_profile(text: str, where: str) -> Calibration:
    """The calibration of a profile file. Raises InputError naming `where` when it is no such file or holds anything but its constants."""
    try:
        values = json.loads(text)
        kind, version = values.pop("format"), values.pop("format_version")
        if (kind, version) != (FORMAT, 1):
            raise InputError(
                f"format {kind!r} version {version!r} is not {FORMAT!r} version 1", where=where, remedy="fit the profile again"
            )
        found = Calibration(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"is no calibration profile ({error})", where=where, remedy="fit the profile again") from error
    bad = [item.name for item in fields(found) if item.name != "engine" and not isinstance(getattr(found, item.name), int | float | None)]
    if bad or not isinstance(found.engine, str) or found.compute_frac <= 0.0 or found.communication_frac <= 0.0 or found.memory_frac <= 0.0:
        raise InputError(f"{', '.join(bad) or 'a constant'} is no usable value", where=where, remedy="fit the profile again")
    return found


def _stage(stage: StageMemory, calibration: Calibration) -> StageMemory:
    """More (or fewer) bytes of tensors at every peak; the class that names what runs need besides what they keep takes them."""
    extra = (calibration.memory_frac - 1.0) * stage.allocated_bytes + calibration.offset_bytes
    classes = tuple(replace(line, amount=line.amount + extra) if line.name == "recompute_workspace" else line for line in stage.classes)
    return replace(
        stage, classes=classes, init_peak_bytes=stage.init_peak_bytes + calibration.offset_bytes, step_peak_bytes=stage.step_peak_bytes + extra,
        optimizer_peak_bytes=stage.optimizer_peak_bytes + extra,
    )  # fmt: skip


def _scaled(lines: tuple[Line, ...], factor: float) -> tuple[Line, ...]:
    return tuple(replace(line, amount=line.amount * factor) for line in lines)


def _causes(estimate: Estimate) -> tuple[float, ...]:
    """compute, exposed communication, hidden communication, copies, host, bubble, optimizer."""
    line = {item.name: item.amount for item in estimate.time}
    return (
        line["compute"], line["exposed_communication"], estimate.hidden_communication_s, line["exposed_copy"], line["host"], line["bubble"],
        line["optimizer"],
    )  # fmt: skip


def _step_s(x: Array, parts: Array) -> Array:
    """step' of rows of `_causes` under constants (compute_frac, communication_frac, exposed_frac, overhead_s)."""
    compute, communication, hidden, copies, host, bubble, optimizer = parts.T
    busy = compute + communication + copies + host
    scaled = x[0] * compute + x[1] * communication + x[2] * hidden + copies + host
    return np.asarray(scaled * (1.0 + bubble / np.maximum(busy, 1e-12)) + optimizer + x[3])


def _peak_bytes(x: Array, peaks: Array) -> Array:
    return np.asarray(np.maximum(x[0] * peaks[:, 0] + peaks[:, 1] + x[1], 1.0))


def _fit_time(parts: Array, seconds: Array) -> Array:
    center = np.array([log(median) for median, _ in TIME_PRIORS])
    spread = np.array([sd for _, sd in TIME_PRIORS])
    return np.exp(_least_squares(lambda x: np.log(_step_s(np.exp(x), parts) / seconds), center, spread))


def _fit_memory(peaks: Array) -> Array:
    def constants(x: Array) -> Array:
        return np.array([np.exp(x[0]), x[1] * OFFSET_SD_BYTES])

    spread = np.array([MEMORY_FACTOR_SD, 1.0])
    return constants(_least_squares(lambda x: np.log(_peak_bytes(constants(x), peaks) / peaks[:, 2]), np.zeros(2), spread))


def _least_squares(errors: Callable[[Array], Array], center: Array, spread: Array, rounds: int = 40) -> Array:
    """argmin sum huber(errors / NOISE_FRAC) + sum ((x - center) / spread)^2 by damped Gauss-Newton with numeric derivatives."""
    x, damping = center.copy(), 1e-3

    def cost(at: Array) -> float:
        size = np.abs(errors(at)) / NOISE_FRAC
        inside = np.where(size <= HUBER, size**2, 2.0 * HUBER * size - HUBER**2)
        return float(inside.sum() + (((at - center) / spread) ** 2).sum())

    best = cost(x)
    for _ in range(rounds):
        now = errors(x)
        slope = np.stack([(errors(x + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1) / NOISE_FRAC
        scaled = now / NOISE_FRAC
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(scaled), 1e-12))
        matrix = slope.T @ (weight[:, None] * slope) + np.diag(spread**-2.0)
        gradient = slope.T @ (weight * scaled) + (x - center) / spread**2
        trial = x - np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
        if (found := cost(trial)) < best:
            done = best - found < 1e-9 * (1.0 + best)
            x, best, damping = trial, found, damping / 3.0
            if done:
                break
        else:
            damping *= 5.0
    return x


def _cross_validated(count: int, fit: Callable[[NDArray[np.intp]], Array], errors: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The fit to all rows, and the error of each row under the fit to the others."""
    rows = np.arange(count)
    if not count:
        return np.zeros(0), np.zeros(0)
    left_out = [errors(fit(rows[rows != row]))[row] for row in rows] if count > 1 else []
    return fit(rows), np.array(left_out)


def _median(errors: Array) -> float | None:
    return float(np.median(np.abs(errors))) if len(errors) else None


def _worst(errors: Array) -> float | None:
    return float(np.abs(errors).max()) if len(errors) else None
