"""Every launcher's own parser accepts what we export, and refuses it once corrupted. Each launcher runs in its own environment (launcher_venvs.py)."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.mesh import Mesh
from planner.export import export, write_exported
from planner.export.torchtitan_models import flavors
from planner.job import Job
from planner.models import spec_graph
from planner.plan import Plan
from planner.strategy import Strategy
from tests.e2e.launcher_venvs import VenvError, launcher_python
from tests.planner.sample_plans import DEEPSEEK_16B, GPT2, LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN_30B_A3B, sample_cluster, sample_plan

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(1800)]

INTERLEAVED = Strategy(
    mesh=Mesh(pp=4, dp_shard=2, tp=4), zero_stage=3, schedule="interleaved_1f1b", vpp=2, sequence_parallel=True, recompute="selective"
)
UNEVEN = Strategy(
    mesh=Mesh(pp=4, dp_shard=2), zero_stage=3, schedule="1f1b", stage_layers=(7, 9, 9, 7), recompute="first_k", recompute_layers=2
)
REPLICATED = Strategy(mesh=Mesh(dp_replicate=2, dp_shard=4), zero_stage=3, recompute="full")
LONG = Strategy(mesh=Mesh(dp_shard=2, cp=4), zero_stage=3)
EXPERTS = Strategy(mesh=Mesh(dp_shard=8, ep=8), zero_stage=3)


def ask(launcher: str, script: str, cases: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """The answers of check script `script` in the environment of `launcher`, by case name. Skips the test when there is no environment."""
    try:
        python = launcher_python(launcher)
    except (VenvError, OSError) as error:
        pytest.skip(f"no environment for {launcher}: {error}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [str(python), str(Path(__file__).with_name(script))]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr[-3000:]
    return {answer["name"]: answer for answer in answers}


# torchtitan


def titan_plans() -> dict[str, Plan]:
    """One plan a feature."""
    return {
        "fsdp": sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_shard=8), zero_stage=3), engine="torchtitan"),
        "interleaved": sample_plan(LLAMA_70B, INTERLEAVED, engine="torchtitan"),
        "uneven": sample_plan(LLAMA_8B, UNEVEN, engine="torchtitan"),
        "hsdp": sample_plan(LLAMA_8B, REPLICATED, engine="torchtitan"),
        "long": sample_plan(LLAMA_8B, LONG, engine="torchtitan", job=Job(global_batch=8, seq_len=32768)),
        "experts": sample_plan(QWEN_30B_A3B, EXPERTS, engine="torchtitan"),
        "latent": sample_plan(DEEPSEEK_16B, replace(EXPERTS, recompute="full"), engine="torchtitan"),
        "gpipe": sample_plan(LLAMA_8B, replace(UNEVEN, schedule="gpipe", recompute="none", recompute_layers=0), engine="torchtitan"),
        "replicas": sample_plan(
            LLAMA_8B, Strategy(mesh=Mesh(dp_shard=8)), engine="torchtitan", job=Job(global_batch=8, seq_len=4096, precision="fp32")
        ),
    }


CORRUPTIONS = {  # name: (plan, text, its replacement)
    "misspelt field": ("fsdp", "tensor_parallel_degree=", "tensor_paralel_degree="),
    "graphs under pp": ("uneven", "disable_cuda_graphs=True", "disable_cuda_graphs=False"),
    "wrong world": ("fsdp", "data_parallel_shard_degree=8", "data_parallel_shard_degree=4"),
    "odd batch": ("fsdp", "global_batch_size=64", "global_batch_size=60"),
    "unknown flavor": ("fsdp", 'model_registry("8B"', 'model_registry("9B"'),
    "unknown schedule": ("uneven", '"1F1B"', '"2F2B"'),
    "lost part": ("interleaved", '"layers.79", "norm", "lm_head"],', '"layers.79"], ["norm"], ["lm_head"],'),
}


@pytest.fixture(scope="module")
def titan(tmp_path_factory) -> dict[str, dict[str, object]]:
    """torchtitan's answers for every plan on its first and last rank, and for every corruption on its first."""
    cases = []
    for name, plan in titan_plans().items():
        folder = tmp_path_factory.mktemp(name)
        write_exported(export(plan, "torchtitan"), folder)
        world = plan.strategy.mesh.num_devices
        cases += [_titan_case(f"{name}/{rank}", folder, world, rank) for rank in (0, world - 1)]
    for name, (plan_name, text, replacement) in CORRUPTIONS.items():
        plan = titan_plans()[plan_name]
        folder = tmp_path_factory.mktemp("corrupt")
        write_exported(export(plan, "torchtitan"), folder)
        recipe = folder / "autoplan_recipe.py"
        assert text in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(text, replacement))
        cases.append(_titan_case(name, folder, plan.strategy.mesh.num_devices, 0))
    return ask("torchtitan", "check_torchtitan.py", cases)


