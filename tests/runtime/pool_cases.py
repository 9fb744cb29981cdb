"""Small cases for the pool's own tests."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def add_ranks(*, offset: int) -> list[int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return [dist.get_rank(), int(total) + offset]


def fail_on(*, rank: int) -> float:
    return 1 / (dist.get_rank() - rank)


def die_on(*, rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(9)
    dist.barrier()


def hang() -> None:
    time.sleep(60)
