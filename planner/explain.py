"""Why this plan: text from the plan alone, so that a loaded file explains itself without pricing anything again.

Sections: why (where time and memory go), what was second and by how much, what was rejected with counts and an example, what would have to change
(levers: one-step changes, each re-priced when the plan was made), and what the search can vouch for.
"""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.estimate import RISKS, Estimate, Line, StageMemory, memory_risk
from costmodel.units import format_bytes, format_count, format_percent, format_seconds
from planner.plan import Alternative, Plan
from planner.space import describe

NEGLIGIBLE_FRAC = 0.002


def explain(plan: Plan) -> str:
    """The explanation as plain text, sections separated by blank lines."""
    sections = (
        ("Why this plan", _why(plan)),
        ("What was second", _second(plan)),
        ("What was rejected", _rejected(plan)),
        ("What would have to change", _change(plan)),
        ("What the search vouches for", _proof(plan)),
    )
    blocks = [f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections]
    return "\n\n".join(blocks) + "\n"


def fullest(estimate: Estimate) -> StageMemory:
    """The pipeline rank with the largest peak."""
    return max(estimate.stages, key=lambda stage: (stage.peak_bytes, -stage.rank_index))


def binding_class(estimate: Estimate) -> Line:
    """The largest memory class of the fullest rank."""
    return max(fullest(estimate).classes, key=lambda line: line.amount)


