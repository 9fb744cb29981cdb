"""Fit the GEMM constants of costmodel/profiles/gemm.py to measured times: python -m tests.bench.fit_kernels TABLE.csv.gz (needs scipy).

TABLE has the columns device, dtype, m, n, k, time_s (aiconfigurator-core 0.12.0, Apache-2.0, in that form). Nonlinear least squares on log time with a
robust loss (soft L1 beyond 3 %), from one start, by device and dtype. A fifth of the (n, k) pairs is left out of the fit, so that no shape that tests was seen.
Prints one row of costmodel/profiles/gemm.py each, with median and 90th percentile of |predicted / measured - 1| on what was left out.
"""

from __future__ import annotations

import csv
import gzip
import sys

import numpy as np
from scipy.optimize import least_squares

from costmodel.compute import SPLITS, TILE_CLASSES, TILES
from costmodel.profiles.kernels import kernel_profile
from costmodel.work import DTYPE_BYTES
from tests.bench.kernels import dtype_of
from tests.bench.machines import Machines

# field -> (start, low, high, unit) of the search
SEARCH = {
    "efficiency_frac": (0.85, 0.3, 1.3, 1.0),
    "square_frac": (0.95, 0.3, 1.0, 1.0),
    "half_frac": (0.8, 0.3, 1.0, 1.0),
    "small_frac": (0.65, 0.2, 1.0, 1.0),
    "k_overhead": (100.0, 10.0, 400.0, 1.0),
    "drift_frac": (0.4, 0.0, 1.0, 1.0),
    "split_s": (1.0, 0.0, 20.0, 1e-6),
    "start_s": (3.0, 0.3, 30.0, 1e-6),
    "bandwidth_frac": (0.85, 0.3, 1.0, 1.0),
    "l2_per_core": (30.0, 7.0, 60.0, 1e9),
    "l2_frac": (0.5, 0.1, 2.0, 1.0),
    "overlap": (4.0, 1.5, 10.0, 1.0),
    "derate_frac": (0.05, 0.0, 1.0, 1.0),
    "cast_s": (1.0, 0.0, 20.0, 1e-12),
}  # fmt: skip
Array = np.ndarray
Machine = tuple[float, int, float, float]


def seconds(rows: Array, values: dict[str, float], machine: Machine, size: float) -> Array:
    """costmodel.compute's time of a plain GEMM with a two-byte result, for all rows (m, n, k, ...) at once; machine: peak, cores, bandwidth, L2 bytes."""
    peak, cores, bandwidth, cache = machine
    m, n, k = (rows[:, column][:, None, None] for column in range(3))
    tile_m, tile_n = (np.array([tile[axis] for tile in TILES], float)[None, :, None] for axis in (0, 1))
    share = np.array([1.0 if name == "" else values[f"{name}_frac"] for name in TILE_CLASSES])[None, :, None]
    splits = np.array(SPLITS, float)[None, None, :]
    ratio = np.ceil(m / tile_m) * np.ceil(n / tile_n) * splits / cores
    waves = np.maximum(1.0, (1.0 - values["drift_frac"]) * np.ceil(ratio) + values["drift_frac"] * ratio)
    loops = waves * 2.0 * tile_m * tile_n / (peak / cores * values["efficiency_frac"] * share) * (k / splits + values["k_overhead"])
    cache_rate = values["l2_per_core"] * cores
    loops = loops + np.where(splits > 1, values["split_s"] + 8.0 * splits * m * n / cache_rate, 0.0)
    loops = np.where((splits > 1) & ((ratio > 2.0) | (k < 128 * splits)), np.inf, loops).reshape(len(rows), -1).min(1)
    m, n, k = rows[:, 0], rows[:, 1], rows[:, 2]
    moved = size * (m * k + n * k) + 2.0 * m * n
    miss = 1.0 / (1.0 + (cache * values["l2_frac"] / moved) ** 4)
    memory = moved * (miss / (bandwidth * values["bandwidth_frac"]) + (1.0 - miss) / cache_rate)
    busy = (loops ** values["overlap"] + memory ** values["overlap"]) ** (1.0 / values["overlap"])
    result: Array = values["start_s"] + busy * (1.0 + values["derate_frac"] * busy / (busy + 1e-3)) + values["cast_s"] * m * k
    return result