def _titan_case(name: str, folder: Path, world_size: int, rank: int) -> dict[str, object]:
    module = {"folder": str(folder), "module": "autoplan_recipe", "function": "train"}
    return {"name": name, **module, "world_size": world_size, "rank": rank}


@pytest.mark.parametrize("name", list(titan_plans()))
def test_torchtitan_runs_the_recipe_dry(titan, name):
    plan = titan_plans()[name]
    mesh, strategy = plan.strategy.mesh, plan.strategy
    for rank, pp_rank in ((0, 0), (mesh.num_devices - 1, mesh.pp - 1)):
        answer = titan[f"{name}/{rank}"]
        assert answer["ok"], answer
        counts = [sum(".layers." in path for path in stage.layer_paths) for stage in plan.stages if stage.rank_index == pp_rank]
        assert answer["layers"] == counts
        recomputed = [
            count if strategy.recompute in ("full", "selective") else stage.recompute_layers
            for count, stage in zip(counts, (stage for stage in plan.stages if stage.rank_index == pp_rank), strict=True)
        ]
        assert answer["recomputed"] == recomputed
        if mesh.pp > 1:
            assert (
                answer["schedule"]
                == {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}[strategy.schedule]
            )
            assert answer["micro_batches"] == strategy.num_micro_batches(plan.job.global_batch)


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_torchtitan_refuses_a_corrupted_recipe(titan, name):
    assert not titan[name]["ok"], titan[name]


FAMILIES = {
    "llama3": "llama",
    "qwen3": "qwen3",
    "qwen3 experts": "qwen3_moe",
    "gpt_oss experts": "gpt_oss",
    "deepseek_v3 experts": "deepseek_v3",
}


def test_torchtitan_flavors_have_the_sizes_of_our_table(tmp_path):
    """The parameters of every flavor, built by torchtitan, against those of our own graph of the flavor's spec."""
    cases, expected = [], {}
    for flavor in flavors():
        spec = replace(
            flavor.spec, family=FAMILIES[flavor.module + (" experts" if flavor.spec.experts else "")], rope_dim=flavor.spec.head_dim
        )
        plan = sample_plan(spec, Strategy(mesh=Mesh(dp_shard=8), zero_stage=3), engine="torchtitan")
        folder = tmp_path / f"{flavor.module}-{flavor.name}"
        write_exported(export(plan, "torchtitan"), folder)
        cases.append(_titan_case(folder.name, folder, 8, 0))
        expected[folder.name] = spec_graph(spec, sequence=4096).num_parameters
    answers = ask("torchtitan", "check_torchtitan.py", cases)
    assert {name: answer.get("total_parameters", answer) for name, answer in answers.items()} == expected


# Megatron-LM


def megatron_plans() -> dict[str, Plan]:
    """One plan a feature."""
    sharded = Strategy(mesh=Mesh(dp_shard=8), zero_stage=1)
    tensor = Strategy(mesh=Mesh(dp_shard=4, tp=2), zero_stage=1)
    mixture = Strategy(mesh=Mesh(pp=2, dp_shard=8, tp=2, ep=8), zero_stage=1, schedule="1f1b", sequence_parallel=True)
    long, long_job = replace(LONG, zero_stage=1), Job(global_batch=8, seq_len=32768)
    fp8, adam_8bit = (Job(global_batch=64, seq_len=4096, **choice) for choice in ({"precision": "fp8"}, {"optimizer": "adamw_8bit"}))
    dropout = Job(global_batch=64, seq_len=1024, dropout=0.1)
    return {
        "data parallel": sample_plan(LLAMA_8B, sharded, engine="megatron"),
        "interleaved": sample_plan(LLAMA_70B, replace(INTERLEAVED, zero_stage=1), engine="megatron"),
        "uneven": sample_plan(LLAMA_8B, replace(UNEVEN, zero_stage=1), engine="megatron"),
        "replicas": sample_plan(LLAMA_8B, replace(REPLICATED, zero_stage=1), engine="megatron"),
        "long": sample_plan(LLAMA_8B, long, engine="megatron", job=long_job),
        "long a2a": sample_plan(LLAMA_8B, replace(long, cp_kind="all_to_all"), engine="megatron", job=long_job),
        "mixtral": sample_plan(MIXTRAL, mixture, engine="megatron"),
        "latent": sample_plan(DEEPSEEK_16B, Strategy(mesh=Mesh(dp_shard=8, ep=8), zero_stage=1), engine="megatron"),
        "gpt2": sample_plan(GPT2, Strategy(mesh=Mesh(dp_shard=8)), engine="megatron", job=dropout),
        "fp8": sample_plan(LLAMA_8B, tensor, engine="megatron", job=fp8),
        "fp8 blackwell": sample_plan(LLAMA_8B, tensor, engine="megatron", job=fp8, cluster=sample_cluster(1, arch="blackwell")),
        "8-bit Adam": sample_plan(LLAMA_8B, sharded, engine="megatron", job=adam_8bit),
        "parameters sharded": sample_plan(LLAMA_8B, REPLICATED, engine="torch"),
    }


