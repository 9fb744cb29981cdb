"""Engines as data: what distinguishes the runtimes that may execute a plan. The same mesh costs differently under each.

Every field is a fact about a runtime with an effect on time or memory; `sources` says where it was read. Adding an engine is adding a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Facts about one runtime.

    gradient_dtype: dtype in which gradients live and are reduced ("parameter" = same as the parameters).
    master_weights: keeps an fp32 copy of bf16/fp16 parameters as optimizer state.
    parameters_dtype: dtype parameters are stored in between steps ("compute" = the job's compute dtype, "fp32" = FSDP2 style mixed precision).
    flat_gradient_buffer: gradients are allocated whole before the first backward, not one by one.
    fused_kernels: norms, activations, rope, softmax-cross-entropy run as one kernel each and save only their inputs (TransformerEngine, Liger).
    saves_gathered_input: with sequence parallel, the all-gathered input of a column-parallel linear is kept for backward (DTensor) rather than
        gathered again (Megatron).
    fused_input_gradient: the input gradients of q/k/v (gate/up) are summed before one reduction (fused QKV weights) instead of one each.
    overlap_gradient_reduce, overlap_parameter_gather: ZeRO traffic runs beside compute.
    fully_shard: ZeRO-2 and 3 are torch's fully_shard. Parameters at rest are sharded under both; both gather them and reduce gradients in every micro-batch
        (with a pipeline: gather once, keep whole parameters and whole gradients, reduce after the last backward).
    ddp_bucket_copy: plain data parallelism keeps a second copy of the gradients in reduction buckets (DDP without gradient_as_bucket_view).
    bucket_elements, bucket_elements_per_rank: gradients (and ZeRO-1 parameters) travel in buckets of at least the first, or the second x data-parallel ranks
        (Megatron: 40 million, 1 million; DDP: 25 MiB); fully_shard goes block by block.
    pipeline_buffers: stages run in torch.distributed.pipelining: receive buffers are allocated for every micro-batch up front and stage outputs are kept until
        their backward; a split backward keeps all it saved until the weight gradients, and the first stage runs all of its backward there (torch 2.13 stage.py,
        _backward.py: the graph is retained, and stage 0 skips stage_backward_input).
    attention_kernel: "native" runs the architecture's best fused attention (cuDNN, FlashAttention 3), "flash2" FlashAttention 2 everywhere, "triton"
        the Triton version of FlashAttention 1.
    fused_optimizer: one kernel updates each group of weights; otherwise temporaries of all weights appear in the optimizer step.
    overlap_tensor_parallel: in backward, reductions of input gradients and repeated gathers of inputs run beside the weight and input gradient matmuls.
    recompute_stops_early: full recompute ends with the last kernel whose output backward reads (torch's non-reentrant checkpoint with early_stop).
    selective_recompute: what "selective" recompute means: "core_attention", "keep_matmuls" (all but matmul and attention outputs) or
        "keep_every_other_matmul".
    splits_modules: it trains the user's own module, cutting weights contiguously and its list of blocks (planner.module_limits); else model code of its own.
    zero_stages, schedules, recompute, precisions, supports_*: what it can express; a plan for the engine uses only that.
    lean_layers: latent attention, router and experts keep what Megatron-core's code keeps (planner.lean).
    fp32_probabilities: the loss turns logits into fp32, keeps the probabilities in that dtype for backward and drops the logits (vocab-parallel cross entropy).
    weight_gradient_placeholders: weight gradients are accumulated inside the matmul, and autograd gets a dummy: one tensor in the compute dtype for every
        distinct weight shape of the layers, kept for good. Without it a gradient in the compute dtype exists until it has been added to the buffer.
    workspace_bytes: tensors that libraries keep inside the allocator (matmul workspaces).
    gather_buffer: with sequence parallelism one whole hidden state is kept for good.
    update_bytes: temporaries of the optimizer step per element that a rank updates (a flat half-precision gradient, its fp32 copy).
    keeps_stage_outputs: a stage's output lives until its backward (otherwise it is dropped once sent).
    context_bytes: device memory of context and libraries outside the allocator. allocator_reserve_frac: reserved over allocated, minus 1.
    launch_s: host time to dispatch one kernel eagerly (Python, dispatcher, autograd); 0 when captured in a graph.
    overlap_pipeline: activations and gradients travel between stages beside compute; otherwise each send and receive stops both ranks.
    pipeline_call_s, pipeline_step_s: what a tensor-parallel collective and each of its ring steps take at least while a pipeline runs over the network.
    """

    name: str
    gradient_dtype: str
    master_weights: bool
    parameters_dtype: str
    flat_gradient_buffer: bool
    fused_kernels: bool
    saves_gathered_input: bool
    fused_input_gradient: bool
    overlap_gradient_reduce: bool
    overlap_parameter_gather: bool
    fully_shard: bool
    ddp_bucket_copy: bool
    bucket_elements: int
    bucket_elements_per_rank: int
    pipeline_buffers: bool
    attention_kernel: str
    fused_optimizer: bool
    overlap_tensor_parallel: bool
    recompute_stops_early: bool
    selective_recompute: str
    zero_stages: tuple[int, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...]
    precisions: tuple[str, ...]
    splits_modules: bool
    supports_compile: bool
    supports_uneven_stages: bool
    supports_cp: bool
    supports_ep: bool
    context_bytes: float
    allocator_reserve_frac: float
    launch_s: float
    sources: tuple[str, ...]
    lean_layers: bool = False
    fp32_probabilities: bool = False
    weight_gradient_placeholders: bool = False
    workspace_bytes: float = 32.0 * 2**20
    gather_buffer: bool = False
    update_bytes: float = 0.0
    keeps_stage_outputs: bool = False
    overlap_pipeline: bool = True
    pipeline_call_s: float = 0.0
    pipeline_step_s: float = 0.0


