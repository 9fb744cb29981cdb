"""Exported files say what the plan says, in the launcher's words, and admit the rest."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace

import pytest

from costmodel.errors import InputError
from costmodel.mesh import Mesh
from costmodel.schedule import actions
from costmodel.schedules.table import from_csv
from planner.codec import plan_from_json
from planner.export import TARGETS, Exported, export, write_exported
from planner.export.megatron import pipeline_layout
from planner.export.torchtitan import module_names
from planner.export.torchtitan_models import flavors
from planner.job import Job
from planner.strategy import Strategy
from tests.planner.sample_plans import DEEPSEEK_16B, GPT2, LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN_30B_A3B, sample_cluster, sample_plan

FSDP = Strategy(mesh=Mesh(dp_shard=8), zero_stage=3)
TP_PP = Strategy(
    mesh=Mesh(pp=4, dp_shard=2, tp=4),
    zero_stage=1,
    schedule="interleaved_1f1b",
    vpp=2,
    sequence_parallel=True,
    recompute="selective",
    micro_batch=2,
)


def megatron_flags(exported: Exported) -> dict[str, list[str]]:
    """Flag -> values of the JSON copy."""
    flags: dict[str, list[str]] = {}
    for part in json.loads(exported.text("megatron_args.json"))["arguments"]:
        if part.startswith("--"):
            assert part not in flags, f"{part} twice"
            flags[part] = []
            last = flags[part]
        else:
            last.append(part)
    return flags


def recipe_call(exported: Exported, name: str) -> dict[str, object]:
    """Literal keyword arguments of the call of `name` in the recipe."""
    tree = ast.parse(exported.text("autoplan_recipe.py"))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name)
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def lost(exported: Exported) -> list[str]:
    return [loss.field for loss in exported.losses]


@pytest.mark.parametrize("target", TARGETS)
def test_export_is_a_function_of_the_plan(target):
    plan = sample_plan(LLAMA_8B, replace(FSDP, zero_stage=3), engine="torch")
    assert export(plan, target) == export(plan, target)
    other = export(replace(plan, job=replace(plan.job, global_batch=128)), target)
    assert other.files != export(plan, target).files


@pytest.mark.parametrize(
    ("target", "engine", "strategy"), [("torchrun", "torch", FSDP), ("torchtitan", "torchtitan", FSDP), ("megatron", "megatron", TP_PP)]
)
def test_a_plan_for_the_launchers_own_engine_loses_nothing(target, engine, strategy):
    exported = export(sample_plan(LLAMA_8B, strategy, engine=engine), target)
    assert exported.losses == ()
    assert all("loses nothing" in text for name, text in exported.files if not name.endswith(".json"))


@pytest.mark.parametrize("target", TARGETS)
def test_prices_of_another_runtime_are_a_loss(target):
    engine = "megatron" if target != "megatron" else "torch"
    exported = export(sample_plan(LLAMA_8B, FSDP, engine=engine), target)
    assert "engine" in lost(exported)
    assert f"LOST: engine = {engine}" in exported.text("launch.sh")


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(InputError, match="torchrun, torchtitan, megatron"):
        export(sample_plan(LLAMA_8B, FSDP, engine="torch"), "slurm")


@pytest.mark.parametrize("target", TARGETS)
def test_written_files_are_whole_and_scripts_run(target, tmp_path):
    exported = export(sample_plan(LLAMA_8B, FSDP, engine="torch"), target)
    folder = tmp_path / "a" / "b"
    paths = write_exported(exported, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(name for name, _ in exported.files)
    for path, (_, text) in zip(paths, exported.files, strict=True):
        assert path.read_text() == text
        assert bool(path.stat().st_mode & 0o100) == (path.suffix == ".sh")
        if path.suffix == ".sh":
            subprocess.run(["bash", "-n", str(path)], check=True)
        if path.suffix == ".py":
            ast.parse(text)


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot make the folder"):
        write_exported(export(sample_plan(LLAMA_8B, FSDP, engine="torch"), "torchrun"), tmp_path / "file")


@pytest.mark.parametrize("target", TARGETS)
def test_a_mesh_larger_than_the_cluster_is_refused(target):
    plan = sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_shard=16), zero_stage=3), engine="torch", cluster=sample_cluster(1))
    with pytest.raises(InputError, match="16 ranks, the cluster 8 devices"):
        export(plan, target)


def test_stages_that_lost_a_layer_are_refused():
    plan = sample_plan(LLAMA_8B, Strategy(mesh=Mesh(pp=2, dp_shard=4), zero_stage=3, schedule="1f1b"), engine="torchtitan")
    with pytest.raises(InputError, match="31 indexed layers of 32"):
        export(replace(plan, stages=(replace(plan.stages[0], layer_paths=plan.stages[0].layer_paths[:-1]), plan.stages[1])), "torchtitan")


# torchrun


def test_torchrun_carries_the_plan_itself():
    plan = sample_plan(None, FSDP, engine="torch", num_layers=4, model="examples.gpt:build_model")
    exported = export(plan, "torchrun")
    text = exported.text("plan.json")
    assert json.loads(text)["strategy"]["mesh"]["dp_shard"] == 8
    assert 'MODEL = "examples.gpt:build_model"' in exported.text("train.py")
    assert 'torchrun --standalone --nproc-per-node 8 "$here/train.py"' in exported.text("launch.sh")


def test_torchrun_on_several_hosts_meets_at_the_first():
    exported = export(sample_plan(LLAMA_8B, replace(FSDP, mesh=Mesh(dp_replicate=4, dp_shard=8)), engine="torch"), "torchrun")
    assert "--nnodes 4 --nproc-per-node 8" in exported.text("launch.sh")
    assert "MASTER_ADDR" in exported.text("launch.sh")


def test_torchrun_on_cpu_ranks_gives_each_one_thread():
    cluster = sample_cluster(1, devices_per_node=4, kind="cpu", arch="cpu")
    exported = export(sample_plan(LLAMA_8B, Strategy(mesh=Mesh(tp=4)), engine="torch", cluster=cluster), "torchrun")
    assert "export OMP_NUM_THREADS=1" in exported.text("launch.sh")


@pytest.mark.parametrize("strategy", [Strategy(mesh=Mesh(cp=8)), Strategy(mesh=Mesh(dp_shard=8), zero_stage=1)])
def test_torchrun_refuses_what_the_runtime_cannot_do(strategy):
    with pytest.raises(InputError, match="plan for --engine torch"):
        export(sample_plan(LLAMA_8B, strategy, engine="megatron"), "torchrun")


# torchtitan


def test_torchtitan_parts_name_every_module_once():
    names = module_names((3, 5, 4, 4))
    assert [len(part) for part in names] == [4, 5, 4, 6]
    flat = [name for part in names for name in part]
    assert flat == ["tok_embeddings", *(f"layers.{index}" for index in range(16)), "norm", "lm_head"]


def test_torchtitan_pipeline_batches():
    exported = export(sample_plan(LLAMA_70B, replace(TP_PP, zero_stage=3), engine="torchtitan"), "torchtitan")
    training, parallelism = recipe_call(exported, "TrainingConfig"), recipe_call(exported, "ParallelismConfig")
    assert training["local_batch_size"] == 32  # 16 micro-batches of 2
    assert training["global_batch_size"] == 64
    assert training["disable_cuda_graphs"] is True
    assert parallelism["pipeline_parallel_microbatch_size"] == 2
    assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert len(parallelism["module_fqns_per_model_part"]) == 8


@pytest.mark.parametrize(
    ("schedule", "vpp", "name", "table"),
    [
        ("breadth_first", 2, "LoopedBFS", False), ("zb_h1", 1, "InterleavedZeroBubble", False), ("zb_h2", 1, "PipelineScheduleMulti", True),
        ("zbv", 2, "ZBVZeroBubble", False), ("v_half", 2, "ZBVZeroBubble", True), ("v_min", 2, "ZBVZeroBubble", True),
        ("dualpipev", 2, "DualPipeV", False),
    ],
)  # fmt: skip
def test_torchtitan_schedules(schedule, vpp, name, table):
    """By torch's name where torch makes the same list, else from a table with as many rows as pipeline ranks."""
    strategy = Strategy(mesh=Mesh(pp=4, dp_shard=2), zero_stage=3, schedule=schedule, vpp=vpp)
    exported = export(sample_plan(LLAMA_8B, strategy, engine="torchtitan"), "torchtitan")
    text = exported.text("autoplan_recipe.py")
    assert f'pipeline_parallel_schedule="{name}"' in text
    assert ("schedule.csv" in text) == table == ("schedule.csv" in dict(exported.files))
    if table:
        orders = from_csv(exported.text("schedule.csv"))
        assert orders == actions(schedule, pp=4, vpp=vpp, num_micro_batches=32)


