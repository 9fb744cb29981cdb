"""Give command lines to Megatron-LM's own parser and validators on a CPU machine. Runs in Megatron's own environment, beside answering.py alone.

Input: JSON lines {"name", "arguments", "environment", "world_size", "capability"}. Output: a JSON line each, {"name", "ok", ...} or {"name", "error"}.
Beyond parse_args and validate_args, the TransformerConfig is built from the arguments and its pipeline layout checked. Transformer Engine, which has no
CPU build, is said to be there; the fused rope kernel, whose presence the configuration checks, is set aside after the arguments are accepted.
"""

import os
import sys
import typing

import torch
import typing_extensions
from answering import answer_cases

typing.override = getattr(typing, "override", typing_extensions.override)

import megatron.training.arguments as arguments  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: E402


def check(case):
    """What Megatron makes of one command line."""
    major = case["capability"]
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron") and hasattr(module, "get_device_arch_version"):
            module.get_device_arch_version = lambda: major
        if getattr(module, "__name__", "").startswith("megatron") and hasattr(module, "is_te_min_version"):
            module.is_te_min_version = lambda *version, **options: True
    torch.cuda.get_device_capability = lambda *device: (major, 0)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["environment"], WORLD_SIZE=str(case["world_size"]), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *case["arguments"]]
    parsed = arguments.validate_args(arguments.parse_args(), {})
    parsed.apply_rope_fusion = False
    config = arguments.core_transformer_config_from_args(parsed)
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, PipelineParallelLayerLayout):
        layout.validate_layer_layout(num_layers=parsed.num_layers, mtp_num_layers=None)
    chunks = layout and [[len([x for x in chunk if x.name == "decoder"]) for chunk in rank] for rank in layout.layout]
    return {
        "data_parallel": parsed.data_parallel_size,
        "virtual": parsed.virtual_pipeline_model_parallel_size,
        "chunks": chunks,
        "recompute": [parsed.recompute_granularity, parsed.recompute_method, parsed.recompute_num_layers],
        "micro_batches": parsed.global_batch_size // (parsed.micro_batch_size * parsed.data_parallel_size),
        "sequence_parallel": parsed.sequence_parallel,
        "experts_per_rank": (parsed.num_experts or 0) // parsed.expert_model_parallel_size,
    }


if __name__ == "__main__":
    answer_cases(check)
