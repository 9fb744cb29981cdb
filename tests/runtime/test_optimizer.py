"""Optimizers by name: state bytes as costmodel.optimizers prices them, and 8-bit moments that train like whole ones."""

from __future__ import annotations

import pytest
import torch

from costmodel.optimizers import optimizer as priced
from runtime.adamw_8bit import AdamW8bit, dequantize, dynamic_table, quantize
from runtime.optimizer import build_optimizer, state_bytes


@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw_8bit"])
def test_state_bytes_are_those_that_are_priced(name):
    weight = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = build_optimizer(name, [{"params": [weight]}])
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert state_bytes(optimizer) == pytest.approx(priced(name).state_bytes * weight.numel(), abs=8)


@pytest.mark.parametrize("signed", [True, False])
def test_quantization_error_is_relative(signed):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1000, generator=generator) * 10 ** (torch.rand(1000, generator=generator) * 4 - 4)
    value = value if signed else value.abs()
    table = dynamic_table(signed=signed, device=torch.device("cpu"))
    assert table.shape == (256,)
    assert (table.diff() >= 0).all()
    again = dequantize(*quantize(value, table), table, value.shape)
    large = value.abs() > 1e-3 * value.abs().max()
    assert ((again - value).abs() / value.abs())[large].max() < 0.3
    assert (again - value).abs().max() < 0.02 * value.abs().max()


def test_8bit_trains_like_adamw():
    def final_loss(build):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        optimizer = build(model.parameters())
        inputs, truth = torch.randn(256, 32), torch.randn(256, 8)
        for _ in range(150):
            loss = (model(inputs) - truth).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    whole = final_loss(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    eight = final_loss(lambda parameters: AdamW8bit(parameters, lr=1e-2))
    assert whole < 0.5
    assert eight == pytest.approx(whole, rel=0.1)