def test_torchtitan_accumulation_without_pipeline():
    exported = export(sample_plan(LLAMA_8B, replace(FSDP, micro_batch=2), engine="torchtitan"), "torchtitan")
    training = recipe_call(exported, "TrainingConfig")
    assert (training["local_batch_size"], training["global_batch_size"]) == (2, 64)


@pytest.mark.parametrize(("zero_stage", "degrees", "reshard"), [(0, (8, 1), "never"), (2, (2, 4), "never"), (3, (2, 4), "always")])
def test_torchtitan_zero_stages(zero_stage, degrees, reshard):
    plan = sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_replicate=2, dp_shard=4), zero_stage=zero_stage), engine="torchtitan")
    exported = export(plan, "torchtitan")
    fields = recipe_call(exported, "ParallelismConfig")
    assert (fields["data_parallel_replicate_degree"], fields["data_parallel_shard_degree"]) == degrees
    assert fields["fsdp_reshard_after_forward"] == reshard
    assert exported.losses == ()


@pytest.mark.parametrize(
    ("recompute", "policy"), [("none", "None"), ("full", "FullAC"), ("selective", "KeepMatmuls"), ("first_k", "ChosenLayers")]
)
def test_torchtitan_recompute_policies(recompute, policy):
    strategy = Strategy(
        mesh=Mesh(pp=2, dp_shard=4), zero_stage=3, schedule="1f1b", recompute=recompute, recompute_layers=3 if recompute == "first_k" else 0
    )
    exported = export(sample_plan(LLAMA_8B, strategy, engine="torchtitan"), "torchtitan")
    assert f"activation_checkpoint={policy}" in exported.text("autoplan_recipe.py")
    assert exported.losses == ()
    if recompute == "first_k":
        chosen = recipe_call(exported, "ChosenLayers.Config")["layers"]
        assert chosen == [f"layers.{index}" for index in (0, 1, 2, 16, 17, 18)]


