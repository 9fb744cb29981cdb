"""torchtitan 0.3: a Python recipe whose function returns Trainer.Config, and a launch script.

Facts read in torchtitan 0.3.0 and checked by a dry run on a fake process group:
* pipeline and expert parallelism refuse CUDA graphs (on by default); the plan was priced without them, so they are off;
* stages are explicit (`module_fqns_per_model_part`): the automatic split counts embedding and head as layers;
* with pp the step is one call on local_batch_size = micro-batch x micro-batches; without pp, accumulation follows from global_batch_size;
* seq_len must divide by tp x 2 cp; FlexAttention under cp needs the "ptrr" balancer (the default cannot
  shard its mask), whole mask blocks on every rank, and gathers K and V;
* the default spmd_backend needs a newer torch than 2.13, "partial_dtensor" runs on both;
* pipeline_parallel_schedule decides which rank holds which stage (V-shaped for ZBVZeroBubble and DualPipeV), pipeline_parallel_schedule_csv the order;
* SelectiveAC drops every second matmul and there is no per-layer recompute: where the plan says otherwise the recipe carries a policy of its own;
* the shipped recipes may add float8, compile or a chunked loss; this one builds on the bare model, so that it is what was priced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import indent

from costmodel.engine import engine
from costmodel.errors import InputError
from costmodel.schedule import actions
from costmodel.schedules.table import to_csv
from planner.export.facts import comment, common_losses, header, layers_per_stage, ranks, script, torchrun
from planner.export.result import Exported, Loss
from planner.export.torchtitan_models import Flavor, flavor_of
from planner.plan import Plan

LAUNCHER = "torchtitan 0.3.0 on torch >= 2.13"
MODULE = "autoplan_recipe"
FLEX_BLOCK = 128  # rows of a FlexAttention mask block: _DEFAULT_SPARSE_BLOCK_SIZE of torch.nn.attention.flex_attention
# torch's class for each schedule. Where torch has none of its own, the class names the placement of stages, and the actions come from a table.
_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "breadth_first": "LoopedBFS", "zb_h1": "InterleavedZeroBubble",
    "zb_h2": "PipelineScheduleMulti", "zbv": "ZBVZeroBubble", "v_half": "ZBVZeroBubble", "v_min": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
_TABLES = ("zb_h2", "v_half", "v_min")
TABLE = "schedule.csv"
_ENVIRONMENT = (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)

_RECIPE = '''{imports}

{policy}def train() -> Trainer.Config:
    """The run of the plan above."""
    model_spec = {registry}
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./assets/hf",  # folder with the tokenizer of the model
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training=TrainingConfig(
{training}        ),
        parallelism=ParallelismConfig(
{parallelism}        ),
        activation_checkpoint={activation_checkpoint},
        compile=CompileConfig(enable={compile}),
    )
'''

_KEEP_MATMULS = '''class KeepMatmuls(SelectiveAC):
    """Keeps the outputs of every matmul, attention and collective; recomputes the rest."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        kept = self.get_save_ops()

        def policy(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint_wrapper(module, context_fn=lambda: create_selective_checkpoint_contexts(policy), early_stop=False)


'''

_CHOSEN_LAYERS = '''class ChosenLayers(FullAC):
    """Recomputes the named layers in full and keeps everything of the others."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: list[str] = field(default_factory=list)

    def _wrap_block(self, module, *, base_fqn=None):
        return super()._wrap_block(module, base_fqn=base_fqn) if base_fqn in self.config.layers else module


'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The path of a file beside the recipe, wherever that is put."""

    name: str


def export_torchtitan(plan: Plan) -> Exported:
    """launch.sh and autoplan_recipe.py, whose `train` returns the Trainer.Config of the plan.

    Raises InputError when torchtitan ships no model of the plan's sizes, or refuses its batch or sequence length.
    """
    flavor = flavor_of(plan.spec, plan.model)
    _check(plan)
    losses = (*common_losses(plan, engine="torchtitan"), *_losses(plan))
    command = "bash launch.sh"
    top = header(plan, launcher=LAUNCHER, losses=losses, environment=_ENVIRONMENT, command=command)
    path = 'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    start = torchrun(ranks(plan), f'-m torchtitan.train --module {MODULE} --config train "$@"')
    files = (
        ("launch.sh", script(top, _ENVIRONMENT, path, start)),
        (f"{MODULE}.py", comment(top) + recipe(plan, flavor)),
        *_table(plan),
    )
    return Exported(target="torchtitan", files=files, losses=losses, command=command)


def recipe(plan: Plan, flavor: Flavor) -> str:
    """The Python text of the recipe."""
    policy, activation_checkpoint, imports = _activation_checkpoint(plan)
    return _RECIPE.format(
        imports=_imports(plan, flavor, imports),
        policy=f"\n{policy}" if policy else "\n",
        registry=_registry(plan, flavor),
        training=_arguments(_training(plan)),
        parallelism=_arguments(_parallelism(plan)),
        activation_checkpoint=activation_checkpoint,
        compile=plan.strategy.compile,
    )


def _table(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The actions of every pipeline rank, where torch has no class that makes them."""
    strategy = plan.strategy
    if strategy.schedule not in _TABLES:
        return ()
    numbers = {"pp": strategy.mesh.pp, "vpp": strategy.vpp, "num_micro_batches": strategy.num_micro_batches(plan.job.global_batch)}
    return ((TABLE, to_csv(actions(strategy.schedule, **numbers))),)


def module_names(counts: tuple[int, ...]) -> list[list[str]]:
    """torchtitan's module names of every model part: (1, 1) is [[tok_embeddings, layers.0], [layers.1, norm, lm_head]]."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    parts = [[f"layers.{start + offset}" for offset in range(count)] for start, count in zip(starts, counts, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _training(plan: Plan) -> tuple[tuple[str, object], ...]:
    strategy, job = plan.strategy, plan.job
    local = strategy.micro_batch * (strategy.num_micro_batches(job.global_batch) if strategy.mesh.pp > 1 else 1)
    return (
        ("local_batch_size", local),
        ("global_batch_size", job.global_batch),
        ("seq_len", job.seq_len),
        ("steps", 20),
        ("disable_cuda_graphs", True),
        ("dtype", "float32"),
        ("mixed_precision_param", "float32" if job.precision == "fp32" else "bfloat16"),
        ("mixed_precision_reduce", "float32"),
    )


def _parallelism(plan: Plan) -> tuple[tuple[str, object], ...]:
    strategy, mesh = plan.strategy, plan.strategy.mesh
    sharded = strategy.zero_stage > 0
    fields: list[tuple[str, object]] = [
        ("data_parallel_replicate_degree", mesh.dp_replicate if sharded else mesh.dp),
        ("data_parallel_shard_degree", mesh.dp_shard if sharded else 1),
        ("fsdp_reshard_after_forward", "always" if strategy.zero_stage == 3 else "never"),
        ("tensor_parallel_degree", mesh.tp),
        ("enable_sequence_parallel", strategy.sequence_parallel),
        ("context_parallel_degree", mesh.cp),
        ("expert_parallel_degree", mesh.ep),
        ("pipeline_parallel_degree", mesh.pp),
        ("spmd_backend", "partial_dtensor"),
    ]
    if mesh.cp > 1:
        fields.append(("context_parallel_load_balancer", "ptrr"))
    if mesh.pp > 1:
        fields += [
            ("pipeline_parallel_schedule", _SCHEDULES[strategy.schedule]),
            ("pipeline_parallel_microbatch_size", strategy.micro_batch),
            ("module_fqns_per_model_part", module_names(layers_per_stage(plan))),
        ]
        if strategy.schedule in _TABLES:
            fields.append(("pipeline_parallel_schedule_csv", Beside(name=TABLE)))
    return tuple(fields)


def _activation_checkpoint(plan: Plan) -> tuple[str, str, tuple[str, ...]]:
    """The policy class to emit (or ""), the expression that configures it, and the imports both need."""
    checkpoint = "from torchtitan.distributed.activation_checkpoint import {}"
    match plan.strategy.recompute:
        case "full":
            return "", "FullAC.Config()", (checkpoint.format("FullAC"),)
        case "selective":
            imports = (
                "from dataclasses import dataclass",
                "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
                "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",
                checkpoint.format("SelectiveAC"),
            )
            return _KEEP_MATMULS, "KeepMatmuls.Config()", imports
        case "first_k":
            counts = layers_per_stage(plan)
            firsts = [sum(counts[:index]) for index in range(len(counts))]
            chosen = [
                f"layers.{first + offset}"
                for first, stage in zip(firsts, plan.stages, strict=True)
                for offset in range(stage.recompute_layers)
            ]
            return (
                _CHOSEN_LAYERS,
                f"ChosenLayers.Config(layers={json.dumps(chosen)})",
                ("from dataclasses import dataclass, field", checkpoint.format("FullAC")),
            )
    return "", "None", ()


def _registry(plan: Plan, flavor: Flavor) -> str:
    attention = "" if flavor.module == "gpt_oss" and plan.strategy.mesh.cp == 1 else ', attn_backend="flex"'
    if plan.job.precision != "fp8":
        return f'model_registry("{flavor.name}"{attention})'
    converter = f'Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled={plan.strategy.compile})'
    return f'model_registry("{flavor.name}"{attention}, converters=[{converter}])'


def _imports(plan: Plan, flavor: Flavor, extra: tuple[str, ...]) -> str:
    lines = {
        "from torchtitan.components.loss import CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{flavor.module} import model_registry",
        "from torchtitan.trainer import Trainer",
        *extra,
    }
    if plan.job.precision == "fp8":
        lines.add("from torchtitan.components.quantization import Float8LinearConverter")
    if plan.strategy.schedule in _TABLES:
        lines.add("from pathlib import Path")
    standard = sorted(line for line in lines if line.startswith(("from dataclasses", "from pathlib")))
    return "\n".join([*standard, *([""] if standard else []), *sorted(lines.difference(standard))])


def _arguments(fields: tuple[tuple[str, object], ...]) -> str:
    lines = []
    for name, value in fields:
        if isinstance(value, Beside):
            lines.append(f"{name}=str(Path(__file__).with_name({json.dumps(value.name)})),\n")
        elif isinstance(value, list):
            rows = "".join(f"    {json.dumps(row)},\n" for row in value)
            lines.append(f"{name}=[\n{rows}],\n")
        else:
            lines.append(f"{name}={json.dumps(value) if isinstance(value, str) else value},\n")
    return indent("".join(lines), " " * 12)


def _check(plan: Plan) -> None:
    mesh, job = plan.strategy.mesh, plan.job
    if job.seq_len % (mesh.tp * 2 * mesh.cp):
        what = f"{job.seq_len} tokens do not divide by tp x 2 cp = {mesh.tp * 2 * mesh.cp}"
        raise InputError(what, where="Plan.job.seq_len", remedy="change the sequence length or the mesh")
    if mesh.cp > 1 and job.seq_len % (FLEX_BLOCK * mesh.cp):
        what = f"{job.seq_len} tokens do not divide into blocks of {FLEX_BLOCK} for each of cp = {mesh.cp} ranks (the ptrr balancer)"
        raise InputError(what, where="Plan.job.seq_len", remedy="change the sequence length or cp")
    micro_batches = plan.strategy.num_micro_batches(job.global_batch)
    rounds = max(1, micro_batches // mesh.pp)
    if plan.strategy.schedule in ("interleaved_1f1b", "zb_h1") and micro_batches % rounds:
        what = f"{_SCHEDULES[plan.strategy.schedule]} needs {micro_batches} micro-batches to divide into {rounds} rounds of about pp = {mesh.pp}"
        raise InputError(what, where="Plan.strategy.micro_batch", remedy="make the number of micro-batches a multiple of pp")


def _losses(plan: Plan) -> tuple[Loss, ...]:
    strategy, job = plan.strategy, plan.job
    recompute = engine(plan.engine).selective_recompute
    facts = (
        (
            "strategy.zero_stage",
            strategy.zero_stage,
            strategy.zero_stage == 1,
            "shards gradients too and gathers parameters once per step (FSDP2)",
        ),
        (
            "strategy.zero_stage",
            strategy.zero_stage,
            strategy.zero_stage == 0 and strategy.mesh.cp > 1,
            "shards parameters over cp (FSDP2)",
        ),
        (
            "strategy.recompute",
            recompute,
            strategy.recompute == "selective" and recompute != "keep_matmuls",
            "keeps matmuls, recomputes the rest",
        ),
        ("strategy.cp_kind", strategy.cp_kind, strategy.mesh.cp > 1, "gathers K and V before attention (FlexAttention context parallel)"),
        ("strategy.flash_attention", False, not strategy.flash_attention, "runs FlexAttention, which never stores the scores"),
        ("job.precision", job.precision, job.precision == "fp16", "computes in bfloat16"),
        ("job.optimizer", job.optimizer, job.optimizer != "adamw", "runs AdamW with fp32 states: 8 bytes a parameter"),
        ("job.dropout", job.dropout, job.dropout > 0, "has no dropout in its models"),
    )
    return tuple(Loss(field=field, says=str(says), launcher_does=does) for field, says, lost, does in facts if lost)
