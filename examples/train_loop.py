"""Your own loop under a plan. One process a rank:

autoplan plan examples.gpt:build_model 4xCPU --seq-len 64 --global-batch 16 --precision fp32 -o plan.json
torchrun --nproc-per-node 4 -m examples.train_loop plan.json
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import runtime
from examples.gpt import batches, build_model, loss_fn
from planner import Plan


def main(plan_file: str, steps: int = 20) -> None:
    """Train `steps` steps and print the loss of the global batch."""
    dist.init_process_group()
    plan = Plan.load(plan_file)
    torch.manual_seed(0)  # equal weights on every rank
    trainer = runtime.apply(plan, build_model(), loss_fn=loss_fn, optimizer_factory=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    share = plan.job.global_batch // plan.strategy.mesh.dp
    data = batches(batch=share, sequence=plan.job.seq_len, seed=trainer.place.data_index)  # every data-parallel rank its own sequences
    for step in range(steps):
        loss = trainer.step(next(data))
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
