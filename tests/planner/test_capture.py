"""Capture: what the graph says is what eager PyTorch does."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from costmodel.errors import InputError
from examples.gpt import GPTConfig, batches, build_model, loss_fn
from planner.capture import capture
from planner.graph import Graph

BYTES = {"compute": 4, "fp32": 4, "int64": 8, "bool": 1, "int32": 4}


def saved_bytes(graph: Graph) -> int:
    """Bytes of everything that all layers of a graph keep (fp32 compute)."""
    total = 0
    for layer in graph.layers:
        block = graph.kind(layer.kind_id)
        total += sum(block.tensor(name).num_elements * BYTES[block.tensor(name).dtype] for name in block.saved)
    return total


class Kept:
    """What a pack hook returns: it lives as long as the autograd node that saved it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def eager_saved_bytes(model: nn.Module, run) -> int:
    """Bytes of distinct storages that autograd holds after a real forward, parameters and buffers excluded."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor):
        holder = Kept(tensor)
        kept.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        loss = run()
    storages = {holder.tensor.untyped_storage()._cdata: holder.tensor.untyped_storage().nbytes() for holder in kept}
    del loss
    return sum(size for key, size in storages.items() if key not in own)


@pytest.mark.parametrize("config", [GPTConfig(), GPTConfig(num_kv_heads=2, tied=True), GPTConfig(norm="rms", num_layers=2)])
@pytest.mark.parametrize("batch", [1, 4])
def test_saved_bytes_equal_real_eager_bytes(config, batch):
    model = build_model(config)
    graph = capture(model, batch=batch, sequence=32, loss_fn=loss_fn, dtype="fp32", fused_kernels=False)
    data = next(batches(batch=batch, sequence=32))
    assert saved_bytes(graph) == eager_saved_bytes(model, lambda: loss_fn(model(data["input_ids"]), data))


def total(graph: Graph) -> tuple[float, float, int, int]:
    """(forward flops, backward flops, saved bytes, parameters) of all layers."""
    blocks = [graph.kind(layer.kind_id) for layer in graph.layers]
    flops = [sum(block.flops(phase) for block in blocks) for phase in ("forward", "backward")]
    return flops[0], flops[1], saved_bytes(graph), graph.num_parameters


def llama(**changes) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))


@pytest.mark.parametrize("build", [lambda: build_model(GPTConfig(tied=True)), llama])
def test_folding_changes_nothing(build, monkeypatch):
    model = build()
    folded = capture(model, batch=2, sequence=32, dtype="fp32")
    monkeypatch.setattr("planner.capture.find_blocks", lambda module: {})
    whole = capture(model, batch=2, sequence=32, dtype="fp32")
    assert len(whole.layers) == 1
    assert total(folded) == total(whole)


@pytest.mark.parametrize("build", [lambda: build_model(GPTConfig(num_kv_heads=2)), llama])
def test_micro_batches_scale_as_they_are_captured(build):
    model = build()
    sizes = {batch: capture(model, batch=batch, sequence=32) for batch in (1, 2, 4)}
    for batch in (1, 4):
        for small, large in zip(sizes[batch].kinds, sizes[2].kinds, strict=True):
            axes = {tensor.tensor_id: tensor for tensor in large.tensors}
            for tensor in small.tensors:
                factor = [batch / 2 if axis in ("batch", "tokens") else 1 for axis in axes[tensor.tensor_id].axes]
                expected = tuple(int(size * f) for size, f in zip(axes[tensor.tensor_id].shape, factor, strict=True))
                assert (tensor.shape, tensor.axes) == (expected, axes[tensor.tensor_id].axes)
            assert [node.flops * 2 / batch for node in small.nodes] == [node.flops for node in large.nodes]


def test_seventy_billion_parameters_are_captured_without_allocating_any():
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
              "vocab_size": 128256}  # fmt: skip
    with torch.device("meta"):
        model = llama(**config)
    graph = capture(model, sequence=8192)
    assert graph.num_parameters == 70_553_706_496
    assert [(block.role, count) for block, count in graph.runs()] == [("embedding", 1), ("layer", 80), ("head", 1)]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_flops_are_those_of_the_flop_counter():
    """Matmuls only, since torch's counter has no formula for the CPU's flash attention: those are checked by hand."""
    from torch.utils.flop_counter import FlopCounterMode

    model, data = build_model(), next(batches(batch=2, sequence=32))
    with FlopCounterMode(display=False) as counter:
        loss_fn(model(data["input_ids"]), data).backward()
    graph = capture(model, batch=2, sequence=32, loss_fn=loss_fn)
    nodes = [node for layer in graph.layers for node in graph.kind(layer.kind_id).nodes]
    assert sum(node.flops for node in nodes if node.op == "gemm") == counter.get_total_flops()
    heads, pairs, width = 2 * 8, 32 * 32 / 2, 8 + 8
    assert {node.flops for node in nodes if node.op == "attention"} == {2 * heads * pairs * width, 5 * heads * pairs * width}


class LowRank(nn.Module):
    """A frozen linear with trainable adapters."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def adapted() -> nn.Module:
    model = build_model(GPTConfig(num_layers=3)).requires_grad_(False)
    for block in model.blocks:
        for name in ("q_proj", "v_proj", "out_proj"):
            setattr(block.attention, name, LowRank(getattr(block.attention, name)))
    return model


