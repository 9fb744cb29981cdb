"""One step: the lines add up, and every technique moves time the way it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.engine import ENGINES, engine
from costmodel.errors import InputError
from costmodel.estimate import TIME_CAUSES
from costmodel.mesh import Mesh
from costmodel.simulate import estimate_step
from tests.costmodel.steps import V100, cluster, llama

MESHES = [
    (Mesh(dp_shard=8), {"zero_stage": 3}),
    (Mesh(dp_shard=8), {"zero_stage": 2}),
    (Mesh(dp_replicate=8), {"zero_stage": 0}),
    (Mesh(dp_replicate=2, dp_shard=4), {"zero_stage": 3, "num_micro_batches": 2}),
    (Mesh(tp=8), {"zero_stage": 0}),
    (Mesh(pp=4, tp=2), {"zero_stage": 0, "schedule": "1f1b", "num_micro_batches": 8}),
    (Mesh(pp=4, dp_shard=2), {"zero_stage": 1, "schedule": "interleaved_1f1b", "vpp": 2, "num_micro_batches": 8}),
]


@pytest.mark.parametrize("name", [row.name for row in ENGINES])
@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_lines_add_up_to_the_step(name: str, mesh: Mesh, options: dict[str, object]) -> None:
    estimate = estimate_step(llama(mesh=mesh, **options), cluster(), engine(name))
    assert tuple(line.name for line in estimate.time) == TIME_CAUSES
    assert estimate.step_s == sum(line.amount for line in estimate.time)
    assert all(line.amount >= 0.0 for line in estimate.time)
    named = {line.name: line.amount for line in estimate.time}
    assert named["compute"] == pytest.approx(sum(line.amount for line in estimate.compute_by_class))
    assert named["exposed_communication"] == pytest.approx(sum(line.amount for line in estimate.communication_by_axis))
    assert 0.05 < estimate.mfu_frac < 0.75
    assert len(estimate.stages) == mesh.pp


def test_llama_8b_on_one_node_lands_where_such_runs_land() -> None:
    """Published FSDP2 runs of Llama-3-8B at 8192 tokens on H100 do 5,700-8,500 tokens/s per device, with recompute and eager kernels at the low end."""
    estimate = estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(), engine("torchtitan"))
    assert 6000 < estimate.tokens_per_s_per_device < 13000


def test_bubble_shrinks_with_micro_batches_and_with_chunks() -> None:
    def bubble(m: int, schedule: str = "1f1b", vpp: int = 1) -> float:
        estimate = estimate_step(
            llama(mesh=Mesh(pp=4, tp=2), zero_stage=0, schedule=schedule, vpp=vpp, num_micro_batches=m, vocab=1024),
            cluster(),
            engine("megatron"),
        )
        return next(line.amount for line in estimate.time if line.name == "bubble") / estimate.step_s

    assert bubble(4) > bubble(8) > bubble(32)
    assert bubble(8, "interleaved_1f1b", 2) < bubble(8)


def test_overlap_hides_gradient_reduction() -> None:
    step = llama(mesh=Mesh(dp_replicate=8), zero_stage=0, parameter_dtype="bf16", gradient_dtype="fp32")
    beside, after = (estimate_step(step, cluster(), replace(engine("megatron"), overlap_gradient_reduce=flag)) for flag in (True, False))
    assert beside.step_s < after.step_s
    assert beside.hidden_communication_s > after.hidden_communication_s


def test_a_slow_network_exposes_zero_3() -> None:
    near = estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(), engine("torch"))
    far = estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(nodes=8, per_node=1), engine("torch"))
    assert far.step_s > 1.2 * near.step_s


def test_small_models_are_bound_by_the_host_and_less_so_compiled() -> None:
    small = llama(mesh=Mesh(dp_replicate=8), layers=8, hidden=256, ffn=1024, heads=4, kv_heads=4, vocab=1024, sequence=256, zero_stage=0)
    eager, graph = (estimate_step(replace(small, compiled=flag), cluster(), engine("torch")) for flag in (False, True))
    assert next(line.amount for line in eager.time if line.name == "host") > 0.0
    assert graph.step_s < eager.step_s


def test_errors_name_device_dtype_and_counts() -> None:
    with pytest.raises(InputError, match="v100-sxm2-16gb has no bf16"):
        estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(V100), engine("torch"))
    with pytest.raises(InputError, match="needs 16 devices"):
        estimate_step(llama(mesh=Mesh(dp_shard=16)), cluster(), engine("torch"))


def test_another_device_of_the_family_is_flagged_as_extrapolated() -> None:
    known = estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(), engine("torch"))
    device = replace(cluster().pool.device, device_id="h100-pcie-80gb")
    assert known.notes == ()
    assert any("extrapolated" in note for note in estimate_step(llama(mesh=Mesh(dp_shard=8)), cluster(device), engine("torch")).notes)
