"""Rendering: golden text, no colour when plain, colour on a terminal, nothing lost on awkward plans."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from planner.render import cluster_view, estimate_view, plan_panel, plan_text, to_text
from tests.planner import samples

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_golden_panel():
    assert plan_text(samples.plan()) == (GOLDEN / "plan.txt").read_text()


def test_str_is_the_panel():
    assert str(samples.plan()) == plan_text(samples.plan())


def test_plain_text_has_no_escapes_and_fits_its_width():
    text = plan_text(samples.plan())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_terminal_has_colour():
    stream = StringIO()
    Console(file=stream, force_terminal=True, color_system="truecolor", width=120, _environ={}).print(plan_panel(samples.plan()))
    assert "\x1b[" in stream.getvalue()


def test_markup_in_names_is_text():
    assert "[red]evil[/red]" in plan_text(replace(samples.plan(), model="[red]evil[/red]", assumptions=("[bold]x[/bold]",)))


def test_too_big_is_said():
    plan = samples.plan()
    text = plan_text(replace(plan, estimate=samples.estimate_of(2.0, 90 * samples.GIB)))
    assert "DOES NOT FIT" in text
    assert "112.5 %" in text


def test_estimate_lists_every_rank_and_the_arithmetic():
    estimate = samples.estimate_of(2.0, 60 * samples.GIB, ranks=3)
    text = to_text(estimate_view(estimate))
    assert "micro-batches in flight" in text
    assert "3 x 4" not in text
    explained = to_text(estimate_view(estimate, explained=True))
    assert "compute 1.50 s = 3 x 4" in explained
    assert "parameters 15.0 GiB = stored in bf16" in explained


def test_cluster():
    text = to_text(cluster_view(samples.cluster(2)))
    assert "8xtest*2: 16 devices" in text
    assert "bf16 1000 TFLOP/s" in text
    assert "80.0 GiB" in text
