"""Give command lines to Megatron-LM's own parser and validators on a CPU machine. Runs in Megatron's own environment, knows nothing of this project.

Input: JSON lines {"name", "arguments", "environment", "world_size", "capability"}. Output: a JSON line each, {"name", "ok", ...} or {"name", "error"}.
Beyond parse_args and validate_args, the TransformerConfig is built from the arguments and its pipeline layout checked. Transformer Engine, which has no
CPU build, is said to be there; the fused rope kernel, whose presence the configuration checks, is set aside after the arguments are accepted.
"""

import json
import os
import sys
import traceback
import typing

import torch
import typing_extensions

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


def main():
    """Check every line of stdin in a process of its own."""
    results = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            answer = {"name": case["name"], "ok": True, **check(case)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"name": case["name"], "ok": False, "error": f"{type(error).__name__}: {error}"}
        os.write(results, (json.dumps(answer) + "\n").encode())
        os._exit(0)


if __name__ == "__main__":
    main()
