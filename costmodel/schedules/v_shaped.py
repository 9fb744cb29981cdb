"""Schedules on V-shaped stages: rank r holds stage r on the way down and stage 2 pp - 1 - r on the way up, so rank 0 has the first and the last stage.

`zbv` and `dual_pipe_v` follow published lists; `v_half` and `v_min` repeat a building block (costmodel.schedules.building_block).
"""

from __future__ import annotations

from collections import deque

from costmodel.schedules.action import Order, OrderWriter


def zbv(rank: int, pp: int, num_micro_batches: int) -> Order:
    """ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6): fill with 2 (pp - rank) - 1 forwards, then F I W of both chunks in turn.

    Written for at least 2 pp - 1 micro-batches; with fewer, the actions of the missing ones drop out.
    """
    total = max(num_micro_batches, 2 * pp - 1)
    down, up = rank, 2 * pp - 1 - rank
    record = OrderWriter()
    for _ in range(2 * (pp - rank) - 1):
        record.put((down, "F"))
    for _ in range(rank):
        record.put((up, "F"), (down, "F"))
    for _ in range(pp - rank):
        record.put((up, "F"), (up, "I"), (up, "W"))
    while record.count(up, "F") < total:
        if record.count(down, "F") < total:
            record.put((down, "F"))
        record.put((down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
    for _ in range(rank):
        record.put((down, "I"), (up, "I"))
    for _ in range(pp - rank):
        record.put((down, "I"), (down, "W"))
    for stage in (up, down):
        while record.count(stage, "W") < total:
            record.put((stage, "W"))
    return tuple(action for action in record.order if action[2] < num_micro_batches)


def dual_pipe_v(rank: int, pp: int, num_micro_batches: int) -> Order:
    """DualPipeV (DeepSeek-AI 2024, github.com/deepseek-ai/DualPipe, by Sea AI Lab's cut-in-half of DualPipe), for at least 2 pp micro-batches.

    A forward and a backward that DualPipe overlaps stand here one after the other, the forward first.
    """
    down, up, after = rank, 2 * pp - 1 - rank, pp - 1 - rank
    record, owed = OrderWriter(), deque[int]()
    for _ in range(2 * after):
        record.put((down, "F"))
    for _ in range(rank + 1):
        record.put((down, "F"), (up, "F"))
    for _ in range(after):
        record.put((up, "I"), (up, "W"), (up, "F"))
    for _ in range(num_micro_batches - 2 * pp + rank + 1):
        record.put((down, "F"), (up, "B"), (up, "F"), (down, "B"))
    for _ in range(after):
        record.put((up, "B"), (up, "F"), (down, "B"))
    # The second half of the last backwards is split: their weight gradients fill the drain.
    for step in range(2 * (rank + 1)):
        stage = down if step % 2 else up
        record.put((stage, "I" if step > rank else "B"))
        owed.extend([stage] * (step > rank))
    for _ in range(after):
        record.put((owed.popleft(), "W"), (down, "I"))
        owed.append(down)
    record.put(*((stage, "W") for stage in owed))
    return tuple(record.order)
