"""AdamW with 8-bit moments: a byte an element each, plus one fp32 scale per block of 256 elements (Dettmers et al. 2022, arXiv:2110.02861).

A moment is stored as the index of the nearest value of a fixed 256-entry table, times the block's largest magnitude. The table is *dynamic*: seven
decades below 1, each with twice the steps of the one below, so that small second moments do not become zero. On DTensors every rank keeps the
moments of its own part. Any device, plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.data_parallel import like, local

BLOCK = 256
DECADES = 7
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def dynamic_table(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 sorted values in [-1, 1] (or [0, 1]) that a byte stands for.

    Both ends are in it, so that a block's largest magnitude is kept and to quantise what was quantised changes nothing.
    (For -1 the smallest negative step is left out.)
    """
    values = [0.0, 1.0, *([-1.0] if signed else [])]
    for decade in range(DECADES):
        steps = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        means = (steps[:-1] + steps[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        values += means.tolist()
        values += (-means).tolist() if signed and decade else []
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def quantize(value: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 of the value's size, fp32 scale per block) of a tensor."""
    flat = value.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    unit = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(unit, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    return codes.view(-1)[: flat.numel()], scale.view(-1)


def dequantize(codes: Tensor, scale: Tensor, table: Tensor, shape: torch.Size) -> Tensor:
    """The fp32 tensor of `shape` that codes and scales stand for."""
    return (table[codes.int()] * scale.repeat_interleave(BLOCK)[: codes.numel()]).view(shape)


class AdamW8bit(Optimizer):
    """Decoupled weight decay Adam (Loshchilov and Hutter 2019) over block-wise quantised moments."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.tables: dict[tuple[torch.device, bool], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and local(parameter).numel():
                    self._update(local(parameter), local(parameter.grad).float(), self.state[parameter], group)
        return loss

    def portable(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments in fp32, laid out as the parameter, and the number of steps (runtime.state.PortableStates)."""
        state, weight = self.state.get(parameter, {}), local(parameter)
        if not state:
            return {}
        moments = {name: self._moment(state, name, weight, signed=signed) for name, signed in MOMENTS}
        return {name: like(parameter, value) for name, value in moments.items()} | {"step": torch.tensor(float(state["step"]))}

    def take(self, parameter: nn.Parameter, states: dict[str, Tensor]) -> None:
        """Adopt what `portable` gave, quantised again."""
        if states and local(parameter).numel():
            state = self.state[parameter]
            state["step"] = int(states["step"])
            for name, signed in MOMENTS:
                self._keep(state, name, local(states[name]).float(), signed=signed)

    def _update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first_beta, second_beta = group["betas"]
        state["step"] = count = state.get("step", 0) + 1
        first = self._moment(state, "exp_avg", weight, signed=True).lerp_(gradient, 1 - first_beta)
        second = (
            self._moment(state, "exp_avg_sq", weight, signed=False).mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
        )
        self._keep(state, "exp_avg", first, signed=True)
        self._keep(state, "exp_avg_sq", second, signed=False)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = second.div_(1 - second_beta**count).sqrt_().add_(group["eps"])
        weight.addcdiv_(first.to(weight.dtype), denominator.to(weight.dtype), value=-group["lr"] / (1 - first_beta**count))

    def _table(self, device: torch.device, signed: bool) -> Tensor:
        key = (device, signed)
        if key not in self.tables:
            self.tables[key] = dynamic_table(signed=signed, device=device)
        return self.tables[key]

    def _moment(self, state: dict[str, Any], name: str, weight: Tensor, *, signed: bool) -> Tensor:
        if name not in state:
            return torch.zeros_like(weight, dtype=torch.float32)
        return dequantize(state[name], state[f"{name}_scale"], self._table(weight.device, signed), weight.shape)

    def _keep(self, state: dict[str, Any], name: str, moment: Tensor, *, signed: bool) -> None:
        state[name], state[f"{name}_scale"] = quantize(moment, self._table(moment.device, signed))
