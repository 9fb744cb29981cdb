"""The cost model's schedules are torch's: the same actions in the same order on every rank, and tables that torch's runtime loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from costmodel.schedule import SCHEDULES, actions, rank_of_stage
from costmodel.schedules.table import to_csv

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

ONE_STAGE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B", "breadth_first": "ScheduleLoopedBFS", "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV",
}  # fmt: skip
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
Order = list[tuple[int, str, int]]


def recorded(kind: Any, pp: int, m: int) -> list[Order]:
    """What the step loop of a one-stage schedule calls on each rank, with stages that only write down what they are asked."""
    orders: list[Order] = []
    for rank in range(pp):
        order: Order = []
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


def torch_order(name: str, pp: int, vpp: int, m: int) -> list[Order]:
    """Compute actions of torch's schedule per rank, from the functions that its classes run, without a process group."""
    if name in ONE_STAGE:
        return recorded(getattr(schedules, ONE_STAGE[name]), pp, m)
    rounds = max(1, m // pp)
    facts = SimpleNamespace(
        n_local_stages=vpp,
        pp_group_size=pp,
        num_stages=pp * vpp,
        _n_microbatches=m,
        microbatches_per_round=m // rounds,
        _stages=[None] * vpp,
    )
    make = getattr(schedules, CLASSES[name])._calculate_single_rank_operations
    return [[action for step in make(facts, rank) if step for action in _compute(step)] for rank in range(pp)]


def _compute(step: Any) -> Iterator[tuple[int, str, int]]:
    """The step, or the forward and backward that run in it side by side."""
    for part in step.sub_actions or (step,):
        yield part.stage_index, LETTERS[part.computation_type.name], part.microbatch_index


@pytest.mark.parametrize("name", [*ONE_STAGE, *CLASSES])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_order_equals_torch(name: str, pp: int, rounds: int) -> None:
    chunks = next(item.chunks for item in SCHEDULES if item.name == name)
    for vpp in range(chunks[0], min(4, chunks[1]) + 1):
        m = pp * rounds * (2 if name == "dualpipev" else 1)
        ours = actions(name, pp=pp, vpp=vpp, num_micro_batches=m)
        assert [list(order) for order in ours] == torch_order(name, pp, vpp, m)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_micro_batches_that_do_not_fill_the_pipeline(name: str) -> None:
    vpp = 2 if name == "zbv" else 1
    for m in (1, 3, 5, 7):
        assert [list(order) for order in actions(name, pp=4, vpp=vpp, num_micro_batches=m)] == torch_order(name, 4, vpp, m)


@pytest.fixture(scope="module")
def fake_group() -> Iterator[None]:
    """A process group of four ranks that sends nothing."""
    dist = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=4, store=fake.FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", [item.name for item in SCHEDULES if item.name != "none"])
@pytest.mark.parametrize("m", [8, 12])
def test_torch_loads_every_table(name: str, m: int, tmp_path: Path) -> None:
    """Torch's own checks (each action once, F before I before W), its placement and its insertion of sends and receives without deadlock."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    pp = 4
    chunks = next(item.chunks for item in SCHEDULES if item.name == name)
    for vpp in sorted({chunks[0], min(3, chunks[1])}):
        ranks = rank_of_stage(name, pp=pp, vpp=vpp)
        ours = actions(name, pp=pp, vpp=vpp, num_micro_batches=m)
        path = tmp_path / f"{name}-{vpp}.csv"
        path.write_text(to_csv(ours), encoding="utf-8")
        mine = [stage for stage, rank in enumerate(ranks) if rank == 0]
        stages = [PipelineStage(torch.nn.Linear(2, 2), stage, pp * vpp, torch.device("cpu")) for stage in mine]
        runtime = schedules._PipelineScheduleRuntime(stages, m, loss_fn=lambda output, target: (output - target).sum())
        runtime._load_csv(str(path), format="compute_only")
        assert runtime.stage_index_to_group_rank == dict(enumerate(ranks))
        for rank, order in enumerate(ours):
            loaded = runtime.pipeline_order_with_comms[rank]
            kept = [
                (step.stage_index, LETTERS[step.computation_type.name], step.microbatch_index)
                for step in loaded
                if step.computation_type.name in LETTERS
            ]
            assert kept == list(order)
            sends = [step for step in loaded if step.computation_type.name in ("SEND_F", "SEND_B")]
            across = [stage for stage, kind, _ in order if _leaves(stage, kind, ranks)]
            assert len(sends) == len(across)


def _leaves(stage: int, kind: str, ranks: tuple[int, ...]) -> bool:
    """Whether what the action makes goes to another rank."""
    receiver = stage + 1 if kind == "F" else stage - 1
    return kind != "W" and 0 <= receiver < len(ranks) and ranks[receiver] != ranks[stage]