_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
# Any list of actions runs from a table (pipeline_parallel_schedule_csv).
_TABLES = (*_SCHEDULES, "breadth_first", "zb_h1", "zb_h2", "zbv", "v_half", "v_min", "dualpipev")
_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
_RECOMPUTE = ("none", "selective", "full", "first_k")

_TORCH = Engine(
    name="torch",
    gradient_dtype="parameter",
    master_weights=False,
    parameters_dtype="fp32",
    flat_gradient_buffer=False,
    fused_kernels=False,
    saves_gathered_input=True,
    fused_input_gradient=True,
    overlap_gradient_reduce=True,
    overlap_parameter_gather=True,
    fully_shard=True,
    ddp_bucket_copy=False,
    bucket_elements=6_553_600,
    bucket_elements_per_rank=0,
    pipeline_buffers=True,
    attention_kernel="flash2",
    fused_optimizer=True,
    overlap_tensor_parallel=False,
    recompute_stops_early=True,
    selective_recompute="keep_matmuls",
    zero_stages=(0, 2, 3),
    schedules=_SCHEDULES,
    recompute=_RECOMPUTE,
    precisions=("bf16", "fp32"),
    splits_modules=True,
    supports_compile=False,
    supports_uneven_stages=True,
    supports_cp=False,
    supports_ep=False,
    context_bytes=1.0 * 2**30,
    allocator_reserve_frac=0.05,
    launch_s=10e-6,
    sources=("this repository: runtime/", "torch 2.13 fully_shard: fp32 sharded parameters, bf16 all-gather by MixedPrecisionPolicy"),
)

_TORCHTITAN = replace(
    _TORCH,
    name="torchtitan",
    fused_input_gradient=False,
    ddp_bucket_copy=True,
    recompute_stops_early=False,
    schedules=_TABLES,
    recompute=("none", "selective", "full"),
    precisions=_PRECISIONS,
    splits_modules=False,
    supports_compile=True,
    supports_cp=True,
    supports_ep=True,
    sources=("torchtitan 0.3.0 Trainer.Config, distributed/activation_checkpoint.py",),
)

