"""A plan file with any one value deleted or replaced is refused with its place, or still explains, prints and saves itself."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from planner.codec import plan_from_json, plan_to_json
from planner.explain import explain
from planner.render import plan_text
from tests.planner import samples

DOCUMENT = json.loads(plan_to_json(samples.plan()))
VALUES = (None, 0, -1, 1, 3, 7, 1e308, -1.5, 0.5, "", "x", "1f1b", True, False, [], {}, [1], 10**30, "\0", [["a", "b"]])


def places(part, path=()):
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def changed(path, *value):
    document = copy.deepcopy(DOCUMENT)
    part = document
    for key in path[:-1]:
        part = part[key]
    if value:
        part[path[-1]] = value[0]
    else:
        del part[path[-1]]
    return json.dumps(document)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(sorted(places(DOCUMENT), key=str)), value=st.sampled_from(((), *((value,) for value in VALUES))))
def test_one_fault_is_an_error_or_a_plan(path, value):
    try:
        plan = plan_from_json(changed(path, *value), "plan.json")
    except InputError as error:
        assert str(error).startswith("plan.json")  # noqa: PT017  (acceptance is as good)
        return
    assert explain(plan)
    assert plan_text(plan)
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(
    "path",
    [("estimate", "stages", 0, "classes"), ("stages", 0, "layer_paths"), ("estimate", "usable_bytes"), ("estimate", "step_s"), ("memory_risk",)],
)  # fmt: skip
@pytest.mark.parametrize("value", [[], 0])
def test_what_nothing_can_be_computed_from(path, value):
    with pytest.raises(InputError, match=str(path[-1])):
        plan_from_json(changed(path, value), "plan.json")