def test_torchtitan_admits_what_it_cannot_do():
    job = Job(global_batch=64, seq_len=4096, precision="fp16", optimizer="sgd", dropout=0.1)
    strategy = Strategy(mesh=Mesh(dp_shard=4, cp=2), zero_stage=1, flash_attention=False, recompute="selective")
    exported = export(sample_plan(LLAMA_8B, strategy, engine="megatron", job=job), "torchtitan")
    expected = {"engine", "strategy.zero_stage", "strategy.cp_kind", "strategy.flash_attention", "strategy.recompute"}
    assert set(lost(exported)) == expected | {"job.precision", "job.optimizer", "job.dropout"}


def test_torchtitan_knows_models_by_their_sizes():
    assert 'model_registry("8B"' in export(sample_plan(replace(LLAMA_8B, name="mine"), FSDP, engine="torchtitan"), "torchtitan").text(
        "autoplan_recipe.py"
    )
    with pytest.raises(InputError, match=r"llama3 70B.*deepseek_v3 671B"):
        export(sample_plan(replace(LLAMA_8B, ffn=14337), FSDP, engine="torchtitan"), "torchtitan")
    with pytest.raises(InputError, match="carries no sizes"):
        export(sample_plan(None, FSDP, engine="torchtitan", num_layers=4), "torchtitan")


@pytest.mark.parametrize(
    ("spec", "module", "flavor"), [(QWEN_30B_A3B, "qwen3", "30B-A3B"), (DEEPSEEK_16B, "deepseek_v3", "16B"), (LLAMA_70B, "llama3", "70B")]
)
def test_torchtitan_flavors(spec, module, flavor):
    text = export(
        sample_plan(spec, replace(FSDP, mesh=Mesh(dp_shard=8, ep=8 if spec.experts else 1)), engine="torchtitan"), "torchtitan"
    ).text("autoplan_recipe.py")
    assert f"from torchtitan.models.{module} import model_registry" in text
    assert f'model_registry("{flavor}"' in text