def test_frozen_parameters_and_adapters():
    model = adapted()
    graph = capture(model, batch=2, sequence=32, loss_fn=loss_fn, dtype="fp32")
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert graph.num_trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad) == 3 * 3 * 2 * 4 * 64
    made = {name for block in graph.kinds for node in block.nodes for name in node.outputs}
    trained = {name for name in made if name.endswith(("weight.grad", "bias.grad"))}
    assert trained
    assert all("lora" in name for name in trained)
    assert [count for _, count in graph.runs()] == [1, 1, 2, 1], "the first layer has no input gradient"
    data = next(batches(batch=2, sequence=32))
    assert saved_bytes(graph) == eager_saved_bytes(model, lambda: loss_fn(model(data["input_ids"]), data))


def test_adapters_follow_what_they_adapt():
    layouts = dict(next(block for block in capture(adapted(), sequence=16, loss_fn=loss_fn).kinds if block.role == "layer").layouts)
    assert layouts["attention.q_proj.base_layer"] == layouts["attention.q_proj.lora_b"] == "column"
    assert layouts["attention.q_proj.lora_a"] == "replicate"
    assert layouts["attention.out_proj.base_layer"] == layouts["attention.out_proj.lora_a"] == "row"


def test_dropout_keeps_a_bool_mask_in_train_mode():
    model = build_model(GPTConfig(dropout=0.1))
    layer = next(block for block in capture(model, batch=2, sequence=32, loss_fn=loss_fn).kinds if block.role == "layer")
    assert [layer.tensor(name).shape for name in layer.saved if layer.tensor(name).dtype == "bool"] == [(2, 32, 64)] * 2
    layer = next(block for block in capture(model.eval(), batch=2, sequence=32, loss_fn=loss_fn).kinds if block.role == "layer")
    assert not [name for name in layer.saved if layer.tensor(name).dtype == "bool"]


def test_norm_statistics_are_single_precision_and_rms_norm_is_one_kernel():
    layer = next(
        block for block in capture(build_model(GPTConfig(norm="rms")), sequence=32, loss_fn=loss_fn).kinds if block.role == "layer"
    )
    norms = [node for node in layer.nodes if node.op == "norm" and node.phase == "forward"]
    assert [node.outputs[1] in layer.saved and layer.tensor(node.outputs[1]).dtype for node in norms] == ["fp32", "fp32"]


