"""Fit the GEMM constants of costmodel/profiles/kernels.py to a table of measured times: python tests/bench/fit_kernels.py TABLE.csv.gz.

TABLE has the columns device, dtype, m, n, k, time_s (aiconfigurator-core 0.12.0, Apache-2.0, in that form). Prints one JSON line per device
and dtype: constants, and the error on held-out rows (every third row of the table; shapes do not
repeat). Minimises the mean |log(predicted / measured)| by coordinate descent.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from math import log
from statistics import fmean, quantiles

from costmodel.compute import gemm_bytes, gemm_s
from costmodel.profiles.kernels import GemmConstants

# device -> (cores, bandwidth bytes/s, dense peak by dtype): datasheets
DEVICES = {
    "a100-sxm4-80gb": (108, 2039e9, {"bfloat16": 312e12}),
    "h100-sxm5-80gb": (132, 3350e9, {"bfloat16": 989.4e12, "fp8": 1978.9e12}),
    "h200-sxm": (132, 4800e9, {"bfloat16": 989.4e12, "fp8": 1978.9e12}),
    "b200-sxm": (148, 8000e9, {"bfloat16": 2250e12, "fp8": 4500e12}),
    "l40s": (142, 864e9, {"bfloat16": 362.05e12, "fp8": 733e12}),
    "rtx-pro-6000-server": (188, 1597e9, {"bfloat16": 503.8e12, "fp8": 1007.6e12}),
    "gb200": (152, 8000e9, {"bfloat16": 2500e12, "fp8": 5000e12}),
    "b300-sxm": (148, 8000e9, {"bfloat16": 2250e12, "fp8": 4500e12}),
    "gb300": (152, 8000e9, {"bfloat16": 2500e12, "fp8": 5000e12}),
}
SIZE = {"bfloat16": 2.0, "fp8": 1.0}
STEPS = {"efficiency_frac": 1.03, "k_overhead": 1.3, "reuse": 1.3, "drift_frac": 1.25, "start_s": 1.2}

Row = tuple[int, int, int, float]


def predict(row: Row, size: float, peak: float, cores: int, bandwidth: float, constants: GemmConstants, frac: float) -> float:
    """Seconds of one row: the formula of costmodel.compute for a plain GEMM whose result is bf16."""
    m, n, k, _ = row
    moved = gemm_bytes(m, n, k, 1, size) + (2.0 - size) * m * n
    return constants.start_s + max(gemm_s(m, n, k, 1, peak, cores, constants), moved / (bandwidth * frac))


def errors(rows: list[Row], size: float, device: str, dtype: str, constants: GemmConstants, frac: float) -> list[float]:
    """log(predicted / measured) per row."""
    cores, bandwidth, peaks = DEVICES[device]
    return [log(predict(row, size, peaks[dtype], cores, bandwidth, constants, frac) / row[3]) for row in rows]


def _constants(values: dict[str, float]) -> GemmConstants:
    return GemmConstants(
        efficiency_frac=values["efficiency_frac"], k_overhead=round(values["k_overhead"]), reuse=round(values["reuse"]), drift_frac=values["drift_frac"],
        start_s=values["start_s"],
    )  # fmt: skip


def fit(rows: list[Row], device: str, dtype: str, rounds: int = 6) -> tuple[GemmConstants, float]:
    """Constants and bandwidth fraction with the least mean absolute log error on `rows`."""
    values = {"efficiency_frac": 0.8, "k_overhead": 100.0, "reuse": 30.0, "drift_frac": 0.4, "start_s": 3e-6, "frac": 0.8}

    def loss(candidate: dict[str, float]) -> float:
        constants = _constants(candidate)
        return fmean(abs(error) for error in errors(rows, SIZE[dtype], device, dtype, constants, candidate["frac"]))

    best = loss(values)
    for turn in range(rounds):
        for name, step in (*STEPS.items(), ("frac", 1.05)):
            for factor in (step ** (1.0 / (1 + turn)), step ** (-1.0 / (1 + turn))):
                while True:
                    trial = values | {name: values[name] * factor}
                    if max(trial["efficiency_frac"], trial["drift_frac"], trial["frac"]) > 1.0 or (score := loss(trial)) >= best - 1e-6:
                        break
                    values, best = trial, score
    return _constants(values), values["frac"]


def main(table: str) -> None:
    """Fit every device and dtype of the table that DEVICES knows."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    with gzip.open(table, "rt") as stream:
        for row in csv.DictReader(stream):
            if row["dtype"] in DEVICES.get(row["device"], (0, 0, {}))[2]:
                item = (int(row["m"]), int(row["n"]), int(row["k"]), float(row["time_s"]))
                grouped.setdefault((row["device"], row["dtype"]), []).append(item)
    for (device, dtype), rows in grouped.items():
        held = rows[::3]
        train = [row for index, row in enumerate(rows) if index % 3][::2]
        constants, frac = fit(train, device, dtype)
        test = errors(held, SIZE[dtype], device, dtype, constants, frac)
        large = errors([r for r in held if r[0] * r[1] * r[2] >= 2**33], SIZE[dtype], device, dtype, constants, frac)
        print(json.dumps({
            "device": device, "dtype": dtype, "efficiency_frac": round(constants.efficiency_frac, 4), "k_overhead": round(constants.k_overhead, 1),
            "reuse": round(constants.reuse, 1), "drift_frac": round(constants.drift_frac, 3), "start_s": round(constants.start_s, 8),
            "bandwidth_frac": round(frac, 3), "held_out_mean_abs": round(fmean(map(abs, test)), 4),
            "held_out_p90_abs": round(quantiles(map(abs, test), n=10)[-1], 4), "large_mean_abs": round(fmean(map(abs, large)), 4),
            "large_bias": round(fmean(large), 4),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