def peaks(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    """The three peaks by name."""
    return (("init", stage.init_peak_bytes), ("step", stage.step_peak_bytes), ("optimizer", stage.optimizer_peak_bytes))


def compare(base: Estimate, other: Estimate) -> str:
    """What makes `other` slower or faster than `base`: the causes that differ, largest first."""
    mine, theirs = ({line.name: line.amount for line in estimate.time} for estimate in (base, other))
    names = sorted(mine.keys() | theirs.keys())
    changes = [(theirs.get(name, 0.0) - mine.get(name, 0.0), name) for name in names]
    large = sorted((change for change in changes if abs(change[0]) > NEGLIGIBLE_FRAC * base.step_s), key=lambda change: -abs(change[0]))
    return ", ".join(f"{name.replace('_', ' ')} {signed_seconds(change)}" for change, name in large[:3]) or "the same by cause"


def signed_seconds(seconds: float) -> str:
    """`+1.20 s` or `-30.0 ms`."""
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def _why(plan: Plan) -> Iterator[str]:
    estimate, strategy = plan.estimate, plan.strategy
    micro_batches = strategy.num_micro_batches(plan.job.global_batch)
    yield f"{describe(strategy)}; {micro_batches} micro-batches a step on each data-parallel rank."
    causes = sorted((line for line in estimate.time if line.amount > 0), key=lambda line: -line.amount)
    shares = ", ".join(f"{line.name.replace('_', ' ')} {format_percent(line.amount / estimate.step_s)}" for line in causes)
    yield f"A step takes {format_seconds(estimate.step_s)}: {shares}."
    axes = sorted((line for line in estimate.communication_by_axis if line.amount > 0), key=lambda line: -line.amount)
    if axes:
        exposed = ", ".join(f"{line.name} {format_seconds(line.amount)}" for line in axes)
        yield f"Communication that compute does not hide: {exposed}; {format_seconds(estimate.hidden_communication_s)} more is hidden."
    stage, binding = fullest(estimate), binding_class(estimate)
    peak, size = max(peaks(stage), key=lambda item: item[1])
    used = format_percent(size / estimate.usable_bytes)
    yield (
        f"Memory is fullest on pipeline rank {stage.rank_index} at the {peak} peak: {format_bytes(size)} of {format_bytes(estimate.usable_bytes)} "
        f"({used}); most of it is {binding.name.replace('_', ' ')} ({format_bytes(binding.amount)})."
    )
    yield _risk(plan)
    yield f"{format_count(estimate.tokens_per_s)} tokens/s, MFU {format_percent(estimate.mfu_frac)} ({estimate.mfu_denominator})."


def _risk(plan: Plan) -> str:
    """The headroom in words, and what it costs to have more of it."""
    estimate = plan.estimate
    free = format_percent(max(0.0, 1.0 - estimate.peak_bytes / estimate.usable_bytes))
    words = {
        "OK": f"Memory risk OK: {free} of the device stays free.",
        "TIGHT": f"Memory risk TIGHT: {free} of the device stays free; watch the first steps.",
        "RISKY": f"Memory risk RISKY: {free} of the device stays free; fragmentation or another process can end the run.",
        "NO": "Memory risk NO: it does not fit.",
    }
    mesh = plan.strategy.mesh
    others = (*plan.alternatives, *(lever for lever in plan.levers if lever.strategy.mesh == mesh and lever.strategy != plan.strategy))
    risks = [(memory_risk(other.peak_bytes, estimate.usable_bytes), other) for other in others]
    safer = [(risk, other) for risk, other in risks if RISKS.index(risk) < RISKS.index(estimate.risk)]
    if not safer:
        return words[estimate.risk]
    risk, best = min(safer, key=lambda pair: pair[1].step_s)
    return f"{words[estimate.risk]} {risk} with {describe(best.strategy)}: {_times(plan, best)}, {format_bytes(best.peak_bytes)}."


def _second(plan: Plan) -> Iterator[str]:
    if not plan.alternatives:
        yield "Nothing else was priced that fits." if plan.proof.status != "estimated" else "The strategy was given; nothing was searched."
    for i, other in enumerate(plan.alternatives):
        yield f"{i + 2}. {describe(other.strategy)}"
        slower = other.step_s / plan.estimate.step_s - 1
        yield f"   {format_seconds(other.step_s)} (+{format_percent(slower)}), {format_bytes(other.peak_bytes)}: {other.remark}"


def _rejected(plan: Plan) -> Iterator[str]:
    if not plan.rejections:
        yield "Nothing."
    for rejection in plan.rejections:
        yield f"{rejection.count:,} x {rejection.reason}" + (f"; for example {rejection.example}" if rejection.example else "")


def _change(plan: Plan) -> Iterator[str]:
    stage, binding = fullest(plan.estimate), binding_class(plan.estimate)
    free = plan.estimate.usable_bytes - stage.peak_bytes
    yield f"{format_bytes(max(0.0, free))} are free on the fullest rank; {binding.name.replace('_', ' ')} bind first."
    faster = [lever for lever in plan.levers if lever.fits and lever.step_s < plan.estimate.step_s]
    slower = [lever for lever in plan.levers if lever.fits and lever.step_s >= plan.estimate.step_s]
    too_big = [lever for lever in plan.levers if not lever.fits and lever.step_s < plan.estimate.step_s]
    for lever in sorted(faster, key=lambda lever: lever.step_s):
        yield f"{lever.remark}: {_times(plan, lever)}, {format_bytes(lever.peak_bytes)}."
    for lever in sorted(too_big, key=lambda lever: lever.step_s):
        missing = lever.peak_bytes - plan.estimate.usable_bytes
        yield f"{lever.remark}: {_times(plan, lever)}, but needs {format_bytes(missing)} more than a device has."
    for lever in sorted(slower, key=lambda lever: lever.step_s)[:4]:
        saved = plan.estimate.peak_bytes - lever.peak_bytes
        memory = f"frees {format_bytes(saved)}" if saved > 0 else f"takes {format_bytes(-saved)} more"
        memory = "the same memory" if abs(saved) < NEGLIGIBLE_FRAC * plan.estimate.peak_bytes else memory
        yield f"{lever.remark}: {_times(plan, lever)}, {memory}."
    if not plan.levers:
        yield "No one-step change was priced."


def _times(plan: Plan, lever: Alternative) -> str:
    change = lever.step_s / plan.estimate.step_s - 1
    return f"{format_seconds(lever.step_s)} a step ({'+' if change >= 0 else '-'}{format_percent(abs(change))})"


def _proof(plan: Plan) -> Iterator[str]:
    proof = plan.proof
    if proof.status == "estimated":
        yield "Nothing was searched: this is the estimate of the given strategy."
        return
    yield f"{proof.num_candidates:,} strategies in the space, {proof.num_evaluated:,} priced in full ({proof.method})."
    if proof.status == "optimal":
        yield f"No strategy of the space is estimated below {format_seconds(proof.bound_s)}: the plan is optimal in it, as far as the estimates are true."
    else:
        yield (
            f"Stopped ({proof.status}): nothing in the space is below {format_seconds(proof.bound_s)}, the plan is at {format_seconds(proof.objective_s)} "
            f"(gap {format_percent(proof.gap_frac)})."
        )
