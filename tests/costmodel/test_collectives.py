"""Collectives: bus bandwidth, latency, tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.collectives import collective_s, volume_factor
from costmodel.hardware import Link
from costmodel.mesh import Group, Mesh
from tests.costmodel.steps import pool

NODE = Group(size=8, per_fast_domain=8, per_node=8)


def test_large_all_reduce_matches_the_measured_bus_bandwidth() -> None:
    """H100 x 8, 512 MiB: nccl-tests reports 351 and 445 GB/s (NVLS; the two rows of the table)."""
    seconds = collective_s("all_reduce", 512 * 2**20, NODE, pool())
    assert 512 * 2**20 * volume_factor("all_reduce", 8) / seconds == pytest.approx(395e9, rel=0.05)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "broadcast"])
def test_time_is_monotone_in_bytes_and_free_for_one_rank(kind: str) -> None:
    times = [collective_s(kind, float(2**power), NODE, pool()) for power in range(10, 31)]
    assert times == sorted(times)
    assert times[0] > 1e-6
    assert collective_s(kind, 1e9, Group(size=1, per_fast_domain=1, per_node=1), pool()) == 0.0


def test_leaving_the_node_is_slower_and_one_rank_per_node_slower_still() -> None:
    nodes = pool(nodes=4)
    inside = collective_s("all_gather", 1e9, NODE, nodes)
    whole = collective_s("all_gather", 1e9, Group(size=32, per_fast_domain=8, per_node=8), nodes)
    strided = collective_s("all_gather", 1e9, Group(size=4, per_fast_domain=1, per_node=1, stride=8), nodes)
    assert inside < whole < strided
    assert strided == pytest.approx(0.75 * 1e9 / (50e9 * 0.85), rel=0.05)


def test_all_reduce_costs_a_reduce_scatter_and_an_all_gather_on_one_wire() -> None:
    group = Group(size=16, per_fast_domain=1, per_node=1)
    nodes = pool(nodes=16)
    parts = collective_s("reduce_scatter", 1e9, group, nodes) + collective_s("all_gather", 1e9, group, nodes)
    assert collective_s("all_reduce", 1e9, group, nodes) == pytest.approx(parts, rel=0.02)


def test_mesh_lays_tensor_parallel_groups_inside_a_node() -> None:
    mesh = Mesh(pp=2, dp_shard=4, tp=8)
    assert mesh.group("tp", fast_domain=8, per_node=8) == Group(size=8, per_fast_domain=8, per_node=8, stride=1)
    assert mesh.group("dp_shard", fast_domain=8, per_node=8) == Group(size=4, per_fast_domain=1, per_node=1, stride=8)


def test_a_pcie_box_is_slow() -> None:
    box = replace(
        pool(), device=replace(pool().device, device_id="x"), fast_link=Link(kind="pcie", bandwidth_bytes_per_s=31.5e9, latency_s=5e-6)
    )
    assert collective_s("all_reduce", 1e9, NODE, box) > 20 * collective_s("all_reduce", 1e9, NODE, pool())