def fit(rows: Array, machine: Machine, size: float) -> dict[str, float]:
    """The constants with the least robust squared log error on `rows` (m, n, k, seconds)."""
    fields = [name for name in SEARCH if name != "cast_s" or size < 2.0]
    scale = np.array([SEARCH[name][0] for name in fields])
    fixed = {name: 0.0 for name in SEARCH if name not in fields}

    def values(point: Array) -> dict[str, float]:
        return fixed | {name: float(x * SEARCH[name][0] * SEARCH[name][3]) for name, x in zip(fields, point, strict=True)}

    def residual(point: Array) -> Array:
        return np.log(seconds(rows, values(point), machine, size) / rows[:, 3])

    point = np.ones(len(fields))
    bounds = tuple(np.array([SEARCH[name][side] for name in fields]) / scale for side in (1, 2))
    for step in (0.1, 0.03, 0.01):
        point = least_squares(residual, point, bounds=bounds, loss="soft_l1", f_scale=0.03, diff_step=step, max_nfev=30).x
    return values(point)


def describe(dtype: str, v: dict[str, float], start_s: float) -> str:
    """One line of costmodel/profiles/gemm.py; of the floor, what is beyond `start_s` belongs to the cast."""
    tiles = ", ".join(f"{v[f'{name}_frac']:.3f}" for name in ("square", "half", "small"))
    start, cast_start = min(start_s, v["start_s"]), max(0.0, v["start_s"] - start_s)
    text = f'("{dtype}", {v["efficiency_frac"]:.3f}, ({tiles}), {v["k_overhead"]:.0f}, {v["drift_frac"]:.2f}, {v["split_s"] * 1e6:.1f}, {start * 1e6:.1f}, '
    text += f"{v['bandwidth_frac']:.3f}, {v['l2_per_core'] / 1e9:.0f}, {v['l2_frac']:.2f}, {v['overlap']:.1f}, {v['derate_frac']:.3f}"
    return text + (f", {cast_start * 1e6:.1f}, {v['cast_s'] * 1e12:.2f})," if v["cast_s"] else "),")


def main(table: str) -> None:
    """Fit every device and dtype of the table."""
    grouped: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with gzip.open(table, "rt") as stream:
        for row in csv.DictReader(stream):
            item = tuple(float(row[key]) for key in ("m", "n", "k", "time_s"))
            grouped.setdefault((row["device"], row["dtype"]), []).append(item)
    machines, floor = Machines(), 3e-6
    for (name, text), items in grouped.items():
        device, dtype, rows = machines.cluster({"gpu": name}, 1).pool.device, dtype_of(text), np.array(items)
        profile = kernel_profile(device)
        machine = (device.peak(dtype.partition("_")[0]), profile.num_cores(device), device.memory_bandwidth_bytes_per_s, profile.l2_bytes)
        held = np.array([hash((int(n), int(k))) % 5 == 0 for n, k in rows[:, 1:3]])
        values = fit(rows[~held], machine, DTYPE_BYTES[dtype])
        floor = values["start_s"] if dtype == "bf16" else floor
        error = np.abs(seconds(rows[held], values, machine, DTYPE_BYTES[dtype]) / rows[held, 3] - 1.0)
        even = error[rows[held, 0] % 128 == 0]
        scores = (
            f"{np.median(error):.3f}, {np.percentile(error, 90):.3f}; m % 128 == 0: {np.median(even):.3f}, {np.percentile(even, 90):.3f}"
        )
        sys.stdout.write(f"{device.device_id}  {describe(dtype, values, floor)}  # {scores}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
