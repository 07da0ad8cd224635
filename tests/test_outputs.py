"""On a real model every text of positive weight satisfies its constraint by Python's own means, however it was drawn.

``benchmarks/outputs.py`` does the same with many more texts.
"""

import math

import pytest
from output_tasks import tasks

import smcdecode as smc

NAMES = [task.name for task in tasks()]


def proposal(p, kind):
    """The draft is the target's own first layers, and hot: most of what it writes is redrawn."""
    if kind == "draft":
        return smc.Draft(smc.LayerSkip(p, layers=6), block=2, temperature=1.2, strictness=0.3)
    return smc.Local(check=kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "auto") for name in NAMES]
    + [(name, "draft") for name in ("phone", "sql", "flags", "no u sql", "after", "between")]
    + [(name, "rejection") for name in ("date", "flags", "between")],
)
def test_outputs_satisfy_their_constraint(demo_model, name, kind):
    task = next(task for task in tasks() if task.name == name)
    method = smc.SMC(proposal(demo_model, kind), particles=4)
    out = smc.sample(demo_model * task.psi, task.prompt, method=method, max_tokens=task.max_tokens, seed=0)
    assert [text for text in out.distribution() if not task.good(text)] == []
    assert out.alive or out.log_z == -math.inf
    assert out.log_z < 0 or name == "between"  # log p(x ∈ L), estimated


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_can_say_no(name):
    task = next(task for task in tasks() if task.name == name)
    assert not task.good("(1999")
