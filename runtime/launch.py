"""Train under a plan: one process a rank, started by torchrun or by `run_local`.

    torchrun --nproc-per-node 4 -m runtime.launch plan.json examples.gpt:build_model --steps 20

Every rank builds the same seeded model, draws the same global batches and trains on its part. Rank 0 prints the loss and, at the end, measured
beside predicted, and writes that to the report.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from costmodel.errors import AutoplanError, InputError
from planner import codec
from planner.plan import Plan
from runtime.batch import Batch
from runtime.build import apply
from runtime.check import check_runnable
from runtime.measure import Report, build_meter, build_report
from runtime.mesh import Place, local_device
from runtime.target import load_target

GROUP_TIMEOUT = timedelta(minutes=10)
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
STOP_TIMEOUT_S = 40.0  # torchrun itself waits 30 s for its ranks


def report_path(plan_path: Path) -> Path:
    """Where a run's report goes unless told otherwise: plan.json -> plan.measured.json."""
    return plan_path.with_suffix(".measured.json")


def run_local(plan_path: Path, target: str, *, steps: int = 20, seed: int = 0, report: Path | None = None, quiet: bool = False) -> Report:
    """Train on this machine, one process a rank, through torchrun. Returns the report, which is also written (report_path unless given).

    The ranks' output goes to this process's; with `quiet` all of it to stderr.
    Raises InputError when the plan cannot run here or is not this model's, AutoplanError when a rank fails otherwise.
    """
    plan = codec.load_plan(plan_path)
    check_runnable(plan)
    _check_local(plan)
    report = report or report_path(plan_path)
    _check_writable(report)
    ranks = plan.strategy.mesh.num_devices
    with tempfile.TemporaryDirectory(prefix="autoplan-run-") as folder:
        failure = Path(folder) / "error.json"
        returncode = _torchrun(ranks, [*_arguments(plan_path, target, steps, seed, report), "--error-file", str(failure)], quiet=quiet)
        if failure.exists():
            raise InputError(**codec.loads(codec.read_text(failure), str(failure)))
    if returncode:
        raise AutoplanError(
            "a rank died without a word", where="run", remedy="torchrun says above which one, and by which signal or exit code"
        )
    return codec.decode(codec.loads(codec.read_text(report), str(report)), Report, str(report))


def _arguments(plan_path: Path, target: str, steps: int, seed: int, report: Path) -> list[str]:
    return [str(plan_path), target, "--steps", str(steps), "--seed", str(seed), "--report", str(report)]


def _torchrun(ranks: int, arguments: list[str], *, quiet: bool) -> int:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "runtime.launch",
        *arguments,
    ]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    return _supervised(subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet else None))


def _supervised(process: subprocess.Popen[bytes]) -> int:
    """The exit code of torchrun. Ctrl-C or a termination of this process ends it, and with it the ranks, before it goes on."""

    def terminated(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, terminated) if main else None
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if main:
            signal.signal(signal.SIGTERM, previous)


def train(plan: Plan, target_name: str, *, steps: int, seed: int, local_rank: int) -> Report:
    """Train `steps` steps in an initialised process group; rank 0 prints the losses. Collective; the report is the same on every rank."""
    target = load_target(target_name)
    torch.manual_seed(seed)
    model = target.build_model()
    stream = iter(target.batches(model, plan.job, seed))
    trainer = apply(plan, model, loss_fn=target.loss_fn, optimizer_factory=target.optimizer_factory, local_rank=local_rank)
    del model
    torch.manual_seed(seed + 1 + trainer.place.data_index)
    meter = build_meter(trainer, steps)
    losses = []
    for index in range(steps):
        batch = next(stream, None)
        if batch is None:
            raise InputError(
                f"batches ended after {index} of {steps} steps", where="batches", remedy="let it go on, or ask for fewer steps"
            )
        losses.append(meter.step(index, _share(batch, plan, trainer.place)))
        if not math.isfinite(losses[-1]):
            remedy = "lower the learning rate, or look at the loss and the data"
            raise InputError(f"the loss is {losses[-1]} in step {index + 1}", where="loss_fn", remedy=remedy)
        if dist.get_rank() == 0:
            print(f"step {index + 1:4d}  loss {losses[-1]:.4f}", flush=True)
    return build_report(meter, losses)


