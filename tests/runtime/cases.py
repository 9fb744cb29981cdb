"""What the ranks of the pool run: train under a plan and compare with one process. Imported by the workers, not collected."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import runtime
from examples.gpt import GPTConfig, batches, build_model, loss_fn
from runtime.launch import train
from runtime.measure import build_meter
from tests.runtime.plans import GPT_LAYOUTS, LLAMA_LAYOUTS, make_plan

VOCAB, SEQUENCE, GLOBAL_BATCH, STEPS = 96, 16, 8, 3
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": SEQUENCE,
}  # fmt: skip


def gpt(num_layers: int, **config: Any) -> nn.Module:
    """The examples' GPT with biases everywhere, so that every kind of parameter is compared."""
    sizes = {"vocab_size": VOCAB, "max_sequence": SEQUENCE, "num_layers": num_layers, "hidden_size": 32, "num_heads": 4}
    model = build_model(GPTConfig(**{**sizes, **config}))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1) * 0.1, std=0.08)
    return model


def llama(num_layers: int, **config: Any) -> nn.Module:
    """A small Llama of transformers with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, "num_hidden_layers": num_layers, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config}))


def logits_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The examples' loss, on logits or on a Hugging Face output."""
    return loss_fn(getattr(output, "logits", output), batch)


def qwen3(num_layers: int, **config: Any) -> nn.Module:
    """Norms on every head's queries and keys: replicated modules that see only a rank's heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, **config}))


def gemma2(num_layers: int, **config: Any) -> nn.Module:
    """Norms after attention and mlp, alternating windows, capped logits, tied embeddings."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "attn_implementation": "eager",
    }
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**{**sizes, **config}))


def gpt2(num_layers: int, **config: Any) -> nn.Module:
    """Conv1D instead of linears, learned positions, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def phi3(num_layers: int, **config: Any) -> nn.Module:
    """Query, key and value in one linear, gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(1)
    return Phi3ForCausalLM(
        Phi3Config(**{**SIZES, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config})
    )


PHI3_LAYOUTS = (
    *((name, style) for name, style in LLAMA_LAYOUTS if "gate" not in name and "up_proj" not in name and "self_attn" not in name),
    *((f"model.layers.*.{name}", "column") for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")),
    ("model.layers.*.self_attn.o_proj", "row"),
)
LLAMA = {"chain": "model.layers", "ends": ("model.embed_tokens", "lm_head")}
MODELS = {
    "phi3": (phi3, {**LLAMA, "layouts": PHI3_LAYOUTS}),
    "qwen3": (qwen3, {**LLAMA, "layouts": (*LLAMA_LAYOUTS, *((f"model.layers.*.self_attn.{name}_norm", "replicate") for name in "qk"))}),
    "gemma2": (
        gemma2,
        {
            **LLAMA,
            "layouts": (*LLAMA_LAYOUTS, *((f"model.layers.*.{name}_feedforward_layernorm", "replicate") for name in ("pre", "post"))),
        },
    ),
    "gpt2": (
        gpt2,
        {"chain": "transformer.h", "layouts": (("transformer.h.*.attn.c_attn", "column"),), "ends": ("transformer.wte", "lm_head")},
    ),
    "gpt": (gpt, {"chain": "blocks", "layouts": GPT_LAYOUTS}),
    "llama": (llama, {**LLAMA, "layouts": LLAMA_LAYOUTS}),
}


def optimizer_factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW with an eps above fp32 noise: a gradient that is zero up to rounding must not become a full step in a random direction."""
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def global_batches(steps: int) -> list[dict[str, Tensor]]:
    """The same global batches on every rank."""
    stream = batches(batch=GLOBAL_BATCH, sequence=SEQUENCE, vocab_size=VOCAB)
    return [next(stream) for _ in range(steps)]


def reference(model: nn.Module, data: list[dict[str, Tensor]]) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses and gradients of every step, and final weights, of one process on whole batches. Shared parameters under all their names."""
    optimizer = optimizer_factory([{"params": list(model.parameters())}])
    losses, gradients = [], []
    for batch in data:
        loss = logits_loss(model(batch["input_ids"]), batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters(remove_duplicate=False)})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, dict(model.named_parameters(remove_duplicate=False))


def error(value: Tensor, truth: Tensor, floor: float) -> float:
    """Largest difference over the largest true magnitude (at least `floor`)."""
    return float((value - truth).abs().max() / max(float(truth.abs().max()), floor))