_MEGATRON = Engine(
    name="megatron",
    gradient_dtype="fp32",
    master_weights=True,
    parameters_dtype="compute",
    flat_gradient_buffer=True,
    fused_kernels=True,
    saves_gathered_input=False,
    fused_input_gradient=True,
    overlap_gradient_reduce=True,
    overlap_parameter_gather=True,
    fully_shard=False,
    ddp_bucket_copy=False,
    bucket_elements=40_000_000,
    bucket_elements_per_rank=1_000_000,
    pipeline_buffers=False,
    attention_kernel="native",
    fused_optimizer=True,
    overlap_tensor_parallel=True,
    recompute_stops_early=False,
    selective_recompute="core_attention",
    zero_stages=(0, 1),
    schedules=("1f1b", "interleaved_1f1b"),
    recompute=_RECOMPUTE,
    precisions=_PRECISIONS,
    splits_modules=False,
    supports_compile=True,
    supports_uneven_stages=True,
    supports_cp=True,
    supports_ep=True,
    context_bytes=1.5 * 2**30,
    allocator_reserve_frac=0.04,
    launch_s=10e-6,
    sources=(
        "megatron-core 0.19.2 arguments.py, core/distributed/param_and_grad_buffer.py; 18 B/param without sharding (Megatron-LM PR 482)",
        "megatron-core fusions/fused_cross_entropy.py (exp_logits in fp32), tensor_parallel/layers.py and utils.py (GlobalMemoryBuffer)",
        "TransformerEngine 2.11 module/base.py: get_dummy_wgrad, cuBLAS workspace of 32 MiB from Hopper on, as torch's own",
    ),
    lean_layers=True,
    fp32_probabilities=True,
    weight_gradient_placeholders=True,
    workspace_bytes=64.0 * 2**20,
    gather_buffer=True,
)

_MEGATRON_LOCAL = replace(
    _MEGATRON,
    name="megatron_local",
    overlap_gradient_reduce=False,
    overlap_parameter_gather=False,
    attention_kernel="flash2",
    overlap_tensor_parallel=False,
    supports_cp=False,
    supports_ep=False,
    sources=(
        "Megatron-LM before 0.5 and its forks: local layers with fused bias, activation, norm and softmax kernels; nothing overlaps by default",
    ),
    lean_layers=False,
    weight_gradient_placeholders=False,
    workspace_bytes=32.0 * 2**20,
)

_NANOTRON = replace(
    _MEGATRON_LOCAL,
    name="nanotron",
    fused_kernels=False,
    bucket_elements=0,
    bucket_elements_per_rank=0,
    schedules=("1f1b",),
    recompute=("none", "full"),
    launch_s=40e-6,
    sources=(
        "nanotron 0.4 (bf16 weights, fp32 gradient accumulation and masters, FlashAttention 2, eager kernels)",
        "launch_s: 38.9-41.9 us a kernel and collective in 26 host-bound runs of 1B, 3B and 8B models on tp 2-8 (ultra-scale playbook)",
    ),
    gather_buffer=False,
    keeps_stage_outputs=True,
    pipeline_call_s=0.65e-3,
    pipeline_step_s=0.24e-3,
)

_MEGATRON_DEEPSPEED = replace(
    _MEGATRON_LOCAL,
    name="megatron_deepspeed",
    fused_kernels=False,
    sources=(
        "Megatron-DeepSpeed (bigscience branch, 2022): local layers, PipelineEngine, ZeRO-1 after the last backward",
        "DeepSpeed 0.6 runtime/pipe/engine.py (pipe_buffers), runtime/zero/stage_1_and_2.py (fp16 gradients, flat copies, fp32 gradient at the step)",
    ),
    gather_buffer=False,
    update_bytes=4.0,
    keeps_stage_outputs=True,
    overlap_pipeline=False,
)

_FSDP1 = replace(
    _TORCH,
    name="fsdp1",
    fused_input_gradient=False,
    ddp_bucket_copy=True,
    attention_kernel="triton",
    recompute_stops_early=False,
    recompute=("none", "selective", "full"),
    precisions=_PRECISIONS,
    splits_modules=False,
    supports_compile=True,
    supports_cp=True,
    supports_ep=True,
    sources=("torch 2.x FullyShardedDataParallel as LLM Foundry/Composer wrap it: fp32 shards, autocast or bf16 parameters",),
)

ENGINES: tuple[Engine, ...] = (_TORCH, _TORCHTITAN, _MEGATRON, _NANOTRON, _MEGATRON_LOCAL, _MEGATRON_DEEPSPEED, _FSDP1)


def engine(name: str) -> Engine:
    """The engine called `name`. Raises InputError with the known names."""
    for candidate in ENGINES:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in ENGINES)
    raise InputError(f"unknown engine {name!r}", where="engine", remedy=f"use one of {known}")
