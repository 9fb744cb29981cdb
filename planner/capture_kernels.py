"""The kernels an accelerator would run, where they differ from the CPU's that capture traces on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Kernels(TorchFunctionMode):
    """Chooses the accelerator's kernel where the CPU's differs.

    Attention is one fused kernel even where the CPU has none (a bias that needs a gradient, values of another width), and its dropout is 0: a fused kernel
    draws it again from the seed and stores nothing. With `fused`, dropout keeps a bool mask (native_dropout) rather than a float one, and RMSNorm is one
    kernel; without, these two and attention are the CPU's own.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self._fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            return _attention(*args[:3], fused=self._fused, **kwargs)
        if self._fused and func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        if self._fused and func is nn.functional.rms_norm:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, fused: bool, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The flash kernel; where the CPU would fall back to plain matmuls, the memory-efficient one that an accelerator takes (its bias is float and expanded)."""
    plain = q.shape[-1] == v.shape[-1] and not (attn_mask is not None and attn_mask.requires_grad)
    if plain or not fused:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)[0]
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0.0 else input


class _RMSNorm(torch.autograd.Function):
    """RMSNorm as an accelerator runs it: one kernel each way, keeping its input and 1 / rms of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        out, scale = torch.ops.autoplan._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, scale, weight = ctx.saved_tensors
        dx, dw = torch.ops.autoplan._fused_rms_norm_backward(grad, x, ctx.shape, scale, weight)
        return dx, None, dw if weight is not None else None, None


def _library() -> Any:
    """Shapes of the RMSNorm kernels that ATen has on accelerators only: operators without an implementation, registered when this file is imported."""
    library: Any = torch.library.Library("autoplan", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("_fused_rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)")
    library.define(
        "_fused_rms_norm_backward(Tensor grad, Tensor x, int[] normalized_shape, Tensor scale, Tensor? weight) -> (Tensor, Tensor)"
    )

    def forward(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
        rows = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
        return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)

    def backward(grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty(shape, dtype=x.dtype if weight is None else weight.dtype)

    library.impl("_fused_rms_norm", forward, "Meta")
    library.impl("_fused_rms_norm_backward", backward, "Meta")
    return library


_OPERATORS = _library()


def _rms_norm(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    out: Tensor = _RMSNorm.apply(input, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]
    return out
