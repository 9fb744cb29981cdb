"""The verbs that think: plan, estimate, explain, diff."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from costmodel.errors import UnprovenError
from planner.cli_options import (
    add_output_flags,
    add_problem_flags,
    add_strategy_flags,
    headroom,
    positive_seconds,
    problem_from,
    strategy_from,
    whole,
)  # fmt: skip
from planner.cli_output import Output

if TYPE_CHECKING:
    from costmodel.estimate import Estimate
    from planner.diff import Change
    from planner.plan import Plan
    from planner.problem import Problem
    from planner.strategy import Strategy

ESTIMATE_FORMAT, EXPLANATION_FORMAT, DIFF_FORMAT = "autoplan/estimate", "autoplan/explanation", "autoplan/diff"

PLAN_EXAMPLES = """examples:
  autoplan plan llama3-8b 8xH100 --seq-len 8192 --global-batch 128
  autoplan plan llama3-70b 8xH100*8 --seq-len 8192 --global-batch 512 --engine megatron --fix "tp=8,pp<=4,recompute=full|selective"
  autoplan plan ./config.json p5.48xlarge*2 --seq-len 4096 --global-batch 256 --json > plan.json
  autoplan plan examples/gpt.py:build_model local-cpu:4 --seq-len 64 --global-batch 16 --precision fp32 -o plan.json

