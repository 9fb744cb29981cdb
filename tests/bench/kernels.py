"""How far kernel and collective times are from measured ones: one JSON object on stdout, errors as fractions.

python -m tests.bench.kernels --gemm FILE --nccl FILE --json

FILE: .csv or .jsonl, plain or .gz. GEMM: device (or gpu), dtype, m, n, k, time_s (or time_us). NCCL: device (or gpu), collective, num_gpus (or gpus),
message_bytes (or size_bytes), time_s (or time_us); more devices than a host holds are priced on gpus_per_node each. GEMM tables are short bursts, so the
factor that a training step loses to the power limit (KernelProfile.sustained_frac) is left out here; their fp8 and fp4 rows hold the cast of the input.
Rows of an unknown device or dtype, or that give no device, are not scored; they count in `skipped`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from costmodel.collectives import collective_s
from costmodel.compute import cast_s, compute_s
from costmodel.errors import AutoplanError, InputError
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from costmodel.profiles.kernels import kernel_profile
from costmodel.work import DTYPE_BYTES, Compute
from tests.bench.machines import Machines
from tests.bench.runs import read_rows
from tests.bench.stats import summary

# Words of a table's dtype -> ours; the first that occurs wins.
DTYPE_WORDS = (
    ("fp4", "fp4"),
    ("fp8_block", "fp8_block"),
    ("fp8", "fp8"),
    ("bf", "bf16"),
    ("half", "fp16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("32", "fp32"),
)
KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
         "sendrecv": "p2p", "p2p": "p2p", "broadcast": "broadcast"}  # fmt: skip
Row = Mapping[str, Any]


def _first(row: Row, *names: str) -> Any:
    """The first of `names` that the row has. Raises InputError."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise InputError(f"no {names[0]}", where="row", remedy=f"give {' or '.join(names)}")


def _seconds(row: Row) -> float:
    return float(row["time_s"]) if row.get("time_s") else float(_first(row, "time_us")) * 1e-6


def _cluster(row: Row, devices: int, machines: Machines) -> Cluster:
    per_node = int(row.get("gpus_per_node") or 8)
    return machines.cluster({"gpu": _first(row, "device", "gpu"), "gpus_per_node": per_node, "inter_bw": row.get("inter_bw")}, devices)


def dtype_of(text: str) -> str:
    """Our name of a table's dtype: the same where the cost model knows it. Raises InputError."""
    if text in DTYPE_BYTES:
        return text
    found = next((name for word, name in DTYPE_WORDS if word in text.lower()), None)
    if found is None:
        raise InputError(f"dtype {text!r} is unknown", where="row.dtype", remedy="give bf16, fp16, fp8, fp4 or fp32")
    return found


def gemm_error(row: Row, machines: Machines) -> float:
    """predicted / measured - 1 of one matrix product; its result is stored in two bytes (four under fp32). Raises AutoplanError."""
    device, dtype = _cluster(row, 1, machines).pool.device, dtype_of(_first(row, "dtype"))
    m, n, k, batch = (
        int(_first(row, key, key.upper())) if key != "batch" else int(row.get("batch") or 1) for key in ("m", "n", "k", "batch")
    )
    size = DTYPE_BYTES[dtype]
    work = Compute(
        name="gemm", op_class="gemm", flops=2.0 * batch * m * n * k, read_bytes=batch * size * (m * k + k * n),
        write_bytes=batch * max(size, 2.0) * m * n, dtype=dtype, m=m, n=n, k=k, batch=batch,
    )  # fmt: skip
    burst = replace(kernel_profile(device), sustained_frac=1.0)
    return (compute_s(work, device, burst) + cast_s(m, k, device, dtype, burst)) / _seconds(row) - 1.0


def nccl_error(row: Row, machines: Machines) -> float:
    """predicted / measured - 1 of one collective. Raises AutoplanError."""
    ranks, kind = int(_first(row, "num_gpus", "gpus")), str(_first(row, "collective")).lower().replace("_", "").replace("-", "")
    if kind not in KINDS:
        raise InputError(f"collective {kind!r} is unknown", where="row.collective", remedy=f"known: {', '.join(KINDS)}")
    cluster = _cluster(row, ranks, machines)
    pool = cluster.pool
    group = Mesh(dp_shard=ranks).group("dp_shard", fast_domain=pool.fast_domain, per_node=pool.devices_per_node)
    return collective_s(KINDS[kind], float(_first(row, "message_bytes", "size_bytes")), group, pool) / _seconds(row) - 1.0


def score(rows: Iterable[Row], error_of: Callable[[Row, Machines], float], label: Callable[[Row], str]) -> dict[str, Any]:
    """n, median, p90 (and the rest of a summary), by label, and what was skipped, by reason."""
    machines, skipped = Machines(), Counter[str]()
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        try:
            errors[label(row)].append(error_of(row, machines))
        except AutoplanError as error:
            skipped[error.what] += 1
    everything = [error for found in errors.values() for error in found]
    return {**summary(everything), "skipped": dict(skipped.most_common()), "by": {key: summary(errors[key]) for key in sorted(errors)}}


def main(argv: list[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gemm", nargs="+", default=[], metavar="FILE", help="measured matrix products")
    parser.add_argument("--nccl", nargs="+", default=[], metavar="FILE", help="measured collectives")
    parser.add_argument("--json", action="store_true", help="one line of JSON (the default output is indented)")
    options = parser.parse_args(argv)

    def device(row: Row) -> str:
        return str(row.get("device") or row.get("gpu"))

    result = {
        "gemm": score(read_rows(options.gemm), gemm_error, lambda row: f"{device(row)} {row.get('dtype')}"),
        "nccl": score(
            read_rows(options.nccl),
            nccl_error,
            lambda row: f"{device(row)} {row.get('collective')} {row.get('num_gpus') or row.get('gpus')}",
        ),
    }
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
