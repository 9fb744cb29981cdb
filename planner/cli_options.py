"""Flags that several verbs share, and what they become: Job, Strategy, Problem. Reads code of the user only for `pkg.mod:factory` models."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.engine import ENGINES, engine
from costmodel.errors import AutoplanError, InputError
from costmodel.hardware import Cluster
from costmodel.mesh import Mesh
from planner.job import OPTIMIZERS, PRECISIONS, Job
from planner.problem import Problem, capture_problem, problem_of
from planner.strategy import CP_KINDS, RECOMPUTE, SCHEDULES, Strategy

MODEL_HELP = "a name (see `autoplan models`), a config.json or its folder, pkg.mod:factory or file.py:factory"
CLUSTER_HELP = "8xH100*4, p5.48xlarge*2, local:4, a .yaml or .json file"


def whole(text: str) -> int:
    """A positive whole number, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def whole_or_none(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def positive_seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def fraction(text: str) -> float:
    """A probability in [0, 1), for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def headroom(text: str) -> float:
    """A share of memory in [0, 1): `5%` or `0.05`, for argparse."""
    try:
        return fraction(str(float(text.removesuffix("%")) / 100) if text.endswith("%") else text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share below 100 %, such as 5% or 0.05") from None


def layer_counts(text: str) -> tuple[int, ...]:
    """`9,10,10,9`, for argparse."""
    return tuple(whole(part.strip()) for part in text.split(","))


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every verb."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one versioned JSON document")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress, and no panel when -o writes the plan")
    group.add_argument("-v", "--verbose", action="store_true", help="more on stderr: progress without a terminal, tracebacks")
    group.add_argument("--no-color", action="store_true", help="plain text (NO_COLOR does the same)")


def add_problem_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, CLUSTER and the job."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("cluster", metavar="CLUSTER", help=CLUSTER_HELP)
    group = parser.add_argument_group("job")
    group.add_argument("--seq-len", type=whole, required=True, metavar="N", help="tokens per sequence")
    group.add_argument("--global-batch", type=whole, required=True, metavar="N", help="sequences per step")
    group.add_argument("--precision", choices=PRECISIONS, default="bf16", help="compute dtype (default bf16)")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default adamw)")
    group.add_argument("--dropout", type=fraction, default=0.0, metavar="P", help="at every dropout of the model (default 0)")
    group.add_argument(
        "--engine", choices=[row.name for row in ENGINES], default="torch", help="the runtime that will execute it (default torch)"
    )


def add_strategy_flags(parser: argparse.ArgumentParser) -> None:
    """One strategy, flag by flag."""
    group = parser.add_argument_group("strategy")
    for name in ("tp", "pp", "cp", "ep"):
        group.add_argument(f"--{name}", type=whole, default=1, metavar="N")
    group.add_argument("--dp", type=whole, metavar="N", help="data-parallel degree (default: the devices that are left)")
    group.add_argument("--dp-replicate", type=whole, metavar="N", help="of it, replicas (HSDP); default all with ZeRO 0, else 1")
    group.add_argument("--zero", type=whole_or_none, choices=(0, 1, 2, 3), default=0, help="ZeRO stage (default 0)")
    group.add_argument("--micro-batch", type=whole, default=1, metavar="N")
    group.add_argument("--schedule", choices=SCHEDULES, help="default 1f1b with --pp, interleaved_1f1b with --vpp")
    group.add_argument("--vpp", type=whole, default=1, metavar="N", help="model chunks per pipeline rank")
    group.add_argument("--stage-layers", type=layer_counts, default=(), metavar="A,B,..", help="layers of each chunk (default: balanced)")
    group.add_argument("--recompute", choices=RECOMPUTE, default="none")
    group.add_argument("--recompute-layers", type=whole, default=0, metavar="K", help="with --recompute first_k")
    group.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None, help="default on with --tp")
    group.add_argument("--cp-kind", choices=CP_KINDS, default="ring")
    group.add_argument("--flash-attention", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)


def problem_from(options: argparse.Namespace) -> Problem:
    """The problem of MODEL, CLUSTER and the job flags. Raises InputError."""
    job = Job(
        global_batch=options.global_batch,
        seq_len=options.seq_len,
        precision=options.precision,
        optimizer=options.optimizer,
        dropout=options.dropout,
    )
    cluster = Cluster.parse(options.cluster)
    runtime = engine(options.engine)
    if ":" in options.model and not Path(options.model).exists():
        factory, module = load_factory(options.model)
        problem = capture_problem(build(factory, options.model), cluster, job, runtime, loss_fn=getattr(module, "loss_fn", None))
        return replace(problem, model=options.model)
    return problem_of(options.model, cluster, job, runtime)


def load_factory(text: str) -> tuple[Callable[[], Any], Any]:
    """(factory, its module) of `pkg.mod:factory` or `file.py:factory`, found from the working directory too. Raises InputError."""
    place, _, name = text.rpartition(":")
    where = f"model {text!r}"
    if not place or not name.isidentifier():
        raise InputError("not pkg.mod:factory or file.py:factory", where=where, remedy="for example examples.gpt:build_model")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _file_module(place, where) if place.endswith(".py") else _module(place, where)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"{place} has no function {name!r}", where=where, remedy="name the function that builds the model")
    return factory, module


def _file_module(place: str, where: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise InputError(f"no such file {place}", where=where, remedy="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{place} is not a Python file", where=where, remedy="give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    _guarded(lambda: spec.loader.exec_module(module) if spec.loader else None, f"importing {place}", where)
    return module


def _module(place: str, where: str) -> Any:
    return _guarded(lambda: importlib.import_module(place), f"importing {place}", where)


def _guarded(action: Callable[[], Any], doing: str, where: str) -> Any:
    """Run the user's code; what it raises becomes an InputError that keeps the original as its cause."""
    try:
        return action()
    except AutoplanError:
        raise
    except Exception as error:
        raise InputError(
            f"{doing} raised {type(error).__name__}: {error}", where=where, remedy="run it alone first; -v shows its traceback"
        ) from error


def build(factory: Callable[[], Any], text: str) -> Any:
    """The module that `factory` makes, on the meta device so that no weight is allocated. Raises InputError when it is no nn.Module."""
    import torch

    def on_meta() -> Any:
        with torch.device("meta"):
            return factory()

    where = f"model {text!r}"
    module = _guarded(on_meta, "building the model on the meta device", where)
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"the factory returned a {type(module).__name__}, not an nn.Module", where=where, remedy="return the module")
    return module


