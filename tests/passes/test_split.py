"""A model split into stages computes what the whole one does, holds only its own parameters, and refuses what it would get wrong."""

from __future__ import annotations

import copy

import pytest
import torch

from costmodel.errors import InputError
from passes.sequence import rewrite
from passes.split import EndOfStageError, structural_copy
from tests.passes.models import Chain
from tests.runtime.plans import make_plan

IDS = torch.arange(12).view(3, 4) % 16


def pipeline_plan(**changes):
    return make_plan(**{"chain": "layers", "num_layers": 6, "mesh": {"pp": 2}, "schedule": "1f1b", **changes})


def run(parts, ids):
    hidden = None
    for part, inbox in parts:
        if hidden is not None:
            inbox.put(hidden)
        try:
            hidden = part.module(ids)
        except EndOfStageError as end:
            hidden = end.hidden
    return hidden


def all_parts(model, plan):
    parts = []
    for rank_index in range(plan.strategy.mesh.pp):
        parts += rewrite(plan, structural_copy(model), rank_index=rank_index)
    return sorted(parts, key=lambda item: item[0].stage.stage_index)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage_layers": (3, 3)},
        {"stage_layers": (5, 1)},
        {"mesh": {"pp": 3}, "schedule": "gpipe", "stage_layers": (1, 2, 3)},
        {"vpp": 3, "schedule": "interleaved_1f1b"},
        {"mesh": {"pp": 6}, "recompute": "full"},
    ],
)
def test_stages_in_a_row_are_the_model(changes):
    model = Chain()
    truth = model(IDS)
    truth.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    clone = copy.deepcopy(model)
    clone.zero_grad()
    parts = all_parts(clone, pipeline_plan(**changes))
    output = run(parts, IDS)
    torch.testing.assert_close(output, truth)
    output.square().sum().backward()
    held = {name: parameter for part, _ in parts for name, parameter in part.module.named_parameters()}
    assert held.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(held[name].grad, gradient)


def test_every_parameter_has_one_owner_and_the_rest_is_freed():
    model = Chain()
    total = sum(parameter.numel() for parameter in model.parameters())
    parts = all_parts(model, pipeline_plan(stage_layers=(2, 4)))
    names = [name for part, _ in parts for name in part.parameter_names()]
    assert len(names) == len(set(names)) == len(list(model.named_parameters()))
    assert sum(parameter.numel() for part, _ in parts for parameter in part.module.parameters()) == total
    assert all(not tensor.is_meta for part, _ in parts for tensor in part.module.state_dict().values())


def test_stubs_take_no_memory():
    (first, _), (last, inbox) = all_parts(Chain(), pipeline_plan())
    zeros = last.module.embed(IDS)
    assert zeros.shape == (3, 4, 8)
    assert zeros.untyped_storage().nbytes() == 4
    inbox.put(torch.ones(3, 4, 8))
    hidden, inner = last.module.layers[0](zeros)
    assert hidden.equal(torch.ones(3, 4, 8))
    assert inner is None
    assert first.module.layers[5].up.in_features == 8


@pytest.mark.parametrize(
    ("model", "plan", "what"),
    [
        (Chain(late=True), pipeline_plan(), None),
        (Chain(beside=True), pipeline_plan(), "beside the chain"),
        (Chain(num_layers=4), pipeline_plan(), "does not have"),
        (Chain(num_layers=8), pipeline_plan(), "no stage of the plan holds"),
        (Chain(), pipeline_plan(chain="blocks"), "does not have"),
        (Chain(), pipeline_plan(stage_layers=(6, 0)), "not a run"),
    ],
)
def test_refused(model, plan, what):
    if what is None:
        parts = all_parts(model, plan)
        with pytest.raises(InputError, match="registered before the blocks but runs after"):
            run(parts, IDS)
        return
    with pytest.raises(InputError, match=what):
        all_parts(model, plan)