def parity(*, model: str, num_layers: int = 4, config: dict[str, Any] | None = None, plan: dict[str, Any]) -> dict[str, Any]:
    """Train STEPS steps under the plan and report the largest errors of loss, gradients and weights, and which parameters were compared."""
    build, facts = MODELS[model]
    data = global_batches(STEPS)
    whole = build(num_layers, **(config or {}))
    losses, gradients, weights = reference(copy.deepcopy(whole), data)
    made = make_plan(num_layers=num_layers, global_batch=GLOBAL_BATCH, seq_len=SEQUENCE, **facts, **plan)
    trainer = runtime.apply(made, whole, loss_fn=logits_loss, optimizer_factory=optimizer_factory)
    del whole
    share, index = GLOBAL_BATCH // made.strategy.mesh.dp, trainer.place.data_index
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    worst_name = ""
    for step, batch in enumerate(data):
        mine = {name: value[index * share : (index + 1) * share] for name, value in batch.items()}
        loss = trainer.forward_backward(mine)
        worst["loss"] = max(worst["loss"], abs(loss - losses[step]) / abs(losses[step]))
        floor = 1e-3 * max(float(value.abs().max()) for value in gradients[step].values())
        for name, value in trainer.whole({name: parameter.grad for name, parameter in trainer.parameters().items()}).items():
            difference = error(value, gradients[step][name], floor)
            if difference > worst["gradient"]:
                worst["gradient"], worst_name = difference, name
        trainer.update()
    held = trainer.whole(dict(trainer.parameters()))
    for name, value in held.items():
        worst["weight"] = max(worst["weight"], error(value.detach(), weights[name].detach(), 0.0))
    local_bytes = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in trainer.parameters().values())
    return {**worst, "worst_name": worst_name, "names": sorted(held), "local_bytes": local_bytes, "rank": dist.get_rank()}


def schedule_order(*, schedule: str, vpp: int, num_layers: int, micro_batch: int) -> list[tuple[int, str, int]]:
    """What this pipeline rank runs in one step, as (stage, F or B, micro-batch), taken where torch runs it."""
    plan = make_plan(
        num_layers=num_layers, mesh={"pp": dist.get_world_size()}, schedule=schedule, vpp=vpp, micro_batch=micro_batch,
        global_batch=GLOBAL_BATCH, seq_len=SEQUENCE,
    )  # fmt: skip
    trainer = runtime.apply(plan, gpt(num_layers), loss_fn=logits_loss)
    ran: list[tuple[int, str, int]] = []
    inner = trainer.pipeline.schedule
    for stage in getattr(inner, "_stages", None) or [inner._stage]:
        for kind, name in (("F", "forward_one_chunk"), ("B", "backward_one_chunk")):
            setattr(stage, name, _recorded(getattr(stage, name), ran, stage.stage_index, kind))
    trainer.step(global_batches(1)[0])
    return ran


def _recorded(function: Any, ran: list[tuple[int, str, int]], stage_index: int, kind: str) -> Any:
    def call(index: int, *args: Any, **kwargs: Any) -> Any:
        ran.append((stage_index, kind, index))
        return function(index, *args, **kwargs)

    return call


def step_peak(*, plan: dict[str, Any]) -> float:
    """Live bytes at the peak of a step, once the optimizer has its state."""
    build, facts = MODELS["gpt"]
    model = build(4, hidden_size=64, max_sequence=128)
    made = make_plan(global_batch=GLOBAL_BATCH, seq_len=128, **facts, **plan)
    trainer = runtime.apply(made, model, loss_fn=logits_loss)
    del model
    meter = build_meter(trainer, 3)
    share = GLOBAL_BATCH // made.strategy.mesh.dp
    for index in range(3):
        meter.step(index, next(batches(batch=share, sequence=128, vocab_size=VOCAB)))
    return meter.peak_bytes


def tied(*, plan: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Parity of a GPT whose head shares the embedding."""
    return parity(model="gpt", config={"tied": True, "vocab_size": vocab_size}, plan=plan)


def split_loss(*, plan: dict[str, Any], mixes: bool) -> dict[str, Any]:
    """Whether a loss ran on logits split over the vocabulary, and its error; `mixes`: the loss needs whole logits."""
    build, facts = MODELS["gpt"]
    model, batch = build(2), global_batches(1)[0]
    index = torch.arange(SEQUENCE)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if mixes:
            output = output * (index[None, :, None] >= 0)
        return logits_loss(output, batch)

    truth = loss(model(batch["input_ids"]), batch).item()
    trainer = runtime.apply(make_plan(num_layers=2, global_batch=GLOBAL_BATCH, seq_len=SEQUENCE, **facts, **plan), model, loss_fn=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = trainer.step(batch)
    return {"gathers": trainer.stages[0].loss_fn.gathers, "error": abs(value - truth)}


def train_target(*, plan: dict[str, Any]) -> list[float]:
    """Losses of the examples' GPT trained as `python -m runtime.launch` trains it."""
    made = make_plan(global_batch=GLOBAL_BATCH, seq_len=32, layouts=GPT_LAYOUTS, **plan)
    return list(train(made, "examples.gpt:build_model", steps=4, seed=0, local_rank=0).losses)