def test_torchtitan_flavors_are_distinct():
    names = [(flavor.module, flavor.name) for flavor in flavors()]
    assert len(set(names)) == len(names)


def test_torchtitan_refuses_lengths_its_mesh_cannot_cut():
    plan = sample_plan(LLAMA_8B, Strategy(mesh=Mesh(cp=4, tp=2), zero_stage=3), engine="torchtitan", job=Job(global_batch=8, seq_len=4100))
    with pytest.raises(InputError, match="tp x 2 cp = 16"):
        export(plan, "torchtitan")
    plan = sample_plan(LLAMA_8B, Strategy(mesh=Mesh(cp=8), zero_stage=3), engine="torchtitan", job=Job(global_batch=8, seq_len=512))
    with pytest.raises(InputError, match="blocks of 128"):
        export(plan, "torchtitan")


# Megatron-LM


def test_megatron_layout_string():
    assert pipeline_layout((7, 9, 9, 7)) == "Et*7|t*9|t*9|t*7L"
    assert pipeline_layout((1, 2, 1, 0)) == "Et|t*2|t|L"


def test_megatron_flags_of_a_dense_model():
    flags = megatron_flags(export(sample_plan(LLAMA_70B, TP_PP, engine="megatron"), "megatron"))
    expected = {
        "--num-layers": ["80"], "--hidden-size": ["8192"], "--ffn-hidden-size": ["28672"], "--num-attention-heads": ["64"],
        "--group-query-attention": [], "--num-query-groups": ["8"], "--swiglu": [], "--disable-bias-linear": [],
        "--untie-embeddings-and-output-weights": [], "--vocab-size": ["128256"], "--tensor-model-parallel-size": ["4"],
        "--pipeline-model-parallel-size": ["4"], "--sequence-parallel": [], "--use-distributed-optimizer": [], "--bf16": [],
        "--pipeline-model-parallel-layout": ["Et*10|t*10|t*10|t*10|t*10|t*10|t*10|t*10L"], "--micro-batch-size": ["2"],
        "--global-batch-size": ["64"], "--recompute-granularity": ["selective"], "--recompute-modules": ["core_attn"],
        "--attention-dropout": ["0"], "--hidden-dropout": ["0"],
    }  # fmt: skip
    assert {name: flags.get(name) for name in expected} == expected


