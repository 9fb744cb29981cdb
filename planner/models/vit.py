"""Vision transformer with its classification head (transformers 5.24 models/vit/modeling_vit.py)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.models import attention, losses, norms, ops
from planner.models.assemble import Program
from planner.models.builder import BlockBuilder, Variable
from planner.models.spec import Image


def build_vit(program: Program) -> None:
    """Write ViTForImageClassification; the sequence is the model's patches and one class token."""
    flows = program.block("embed", "embedding", "", _embedding)
    for index in range(program.spec.num_layers):
        flows = program.block("layer" if flows else "layer_frozen_input", "layer", f"vit.layers.{index}", _layer, flows)
    program.block("head", "head", "", _head, flows)


def _embedding(b: BlockBuilder, program: Program) -> tuple[Variable, ...]:
    spec, image, path = program.spec, _image(program), "vit.embeddings"
    tokens = image.num_patches + 1
    pixels = b.input("pixel_values", (program.batch, image.channels, image.size, image.size), ("batch", "", "", ""), grad=False)
    patches = _patches(b, pixels, f"{path}.patch_embeddings.projection", spec.hidden, image)
    token = b.parameter(f"{path}.cls_token", (1, 1, spec.hidden), ("", "", ""), layout="replicate")
    places = b.parameter(f"{path}.position_embeddings", (1, tokens, spec.hidden), ("", "", ""))
    shape, axes = (program.batch, tokens, spec.hidden), ("batch", "sequence", "")

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        first = b.back("reduce", "sum", [gradient], token)
        return first, Variable(gradient.tensor_id, patches.shape, patches.axes, gradient.dtype, False)

    joined = b.kernel(path, "copy", "cat", [token, patches], [(shape, axes, "compute")], rule)[0]
    return (ops.add(b, joined, places, path),)


def _patches(b: BlockBuilder, pixels: Variable, module: str, width: int, image: Image) -> Variable:
    """Convolution with stride = kernel: 2 m n k flops with m patches, n features, k pixels a patch; backward makes weight and bias gradients at once."""
    batch, pixels_each = pixels.shape[0], image.channels * image.patch**2
    weight = b.parameter(f"{module}.weight", (width, image.channels, image.patch, image.patch), ("", "", "", ""), layout="replicate")
    bias = b.parameter(f"{module}.bias", (width,), ("",))
    flops = 2.0 * batch * image.num_patches * width * pixels_each

    def rule(gradient: Variable) -> Sequence[Variable | None]:
        grads = b.back_many("conv", "convolution_backward", [gradient], [weight, bias], saved=[pixels], flops=flops)
        return (None, *grads)

    out = ((batch, image.num_patches, width), ("batch", "sequence", ""), "compute")
    return b.kernel(module, "conv", "convolution", [pixels, weight, bias], [out], rule, flops=flops)[0]


def _layer(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec = program.spec
    x = program.hidden(b, flows)
    y = norms.layer_norm(b, x, "layernorm_before")
    q, k, v = (
        attention.heads(b, ops.linear(b, y, f"attention.{name}", spec.hidden, "heads", bias=spec.attention_bias), spec.heads, "heads")
        for name in ("q_proj", "k_proj", "v_proj")
    )
    y = attention.attention(b, q, k, v, "attention", causal=False)
    x = ops.add(b, ops.linear(b, y, "attention.o_proj", spec.hidden, bias=True), x, "")
    y = ops.linear(b, norms.layer_norm(b, x, "layernorm_after"), "mlp.fc1", spec.ffn, "ffn", bias=True)
    y = ops.linear(b, ops.activation(b, y, "mlp.activation_fn", spec.activation), "mlp.fc2", spec.hidden, bias=True)
    return (ops.add(b, y, x, ""),)


def _head(b: BlockBuilder, program: Program, flows: bool) -> tuple[Variable, ...]:
    spec, image = program.spec, _image(program)
    x = norms.layer_norm(b, program.hidden(b, flows), "vit.layernorm")
    (first,) = b.slices(x, [((program.batch, spec.hidden), ("batch", ""))], "vit", "select_backward")
    logits = ops.linear(b, first, "classifier", image.classes, bias=True)
    labels = b.input("labels", (program.batch,), ("batch",), "int64", grad=False)
    return (losses.plain_loss(b, logits, labels),)


def _image(program: Program) -> Image:
    image = program.spec.image
    assert image is not None
    return image
