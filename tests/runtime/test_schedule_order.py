"""The cost model's schedules are torch's: the same actions in the same order on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from costmodel.schedule import actions

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def recorded(kind: Any, pp: int, m: int) -> list[list[tuple[int, str, int]]]:
    """What the step loop of a one-stage schedule calls on each rank, with stages that only write down what they are asked."""
    orders: list[list[tuple[int, str, int]]] = []
    for rank in range(pp):
        order: list[tuple[int, str, int]] = []
        stage = MagicMock(stage_index=rank)
        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        stage.forward_one_chunk.side_effect = lambda micro, *_, rank=rank, order=order, **__: order.append((rank, "F", micro))
        stage.backward_one_chunk.side_effect = lambda micro, *_, rank=rank, order=order, **__: order.append((rank, "B", micro))
        schedule = MagicMock(_n_microbatches=m, _num_stages=pp, _stage=stage)
        schedule._check_inputs.return_value = ([()] * m, [{}] * m)
        kind._step_microbatches(schedule)
        orders.append(order)
    return orders


def torch_order(name: str, pp: int, vpp: int, m: int) -> list[list[tuple[int, str, int]]]:
    """Compute actions of torch's schedule per rank, from the functions that its classes run, without a process group."""
    if name != "interleaved_1f1b":
        return recorded({"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}[name], pp, m)
    facts = SimpleNamespace(n_local_stages=vpp, pp_group_size=pp, _n_microbatches=m, microbatches_per_round=pp)
    make = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    names = {schedules._ComputationType.FORWARD: "F", schedules._ComputationType.FULL_BACKWARD: "B"}
    return [
        [(step.stage_index, names[step.computation_type], step.microbatch_index) for step in make(facts, rank) if step]
        for rank in range(pp)
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_order_equals_torch(name: str, pp: int, rounds: int) -> None:
    for vpp in (1,) if name != "interleaved_1f1b" else (2, 3, 4):
        ours = actions(name, pp=pp, vpp=vpp, num_micro_batches=pp * rounds)
        assert [list(order) for order in ours] == torch_order(name, pp, vpp, pp * rounds)


def test_micro_batches_that_do_not_fill_the_pipeline() -> None:
    for m in (1, 3, 5, 7):
        assert [list(order) for order in actions("1f1b", pp=4, vpp=1, num_micro_batches=m)] == torch_order("1f1b", 4, 1, m)
