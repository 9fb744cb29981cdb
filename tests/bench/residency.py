"""The residency frontier of a model's layer: one JSON object on stdout, seconds a micro-batch and bytes of one rank.

python -m tests.bench.residency [--model llama3-8b] [--seq-len 4096] [--tp 1] [--engine torch] [--cluster 8xH100] [--no-flash] [--compile] --json

solve_s: wall seconds for all vertices of the hull. named: what the engine's own recompute policies keep and repeat, and `best_extra_s`, the least extra seconds
within the same bytes. worst_model_error_frac: program against planner.block_work, over all vertices, of the seconds of full recompute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from costmodel.blocks import Machine
from costmodel.engine import engine
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.block_work import prepare
from planner.division import Division
from planner.models import resolve, spec_graph
from planner.residency import hull, record
from planner.residency.program import evaluate, solve


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.residency", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--cluster", default="8xH100")
    parser.add_argument("--no-flash", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    options = parser.parse_args(arguments)
    graph = spec_graph(resolve(options.model), sequence=options.seq_len)
    chosen, tp = engine(options.engine), options.tp
    layer = [block for block in graph.kinds if block.role == "layer"][-1]
    fused = chosen.fused_kernels or options.compile
    block = prepare(layer, flash=not options.no_flash, dropout=False, merge=chosen.fused_input_gradient, fused=fused)
    division = Division(tp=tp, kv_divisor=min(tp, graph.num_kv_heads or tp), sequence_parallel=tp > 1)
    tape = record(block, division, chosen, Machine.of(Cluster.parse(options.cluster).pool, Mesh(tp=tp), chosen))
    started = time.perf_counter()
    points = hull(tape)
    solve_s = time.perf_counter() - started
    named = {}
    for policy in ("none", "selective", "full"):
        saved = tape.work(policy).saved_bytes
        best = solve(tape, seconds_weight=1.0, bytes_weight=0.0, most_bytes=saved)
        named[policy] = {"saved_bytes": saved, "extra_s": tape.extra_s(policy), "best_extra_s": best.extra_s if best else None}
    errors = [abs(evaluate(tape, point.kept).extra_s - point.extra_s) for point in points]
    print(json.dumps({
        "model": options.model, "block": layer.kind_id, "engine": chosen.name, "tp": tp, "storable": len(tape.storable), "vertices": len(points),
        "solve_s": round(solve_s, 3), "saved_bytes": [points[0].saved_bytes, points[-1].saved_bytes],
        "peak_bytes": [min(point.peak_bytes for point in points), max(point.peak_bytes for point in points)],
        "worst_model_error_frac": max(errors) / max(1e-12, points[-1].extra_s), "named": named,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
