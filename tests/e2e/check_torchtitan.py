"""Dry-run torchtitan recipes on a CPU machine. Runs in torchtitan's own environment, beside answering.py alone.

Input: JSON lines {"name", "folder", "module", "function", "world_size", "rank"}. Output: a JSON line each, {"name", "ok", ...} or {"name", "error"}.
The recipe goes through torchtitan's own ConfigManager; then the model is built on the meta device, cut and wrapped for the rank of a fake process group.
"""

import sys

import torch
import torchtitan.distributed.parallel_dims as parallel_dims
import torchtitan.distributed.utils as distributed
import torchtitan.tools.utils as tools
from answering import answer_cases
from torchtitan.config import ConfigManager


def check(case):
    """What torchtitan makes of one recipe on one rank."""
    sys.path.insert(0, case["folder"])
    tools.device_type, tools.device_module, parallel_dims.device_type = "cpu", torch.cpu, "cpu"
    config = ConfigManager().parse_args(["--module", case["module"], "--config", case["function"]])
    distributed.init_fake_mode(case["world_size"], rank=case["rank"])
    torch.autograd.set_multithreading_enabled(False)
    dims = parallel_dims.ParallelDims.from_config(config.parallelism, case["world_size"])
    dims.build_mesh()
    distributed.set_spmd_backend(config.parallelism.spmd_backend)
    spec, training = config.model_spec, config.training
    spec.model.update_from_config(config=config)
    with torch.device("meta"), tools.set_default_dtype(torch.float32):
        model = spec.model.build()
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    if training.global_batch_size % (training.local_batch_size * dims.dp_replicate * dims.dp_shard):
        raise ValueError("global batch size is not a multiple of local batch size x data-parallel ranks")
    common = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": case["folder"],
    }
    schedule = "none"
    if dims.pp_enabled:
        loss = config.loss.build(compile_config=config.compile)
        whole = {"device": torch.device("cpu"), "model_config": spec.model, "parallelize_fn": spec.parallelize_fn, "loss_fn": loss}
        pipeline, parts, _, _ = spec.pipelining_fn(model, **common, **whole)
        schedule, micro_batches = type(pipeline).__name__, pipeline._n_microbatches
    else:
        parts, micro_batches = [spec.parallelize_fn(model, **common)], 1
    local = sum(getattr(p, "_local_tensor", p).numel() for part in parts for p in part.parameters())
    wrapped = [
        sum(
            "CheckpointWrapper" in type(layer).__mro__[0].__name__ or hasattr(layer, "_checkpoint_wrapped_module")
            for layer in part.layers.values()
        )
        for part in parts
    ]
    return {
        "layers": [len(part.layers) for part in parts],
        "recomputed": wrapped,
        "policy": type(config.activation_checkpoint).__qualname__,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "total_parameters": total,
        "local_parameters": local,
    }


if __name__ == "__main__":
    answer_cases(check)
