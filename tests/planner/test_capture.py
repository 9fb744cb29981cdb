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