--fix takes terms joined by commas, NAME OP VALUE with = != <= >= < > and alternatives joined by |; names are pp dp dp_replicate dp_shard cp tp ep zero
micro_batch num_micro_batches schedule vpp sp recompute recompute_layers cp_kind flash_attention compile. Ctrl-C keeps the best plan so far."""

ESTIMATE_EXAMPLES = """examples:
  autoplan estimate llama3-8b 8xH100 --seq-len 8192 --global-batch 128 --zero 3 --recompute full
  autoplan estimate llama3-70b 8xH100*8 --seq-len 8192 --global-batch 512 --engine megatron --tp 8 --pp 4 --zero 1 --explain"""


def add_verbs(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verbs of this file."""
    raw = argparse.RawDescriptionHelpFormatter
    plan = verbs.add_parser("plan", help="find the fastest plan that fits", epilog=PLAN_EXAMPLES, formatter_class=raw, allow_abbrev=False)
    add_problem_flags(plan)
    group = plan.add_argument_group("search")
    group.add_argument("--fix", metavar="TERMS", help='restrict the search, e.g. "tp=8,pp<=4,recompute=full"')
    group.add_argument("--top-k", type=whole, default=1, metavar="K", help="prove the best K (default 1)")
    group.add_argument("--time-limit", type=positive_seconds, metavar="S", help="stop after S seconds with the best so far")
    group.add_argument(
        "--headroom", type=headroom, metavar="SHARE", help="device memory to leave free, e.g. 10%% or 0.1 (default 5%%, of CPU ranks 0)"
    )
    group.add_argument("--require-optimal", action="store_true", help="exit 5 unless the plan is proven optimal")
    group.add_argument("-o", "--output", metavar="FILE", help="write the plan file")
    add_output_flags(plan)
    plan.set_defaults(handler=run_plan)

    estimate = verbs.add_parser(
        "estimate", help="price one given strategy", epilog=ESTIMATE_EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    add_problem_flags(estimate)
    add_strategy_flags(estimate)
    estimate.add_argument("--explain", action="store_true", help="print the arithmetic of every line")
    estimate.add_argument("-o", "--output", metavar="FILE", help="write a plan file of this strategy")
    add_output_flags(estimate)
    estimate.set_defaults(handler=run_estimate)

    explain = verbs.add_parser(
        "explain", help="why a plan, what was second, what was rejected, what would have to change", allow_abbrev=False
    )
    explain.add_argument("plan", metavar="PLAN", help="a plan file")
    add_output_flags(explain)
    explain.set_defaults(handler=run_explain)

    diff = verbs.add_parser("diff", help="what differs between two plans", allow_abbrev=False)
    diff.add_argument("before", metavar="PLAN", help="a plan file")
    diff.add_argument("after", metavar="PLAN", help="another")
    add_output_flags(diff)
    diff.set_defaults(handler=run_diff)


def run_plan(options: argparse.Namespace, output: Output) -> int:
    """`autoplan plan`."""
    from planner.facade import solve
    from planner.outcome import Limits

    limits = Limits(top_k=options.top_k, keep=max(4, options.top_k), time_limit_s=options.time_limit)
    try:
        plan = solve(problem_from(options).with_headroom(options.headroom), fix=options.fix, limits=limits, progress=output.progress)
    finally:
        output.end_progress()
    _deliver(plan, options, output)
    if plan.proof.status == "optimal":
        return 0
    output.say(f"stopped ({plan.proof.status}): the plan is within {100 * plan.proof.gap_frac:.1f} % of the bound")
    return UnprovenError.exit_code if options.require_optimal else 0


def _deliver(plan: Plan, options: argparse.Namespace, output: Output) -> None:
    if options.output is not None:
        plan.save(options.output)
        output.say(f"wrote {options.output}")
    if options.json:
        from planner.codec import plan_to_json

        output.write_json(plan_to_json(plan))
        return
    if options.output and output.quiet:
        return
    from planner.render import plan_panel

    output.show(plan_panel(plan))


def run_estimate(options: argparse.Namespace, output: Output) -> int:
    """`autoplan estimate`."""
    from costmodel.estimate import Estimate
    from planner.facade import plan_of
    from planner.job import Job
    from planner.pricer import GraphPricer
    from planner.strategy import Strategy

    problem = problem_from(options)
    strategy = strategy_from(options, problem.cluster.num_devices)
    estimate = GraphPricer(problem).estimate(strategy)
    if options.output is not None:
        plan_of(problem, strategy).save(options.output)
        output.say(f"wrote {options.output}")
    if options.json:
        from planner.codec import encode

        facts = {"model": problem.model, "cluster": problem.cluster.name, "engine": problem.engine.name, "fits": estimate.fits,
                 "memory_risk": estimate.risk}  # fmt: skip
        parts = {"job": encode(problem.job, Job), "strategy": encode(strategy, Strategy), "estimate": encode(estimate, Estimate)}
        output.document({"format": ESTIMATE_FORMAT, "format_version": 1, **facts, **parts})
    else:
        from planner.render import estimate_view

        output.show(estimate_view(estimate, explained=options.explain))
    return 0 if estimate.fits else _say_too_big(problem, strategy, estimate, output)


def _say_too_big(problem: Problem, strategy: Strategy, estimate: Estimate, output: Output) -> int:
    """By how much the estimated strategy does not fit, and which higher ZeRO stages would."""
    from costmodel.errors import InfeasibleError
    from costmodel.units import format_bytes
    from planner.levers import zero_stages_that_fit

    output.warn(f"does not fit: needs {format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)}")
    better = [f"--zero {stage} ({format_bytes(peak)})" for stage, peak in zero_stages_that_fit(problem, strategy)]
    if better:
        output.warn(f"  what helps: {' or '.join(better)}")
    return InfeasibleError.exit_code


def run_explain(options: argparse.Namespace, output: Output) -> int:
    """`autoplan explain`."""
    from planner.codec import load_plan
    from planner.explain import explain

    text = explain(load_plan(options.plan))
    if options.json:
        output.document({"format": EXPLANATION_FORMAT, "format_version": 1, "text": text})
    else:
        output.write(text)
    return 0


def run_diff(options: argparse.Namespace, output: Output) -> int:
    """`autoplan diff`."""
    from planner.codec import load_plan
    from planner.diff import diff_plans

    changes = diff_plans(load_plan(options.before), load_plan(options.after))
    if options.json:
        rows = [{"field": change.field, "before": change.before, "after": change.after, "unit": change.unit} for change in changes]
        output.document({"format": DIFF_FORMAT, "format_version": 1, "changes": rows})
    elif not changes:
        output.write("the plans decide and cost the same\n")
    else:
        from planner.render import rows_view

        output.show(rows_view(("", options.before, options.after, "change"), map(_diff_row, changes)))
    return 0


def _diff_row(change: Change) -> tuple[str, str, str, str]:
    from costmodel.units import format_bytes, format_seconds

    shown = {"s": format_seconds, "bytes": format_bytes}.get(change.unit, str)
    ratio = "" if change.ratio is None else f"{100 * change.ratio:+.1f} %"
    return change.field.replace("_", " "), shown(change.before), shown(change.after), ratio
