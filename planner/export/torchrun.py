"""torchrun: a launch script, the plan, and a training script that hands the plan to this project's own runtime.

The runtime obeys the plan itself, so nothing is translated and nothing is lost when the plan was made for the engine "torch". A plan that uses
what that engine cannot run (see costmodel.engine) is refused here rather than at launch.
"""

from __future__ import annotations

import json

from costmodel.engine import engine
from costmodel.errors import InputError
from planner.codec import plan_to_json
from planner.export.facts import comment, common_losses, header, ranks, script, torchrun
from planner.export.result import Exported
from planner.plan import Plan

LAUNCHER = "torchrun of torch 2.13"

_SCRIPT = '''"""Train under the plan beside this file; launch.sh starts every rank here. Arguments: [model], then those of `python -m runtime.launch`.

The model is `package.module:function`, importable from the working directory; the function takes no arguments and returns the nn.Module.
"""

import sys
from pathlib import Path

from runtime.launch import main

MODEL = {model}

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if MODEL and not (arguments and ":" in arguments[0]):
        arguments.insert(0, MODEL)
    sys.exit(main([str(Path(__file__).with_name("plan.json")), *arguments]))
'''


def export_torchrun(plan: Plan) -> Exported:
    """launch.sh, train.py and plan.json for `torchrun`. CPU ranks get one thread each and gloo, GPU ranks nccl (the runtime chooses by device).

    Raises InputError when the runtime cannot execute the plan's strategy.
    """
    _refuse_what_runtime_cannot_do(plan)
    model = plan.model if ":" in plan.model else ""
    losses = common_losses(plan, engine="torch")
    environment = (("OMP_NUM_THREADS", "1"),) if plan.cluster.pool.device.kind == "cpu" else ()
    command = "bash launch.sh --steps 20" if model else "bash launch.sh package.module:build_model --steps 20"
    top = header(plan, launcher=LAUNCHER, losses=losses, environment=environment, command=command)
    launch = script(top, environment, torchrun(ranks(plan), '"$here/train.py" "$@"'))
    files = (
        ("launch.sh", launch),
        ("train.py", comment(top) + _SCRIPT.format(model=json.dumps(model))),
        ("plan.json", plan_to_json(plan)),
    )
    return Exported(target="torchrun", files=files, losses=losses, command=command)


def _refuse_what_runtime_cannot_do(plan: Plan) -> None:
    facts, strategy = engine("torch"), plan.strategy
    checks = (
        ("zero_stage", strategy.zero_stage, strategy.zero_stage in facts.zero_stages),
        ("schedule", strategy.schedule, strategy.schedule in ("none", *facts.schedules)),
        ("recompute", strategy.recompute, strategy.recompute in facts.recompute),
        ("mesh.cp", strategy.mesh.cp, strategy.mesh.cp == 1 or facts.supports_cp),
        ("mesh.ep", strategy.mesh.ep, strategy.mesh.ep == 1 or facts.supports_ep),
    )
    for field, value, supported in checks:
        if not supported:
            raise InputError(
                f"{value} is not something the torch runtime can do", where=f"Plan.strategy.{field}", remedy="plan for --engine torch"
            )
