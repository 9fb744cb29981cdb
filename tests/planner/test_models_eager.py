"""Door 2 against reality: reduced models of every family, built by transformers and run by eager PyTorch on this CPU in bf16.

Parameters must be equal by name and shape; matmul flops equal; bytes that autograd holds after the forward pass within 1 % (the CPU keeps
layer-norm statistics in bf16, accelerators in fp32, and the loss keeps a 4-byte weight that is not modelled). Training needs no key-value cache.
"""

import warnings
import weakref

import pytest

from costmodel.work import DTYPE_BYTES
from planner.models import spec_from_config, spec_graph

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, LENGTH = 2, 32
SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
MIXTURE = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
# v_head_dim equals the width of queries and keys, which is when the CPU has a flash kernel for it.
LATENT = {
    **SMALL, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 256, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "llama_tied_biased": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_eager": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "attn_implementation": "eager"}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**SMALL, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SMALL, "head_dim": 16, "sliding_window_pattern": 2}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SMALL, "pad_token_id": 0}),
    "phi4": ("Phi3ForCausalLM", "Phi3Config", {**SMALL, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", SMALL),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", SMALL),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MIXTURE, "shared_expert_intermediate_size": 128}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "n_group": 4, "topk_group": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, **PLAIN, "max_position_embeddings": 64}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SMALL, **PLAIN, "image_size": 32, "patch_size": 8, "num_labels": 10}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 2, "num_heads": 8, "vocab_size": 256, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }),
}  # fmt: skip
# The CPU has no fused kernel for attention with a bias that needs a gradient, so only parameters can be compared.
NO_CPU_KERNEL = {"t5"}


@pytest.fixture(scope="module")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers is not installed (pip install torch-autoplan[hf])")


def build(transformers, family, device):
    architecture, config, values = MODELS[family]
    values = dict(values)
    kind = values.pop("attn_implementation", None)
    config = getattr(transformers, config)(**values)
    with torch.device(device):
        model = getattr(transformers, architecture)._from_config(config, **({"attn_implementation": kind} if kind else {}))
    mapping = {**config.to_dict(), **({"attn_implementation": kind} if kind else {})}
    return model, spec_graph(spec_from_config(mapping, family), batch=BATCH, sequence=LENGTH)


def named_shapes(graph):
    tied = {user for _, user in graph.tied}
    roles = {block.kind_id: block for block in graph.kinds}
    shapes = {}
    for layer in graph.layers:
        block = roles[layer.kind_id]
        for tensor in block.parameters:
            name = f"{layer.path}.{tensor.tensor_id}" if block.role == "layer" else tensor.tensor_id
            if name not in tied:
                shapes[name] = tensor.shape
    return shapes


@pytest.mark.parametrize("family", MODELS)
def test_parameters_are_those_of_transformers(transformers, family):
    model, graph = build(transformers, family, "meta")
    assert named_shapes(graph) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert graph.num_parameters == sum(parameter.numel() for parameter in model.parameters())


class Kept:
    """What autograd holds instead of a saved tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def forward(model, family):
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if family == "vit":
        return model(pixel_values=torch.zeros(BATCH, 3, 32, 32, dtype=torch.bfloat16), labels=torch.zeros(BATCH, dtype=torch.long)).loss
    return model(input_ids=ids, labels=ids.clone(), **({} if family == "bert" else {"use_cache": False})).loss


def measure(model, family):
    """(bytes autograd holds after forward, forward flops, backward flops): storages once, parameters and buffers excepted."""
    from torch.utils.flop_counter import FlopCounterMode

    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = weakref.WeakSet()

    def pack(tensor):
        held = Kept(tensor)
        kept.add(held)
        return held

    counter = FlopCounterMode(display=False, custom_mapping=flop_formulas())
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        loss = forward(model, family)
        before = counter.get_total_flops()
        storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in kept}
        loss.backward()
    return sum(size for place, size in storages.items() if place not in owned), before, counter.get_total_flops() - before


def flop_formulas():
    aten = torch.ops.aten

    def pairs(q, k, v, **_):
        (batch, heads, length, dim), keys, wide = q, k[2], v[3]
        return 2 * batch * heads * length * keys * (dim + wide)

    def attention(q, k, v, *_, out_shape=None, **__):
        return pairs(q, k, v)

    def attention_backward(grad, q, k, v, *_, out_shape=None, **__):
        return 5 * pairs(q, k, v) // 2

    def grouped(a, b, *_, out_shape=None, **__):
        return 2 * a[-2] * a[-1] * b[-1]

    return {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        aten._grouped_mm: grouped,
    }


def graph_flops(graph, phase):
    """Flops with the causal half counted in full, as the CPU's counter does."""
    nodes = [node for layer in graph.layers for node in graph.kind(layer.kind_id).nodes if node.phase == phase]
    return sum(node.flops * (2 if node.op == "attention" and node.causal else 1) for node in nodes)


def graph_saved_bytes(graph):
    widths = {**DTYPE_BYTES, "compute": 2}
    total = 0.0
    for layer in graph.layers:
        block = graph.kind(layer.kind_id)
        tensors = {tensor.tensor_id: tensor for tensor in block.tensors}
        total += sum(tensors[name].num_elements * widths[tensors[name].dtype] for name in block.saved)
    return total


@pytest.mark.parametrize("family", [family for family in MODELS if family not in NO_CPU_KERNEL])
def test_kept_bytes_and_flops_are_those_of_eager_torch(transformers, family):
    model, graph = build(transformers, family, "cpu")
    kept, ahead, back = measure(model.to(torch.bfloat16).train(), family)
    assert graph_saved_bytes(graph) == pytest.approx(kept, rel=0.01)
    assert graph_flops(graph, "forward") == ahead
    assert graph_flops(graph, "backward") == back


class Adapter(torch.nn.Module):
    """A linear layer with a LoRA adapter, as PEFT runs it without dropout."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def test_adapters_keep_and_compute_what_eager_torch_does(transformers):
    model, _ = build(transformers, "llama", "cpu")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (Adapter(base, 4) for base in (layer.self_attn.q_proj, layer.self_attn.v_proj))
    spec = spec_from_config(model.config.to_dict(), "llama").lora(4, ("q_proj", "v_proj"))
    graph = spec_graph(spec, batch=BATCH, sequence=LENGTH)
    kept, ahead, back = measure(model.to(torch.bfloat16).train(), "llama")
    assert graph.num_trainable_parameters == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert graph_saved_bytes(graph) == pytest.approx(kept, rel=0.01)
    assert graph_flops(graph, "forward") == ahead
    assert graph_flops(graph, "backward") == back
