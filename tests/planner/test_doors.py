"""Both doors lead to the same graph: a module captured, and its config read without torch.

Models are transformers' own, reduced to two layers. Sliding windows are as long as the sequence: where they are shorter, transformers' sdpa attention builds an
explicit mask and repeats the key-value heads, which capture reports as it is, while the spec assumes a flash kernel with a window (docs/capture.md).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from costmodel.engine import engine
from costmodel.work import DTYPE_BYTES, Collective
from planner.capture import capture
from planner.graph import TENSOR_PARALLEL_AXES, Graph
from planner.job import Job
from planner.lower import lower
from planner.models import resolve, spec_graph
from tests.planner.graphs import strategy

transformers = pytest.importorskip("transformers")

BATCH, SEQUENCE = 2, 32
DENSE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 128}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = DENSE | TOKENS | {"num_key_value_heads": 4}
ROUTED = GROUPED | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LATENT = DENSE | TOKENS | {
    "num_key_value_heads": 8, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 8, "vocab_size": 128, "n_positions": 64, "resid_pdrop": 0.0,
                                       "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED | {"sliding_window": 64}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED | {"head_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED | {"head_dim": 16, "sliding_window": 64}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GROUPED | {"head_dim": 16, "sliding_window": 64}),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "OlmoForCausalLM": ("OlmoConfig", GROUPED),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 48}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", ROUTED | {"num_experts": 4, "head_dim": 16}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", LATENT | {"n_shared_experts": 1}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
    "GptOssForCausalLM": ("GptOssConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 64}),
    "BertForMaskedLM": ("BertConfig", DENSE | BERT),
    "ViTForImageClassification": ("ViTConfig", {k: v for k, v in DENSE.items() if k != "vocab_size"} | BERT | {"image_size": 32, "patch_size": 8}),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 8, "d_kv": 8, "vocab_size": 128,
                                                "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
}  # fmt: skip


@pytest.fixture(params=FAMILIES, scope="module")
def doors(request):
    """(captured, from the config) of one family."""
    config_name, values = FAMILIES[request.param]
    config = getattr(transformers, config_name)(**values)
    with torch.device("meta"):
        model = getattr(transformers, request.param)(config)
    spec = resolve(config.to_dict())
    return capture(model, batch=BATCH, sequence=SEQUENCE), spec_graph(spec, batch=BATCH, sequence=SEQUENCE)


def saved_bytes(graph: Graph) -> Counter[bool]:
    """Bytes kept for backward, by whether tensor parallelism divides them."""
    total: Counter[bool] = Counter()
    for layer in graph.layers:
        block = graph.kind(layer.kind_id)
        for tensor in map(block.tensor, block.saved):
            split = not TENSOR_PARALLEL_AXES.isdisjoint(tensor.axes)
            total[split] += int(tensor.num_elements * DTYPE_BYTES["bf16" if tensor.dtype == "compute" else tensor.dtype])
    return total


def flops(graph: Graph, phase: str) -> float:
    return sum(graph.kind(layer.kind_id).flops(phase) for layer in graph.layers)


def layouts(graph: Graph) -> dict[str, str]:
    """Tensor-parallel styles under full module names."""
    found = {}
    for layer in graph.layers:
        block = graph.kind(layer.kind_id)
        prefix = f"{layer.path}." if block.role == "layer" else ""
        found |= {f"{prefix}{module}".strip("."): style for module, style in block.layouts}
    return found


def parameter_axes(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Axes of all parameters under full names, tied ones under the names they are used by."""
    found = {}
    for layer in graph.layers:
        block = graph.kind(layer.kind_id)
        prefix = f"{layer.path}." if block.role == "layer" else ""
        found |= {f"{prefix}{tensor.tensor_id}": tensor.axes for tensor in block.parameters}
    return found


def test_counts_are_equal(doors):
    captured, written = doors
    for field in (
        "num_parameters",
        "num_trainable_parameters",
        "num_active_parameters",
        "num_experts",
        "top_k",
        "num_heads",
        "num_kv_heads",
    ):
        assert getattr(captured, field) == getattr(written, field), field
    assert captured.vocab_size == written.vocab_size


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_flops_agree(doors, phase):
    captured, written = doors
    assert flops(written, phase) == pytest.approx(flops(captured, phase), rel=0.01)


@pytest.mark.parametrize("divided", [False, True])
def test_saved_bytes_agree(doors, divided):
    captured, written = doors
    assert saved_bytes(written)[divided] == pytest.approx(saved_bytes(captured)[divided], rel=0.01)


def test_layouts_are_equal(doors):
    captured, written = doors
    assert layouts(captured) == layouts(written)


def test_parameter_axes_are_equal(doors):
    captured, written = doors
    one, two = parameter_axes(captured), parameter_axes(written)
    assert {name: axes for name, axes in one.items() if name in two} == {name: axes for name, axes in two.items() if name in one}
    assert len(one.keys() & two.keys()) >= len(two) - 2


@pytest.mark.parametrize("plan", [strategy(tp=2, sequence_parallel=True), strategy(tp=4)], ids=["sequence_parallel", "tensor_parallel"])
def test_tensor_parallel_traffic_agrees(doors, plan):
    """Bytes of the collectives that the axes imply, all layers and both passes."""
    job = Job(global_batch=BATCH, seq_len=SEQUENCE)
    captured, written = (
        sum(
            count * item.full_bytes
            for block, count in lower(graph, job, plan, engine("torch")).stages[0].blocks
            for item in (*block.forward, *block.backward)
            if isinstance(item, Collective) and item.axis == "tp"
        )
        for graph in doors
    )
    assert written == pytest.approx(captured, rel=0.02)