def strategy_from(options: argparse.Namespace, num_devices: int) -> Strategy:
    """The strategy of the flags on `num_devices` devices. Raises InputError when the axes do not fill them."""
    model_ranks = options.tp * options.pp * options.cp
    dp = options.dp or num_devices // model_ranks
    if model_ranks * dp != num_devices:
        text = f"tp {options.tp} x pp {options.pp} x cp {options.cp} x dp {dp} = {model_ranks * dp}"
        raise InputError(
            f"{text}, but the cluster has {num_devices} devices", where="--tp, --pp, --cp, --dp", remedy="make the product agree"
        )
    replicas = options.dp_replicate or (dp if options.zero == 0 and options.ep == 1 else 1)
    if dp % replicas:
        raise InputError(f"{replicas} replicas do not divide dp {dp}", where="--dp-replicate", remedy=f"use a divisor of {dp}")
    schedule = options.schedule or ("none" if options.pp == 1 else "interleaved_1f1b" if options.vpp > 1 else "1f1b")
    parallel = options.tp > 1 if options.sequence_parallel is None else options.sequence_parallel
    if (options.recompute == "first_k") != bool(options.recompute_layers):
        raise InputError("--recompute first_k and --recompute-layers K go together", where="--recompute", remedy="give both or neither")
    return Strategy(
        mesh=Mesh(pp=options.pp, dp_replicate=replicas, dp_shard=dp // replicas, cp=options.cp, tp=options.tp, ep=options.ep),
        micro_batch=options.micro_batch,
        zero_stage=options.zero,
        sequence_parallel=parallel,
        schedule=schedule,
        vpp=options.vpp,
        stage_layers=options.stage_layers,
        recompute=options.recompute,
        recompute_layers=options.recompute_layers,
        cp_kind=options.cp_kind,
        flash_attention=options.flash_attention,
        compile=options.compile,
    )
