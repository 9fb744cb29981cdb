"""The order in which torch runs a schedule is the order that costmodel.schedule prices."""

from __future__ import annotations

import pytest

from costmodel.schedule import actions

pytestmark = pytest.mark.dist

SCHEDULES = [("gpipe", 1, 4), ("1f1b", 1, 4), ("1f1b", 1, 8), ("interleaved_1f1b", 2, 4), ("interleaved_1f1b", 2, 8)]


@pytest.mark.parametrize(("schedule", "vpp", "num_micro_batches"), SCHEDULES)
def test_torch_runs_the_order_that_is_priced(pool, schedule, vpp, num_micro_batches):
    priced = actions(schedule, pp=4, vpp=vpp, num_micro_batches=num_micro_batches)
    ran = pool.run(
        "tests.runtime.cases:schedule_order", ranks=4, schedule=schedule, vpp=vpp, num_layers=8, micro_batch=8 // num_micro_batches
    )
    assert [[tuple(action) for action in rank] for rank in ran] == [list(order) for order in priced]
