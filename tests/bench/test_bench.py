"""The benchmarks on rows made up here: shape of the JSON, refusals, arithmetic. No row is a measurement."""

from __future__ import annotations

import gzip
import json

import pytest

from costmodel.calibrate import read_profile
from costmodel.errors import InputError
from tests.bench import accuracy, kernels, profile, regret
from tests.bench.machines import Machines
from tests.bench.memory_kinds import kind_of, measured_gib, predicted_bytes
from tests.bench.price import Pricer
from tests.bench.runs import measured_step_s, problem
from tests.bench.shapes import config_of
from tests.bench.stats import quantile, spearman, summary

SUMMARY = {"n", "mape", "median", "p90", "max", "bias"}


def row(run_id="a", *, model=(), cluster=(), job=(), plan=(), measured=(), use=(), **more):
    """A run of a small Llama on 8 H100, with changes."""
    base = {
        "id": run_id, "source": "made_up", "software": None, "notes": "",
        "model": {"name": "tiny", "params_b": None, "layers": 8, "hidden": 1024, "ffn_hidden": 2816, "heads": 8, "kv_heads": 8, "vocab": 32000,
                  "seq_len": 1024, "tied_embeddings": False, "moe": None},
        "cluster": {"gpu": "H100-80GB-SXM", "gpus": 8, "gpus_per_node": 8, "intra_bw": None, "inter_bw": None},
        "job": {"global_batch": 32, "micro_batch": 1, "grad_accum": 4, "precision": "bf16", "optimizer": "adam"},
        "plan": {"dp": 8, "tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": None, "sequence_parallel": None, "zero_stage": 1, "fsdp": None,
                 "recompute": "none", "schedule": None, "flash_attention": True, "compile": None, "offload": None},
        "measured": {"step_time_s": 0.1, "tokens_per_s_per_gpu": None, "peak_memory_gib": 10.0, "oom": False,
                     "peak_memory_kind": "max over ranks of torch.cuda.max_memory_allocated"},
        "use": {"time": True, "memory": True, "feasibility": True, "full_plan": True},
    }  # fmt: skip
    for key, changes in (("model", model), ("cluster", cluster), ("job", job), ("plan", plan), ("measured", measured), ("use", use)):
        base[key].update(changes)
    return base | more


def written(tmp_path, rows, name="runs.jsonl.gz"):
    path = tmp_path / name
    with gzip.open(path, "wt") if name.endswith(".gz") else path.open("w") as stream:
        stream.write("".join(f"{json.dumps(item)}\n" for item in rows))
    return str(path)


def strategy(**changes):
    return problem(row(**changes), Machines()).strategy


