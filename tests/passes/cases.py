"""What the pool's ranks run for tests/passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from costmodel.errors import InputError
from examples.gpt import GPTConfig, build_model
from passes import recompute
from passes.chain import ModelPart
from passes.placements import place_tensors, resolve_layouts
from passes.sequence import rewrite
from passes.styles import local_bytes
from tests.passes.models import Fused, Inline
from tests.runtime.plans import GPT_LAYOUTS, make_plan

INLINE_LAYOUTS = (("layers.*.norm", "replicate"), ("layers.*.up", "column"), ("layers.*.down", "row"))


def with_layout(pattern: str, style: str) -> tuple[tuple[str, str], ...]:
    """GPT_LAYOUTS with one entry changed."""
    return tuple((name, style if name == pattern else old) for name, old in GPT_LAYOUTS)


def refusal(*, name: str) -> str:
    """The message with which the passes refuse the case."""
    mesh = init_device_mesh("cpu", (2,))
    config = GPTConfig(num_layers=2)
    plan = make_plan(num_layers=2, mesh={"tp": 2}, layouts=GPT_LAYOUTS)
    torch.manual_seed(0)
    model: Any = build_model(config)
    if name == "uneven":
        model = build_model(GPTConfig(num_layers=2, ffn_size=33))
    elif name == "no layouts":
        plan = dataclasses.replace(plan, layouts=())
    elif name == "uncovered":
        plan = dataclasses.replace(plan, layouts=tuple(item for item in GPT_LAYOUTS if "k_proj" not in item[0]))
    elif name == "narrow norm":
        model, plan = Inline(norm_width=4), make_plan(chain="layers", num_layers=2, mesh={"tp": 2}, layouts=INLINE_LAYOUTS)
    elif name == "fused":
        layouts = (("layers.*.gate_up", "column"), ("layers.*.down", "row"))
        model, plan = Fused(), make_plan(chain="layers", num_layers=2, mesh={"tp": 2}, layouts=layouts)
    elif name == "untied":
        model = build_model(GPTConfig(num_layers=2, tied=True))
        plan = dataclasses.replace(plan, layouts=with_layout("embed", "column"))
    elif name == "vocab in a block":
        plan = dataclasses.replace(plan, layouts=with_layout("blocks.*.mlp.up_proj", "vocab"))
    elif name == "embedding as row":
        plan = dataclasses.replace(plan, layouts=with_layout("norm", "row"))
    try:
        if name in ("recompute first", "twice"):
            part = ModelPart(module=model, stage=plan.stages[0], blocks=("blocks.0", "blocks.1"), all_blocks=("blocks.0", "blocks.1"))
            layouts = resolve_layouts(model, GPT_LAYOUTS)
            if name == "twice":
                place_tensors(part, plan, mesh, layouts)
            else:
                full = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, recompute="full"))
                recompute.wrap_blocks(part, full)
            place_tensors(part, plan, mesh, layouts)
        else:
            ((part, _),) = rewrite(plan, model, tensor_mesh=mesh)
            part.module(torch.ones(2, 4, 8))
    except InputError as error:
        return str(error)
    return "not refused"


def sharded_bytes() -> dict[str, Any]:
    """Bytes of a tied GPT on one of two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2,))
    ((part, _),) = rewrite(
        make_plan(num_layers=2, mesh={"tp": 2}, layouts=GPT_LAYOUTS), build_model(GPTConfig(num_layers=2, tied=True)), tensor_mesh=mesh
    )
    local, whole = local_bytes(part.module)
    return {"local": local, "whole": whole, "tied": part.module.head.weight is part.module.embed.weight}
