"""Door 2: names, configs and specs to graphs. Published totals, hostile configs, and what every block must obey. No torch."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from costmodel.errors import InputError
from planner.models import ModelSpec, list_models, resolve, spec_from_config, spec_graph

# Totals of distinct parameters: the safetensors metadata of each repository (registry.json names it), without buffers, vision towers and multi-token heads.
PUBLISHED = [
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3.1-405b", 405_853_388_800),
    ("llama3.2-1b", 1_235_814_400),
    ("llama3.2-3b", 3_212_749_824),
    ("mistral-7b", 7_241_732_096),
    ("mistral-7b-v0.3", 7_248_023_552),
    ("mistral-nemo-12b", 12_247_782_400),
    ("mistral-large-2", 122_610_069_504),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_620_634_112),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("qwen3-235b-a22b", 235_093_634_560),
    ("qwen1.5-moe-a2.7b", 14_315_784_192),
    ("gemma2-2b", 2_614_341_888),
    ("gemma2-9b", 9_241_705_984),
    ("gemma2-27b", 27_227_128_320),
    ("gemma3-1b", 999_885_952),
    ("gemma3-4b", 3_880_263_168),
    ("gemma3-12b", 11_766_034_176),
    ("gemma3-27b", 27_009_346_304),
    ("phi-3-mini", 3_821_079_552),
    ("phi-3-medium", 13_960_238_080),
    ("phi-4", 14_659_507_200),
    ("olmo-7b", 6_888_095_744),
    ("olmo2-7b", 7_298_617_344),
    ("olmo2-13b", 13_716_198_400),
    ("olmo2-32b", 32_234_279_936),
    ("deepseek-v2-lite", 15_706_484_224),
    ("deepseek-v2", 235_741_434_880),
    ("deepseek-v3", 671_026_404_352),
    ("gpt-oss-20b", 20_914_757_184),
    ("gpt-oss-120b", 116_829_156_672),
    ("bert-base", 109_514_298),
    ("bert-large", 335_174_458),
    ("vit-b", 86_567_656),
    ("vit-l", 304_326_632),
    ("vit-h", 632_045_800),
    ("t5-small", 60_506_624),
    ("t5-base", 222_903_552),
    ("t5-large", 737_668_096),
    ("t5-3b", 2_851_598_336),
    ("t5-11b", 11_307_321_344),
]

SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "vocab_size": 256},
    "llama": {"model_type": "llama", **SMALL},
    "llama_eager": {"model_type": "llama", **SMALL, "attn_implementation": "eager"},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **SMALL, "head_dim": 16, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window_pattern": 2},
    "phi3": {"model_type": "phi3", **SMALL, "partial_rotary_factor": 0.5},
    "olmo": {"model_type": "olmo", **SMALL},
    "olmo2": {"model_type": "olmo2", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **SMALL, **MIXTURE, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **MIXTURE, "head_dim": 16, "mlp_only_layers": [0]},
    "gpt_oss": {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    "deepseek_v2": {"model_type": "deepseek_v2", **SMALL, **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **SMALL, **LATENT, "n_group": 4, "topk_group": 2},
    "bert": {"model_type": "bert", **SMALL, "max_position_embeddings": 64},
    "vit": {"model_type": "vit", **SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10},
    "t5": {"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 2, "num_heads": 8, "vocab_size": 256},
}


def small_graph(family: str, batch: int = 2):
    return spec_graph(spec_from_config(CONFIGS[family], family), batch=batch, sequence=32)


@pytest.mark.parametrize(("name", "total"), PUBLISHED)
def test_parameter_totals_are_the_published_ones(name, total):
    assert spec_graph(resolve(name), sequence=128).num_parameters == total


def test_the_table_of_totals_is_complete():
    assert [name for name, _ in PUBLISHED] == list(list_models())


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.88e9), ("deepseek-v3", 37.55e9), ("qwen3-235b-a22b", 22.19e9), ("deepseek-v2", 21.4e9)]
)
def test_active_parameters_are_the_published_ones(name, active):
    assert spec_graph(resolve(name), sequence=128).num_active_parameters == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3-70b", "llama3-70b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("llama3-70b", "llama3-70b"),
        ("Llama-3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-3.1-70B", "llama3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_names_as_people_type_them(text, name):
    assert resolve(text).name == name


def test_no_two_rows_answer_to_one_name():
    rows = json.loads(files("planner.models").joinpath("registry.json").read_text())["models"]
    for row in rows:
        assert row["source"].startswith("https://")
        for label in (
            row["name"],
            *row["aliases"],
            row["source"].removeprefix("https://huggingface.co/").removesuffix("/blob/main/config.json"),
        ):
            assert resolve(label).name == row["name"]


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(InputError, match="llama3-70b"):
        resolve("llama3-71b")


def test_a_file_a_folder_and_a_mapping_are_one_model(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    from_file, from_folder = resolve(folder / "config.json"), resolve(str(folder))
    assert from_file == from_folder
    assert from_file.name == "my-model"
    assert replace(from_file, name="config") == resolve(CONFIGS["llama"])
    assert resolve(from_file) is from_file


def test_multimodal_configs_give_their_text_part_and_say_so():
    spec = resolve({"model_type": "gemma3", "text_config": CONFIGS["gemma3"], "vision_config": {"hidden_size": 8}})
    assert spec.family == "gemma3_text"
    assert any("text part" in note for note in spec.notes)


def test_kinds_are_stored_once():
    graph = spec_graph(resolve("llama3-70b"), sequence=8192)
    assert [block.kind_id for block in graph.kinds] == ["embed", "layer", "head"]
    assert (graph.num_layers, len(graph.layers)) == (80, 82)
    assert graph.layers[5].path == "model.layers.4"
    assert graph.graph_id == spec_graph(resolve("llama3-70b"), sequence=8192).graph_id


@pytest.mark.parametrize("family", CONFIGS)
def test_programs_read_only_what_exists(family):
    for block in small_graph(family).kinds:
        tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
        assert len(tensors) == len(block.tensors)
        made = {name for name, tensor in tensors.items() if tensor.kind in ("input", "parameter", "buffer")}
        made |= {"position_ids", "token_type_ids"} & set(tensors)
        forward = set()
        for node in block.nodes:
            if node.phase == "backward" and not forward:
                forward = set(made)
            unknown = [name for name in (*node.inputs, *node.outputs) if name not in tensors]
            assert not unknown, (node.node_id, unknown)
            assert set(node.inputs) <= made, (node.node_id, set(node.inputs) - made)
            made |= set(node.outputs)
        assert set(block.saved) <= forward
        assert set(block.outputs) <= forward


@pytest.mark.parametrize("family", CONFIGS)
def test_backward_reads_nothing_that_was_not_kept(family):
    for block in small_graph(family).kinds:
        tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
        forward = {name for node in block.nodes if node.phase == "forward" for name in (*node.inputs, *node.outputs)}
        lasting = {name for name, tensor in tensors.items() if tensor.kind != "activation"} | set(block.saved)
        for node in block.nodes:
            if node.phase == "backward":
                lost = {name for name in node.inputs if name in forward and name not in lasting}
                assert not lost, (block.kind_id, node.node_id, lost)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_gets_one_gradient_of_its_shape(family, batch):
    for block in small_graph(family, batch).kinds:
        tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
        makers = [name for node in block.nodes if node.role == "wgrad" for name in node.outputs]
        for parameter in block.parameters:
            assert tensors[f"{parameter.tensor_id}.grad"].shape == parameter.shape
            assert makers.count(f"{parameter.tensor_id}.grad") == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_matmul_flops_are_those_of_their_loops_and_backward_is_twice_forward(family):
    graph = small_graph(family)
    for block in graph.kinds:
        for node in block.nodes:
            if node.op in ("gemm", "grouped_gemm"):
                size = 2.0
                for loop in node.loops:
                    size *= 1 if loop.name == "groups" else loop.size
                assert node.flops == size, node.node_id
                links = [other for other in block.nodes if other.forward_id == node.node_id and other.op == node.op]
                if node.phase == "forward" and block.role == "layer":
                    assert [other.flops for other in links] == [node.flops] * 2, node.node_id


@pytest.mark.parametrize("family", CONFIGS)
def test_every_module_with_sharded_parameters_has_a_layout(family):
    for block in small_graph(family).kinds:
        layouts = dict(block.layouts)
        for parameter in block.parameters:
            divided = set(parameter.axes) & {"heads", "kv_heads", "ffn", "vocab"}
            matrix = len(parameter.shape) > 1 and not parameter.tensor_id.endswith("_bias") and parameter.tensor_id != "shared.weight"
            if divided and matrix:
                style = layouts.get(parameter.tensor_id) or layouts.get(parameter.tensor_id.rpartition(".")[0])
                assert style in ("column", "row", "vocab"), parameter.tensor_id


def test_sizes_scale_with_batch_and_sequence_as_their_axes_say():
    one, two = (spec_graph(resolve(CONFIGS["llama"]), batch=batch, sequence=32) for batch in (1, 2))
    for small, large in zip(one.kinds, two.kinds, strict=True):
        for a, b in zip(small.tensors, large.tensors, strict=True):
            factor = 2 if {"batch", "tokens"} & set(a.axes) else 1
            assert b.num_elements == factor * a.num_elements, a.tensor_id


def test_a_window_shorter_than_the_sequence_costs_fewer_pairs():
    inside, outside = (
        spec_graph(resolve(CONFIGS["mistral"]), sequence=length).kind("layer" if length < 17 else "layer_sliding") for length in (16, 32)
    )
    (node,) = (node for node in outside.nodes if node.op == "attention" and node.phase == "forward")
    assert node.flops == 2.0 * 8 * (16 * 32 - 16 * 15 / 2) * (8 + 8)
    assert inside.num_parameters == outside.num_parameters


def test_lora_trains_adapters_only_and_keeps_less():
    spec = spec_from_config(CONFIGS["llama"], "small")
    whole, adapted = spec_graph(spec, sequence=32), spec_graph(spec.lora(4, ("q_proj", "v_proj")), sequence=32)
    assert adapted.num_trainable_parameters == 4 * 4 * ((64 + 64) + (64 + 16))
    assert adapted.num_parameters == whole.num_parameters + adapted.num_trainable_parameters
    first, layer = adapted.kind("layer_frozen_input"), adapted.kind("layer")
    kept = {name.split("/")[0] for name in layer.saved}
    assert "mlp.down_proj" not in kept
    assert len(layer.saved) < len(whole.kind("layer").saved)
    assert len(first.nodes) < len(layer.nodes)
    assert not [node for node in layer.nodes if node.role == "wgrad" and node.module == "mlp.gate_proj"]


def test_a_frozen_model_has_no_backward():
    graph = spec_graph(spec_from_config(CONFIGS["llama"], "small").freeze(), sequence=32)
    assert graph.num_trainable_parameters == 0
    assert not [node for block in graph.kinds for node in block.nodes if node.phase == "backward"]
    assert not [name for block in graph.kinds for name in block.saved if block.role == "layer"]


def test_lora_targets_must_exist():
    with pytest.raises(InputError, match="q_proj"):
        spec_graph(spec_from_config(CONFIGS["llama"], "small").lora(4, ("query",)), sequence=32)


LLAMA = CONFIGS["llama"]
MALFORMED = [
    ({}, "model_type"),
    ({**LLAMA, "model_type": "mamba"}, "model_type"),
    ({**LLAMA, "model_type": 7}, "model_type"),
    ({**LLAMA, "model_type": ["llama"]}, "model_type"),
    ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
    ({**LLAMA, "hidden_size": None}, "hidden_size"),
    ({**LLAMA, "hidden_size": "64"}, "hidden_size"),
    ({**LLAMA, "hidden_size": -64}, "hidden_size"),
    ({**LLAMA, "hidden_size": 0}, "hidden_size"),
    ({**LLAMA, "hidden_size": 64.5}, "hidden_size"),
    ({**LLAMA, "hidden_size": float("nan")}, "hidden_size"),
    ({**LLAMA, "hidden_size": float("inf")}, "hidden_size"),
    ({**LLAMA, "hidden_size": True}, "hidden_size"),
    ({**LLAMA, "hidden_size": [64]}, "hidden_size"),
    ({**LLAMA, "hidden_size": 10**12}, "hidden_size"),
    ({**LLAMA, "num_hidden_layers": 10**7}, "num_hidden_layers"),
    ({**LLAMA, "num_attention_heads": 7}, "num_attention_heads"),
    ({**LLAMA, "num_attention_heads": 64}, "head_dim"),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
    ({**LLAMA, "num_key_value_heads": 16}, "num_key_value_heads"),
    ({**LLAMA, "head_dim": 0}, "head_dim"),
    ({**LLAMA, "hidden_act": "swosh"}, "hidden_act"),
    ({**LLAMA, "attention_bias": "no"}, "attention_bias"),
    ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({**LLAMA, "attn_implementation": 3}, "attn_implementation"),
    ({**CONFIGS["gpt2"], "n_head": 7}, "n_head"),
    ({**CONFIGS["gpt2"], "attn_implementation": "eager"}, "attn_implementation"),
    ({**CONFIGS["mistral"], "sliding_window": -1}, "sliding_window"),
    ({**CONFIGS["gemma2"], "layer_types": ["full_attention"]}, "layer_types"),
    ({**CONFIGS["gemma2"], "layer_types": ["linear_attention"] * 4}, "layer_types"),
    ({**CONFIGS["gemma2"], "final_logit_softcapping": "30"}, "final_logit_softcapping"),
    ({**CONFIGS["phi3"], "partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({**CONFIGS["phi3"], "rope_parameters": 3}, "rope_parameters"),
    ({**CONFIGS["mixtral"], "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({**CONFIGS["qwen3_moe"], "mlp_only_layers": [2]}, "mlp_only_layers"),
    ({**CONFIGS["deepseek_v3"], "n_group": 3}, "n_group"),
    ({**CONFIGS["deepseek_v2"], "topk_method": "random"}, "topk_method"),
    ({**CONFIGS["bert"], "position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({**CONFIGS["vit"], "patch_size": 5}, "patch_size"),
    ({**CONFIGS["t5"], "feed_forward_proj": "gated-gated-relu"}, "feed_forward_proj"),
    ({"model_type": "llava", "text_config": {**LLAMA, "hidden_size": -1}}, "hidden_size"),
]


@pytest.mark.parametrize(("config", "key"), MALFORMED)
def test_malformed_configs_name_the_place_and_a_remedy(config, key):
    with pytest.raises(InputError) as caught:
        spec_from_config(config, "config.json")
    assert key in caught.value.where
    assert "config.json" in caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\x00\xff", '{"model_type": "llama"'])
def test_malformed_files_name_the_file(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        resolve(path)
    assert "config.json" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("model", ["no-such-model", "missing/config.json", "", 3, None, ["llama3-8b"]])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(InputError) as caught:
        resolve(model)
    assert caught.value.remedy


@pytest.mark.parametrize(("batch", "sequence"), [(0, 8), (1, 0), (1, 8.5), (True, 8), (1, "8")])
def test_sizes_must_be_positive_whole_numbers(batch, sequence):
    with pytest.raises(InputError):
        spec_graph(resolve(LLAMA), batch=batch, sequence=sequence)


def test_learned_positions_limit_the_sequence():
    with pytest.raises(InputError, match="1024"):
        spec_graph(resolve("gpt2"), sequence=2048)


@pytest.mark.parametrize(("field", "value"), [("hidden", 0), ("heads", "8"), ("kv_heads", 3), ("family", "mamba")])
def test_specs_by_hand_are_checked(field, value):
    good = {
        "name": "x",
        "family": "llama",
        "num_layers": 2,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 8,
        "ffn": 128,
        "vocab": 256,
        "rope_dim": 8,
    }
    assert spec_graph(ModelSpec(**good), sequence=8).num_parameters > 0
    with pytest.raises(InputError):
        spec_graph(ModelSpec(**{**good, field: value}), sequence=8)
