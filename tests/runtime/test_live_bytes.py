"""Live bytes are those of the tensors that are alive: no more, no fewer; and techniques that save memory are seen to."""

from __future__ import annotations

import pytest
import torch

from runtime.live_bytes import LiveBytes


def test_counts_storages_once_and_forgets_freed_ones():
    with LiveBytes([]) as counter:
        first = torch.zeros(1000)
        view = first[10:].view(3, 330)
        assert counter.peak_bytes == 4000
        del first
        second = torch.ones(500)
        assert counter.peak_bytes == 6000
        del view
        third = torch.ones(500)
        assert counter.peak_bytes == 6000
    assert second.sum() + third.sum() == 1000


def test_what_is_alive_already_counts_once():
    weight = torch.zeros(250)
    with LiveBytes([weight, weight[1:]]) as counter:
        result = weight + 1
    assert counter.peak_bytes == 2000
    assert result.numel() == 250


def test_a_storage_resized_in_place_counts_when_filled():
    gathered = torch.zeros(100)
    gathered.untyped_storage().resize_(0)
    with LiveBytes([gathered]) as counter:
        torch.zeros(1)
        before = counter.peak_bytes
        gathered.untyped_storage().resize_(400)
        gathered.zero_()
        assert counter.peak_bytes >= before + 396
        gathered.untyped_storage().resize_(0)


def test_backward_of_a_chain_keeps_what_autograd_saves():
    width, depth = 64, 8
    x = torch.zeros(width, width, requires_grad=True)
    with LiveBytes([x]) as counter:
        value = x
        for _ in range(depth):
            value = torch.sin(value)
        value.sum().backward()
    matrix = 4 * width * width
    assert (depth + 2) * matrix <= counter.peak_bytes <= (depth + 3) * matrix + 16


@pytest.mark.dist
def test_techniques_save_memory(pool):
    def peak(**plan):
        return max(pool.run("tests.runtime.cases:step_peak", ranks=4, plan=plan))

    plain = peak(mesh={"dp_replicate": 4})
    selective, full = (peak(mesh={"dp_replicate": 4}, recompute=mode) for mode in ("selective", "full"))
    assert full < selective < plain
    two, three = (peak(mesh={"dp_shard": 4}, zero_stage=stage) for stage in (2, 3))
    assert three < two < plain
    whole, sequence = (peak(mesh={"tp": 4}, micro_batch=2, sequence_parallel=flag) for flag in (False, True))
    assert sequence < whole
