"""Multi-head latent attention of DeepSeek V2 and V3 (transformers 5.24 models/deepseek_v3/modeling_deepseek_v3.py; arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import attention, norms, ops
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import LatentAttention, ModelSpec

_PATH = "self_attn"


def attend(b: BlockBuilder, x: Variable, spec: ModelSpec, tables: tuple[Variable, ...]) -> Variable:
    """Queries and keys of nope + rope features a head, values of v_dim, keys and values expanded from one latent a token."""
    latent = spec.latent
    assert latent is not None
    batch, sequence, _ = x.shape
    width = latent.nope_dim + latent.rope_dim
    q = attention.heads(b, _queries(b, x, spec, latent), spec.heads, "heads", _PATH, clones=True)
    q_nope, q_rope = b.split(q, _parts(q, (latent.nope_dim, latent.rope_dim)), _PATH)
    joint = ops.linear(b, x, f"{_PATH}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, bias=spec.attention_bias)
    compressed, k_rope = b.split(joint, _parts(joint, (latent.kv_rank, latent.rope_dim)), _PATH)
    compressed = norms.rms_norm(b, compressed, f"{_PATH}.kv_a_layernorm")
    k_rope = b.view(k_rope, (batch, 1, sequence, latent.rope_dim), ("batch", "", "sequence", ""))
    q_rope, k_rope = (_turned(b, value, tables, spec) for value in (q_rope, k_rope))
    q = ops.concat(b, [q_nope, q_rope], _PATH, q.shape, q.axes)
    kv = ops.linear(b, compressed, f"{_PATH}.kv_b_proj", spec.heads * (latent.nope_dim + latent.v_dim), "heads")
    kv = attention.heads(b, kv, spec.heads, "heads", _PATH, clones=True)
    k_nope, v = b.split(kv, _parts(kv, (latent.nope_dim, latent.v_dim)), _PATH)
    k = _keys(b, k_nope, k_rope, (batch, spec.heads, sequence, width))
    out = attention.attention(b, q, k, v, _PATH, causal=True, clones=width == latent.v_dim)
    return ops.linear(b, out, f"{_PATH}.o_proj", spec.hidden, bias=spec.attention_bias)


def _queries(b: BlockBuilder, x: Variable, spec: ModelSpec, latent: LatentAttention) -> Variable:
    width = spec.heads * (latent.nope_dim + latent.rope_dim)
    if not latent.q_rank:
        return ops.linear(b, x, f"{_PATH}.q_proj", width, "heads")
    low = ops.linear(b, x, f"{_PATH}.q_a_proj", latent.q_rank, bias=spec.attention_bias)
    return ops.linear(b, norms.rms_norm(b, low, f"{_PATH}.q_a_layernorm"), f"{_PATH}.q_b_proj", width, "heads")


def _turned(b: BlockBuilder, x: Variable, tables: tuple[Variable, ...], spec: ModelSpec) -> Variable:
    if spec.rope == "complex":
        return attention.rotate_complex(b, x, tables[0], _PATH)
    cos, sin = tables
    turn = attention.rotate_pairs if spec.rope == "strided" else attention.rotate
    return turn(b, x, cos, sin, _PATH)


def _keys(b: BlockBuilder, nope: Variable, rope: Variable, shape: tuple[int, ...]) -> Variable:
    """Plain and rotated features written side by side, the rotated ones broadcast over heads: backward copies both parts out and sums the heads."""
    axes = ("batch", "heads", "sequence", "")
    spread = Variable(rope.tensor_id, (*shape[:3], rope.shape[-1]), axes, rope.dtype, True)

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        wide = b.back("copy", "clone", [gradient], spread)
        plain = b.back("copy", "clone", [gradient], nope)
        return plain, b.back("reduce", "sum", [wide], rope)

    return b.kernel(_PATH, "copy", "copy_", [nope, rope], [(shape, axes, nope.dtype)], rule)[0]


def _parts(x: Variable, widths: tuple[int, int]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    return [((*x.shape[:-1], width), x.axes) for width in widths]
