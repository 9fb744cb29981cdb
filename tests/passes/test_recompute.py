"""Recompute changes memory, never numbers or names; selective keeps matmuls and attention."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costmodel.errors import InputError
from examples.gpt import GPTConfig, build_model
from passes.recompute import is_wrapped
from passes.sequence import rewrite
from tests.runtime.plans import make_plan

IDS = torch.arange(32).view(2, 16)


class Ops(TorchDispatchMode):
    """Counts aten calls by packet name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def trained(**strategy):
    torch.manual_seed(0)
    model = build_model(GPTConfig(num_layers=3, hidden_size=32, num_heads=4))
    names = [name for name, _ in model.named_parameters()]
    ((part, _),) = rewrite(make_plan(num_layers=3, **strategy), model)
    with Ops() as ops:
        part.module(IDS).square().mean().backward()
    assert [name for name, _ in part.module.named_parameters()] == names
    wrapped = [is_wrapped(block) for block in part.module.blocks]
    return {name: parameter.grad for name, parameter in part.module.named_parameters()}, ops.counts, wrapped


@pytest.mark.parametrize(
    ("strategy", "wrapped"),
    [
        ({"recompute": "full"}, [True] * 3),
        ({"recompute": "first_k", "recompute_layers": 2}, [True, True, False]),
        ({"recompute": "selective"}, [True] * 3),
    ],
)
def test_gradients_do_not_change(strategy, wrapped):
    truth, _, _ = trained()
    gradients, _, actual = trained(**strategy)
    assert actual == wrapped
    for name, gradient in truth.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=0)


def test_selective_repeats_neither_matmuls_nor_attention():
    counts = {mode: trained(recompute=mode)[1] for mode in ("none", "selective", "full")}
    for op in ("addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert counts["selective"][op] == counts["none"][op]
        assert counts["full"][op] > counts["none"][op]
    for op in ("native_layer_norm", "gelu"):
        assert counts["none"][op] < counts["selective"][op] <= counts["full"][op]


def test_more_blocks_than_there_are():
    plan = make_plan(num_layers=3, recompute="first_k", recompute_layers=2)
    stage = plan.stages[0]
    object.__setattr__(stage, "recompute_layers", 4)
    with pytest.raises(InputError, match="recompute_layers is 4 but the stage has 3"):
        rewrite(plan, build_model(GPTConfig(num_layers=3)))
