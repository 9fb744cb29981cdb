"""What the search proposes for engine torch runs, whatever the family; what cannot run is not proposed, and the reason is said. Both doors."""

from __future__ import annotations

import pytest

from costmodel.errors import InfeasibleError
from planner import Job, autoplan, codec
from tests.runtime.families import build, config

pytestmark = pytest.mark.dist

JOB = Job(global_batch=8, seq_len=16, precision="fp32")
FIXES = ("tp=2,sp=false", "tp=2,sp=true", "pp=2", "zero=3")
REFUSED = {
    "gpt2": {"tp=2,sp=false": "Conv1D", "tp=2,sp=true": "Conv1D"},
    "phi3": {"tp=2,sp=false": "several projections", "tp=2,sp=true": "several projections"},
    "mixtral": {"tp=2,sp=false": "a parameter|one parameter", "tp=2,sp=true": "a parameter|one parameter"},
    "one kv head": {"tp=2,sp=false": "k_proj|kv_heads", "tp=2,sp=true": "k_proj|kv_heads"},
    "olmo2": {"tp=2,sp=true": "restrictions"},
    "bert": {},
}


def planned(family: str, door: str, fix: str) -> object:
    model = build(family) if door == "module" else config(family)
    return autoplan(model, "local-cpu:2", JOB, fix=fix)


@pytest.mark.parametrize("door", ["config", "module"])
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_run_is_not_proposed(family, door):
    for fix, reason in REFUSED[family].items():
        with pytest.raises(InfeasibleError, match=reason):
            planned(family, door, fix)


@pytest.mark.parametrize("door", ["config", "module"])
@pytest.mark.parametrize("family", REFUSED)
def test_what_is_proposed_runs(pool, family, door):
    fixes = [fix for fix in FIXES if fix not in REFUSED[family]]
    plans = [codec.plan_to_json(planned(family, door, fix)) for fix in fixes]
    result = pool.run("tests.runtime.families:errors", ranks=2, family=family, plans=plans)[0]
    assert max(result) < 1e-4, dict(zip(fixes, result, strict=True))