def main(argv: Sequence[str] | None = None) -> int:
    """One rank of a run; the exit code is that of the error (costmodel.errors)."""
    parser = argparse.ArgumentParser(prog="python -m runtime.launch", description="Train under a plan; start with torchrun.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("target", help="package.module:build_model")
    parser.add_argument("--steps", type=_positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="default: the plan's name with .measured.json")
    parser.add_argument("--error-file", type=Path, help="where to leave what, where and remedy of a failure")
    parser.add_argument("--verbose", action="store_true", help="log what each pass did")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, or use `autoplan run`")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        plan = codec.load_plan(options.plan)
        check_runnable(plan)
        _check_writable(options.report or report_path(options.plan))
        report = _run_rank(plan, options, local_rank)
    except AutoplanError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        _leave(options.error_file, error)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, RuntimeError) and any(word in str(error) for word in LOST):
            print(f"rank {rank}: lost another rank", file=sys.stderr, flush=True)
            return 1
        failure = _user_error(error, rank)
        _leave(options.error_file, failure)
        return failure.exit_code
    if rank == 0:
        codec.write_atomic(options.report or report_path(options.plan), codec.dumps(codec.encode(report, Report)))
        print("\n".join(report.lines()), flush=True)
    return 0


def _run_rank(plan: Plan, options: argparse.Namespace, local_rank: int) -> Report:
    device = local_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=GROUP_TIMEOUT)
    try:
        return train(plan, options.target, steps=options.steps, seed=options.seed, local_rank=local_rank)
    finally:
        dist.destroy_process_group()


def _share(batch: Batch, plan: Plan, place: Place) -> Batch:
    """This data-parallel rank's sequences of a global batch. Raises InputError when it is none."""
    tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch.values()) if isinstance(batch, Mapping) else [batch]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or tensor.shape[0] != plan.job.global_batch:
            what = f"a tensor {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            remedy = f"give tensors, or a mapping of tensors, whose dim 0 is the global batch of {plan.job.global_batch} sequences"
            raise InputError(f"batches gave {what}", where="batches", remedy=remedy)
    size = plan.job.global_batch // plan.strategy.mesh.dp
    mine = slice(place.data_index * size, (place.data_index + 1) * size)
    return batch[mine] if isinstance(batch, torch.Tensor) else {name: value[mine] for name, value in batch.items()}


def _check_local(plan: Plan) -> None:
    ranks, device = plan.strategy.mesh.num_devices, plan.cluster.pool.device
    if device.kind != "cpu" and not torch.cuda.is_available():
        raise InputError(
            f"the plan is for {ranks} x {device.device_id}, this machine has no GPU",
            where="run",
            remedy="plan for local, or export the plan and start it where the GPUs are",
        )
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise InputError(
            f"the plan needs {ranks} GPUs, this machine has {torch.cuda.device_count()}",
            where="run",
            remedy="start it with torchrun on all hosts",
        )


def _check_writable(report: Path) -> None:
    folder = report.parent
    if report.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"cannot write the report {report}", where="--report", remedy="name a file in an existing folder that can be written"
        )


def _user_error(error: Exception, rank: int) -> InputError:
    """What a rank met outside this project's own checks, at the last place in the user's code (the last of all where there is none)."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = [frame for frame in frames if not frame.filename.startswith(installed)] or list(frames)
    where = f"{own[-1].filename}:{own[-1].lineno}"
    return InputError(f"rank {rank} failed with {type(error).__name__}: {error}", where=where, remedy="its traceback is printed above")


def _leave(path: Path | None, error: AutoplanError) -> None:
    """Leave the error for the parent; the first rank to fail wins, the others may fail because of it."""
    if path is not None:
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(codec.dumps({"what": error.what, "where": error.where, "remedy": error.remedy}))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