MEGATRON_CORRUPTIONS = {  # name: (plan, argument or variable, its replacement)
    "unknown flag": ("uneven", "--micro-batch-size", "--mikro-batch-size"),
    "layout lost a layer": ("uneven", "Et*7|t*9|t*9|t*7L", "Et*7|t*9|t*8|t*7L"),
    "layout lost a stage": ("uneven", "Et*7|t*9|t*9|t*7L", "Et*16|t*9|t*7L"),
    "odd batch": ("uneven", "64", "63"),
    "connections": ("interleaved", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_CONNECTION"),
    "wrong world": ("interleaved", "4", "3"),
    "misspelt experts": ("mixtral", "--num-experts", "--num-expert"),
}


@pytest.fixture(scope="module")
def megatron() -> dict[str, dict[str, object]]:
    """Megatron's answers for every plan and every corruption."""
    plans = megatron_plans()
    cases = [_megatron_case(name, plan) for name, plan in plans.items()]
    for name, (plan_name, text, replacement) in MEGATRON_CORRUPTIONS.items():
        case = _megatron_case(name, plans[plan_name])
        changed = {
            "arguments": [replacement if part == text else part for part in case["arguments"]],
            "environment": {replacement if key == text else key: value for key, value in case["environment"].items()},
        }
        assert changed["arguments"] != case["arguments"] or changed["environment"] != case["environment"]
        cases.append({**case, **changed})
    return ask("megatron", "check_megatron.py", cases)


def _megatron_case(name: str, plan: Plan) -> dict[str, object]:
    capability = {"hopper": 9, "blackwell": 10}[plan.cluster.pool.device.arch]
    return {"name": name, "capability": capability, **json.loads(export(plan, "megatron").text("megatron_args.json"))}


@pytest.mark.parametrize("name", list(megatron_plans()))
def test_megatron_accepts_the_arguments(megatron, name):
    plan, answer = megatron_plans()[name], megatron[name]
    mesh, strategy = plan.strategy.mesh, plan.strategy
    assert answer["ok"], answer
    assert answer["data_parallel"] == mesh.dp
    assert answer["micro_batches"] == strategy.num_micro_batches(plan.job.global_batch)
    assert answer["virtual"] == (strategy.vpp if strategy.vpp > 1 else None)
    assert answer["sequence_parallel"] == strategy.sequence_parallel
    if mesh.pp > 1:
        layers = [[] for _ in range(mesh.pp)]
        for stage in plan.stages:
            layers[stage.rank_index].append(sum(".layers." in path for path in stage.layer_paths))
        assert answer["chunks"] == layers
    if plan.spec.experts:
        assert answer["experts_per_rank"] == plan.spec.experts.num_experts // mesh.ep


@pytest.mark.parametrize("name", list(MEGATRON_CORRUPTIONS))
def test_megatron_refuses_corrupted_arguments(megatron, name):
    assert not megatron[name]["ok"], megatron[name]


# torchrun


def started(folder: Path, tmp_path: Path) -> list[str]:
    """What launch.sh gives to torchrun: a program of that name on PATH writes its arguments down."""
    record = tmp_path / "arguments"
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text(f"#!/usr/bin/env bash\nprintf '%s\\n' \"$@\" > {record}\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "MASTER_ADDR": "first-host", "MEGATRON": "Megatron-LM"}
    subprocess.run(["bash", str(folder / "launch.sh")], env=environment, check=True, capture_output=True)
    return record.read_text().splitlines()


@pytest.mark.parametrize(
    ("target", "plan", "num_nodes", "per_node"),
    [
        ("torchrun", sample_plan(LLAMA_8B, REPLICATED, engine="torch"), 1, 8),
        ("torchrun", sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_shard=32), zero_stage=3), engine="torch"), 4, 8),
        ("torchtitan", sample_plan(LLAMA_70B, INTERLEAVED, engine="torchtitan"), 4, 8),
        ("megatron", sample_plan(LLAMA_70B, replace(INTERLEAVED, zero_stage=1), engine="megatron"), 4, 8),
    ],
)
def test_torchrun_parses_every_launch_script(target, plan, num_nodes, per_node, tmp_path):
    torch_run = pytest.importorskip("torch.distributed.run")
    write_exported(export(plan, target), tmp_path / "run")
    arguments = torch_run.get_args_parser().parse_args(started(tmp_path / "run", tmp_path))
    config, _, program = torch_run.config_from_args(arguments)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (num_nodes, num_nodes, per_node)
    assert (config.rdzv_endpoint == "first-host:29500") == (num_nodes > 1)
    expected = {"torchrun": "train.py", "torchtitan": "torchtitan.train", "megatron": "Megatron-LM/pretrain_gpt.py"}[target]
    assert any(part.endswith(expected) for part in program)
    with pytest.raises(SystemExit):
        torch_run.get_args_parser().parse_args(["--nproc-per-nod-e", "8", "train.py"])
