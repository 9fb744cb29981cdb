"""Calibration: known constants are found again from steps made with them, priors hold what the runs do not determine, a fit is applied exactly."""

from __future__ import annotations

import pytest

from costmodel.calibrate import Calibration, calibrate, calibrated, profile_text, read_profile
from costmodel.errors import InputError
from costmodel.estimate import MEMORY_CLASSES, TIME_CAUSES, Estimate, Line, StageMemory

GIB = 2.0**30


def estimate(compute=1.0, communication=0.2, hidden=0.3, bubble=0.1, tensors=20 * GIB):
    amounts = {
        "compute": compute,
        "exposed_communication": communication,
        "exposed_copy": 0.0,
        "bubble": bubble,
        "optimizer": 0.01,
        "host": 0.0,
    }
    step_s = sum(amounts.values())
    sizes = {"parameters": tensors, "framework": 2 * GIB, "communicators": 0.5 * GIB}
    peak = sum(sizes.values())
    stage = StageMemory(
        rank_index=0, classes=tuple(Line(name=name, amount=sizes.get(name, 0.0)) for name in MEMORY_CLASSES), init_peak_bytes=GIB,
        step_peak_bytes=peak, optimizer_peak_bytes=GIB, in_flight=1.0,
    )  # fmt: skip
    return Estimate(
        step_s=step_s, time=tuple(Line(name=name, amount=amounts[name]) for name in TIME_CAUSES),
        compute_by_class=(Line(name="gemm", amount=compute),), communication_by_axis=(Line(name="tp", amount=communication),),
        hidden_communication_s=hidden, tokens_per_s=1e4 / step_s, tokens_per_s_per_device=1e3 / step_s, mfu_frac=0.4, hfu_frac=0.4,
        mfu_denominator="", stages=(stage,), usable_bytes=80 * GIB, host_bytes_per_node=0.0,
    )  # fmt: skip


SPREAD = [estimate(compute=1.0 + 0.2 * i, communication=0.1 * (i % 5), hidden=1.0 * (i % 3), bubble=0.05 * (i % 4)) for i in range(20)]


def test_known_constants_are_found_again():
    truth = Calibration(engine="e", compute_frac=1.3, communication_frac=1.6, exposed_frac=0.2, overhead_s=0.002)
    found = calibrate("e", [(item, calibrated(item, truth).step_s) for item in SPREAD], [])
    assert found.compute_frac == pytest.approx(1.3, rel=0.02)
    assert found.communication_frac == pytest.approx(1.6, rel=0.05)
    assert found.exposed_frac == pytest.approx(0.2, rel=0.15)
    assert found.num_time_runs == 20
    assert found.time_worst_frac < 0.02
    assert found.memory_median_frac is None


def test_one_hung_run_does_not_move_the_fit():
    steps = [(item, 1.2 * item.step_s) for item in SPREAD]
    steps[3] = (SPREAD[3], 10.0 * SPREAD[3].step_s)
    assert calibrate("e", steps, []).compute_frac == pytest.approx(1.2, rel=0.03)


def test_without_communication_its_constants_stay_at_their_priors():
    steps = [(item, 1.2 * item.step_s) for item in (estimate(communication=0.0, hidden=0.0), estimate(2.0, 0.0, 0.0))]
    found = calibrate("e", steps, [])
    assert found.communication_frac == pytest.approx(1.0)
    assert found.exposed_frac == pytest.approx(0.03)


def test_memory_frac_and_offset():
    peaks = [(size * GIB, 2.0 * GIB, 1.08 * size * GIB + 2.5 * GIB) for size in (1.0, 2.0, 4.0, 10.0, 20.0, 40.0, 60.0)]
    found = calibrate("e", [], peaks)
    assert found.memory_frac == pytest.approx(1.08, abs=0.01)
    assert found.offset_bytes == pytest.approx(0.5 * GIB, rel=0.15)
    assert found.compute_frac == 1.0
    assert found.exposed_frac == 0.0


def test_a_calibrated_estimate_adds_up():
    before = estimate()
    after = calibrated(
        before, Calibration(engine="e", compute_frac=1.5, exposed_frac=0.1, overhead_s=0.01, memory_frac=1.1, offset_bytes=GIB)
    )
    assert sum(line.amount for line in after.time) == pytest.approx(after.step_s)
    assert sum(line.amount for line in after.communication_by_axis) == pytest.approx(0.2 + 0.03)
    assert after.tokens_per_s * after.step_s == pytest.approx(before.tokens_per_s * before.step_s)
    assert after.mfu_frac < before.mfu_frac
    assert sum(line.amount for line in after.stages[0].classes) == pytest.approx(after.stages[0].step_peak_bytes)
    assert after.peak_bytes == pytest.approx(before.peak_bytes + 0.1 * before.stages[0].allocated_bytes + GIB)
    assert after.stages[0].allocated_bytes == pytest.approx(1.1 * before.stages[0].allocated_bytes + GIB)
    assert after.notes


def test_the_neutral_calibration_changes_nothing_but_the_notes():
    before = estimate()
    after = calibrated(before, Calibration(engine="e"))
    assert (after.step_s, after.mfu_frac) == pytest.approx((before.step_s, before.mfu_frac))
    assert (after.time, after.stages) == (before.time, before.stages)


@pytest.mark.parametrize(("steps", "peaks"), [([], []), ([(estimate(), 0.0)], []), ([], [(1.0, 1.0, -1.0)])])
def test_nothing_to_fit_is_refused(steps, peaks):
    with pytest.raises(InputError):
        calibrate("e", steps, peaks)


def test_a_profile_file_is_read_back_and_others_are_refused():
    found = calibrate("e", [(item, 1.1 * item.step_s) for item in SPREAD], [])
    text = profile_text(found)
    assert read_profile(text, "p.json") == found
    for bad in ("", "[]", "{}", text.replace("autoplan/calibration", "other"), text.replace('"compute_frac": 1', '"compute_frac": -1'),
                text.replace('"engine": "e"', '"engine": 3'), text.replace('"overhead_s"', '"overhead"')):  # fmt: skip
        with pytest.raises(InputError, match=r"p\.json"):
            read_profile(bad, "p.json")
