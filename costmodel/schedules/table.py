"""Schedules as comma-separated values: the compute-only form that torch.distributed.pipelining's `_PipelineScheduleRuntime._load_csv` reads.

One row per rank, one cell per action, written <stage><kind><micro-batch>: `3F0,3I0,3W0`.
"""

from __future__ import annotations

import re

from costmodel.errors import InputError
from costmodel.schedules.action import Orders

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def to_csv(orders: Orders) -> str:
    """The text of `orders`."""
    return "".join(",".join(f"{stage}{kind}{micro}" for stage, kind, micro in order) + "\n" for order in orders)


def from_csv(text: str) -> Orders:
    """The orders in `text`; empty cells are idle slots and are skipped. Raises InputError naming the first cell that is no action."""
    return tuple(_row(row, rank) for rank, row in enumerate(text.splitlines()))


def _row(row: str, rank: int) -> tuple[tuple[int, str, int], ...]:
    order = []
    for position, cell in enumerate(row.split(",")):
        if not cell.strip():
            continue
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            raise InputError(
                f"{cell!r} is no action", where=f"schedule table: row {rank}, cell {position}",
                remedy="write <stage><F|B|I|W><micro-batch>, for example 3F0",
            )  # fmt: skip
        order.append((int(match[1]), match[2], int(match[3])))
    return tuple(order)
