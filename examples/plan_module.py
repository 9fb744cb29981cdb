"""Plan a module of your own for GPUs that are not here. It is built on the meta device: no weight is allocated, no element computed.

python -m examples.plan_module
"""

from __future__ import annotations

import torch

from examples.gpt import GPT, GPTConfig
from planner import Job, autoplan

THREE_BILLION = GPTConfig(vocab_size=50304, max_sequence=4096, num_layers=32, hidden_size=2560, num_heads=32)


def main() -> None:
    """Print the plan and why it is the one."""
    with torch.device("meta"):
        model = GPT(THREE_BILLION)
    plan = autoplan(model, "4xA100-40GB", Job(global_batch=64, seq_len=4096))
    print(plan)
    print(plan.explain())


if __name__ == "__main__":
    main()
