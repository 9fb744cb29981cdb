"""Plans and estimates for people: rich renderables for a terminal, the same as plain text when piped. Nothing is computed here but shares and bars."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from itertools import groupby

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from costmodel.estimate import Estimate, Line, StageMemory
from costmodel.hardware import Cluster
from costmodel.units import format_bytes, format_count, format_percent, format_seconds
from planner.explain import fullest, peaks
from planner.plan import Plan, Proof, Stage
from planner.space import describe, describe_mesh
from planner.strategy import Strategy

BAR_WIDTH = 28
TEXT_WIDTH = 110
MAX_RANK_COLUMNS = 6
RISK_WORDS = {"OK": "OK", "TIGHT": "TIGHT", "RISKY": "RISKY", "NO": "  DOES NOT FIT"}
RISK_STYLES = {"OK": "green", "TIGHT": "yellow", "RISKY": "bold yellow", "NO": "bold red"}


def plan_text(plan: Plan) -> str:
    """The plan as plain text."""
    return to_text(plan_panel(plan))


def to_text(renderable: RenderableType, width: int = TEXT_WIDTH) -> str:
    """Any renderable as plain text without colour, `width` columns wide."""
    stream = StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False, _environ={}).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def plan_panel(plan: Plan) -> RenderableType:
    """Everything an engineer acts on: headline, parallelism, stages, memory, time, alternatives, proof, assumptions."""
    estimate = plan.estimate
    body = Group(
        _headline(estimate),
        "",
        _section("Parallelism"),
        _strategy_table(plan.strategy, plan.job.global_batch, plan.num_layers),
        _stage_table(plan.stages) if len(plan.stages) > 1 else "",
        _section(f"Memory of the fullest device (pipeline rank {fullest(estimate).rank_index})"),
        _memory_table(estimate, fullest(estimate)),
        _section("Time of a step"),
        _time_table(estimate),
        *_alternatives(plan),
        _section("Proof"),
        Text(proof_line(plan.proof)),
        *_listed("Assumptions", plan.assumptions),
    )
    return Panel(body, title=Text(_title(plan), style="bold"), box=ROUNDED, padding=(1, 2), width=TEXT_WIDTH)


def estimate_view(estimate: Estimate, *, explained: bool = False) -> RenderableType:
    """Time by cause and memory by class for every pipeline rank; `explained` adds the arithmetic of each line."""
    parts: list[RenderableType] = [_headline(estimate), "", _section("Time of a step"), _time_table(estimate)]
    for title, lines in (
        ("Compute by op class", estimate.compute_by_class),
        ("Exposed communication by axis", estimate.communication_by_axis),
    ):
        if any(line.amount for line in lines):
            parts += [_section(title), _lines_table(lines, sum(line.amount for line in lines), seconds=True)]
    parts += [_section("Memory by class and pipeline rank"), _rank_table(estimate)]
    if explained:
        parts += [_section("Arithmetic"), *_arithmetic(estimate)]
    parts += _listed("Notes", estimate.notes)
    return Group(*parts)


def cluster_view(cluster: Cluster) -> RenderableType:
    """Pools of a cluster with memory, peaks and links."""
    table = _table("", "value")
    for pool in cluster.pools:
        device = pool.device
        peaks_text = ", ".join(f"{dtype} {flops / 1e12:.0f} TFLOP/s" for dtype, flops in device.peak_flops)
        rows = (
            ("devices", f"{pool.num_nodes} nodes x {pool.devices_per_node} x {device.device_id} ({device.arch})"),
            ("memory", f"{format_bytes(device.memory_bytes)} at {device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s"),
            ("dense peaks", peaks_text),
            (
                "fast domain",
                f"{pool.fast_domain} devices on {pool.fast_link.kind}, {pool.fast_link.bandwidth_bytes_per_s / 1e9:,.0f} GB/s each way",
            ),
            ("network", f"{pool.network.kind}, {pool.network.bandwidth_bytes_per_s / 1e9:,.1f} GB/s per device each way"),
            (
                "host",
                f"{format_bytes(pool.host_memory_bytes)} memory, {pool.host_link.kind} {pool.host_link.bandwidth_bytes_per_s / 1e9:,.1f} GB/s per device",
            ),
            ("instance", pool.instance or "-"),
            ("price", "-" if pool.usd_per_hour is None else f"{pool.usd_per_hour:,.2f} USD per hour and node"),
            ("source", device.source or "-"),
        )
        for name, value in rows:
            table.add_row(name, value)
    return Group(Text(f"{cluster.name}: {cluster.num_devices} devices", style="bold"), table, *_listed("Notes", cluster.notes))


def rows_view(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> RenderableType:
    """A plain table of text."""
    table = _table(*headings)
    for row in rows:
        table.add_row(*row)
    return table


def proof_line(proof: Proof) -> str:
    """The proof in one line."""
    if proof.status == "estimated":
        return "nothing was searched: the strategy was given"
    counts = f"{proof.num_evaluated:,} of {proof.num_candidates:,} strategies priced in full"
    if proof.status == "optimal":
        return f"optimal in the space (gap 0 %): {counts}, the rest ruled out by bounds or memory"
    return f"stopped ({proof.status}): gap {format_percent(proof.gap_frac)} to the bound {format_seconds(proof.bound_s)}; {counts}"


def _title(plan: Plan) -> str:
    return f"{plan.model} on {plan.cluster.name} ({plan.cluster.num_devices} devices), engine {plan.engine}"


def _headline(estimate: Estimate) -> Text:
    rate = f"{format_count(estimate.tokens_per_s)} tokens/s ({format_count(estimate.tokens_per_s_per_device)} per device)"
    memory = f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)}"
    text = Text()
    text.append(f"{format_seconds(estimate.step_s)} a step", style="bold green")
    text.append(f"   {rate}   MFU {format_percent(estimate.mfu_frac)}   memory {memory}")
    text.append(f" {RISK_WORDS[estimate.risk]}", style=RISK_STYLES[estimate.risk])
    text.append(f"\nMFU = {estimate.mfu_denominator}", style="dim")
    return text


def _section(title: str) -> Text:
    return Text(title, style="bold cyan")


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=any(headings), pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _strategy_table(strategy: Strategy, global_batch: int, num_layers: int) -> Table:
    mesh = strategy.mesh
    micro_batches = strategy.num_micro_batches(global_batch)
    where = " of each chunk" if mesh.pp > 1 else ""
    recompute = f"first {strategy.recompute_layers} layers{where}" if strategy.recompute == "first_k" else strategy.recompute
    zero = {0: "0 (everything replicated)", 1: "1 (optimizer states sharded)", 2: "2 (+ gradients sharded)", 3: "3 (+ parameters sharded)"}
    rows = [
        ("mesh", describe_mesh(mesh)),
        ("batch", f"{global_batch} = micro-batch {strategy.micro_batch} x {micro_batches} micro-batches x dp {mesh.dp}"),
        ("ZeRO stage", zero[strategy.zero_stage]),
        ("recompute", recompute),
    ]
    if mesh.tp > 1:
        rows.append(("sequence parallel", "yes" if strategy.sequence_parallel else "no"))
    if mesh.pp > 1:
        chunks = f", {strategy.vpp} chunks per rank" if strategy.vpp > 1 else ""
        rows.append(("pipeline", f"{strategy.schedule} over {mesh.pp} ranks{chunks}; {num_layers} layers"))
    if mesh.cp > 1:
        rows.append(("context parallel", strategy.cp_kind))
    rows.append(
        (
            "kernels",
            ("flash attention" if strategy.flash_attention else "unfused attention") + (", compiled" if strategy.compile else ", eager"),
        )
    )
    table = _table("", "")
    for row in rows:
        table.add_row(*row)
    return table


def _stage_table(stages: tuple[Stage, ...]) -> Table:
    table = _table("stages", "rank", "blocks", "recompute", "from", "to")
    for (size, recompute), group in groupby(stages, key=lambda stage: (len(stage.layer_paths), stage.recompute_layers)):
        run = list(group)
        first, last = run[0], run[-1]
        single = first is last
        numbers = str(first.stage_index) if single else f"{first.stage_index}-{last.stage_index}"
        ranks = sorted({stage.rank_index for stage in run})
        rank_text = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        table.add_row(
            numbers, rank_text, f"{size} each" if not single else str(size), str(recompute), first.layer_paths[0], last.layer_paths[-1]
        )
    return table


def _bar(fraction: float) -> str:
    filled = round(max(0.0, min(1.0, fraction)) * BAR_WIDTH)
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _memory_table(estimate: Estimate, stage: StageMemory) -> Table:
    table = _table("class", "bytes", "of device", "")
    for line in stage.classes:
        if line.amount > 0:
            share = line.amount / estimate.usable_bytes
            table.add_row(line.name.replace("_", " "), format_bytes(line.amount), format_percent(share), _bar(share))
    for name, size in peaks(stage):
        share = size / estimate.usable_bytes
        style = "bold red" if share > 1 else "bold" if size == stage.peak_bytes else ""
        table.add_row(f"{name} peak", format_bytes(size), format_percent(share), _bar(share), style=style)
    return table


def _time_table(estimate: Estimate) -> Table:
    return _lines_table(estimate.time, estimate.step_s, seconds=True)


def _lines_table(lines: Iterable[Line], total: float, *, seconds: bool) -> Table:
    table = _table("cause" if seconds else "class", "seconds" if seconds else "bytes", "share", "")
    for line in lines:
        if line.amount:
            share = line.amount / total if total else 0.0
            table.add_row(line.name.replace("_", " "), format_seconds(line.amount), format_percent(share), _bar(share))
    return table


def _rank_table(estimate: Estimate) -> Table:
    """One column a pipeline rank; of many only the first and the last few."""
    stages = estimate.stages
    if len(stages) > MAX_RANK_COLUMNS:
        stages = (*stages[: MAX_RANK_COLUMNS // 2], *stages[-(MAX_RANK_COLUMNS // 2) :])
    table = _table("rank", *(str(stage.rank_index) for stage in stages))
    names = dict.fromkeys(line.name for stage in stages for line in stage.classes)
    for name in names:
        amounts = [sum(line.amount for line in stage.classes if line.name == name) for stage in stages]
        if any(amounts):
            table.add_row(name.replace("_", " "), *map(format_bytes, amounts))
    for i, (name, _) in enumerate(peaks(stages[0])):
        table.add_row(f"{name} peak", *(format_bytes(peaks(stage)[i][1]) for stage in stages))
    table.add_row("micro-batches in flight", *(f"{stage.in_flight:g}" for stage in stages))
    return table


def _arithmetic(estimate: Estimate) -> Iterable[RenderableType]:
    groups = [
        (estimate.time, True),
        (estimate.compute_by_class, True),
        (estimate.communication_by_axis, True),
        (fullest(estimate).classes, False),
    ]
    for lines, seconds in groups:
        for line in lines:
            if line.amount and line.detail:
                amount = format_seconds(line.amount) if seconds else format_bytes(line.amount)
                yield Text(f"  {line.name.replace('_', ' ')} {amount} = {line.detail}")


def _alternatives(plan: Plan) -> list[RenderableType]:
    if not plan.alternatives:
        return []
    table = _table("next best", "step", "", "peak")
    for other in plan.alternatives:
        slower = f"+{format_percent(other.step_s / plan.estimate.step_s - 1)}"
        table.add_row(describe(other.strategy), format_seconds(other.step_s), slower, format_bytes(other.peak_bytes))
    return [table]


def _listed(title: str, items: Iterable[str]) -> list[RenderableType]:
    texts = [Text(f"  - {item}") for item in items]
    return ["", _section(title), *texts] if texts else []