def test_megatron_pads_no_vocabulary():
    for tp in (1, 2, 4, 8):
        flags = megatron_flags(export(sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_shard=8 // tp, tp=tp)), engine="megatron"), "megatron"))
        assert 128256 % (int(flags["--make-vocab-size-divisible-by"][0]) * tp) == 0


def test_megatron_flags_of_gpt2():
    exported = export(
        sample_plan(GPT2, Strategy(mesh=Mesh(dp_shard=8)), engine="megatron", job=Job(global_batch=64, seq_len=1024)), "megatron"
    )
    flags = megatron_flags(exported)
    assert flags["--normalization"] == ["LayerNorm"]
    assert flags["--position-embedding-type"] == ["learned_absolute"]
    assert not {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--use-distributed-optimizer"} & set(flags)
    assert exported.losses == ()


def test_megatron_flags_of_experts():
    flags = megatron_flags(export(sample_plan(MIXTRAL, Strategy(mesh=Mesh(dp_shard=8, ep=8), zero_stage=1), engine="megatron"), "megatron"))
    assert flags["--num-experts"] == ["8"]
    assert flags["--moe-router-topk"] == ["2"]
    assert flags["--expert-model-parallel-size"] == ["8"]
    assert flags["--expert-tensor-parallel-size"] == ["1"]
    flags = megatron_flags(export(sample_plan(DEEPSEEK_16B, Strategy(mesh=Mesh(dp_shard=8, ep=8)), engine="megatron"), "megatron"))
    assert flags["--moe-layer-freq"] == ["([0]*1+[1]*26)"]
    assert flags["--kv-lora-rank"] == ["512"]
    assert flags["--qk-head-dim"] == ["128"]


@pytest.mark.parametrize(
    ("arch", "zero_stage", "expected"), [("hopper", 1, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), ("blackwell", 1, {}), ("hopper", 3, {})]
)
def test_megatron_connection_rule(arch, zero_stage, expected):
    plan = sample_plan(
        LLAMA_8B, Strategy(mesh=Mesh(dp_shard=4, tp=2), zero_stage=zero_stage), engine="megatron", cluster=sample_cluster(1, arch=arch)
    )
    exported = export(plan, "megatron")
    assert json.loads(exported.text("megatron_args.json"))["environment"] == expected
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1" in exported.text("launch.sh")) == bool(expected)


def test_megatron_array_and_json_agree(tmp_path):
    exported = export(sample_plan(DEEPSEEK_16B, Strategy(mesh=Mesh(dp_shard=8, ep=8)), engine="megatron"), "megatron")
    write_exported(exported, tmp_path)
    script = "source ./megatron_args.sh; printf '%s\\n' \"${MEGATRON_ARGS[@]}\""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == json.loads(exported.text("megatron_args.json"))["arguments"]


def test_megatron_shards_within_replicas():
    flags = megatron_flags(
        export(sample_plan(LLAMA_8B, Strategy(mesh=Mesh(dp_replicate=2, dp_shard=4), zero_stage=1), engine="megatron"), "megatron")
    )
    assert flags["--num-distributed-optimizer-instances"] == ["2"]


def test_megatron_recomputes_a_prefix_of_every_chunk():
    strategy = Strategy(mesh=Mesh(pp=2, dp_shard=4), schedule="1f1b", recompute="first_k", recompute_layers=3)
    plan = sample_plan(LLAMA_8B, strategy, engine="megatron")
    flags = megatron_flags(export(plan, "megatron"))
    assert (flags["--recompute-method"], flags["--recompute-num-layers"]) == (["block"], ["3"])
    short = replace(strategy, stage_layers=(2, 30))
    assert export(sample_plan(LLAMA_8B, short, engine="megatron"), "megatron").losses == ()
    uneven = replace(plan, stages=(replace(plan.stages[0], recompute_layers=5), plan.stages[1]))
    exported = export(uneven, "megatron")
    assert lost(exported) == ["stages.recompute_layers"]
    assert megatron_flags(exported)["--recompute-num-layers"] == ["5"]


def test_megatron_admits_what_it_cannot_do():
    job = Job(global_batch=64, seq_len=4096, optimizer="adamw_8bit")
    strategy = Strategy(mesh=Mesh(pp=2, dp_shard=4), schedule="gpipe", compile=True, recompute="selective")
    odd = replace(LLAMA_8B, norm_place="sandwich", activation="gelu_pytorch_tanh", sinks=True, window=4096)
    exported = export(sample_plan(odd, strategy, engine="torch", job=job), "megatron")
    expected = {"engine", "spec.norm_place", "spec.activation", "spec.sinks", "spec.window", "strategy.schedule", "strategy.compile"}
    assert set(lost(exported)) == expected | {"strategy.recompute", "job.optimizer"}


def test_megatron_refuses_what_it_would_not_run():
    few = Job(global_batch=10, seq_len=4096)
    plan = sample_plan(LLAMA_8B, replace(TP_PP, mesh=Mesh(pp=4, dp_shard=1, tp=2), micro_batch=1), engine="megatron", job=few)
    with pytest.raises(InputError, match="multiple of pp = 4"):
        export(plan, "megatron")
    with pytest.raises(InputError, match="carries no sizes"):
        export(sample_plan(None, FSDP, engine="megatron", num_layers=4), "megatron")
    with pytest.raises(InputError, match="not a decoder-only transformer"):
        export(sample_plan(replace(LLAMA_8B, family="t5", encoder_layers=12), FSDP, engine="megatron"), "megatron")


def test_exported_plan_reads_back():
    plan = sample_plan(LLAMA_8B, FSDP, engine="torch")
    assert plan_from_json(export(plan, "torchrun").text("plan.json")) == plan