def test_accuracy_has_the_documented_shape_and_scores_a_doubled_time_as_half(tmp_path, capsys):
    truth = Pricer().price(row()).estimate.step_s
    rows = [
        row("right", measured={"step_time_s": truth}),
        row("half", measured={"step_time_s": 2 * truth, "oom": True, "peak_memory_gib": None}),
        row("lost", plan={"schedule": "made up", "pp": 2, "dp": 4}),
        row("ignored", use={"full_plan": False}),
    ]
    assert accuracy.main(["--runs", written(tmp_path, rows), "--by", "source,gpu,engine,model", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    assert set(result) == {"rows", "priced", "refused", "time", "memory", "feasibility", "coverage", "by"}
    assert (result["rows"], result["priced"]) == (3, 2)
    assert result["refused"] == {"schedule 'made up' is not modelled": 1}
    assert set(result["time"]) == SUMMARY
    assert set(result["memory"]) == SUMMARY | {"by_kind"}
    assert result["time"]["n"] == 2
    assert result["time"]["mape"] == pytest.approx(0.25)
    assert result["time"]["bias"] == pytest.approx(-0.25)
    assert result["time"]["p90"] == result["time"]["max"] == pytest.approx(0.5)
    assert result["memory"]["n"] == 1
    assert set(result["memory"]["by_kind"]) == {"allocated, max"}
    assert result["feasibility"] == {"n": 2, "right_frac": 0.5, "false_fit": 1, "false_oom": 0}
    assert set(result["coverage"]) == {"time_frac", "memory_frac"}
    assert set(result["by"]) == {"source=made_up", "gpu=H100-80GB-SXM", "engine=megatron", "model=tiny"}


def test_rows_view_names_every_cause(tmp_path, capsys):
    assert accuracy.main(["--runs", written(tmp_path, [row("one")], "runs.jsonl"), "--rows"]) == 0
    line = capsys.readouterr().out
    for word in ("one", "compute=", "optimizer=", "parameters=", "allocated, max", "measured fits"):
        assert word in line


def test_step_time_falls_back_to_tokens():
    assert measured_step_s(row(measured={"step_time_s": None, "tokens_per_s_per_gpu": 4096.0})) == pytest.approx(1.0)
    assert measured_step_s(row(measured={"step_time_s": None})) is None


def test_regret_of_a_wrong_and_a_right_order(tmp_path, capsys):
    plans = {"a": {}, "b": {"tp": 8, "dp": 1}, "c": {"tp": 2, "dp": 4}}
    predicted = {name: Pricer().price(row(name, plan=plan)).estimate.step_s for name, plan in plans.items()}
    order = sorted(plans, key=predicted.__getitem__)

    def run(times):
        rows = [row(name, plan=plans[name], measured={"step_time_s": seconds}) for name, seconds in zip(order, times, strict=True)]
        regret.main(["--runs", written(tmp_path, rows), "--json"])
        return json.loads(capsys.readouterr().out)

    right, wrong = run((1.0, 2.0, 3.0)), run((3.0, 2.0, 1.5))
    assert set(right) == {"groups", "mean", "p90", "max", "within_5pct_frac", "spearman"}
    assert (right["groups"], right["mean"], right["within_5pct_frac"]) == (1, 0.0, 1.0)
    assert right["spearman"] == pytest.approx(1.0)
    assert wrong["mean"] == pytest.approx(1.0)
    assert wrong["spearman"] == pytest.approx(-1.0)
    assert wrong["within_5pct_frac"] == 0.0


def test_fewer_than_three_plans_make_no_group():
    rows = [row("a"), row("again"), row("b", plan={"tp": 2, "dp": 4})]
    result = regret.score([Pricer().price(item) for item in rows])
    assert result["groups"] == 0
    assert result["mean"] is None


def test_kernels_score_tables_in_either_form(tmp_path, capsys):
    gemm = tmp_path / "gemm.csv.gz"
    with gzip.open(gemm, "wt") as stream:
        stream.write("device,dtype,m,n,k,time_s\nh100-sxm5-80gb,bfloat16,4096,4096,4096,0.0002\nwarp-drive,bfloat16,1,1,1,1.0\n")
    nccl = [{"gpu": "H100-80GB-SXM", "collective": "all_reduce", "gpus": 16, "gpus_per_node": 8, "size_bytes": 2**28, "time_us": 1e4}]
    kernels.main(["--gemm", str(gemm), "--nccl", written(tmp_path, nccl, "nccl.jsonl"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"gemm", "nccl"}
    assert result["gemm"]["n"] == result["nccl"]["n"] == 1
    assert sum(result["gemm"]["skipped"].values()) == 1
    assert 0.0 < result["gemm"]["median"] < 0.5
    assert 0.0 < result["nccl"]["median"] < 1.0


def test_layers_are_cut_as_launchers_cut():
    pipeline = {"pp": 4, "dp": 2, "schedule": "1F1B"}
    assert strategy(plan=pipeline).stage_layers == (2, 2, 2, 2)
    assert strategy(model={"layers": 10}, plan=pipeline).stage_layers == (3, 3, 2, 2)
    note = "Stages are uniform except the first and last, which hold one layer fewer"
    assert strategy(plan=pipeline, model={"layers": 10}, notes=note).stage_layers == (2, 3, 3, 2)
    heavy_head = strategy(plan=pipeline, model={"vocab": 128000}, software="nanotron").stage_layers
    assert sum(heavy_head) == 8
    assert heavy_head[-1] < heavy_head[0]
    one_each = {"pp": 2, "dp": 4, "schedule": "1F1B-I", "vpp": "1 layer per chunk (max number of chunks)"}
    assert strategy(plan=one_each, model={"layers": 6}, notes=note).stage_layers == (0, 1, 1, 1, 1, 1, 1, 0)
    head_alone = row(plan=pipeline, model={"layers": 3, "vocab": 12500}, software="nanotron")
    assert problem(head_alone, Machines()).strategy.stage_layers == (1, 1, 1, 0)
    assert Pricer().price(head_alone).estimate.step_s > 0.0


def test_ranks_without_layers_idle():
    case = problem(row(plan={"pp": 8, "dp": 1, "schedule": "1F1B"}, model={"layers": 6}), Machines())
    assert case.strategy.mesh.pp == 6
    assert case.cluster.num_devices == 6
    Pricer().price(row(plan={"pp": 8, "dp": 1, "schedule": "1F1B"}, model={"layers": 6}))


def test_what_a_row_leaves_out_follows_its_stack():
    tensor = {"tp": 4, "dp": 2}
    assert not strategy(plan=tensor, software="Megatron-LM").sequence_parallel
    assert strategy(plan=tensor, software="nanotron").sequence_parallel
    assert strategy(plan={"zero_stage": None}).zero_stage == 1
    assert strategy(plan={"zero_stage": None, "distributed_optimizer": False}).zero_stage == 0
    assert strategy(plan={"zero_stage": None, "fsdp": "FULL_SHARD"}).zero_stage == 3
    assert strategy(plan={"zero_stage": None, "fsdp": "SHARD_GRAD_OP"}).zero_stage == 2
    engine = problem(row(plan={"overlap": {"grad_reduce": False}}), Machines()).engine
    assert not engine.overlap_gradient_reduce
    assert engine.overlap_parameter_gather


def test_shapes_decide_the_architecture():
    model = row()["model"]
    assert config_of(model, {}, 1)["model_type"] == "llama"
    assert config_of(model | {"ffn_hidden": 4096}, {}, 1)["model_type"] == "gpt2"
    assert config_of(model | {"ffn_hidden": 4096}, {"swiglu": True}, 1)["model_type"] == "llama"
    assert config_of(model | {"vocab": 50257}, {}, 8)["vocab_size"] == 50264
    moe = {"experts": 16, "top_k": 2, "moe_ffn_hidden": 512, "shared_experts": 2, "dense_layers": 1}
    mla = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = config_of(model | {"moe": moe, "mla": mla}, {}, 1)
    assert (config["model_type"], config["qk_nope_head_dim"], config["first_k_dense_replace"]) == ("deepseek_v2", 32, 1)
    for changes in ({"moe": moe}, {"moe": moe, "mla": mla}, {"mla": mla}):
        assert Pricer().price(row(model=changes)).estimate.step_s > 0.0


def test_clusters_take_what_the_row_says():
    machines = Machines()
    h100 = machines.cluster({"gpu": "H100-80GB-SXM", "gpus_per_node": 8}, 16).pool
    odd = machines.cluster({"gpu": "H100-96GB-HBM2e-500W", "gpus_per_node": 8, "inter_bw": "1600 Gbps node-node RoCE"}, 16).pool
    assert odd.device.memory_bytes == 96 * 2**30
    assert odd.device.peak_flops == h100.device.peak_flops
    assert odd.network.bandwidth_bytes_per_s == pytest.approx(25e9)
    omni = machines.cluster({"gpu": "A100-80GB", "gpus_per_node": 8, "inter_bw": "4x Omni-Path links per node"}, 16).pool
    assert omni.network.bandwidth_bytes_per_s == pytest.approx(6.25e9)
    each = machines.cluster({"gpu": "A100-80GB", "gpus_per_node": 8, "inter_bw": "50 GB/s per GPU"}, 16).pool
    assert each.network.bandwidth_bytes_per_s == pytest.approx(50e9)
    with pytest.raises(InputError, match="warp"):
        machines.cluster({"gpu": "warp-drive", "gpus_per_node": 8}, 8)


def test_memory_is_compared_with_like():
    assert kind_of("torch allocated_bytes.all.peak, last rank") == ("allocated", "last")
    assert kind_of("nvidia-smi, max over first/last nodes") == ("device", "max")
    assert kind_of("peak memory (max over ranks; max_reserved by metrics)") == ("reserved", "max")
    assert kind_of("rank 0 peak (logs both max_memory_allocated and max_memory_reserved)") == ("unstated", "first")
    assert kind_of(None) == ("unstated", "max")
    assert measured_gib(2**30 / 1e9, "GB as printed (bytes/1e9)") == pytest.approx(1.0)
    estimate = Pricer().price(row(plan={"pp": 4, "dp": 2, "schedule": "1F1B"})).estimate
    device, reserved, allocated = (predicted_bytes(estimate, (name, "max")) for name in ("device", "reserved", "allocated"))
    assert device == estimate.peak_bytes > reserved > allocated == predicted_bytes(estimate, ("unstated", "max"))
    assert predicted_bytes(estimate, ("device", "last")) == estimate.stages[-1].peak_bytes


def test_statistics():
    assert summary([])["median"] is None
    assert summary([0.1, -0.3])["mape"] == pytest.approx(0.2)
    assert summary([0.1, -0.3])["bias"] == pytest.approx(-0.1)
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.9) == 9.0
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None


def test_calibration_is_fitted_on_some_rows_and_scored_on_the_others(tmp_path, capsys):
    plans = [{"tp": tp, "dp": 8 // tp} for tp in (1, 2, 4, 8)]
    rows = []
    for index, plan in enumerate((*plans, *plans, *plans)):
        one = row(str(index), plan=plan, job={"global_batch": 32 * (1 + index // 4)})
        rows.append(one | {"measured": one["measured"] | {"step_time_s": 1.5 * Pricer().price(one).estimate.step_s}})
    path = written(tmp_path, rows)
    results = []
    for flags in ([], ["--calibrate-on", "6", "--seed", "1"]):
        accuracy.main(["--runs", path, "--json", *flags])
        results.append(json.loads(capsys.readouterr().out))
    assert [result["time"]["n"] for result in results] == [12, 6]
    assert results[0]["time"]["median"] == pytest.approx(1 / 3)
    assert results[1]["time"]["median"] < 0.1
    profile.main(["--runs", path, "-o", str(tmp_path / "profile.json")])
    found = read_profile((tmp_path / "profile.json").read_text(), "profile.json")
    assert found.num_time_runs == 12
    assert found.compute_frac > 1.2
