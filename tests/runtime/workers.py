"""The process behind the pool: imports torch once, then forks the ranks of every case.

    python -m tests.runtime.workers     (one JSON request a line on stdin, one JSON reply a line on the descriptor named by --reply)

A request names an importable function `module:function`, the number of ranks and JSON arguments. Every rank calls function(**arguments) inside an
initialised gloo group and its JSON result comes back; a rank that fails or dies takes its case down with its traceback, not the pool.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.distributed import FileStore

GROUP_TIMEOUT = timedelta(seconds=60)


def run_rank(case: str, rank: int, ranks: int, rendezvous: str, arguments: dict[str, object]) -> object:
    """One rank of a case, in its own process."""
    torch.set_num_threads(1)
    store = FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    module, _, function = case.partition(":")
    result = getattr(importlib.import_module(module), function)(**arguments)
    dist.barrier()
    return result


def child(write: int, case: str, rank: int, ranks: int, rendezvous: str, arguments: dict[str, object]) -> None:
    """Run a rank and leave its outcome in the pipe; never returns."""
    try:
        outcome = {"result": run_rank(case, rank, ranks, rendezvous, arguments)}
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    with os.fdopen(write, "w") as pipe:
        json.dump(outcome, pipe)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_case(request: dict[str, object]) -> dict[str, object]:
    """Fork the ranks, gather their outcomes; on the first failure or at the deadline the rest is killed."""
    ranks, timeout_s = int(request["ranks"]), float(request["timeout_s"])
    folder = tempfile.TemporaryDirectory(prefix="autoplan-pool-")
    rendezvous = f"{folder.name}/store"
    pipes: dict[int, tuple[int, int]] = {}
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child(write, request["case"], rank, ranks, rendezvous, request["arguments"])
        os.close(write)
        pipes[read] = (rank, pid)
    outcomes = gather(pipes, time.monotonic() + timeout_s)
    for read, (_, pid) in pipes.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    folder.cleanup()
    return {"outcomes": [outcomes.get(rank, {"error": f"rank {rank} was stopped"}) for rank in range(ranks)]}


def gather(pipes: dict[int, tuple[int, int]], deadline: float) -> dict[int, dict[str, object]]:
    """Read every rank's outcome; after a first failure wait only a moment for the others' tracebacks."""
    texts = dict.fromkeys(pipes, b"")
    waiting, outcomes = set(pipes), {}
    while waiting and time.monotonic() < deadline:
        for read in select.select(waiting, [], [], 0.2)[0]:
            part = os.read(read, 1 << 20)
            texts[read] += part
            if part:
                continue
            waiting.discard(read)
            rank = pipes[read][0]
            outcomes[rank] = json.loads(texts[read]) if texts[read] else {"error": f"rank {rank} died"}
            if "error" in outcomes[rank]:
                deadline = min(deadline, time.monotonic() + 2)
    for read in waiting:
        outcomes[pipes[read][0]] = {"error": f"rank {pipes[read][0]} did not finish"}
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", type=int, required=True)
    reply = os.fdopen(parser.parse_args().reply, "w")
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(json.loads(line))), file=reply, flush=True)


if __name__ == "__main__":
    main()
