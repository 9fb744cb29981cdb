"""Work: the waist between planner and cost model. The planner lowers a graph under a strategy to `StepWork`; the cost model prices it.

One rank's view: every size here is local to one device, for one micro-batch, unless its name says otherwise. Bytes are bytes, flops count
one fused multiply-add as 2, and dtypes are the short names of `DTYPE_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.mesh import Mesh

DTYPE_BYTES = {
    "fp64": 8, "int64": 8, "fp32": 4, "tf32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2,
    "fp8": 1, "fp8_block": 1, "int8": 1, "uint8": 1, "bool": 1, "fp4": 0.5,
}  # fmt: skip

OP_CLASSES = (
    "gemm", "grouped_gemm", "conv", "attention", "norm", "softmax", "elementwise", "reduce", "embedding", "cross_entropy",
    "copy", "index", "optimizer",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One kernel (or `num_kernels` launches of the same kind) on one device.

    gemm: `m, n, k` per matrix, `batch` matrices; grouped_gemm: `batch` groups, `m` rows in all groups together.
    attention: `batch` sequences, `heads`, `kv_heads`, `m` query length, `n` key length, `k` head dim of q/k, `v_dim` head dim of v; `causal`.
    Everything else is priced by bytes. `backward` marks attention backward (about 2.5 x the forward flops) and dgrad/wgrad.
    """

    name: str
    op_class: str
    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    dtype: str = "bf16"
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    heads: int = 0
    kv_heads: int = 0
    v_dim: int = 0
    causal: bool = False
    backward: bool = False
    layout: str = "TN"
    accumulate: bool = False
    num_kernels: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communication call on the group of `axis` (see costmodel.mesh).

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, p2p, broadcast, or wait (0 bytes: compute waits for all overlapping calls before it).
    `full_bytes` is the whole logical tensor: the all-reduced buffer, the gathered result, the input of a reduce-scatter, what one rank sends in
    all to all ranks (its own part included), the message of a p2p.
    `overlaps`: may run beside the compute work that follows it in program order without data dependence (prefetch, gradient reduction,
    ring attention); otherwise compute waits for it.
    """

    name: str
    kind: str
    full_bytes: float
    axis: str
    dtype: str = "bf16"
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A host or storage transfer of `num_bytes`; direction: d2h, h2d, disk_write, disk_read."""

    name: str
    num_bytes: float
    direction: str
    overlaps: bool = True


Work = Compute | Collective | Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Parameters of one block kind held on one rank before ZeRO sharding, i.e. after tp (`dense`) and after ep/etp (`expert`).

    Counts are elements. `frozen_*` take memory and gathers but no gradient and no optimizer state.
    """

    dense: float = 0.0
    expert: float = 0.0
    frozen_dense: float = 0.0
    frozen_expert: float = 0.0

    @property
    def trainable(self) -> float:
        """Elements with gradients."""
        return self.dense + self.expert

    @property
    def total(self) -> float:
        """All elements."""
        return self.dense + self.expert + self.frozen_dense + self.frozen_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """`num_bytes` of one memory class (see costmodel.memory.CLASSES) with the name an engineer would look for."""

    name: str
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """One block of one kind on one rank for one micro-batch, in one of the residency variants of the plan.

    `recompute` runs immediately before `backward`. `saved` is what stays alive from this block's forward to its backward.
    `forward_peak_bytes`: most bytes alive inside the forward beyond inputs, minus nothing; `backward_peak_bytes`: most bytes alive inside
    (recompute and) backward beyond the saved bytes of this block and the incoming gradient; both by liveness over the block's nodes.
    `output_bytes`: what it hands to the next block; the incoming gradient of the backward has the same size.
    `accumulate_peak_bytes`: as `backward_peak_bytes`, when every weight gradient is a tensor of its own until it has been added to earlier ones.
    `logits` names the part of the head that deserves its own line. `weight_shapes`: bytes of the local weights of matmuls by shape, one entry a shape.
    `input_gradient` and `weight_gradient` are `backward` in two halves, for schedules that run them apart (empty where none was asked for). The second reads
    `weight_inputs_bytes`, of which `weight_saved_bytes` are saved tensors and the rest gradients (or recomputed tensors) that the first leaves behind.
    """

    kind_id: str
    variant: str = "none"
    role: str = "layer"
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    recompute: tuple[Work, ...] = ()
    parameters: ParameterShard = field(default_factory=ParameterShard)
    saved: tuple[MemoryItem, ...] = ()
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0
    accumulate_peak_bytes: float = 0.0
    weight_shapes: tuple[MemoryItem, ...] = ()
    output_bytes: float = 0.0
    logits_bytes: float = 0.0
    input_gradient: tuple[Work, ...] = ()
    weight_gradient: tuple[Work, ...] = ()
    weight_inputs_bytes: float = 0.0
    weight_saved_bytes: float = 0.0

    @property
    def saved_bytes(self) -> float:
        """Bytes kept from forward to backward for one micro-batch."""
        return sum(item.num_bytes for item in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One pipeline stage (model chunk): blocks in execution order as (work, repeat) runs; what enters it from the stage before.

    `stage_index` counts chunks 0 .. pp*vpp-1 in execution order; `rank_index` is the pipeline rank that holds it.
    """

    stage_index: int
    rank_index: int
    blocks: tuple[tuple[BlockWork, int], ...]
    boundary_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Everything one optimizer step does, lowered. Times and memory of a step are functions of this, a Cluster and an Engine only.

    `tied_embedding_params`: elements (after tp) of an embedding that the head shares. Where the last stage is on another rank than the first,
    it holds a second copy and the two gradients are summed; the head's own ParameterShard does not count it.
    `tokens_per_step` and `model_flops_per_step` are of the whole cluster.
    """

    stages: tuple[StageWork, ...]
    mesh: Mesh
    schedule: str
    vpp: int
    num_micro_batches: int
    zero_stage: int
    compute_dtype: str
    parameter_dtype: str
    gradient_dtype: str
    optimizer: str
    tokens_per_step: float
    model_flops_per_step: float
    sequence_parallel: bool = False
    tied_embedding_params: float = 0.0
    compiled: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
