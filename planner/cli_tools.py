"""The verbs around a plan: export, run, hardware, models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, LossyExportError
from planner.cli_options import CLUSTER_HELP, MODEL_HELP, add_output_flags, whole, whole_or_none
from planner.cli_output import Output

EXPORT_FORMAT, RUN_FORMAT, HARDWARE_FORMAT, MODELS_FORMAT = "autoplan/export", "autoplan/run", "autoplan/hardware", "autoplan/models"
EXPORT_TARGETS = ("torchrun", "torchtitan", "megatron")


def add_verbs(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verbs of this file."""
    export = verbs.add_parser("export", help="write a plan as the files of a launcher", allow_abbrev=False)
    export.add_argument("plan", metavar="PLAN", help="a plan file")
    export.add_argument("--to", required=True, choices=EXPORT_TARGETS, help="the launcher")
    export.add_argument("-o", "--output", metavar="DIR", help="folder to write (default: list what would be written)")
    export.add_argument("--allow-loss", action="store_true", help="write even what the launcher cannot fully carry (else exit 3)")
    add_output_flags(export)
    export.set_defaults(handler=run_export)

    run = verbs.add_parser("run", help="train under a plan on this machine; predicted beside measured", allow_abbrev=False)
    run.add_argument("plan", metavar="PLAN", help="a plan file")
    run.add_argument("target", metavar="TARGET", help="pkg.mod:build_model")
    run.add_argument("--steps", type=whole, default=20, metavar="N", help="(default 20)")
    run.add_argument("--seed", type=whole_or_none, default=0, metavar="N", help="(default 0)")
    run.add_argument("--report", type=Path, metavar="FILE", help="default: the plan's name with .measured.json")
    add_output_flags(run)
    run.set_defaults(handler=run_run)

    for name, thing, about in (("hardware", "CLUSTER", CLUSTER_HELP), ("models", "MODEL", MODEL_HELP)):
        verb = verbs.add_parser(name, help=f"list the known {name}, or show one", allow_abbrev=False)
        verb.add_argument("action", nargs="?", choices=("list", "show"), default="list")
        verb.add_argument("what", nargs="?", metavar=thing, help=about)
        verb.set_defaults(handler=run_hardware if name == "hardware" else run_models)
        add_output_flags(verb)


def run_export(options: argparse.Namespace, output: Output) -> int:
    """`autoplan export`."""
    from planner.codec import load_plan
    from planner.export import export, write_exported

    exported = export(load_plan(options.plan), options.to)
    if exported.losses and not options.allow_loss:
        count = len(exported.losses)
        what = f"{options.to} cannot carry {count} thing{'s' if count > 1 else ''}: {'; '.join(map(str, exported.losses))}"
        raise LossyExportError(what, where=options.plan, remedy="accept it with --allow-loss")
    written = write_exported(exported, options.output) if options.output is not None else ()
    for path in written:
        output.say(f"wrote {path}")
    if options.json:
        losses = [{"field": loss.field, "says": loss.says, "launcher_does": loss.launcher_does} for loss in exported.losses]
        facts = {"target": exported.target, "files": dict(exported.files), "losses": losses, "command": exported.command}
        output.document({"format": EXPORT_FORMAT, "format_version": 1, **facts})
        return 0
    if not written:
        output.write("".join(f"{name} ({len(text.splitlines())} lines)\n" for name, text in exported.files))
    output.write("".join(f"lost: {loss}\n" for loss in exported.losses))
    output.write(f"start: {exported.command}\n")
    return 0


def run_run(options: argparse.Namespace, output: Output) -> int:
    """`autoplan run`."""
    from planner.codec import encode
    from runtime.launch import run_local
    from runtime.measure import Report

    report = run_local(
        Path(options.plan), options.target, steps=options.steps, seed=options.seed, report=options.report, quiet=options.json
    )
    if options.json:
        output.document({"format": RUN_FORMAT, **encode(report, Report)})
    return 0


def run_hardware(options: argparse.Namespace, output: Output) -> int:
    """`autoplan hardware`."""
    from costmodel.clusters import list_devices, list_instances
    from costmodel.hardware import Cluster
    from costmodel.units import format_bytes
    from planner.render import cluster_view, rows_view

    if _wants_one(options, "CLUSTER"):
        cluster = Cluster.parse(options.what)
        if options.json:
            from planner.codec import encode

            output.document({"format": HARDWARE_FORMAT, "format_version": 1, "cluster": encode(cluster, Cluster)})
        else:
            output.show(cluster_view(cluster))
        return 0
    devices, instances = list_devices(), list_instances()
    if options.json:
        rows = [{"name": row.name, "device_id": row.device.device_id, "memory_bytes": row.device.memory_bytes} for row in devices]
        hosts = [
            {"name": row.instance_id, "device_id": row.pool.device.device_id, "num_devices": row.pool.num_devices} for row in instances
        ]
        output.document({"format": HARDWARE_FORMAT, "format_version": 1, "devices": rows, "instances": hosts})
        return 0
    rates = (("bf16", "fp8"), "TFLOP/s")
    output.show(rows_view(
        ("device", "memory", *(f"{dtype} {rates[1]}" for dtype in rates[0]), "architecture"),
        [(row.name, format_bytes(row.device.memory_bytes), *(_tera(row.device.peak(dtype)) for dtype in rates[0]), row.device.arch) for row in devices],
    ))  # fmt: skip
    output.show(rows_view(
        ("instance", "devices", "provider"),
        [(row.instance_id, f"{row.pool.devices_per_node} x {row.pool.device.device_id}", row.provider) for row in instances],
    ))  # fmt: skip
    return 0


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.0f}" if rate else "-"


def run_models(options: argparse.Namespace, output: Output) -> int:
    """`autoplan models`."""
    from planner.codec import encode
    from planner.models import ModelSpec, list_models, resolve
    from planner.render import rows_view

    if _wants_one(options, "MODEL"):
        spec = resolve(options.what)
        document = encode(spec, ModelSpec)
        if options.json:
            output.document({"format": MODELS_FORMAT, "format_version": 1, "model": document})
        else:
            output.show(
                rows_view(("", ""), [(name, str(value)) for name, value in document.items() if value not in (None, "", [], 0, False)])
            )
        return 0
    names = list_models()
    if options.json:
        output.document({"format": MODELS_FORMAT, "format_version": 1, "models": list(names)})
    else:
        output.write("".join(f"{name}\n" for name in names))
    return 0


def _wants_one(options: argparse.Namespace, thing: str) -> bool:
    if (options.action == "show") != (options.what is not None):
        remedy = f"`autoplan {options.verb} list` or `autoplan {options.verb} show {thing}`"
        raise InputError(f"{options.action} with {options.what!r}", where=f"autoplan {options.verb}", remedy=remedy)
    return bool(options.action == "show")