class Explicit(nn.Module):
    """Attention written out: scores, softmax, values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (proj(x).view(*x.shape[:2], 8, 8).transpose(1, 2) for proj in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.o((scores @ v).transpose(1, 2).reshape(x.shape))


def test_written_out_attention_has_heads_too():
    model = nn.Sequential(Explicit(), Explicit())
    data = torch.randn(2, 16, 64, requires_grad=True)
    graph = capture(model, example_inputs=(data,), sequence=16, dtype="fp32")
    (layer,) = [block for block in graph.kinds if block.role == "layer"]
    assert dict(layer.layouts) == {"q": "column", "k": "column", "v": "column", "o": "row"}
    scores = next(layer.tensor(name) for node in layer.nodes if node.op == "softmax" for name in node.outputs)
    assert (scores.shape, scores.axes) == ((2, 8, 16, 16), ("batch", "heads", "sequence", "sequence"))
    assert graph.num_heads == 8


class Fused(nn.Module):
    """q, k and v from one matmul, gate and up from another."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192), nn.Linear(64, 64)
        self.gate_up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 8, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def test_stacked_weights_are_divided_by_their_inner_factor():
    graph = capture(nn.Sequential(Fused(), Fused()), example_inputs=(torch.randn(2, 16, 64),), sequence=16)
    layer = next(block for block in graph.kinds if block.role == "layer")
    assert dict(layer.layouts) == {"qkv": "column", "o": "row", "gate_up": "column", "down": "row"}
    assert layer.tensor("qkv.weight").axes == ("heads", "")
    assert layer.tensor("gate_up.bias").axes == ("ffn",)


def test_windows_shorter_than_the_sequence_keep_the_mask_that_eager_keeps():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
    }
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=16))
    original = transformers.masking_utils.find_packed_sequence_indices
    graph = capture(model, batch=2, sequence=32, dtype="fp32")
    assert transformers.masking_utils.find_packed_sequence_indices is original
    ids = torch.randint(128, (2, 32))
    assert saved_bytes(graph) == eager_saved_bytes(model, lambda: model(input_ids=ids, labels=ids.clone(), use_cache=False).loss)


def test_convolutions_have_flops_and_no_tensor_parallel_axis():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    data = torch.randn(2, 3, 4, 4)
    graph = capture(model, example_inputs=(data,), sequence=1, dtype="fp32")
    nodes = graph.kinds[0].nodes
    assert next(node.flops for node in nodes if node.op == "conv") == 2 * (2 * 16) * 8 * (3 * 9)
    assert graph.layers[0].path == "model"
    assert saved_bytes(graph) == eager_saved_bytes(model, lambda: model(data).float().square().mean())


def test_a_loss_that_trains_nothing_is_an_error():
    with pytest.raises(InputError, match="no gradient reaches any of"):
        capture(build_model(), sequence=16, loss_fn=lambda output, batch: output.detach().sum())


@pytest.mark.parametrize(
    ("field", "values"),
    [("batch", {"batch": 0, "sequence": 4}), ("sequence", {"sequence": -1}), ("dtype", {"sequence": 4, "dtype": "int4"})],
)
def test_bad_sizes_name_the_field(field, values):
    with pytest.raises(InputError, match=f"capture.{field}"):
        capture(build_model(), **values)


def test_wrong_inputs_name_the_line_that_fails():
    with pytest.raises(InputError, match=r"test_capture\.py:\d+.*example_inputs"):
        capture(nn.Sequential(Explicit(), Explicit()), example_inputs=(torch.randn(2, 16, 32),), sequence=16)


def test_parameters_and_tying_are_exact():
    model = build_model(GPTConfig(tied=True))
    graph = capture(model, sequence=32, loss_fn=loss_fn)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert graph.tied == (("embed.weight", "head.weight"),)


def test_module_is_untouched():
    model = build_model()
    before = {name: (parameter, parameter.device) for name, parameter in model.named_parameters()}
    capture(model, sequence=16, loss_fn=loss_fn)
    assert all(parameter is before[name][0] for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_layouts_of_a_transformer_layer():
    graph = capture(build_model(GPTConfig(num_kv_heads=2)), sequence=16, loss_fn=loss_fn)
    layouts = dict(next(block for block in graph.kinds if block.role == "layer").layouts)
    assert {layouts[f"attention.{name}_proj"] for name in "qkv"} == {"column"}
    assert layouts["attention.out_proj"] == layouts["mlp.down_proj"] == "row"
    assert layouts["mlp.up_proj"] == "column"
    assert layouts["mlp_norm"] == "replicate"
    assert (graph.num_heads, graph.num_kv_heads, graph.vocab_size, graph.num_layers) == (8, 2, 512, 4)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return x


def test_data_dependent_control_flow_names_the_line():
    with pytest.raises(InputError, match=r"test_capture\.py:\d+.*if x\.sum\(\) > 0.*torch\.where"):
        capture(Branching(), sequence=4, example_inputs=(torch.zeros(2, 8),))
