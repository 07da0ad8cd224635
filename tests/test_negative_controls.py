"""The master test must see mistakes: each control plants one into the engine and wants the assertion to fail."""

import numpy as np
import pytest
import torch
from test_master import TARGETS, assert_unbiased, method_of, oracle, runs_of

from smcdecode.engine import drafting, judging
from smcdecode.engine.drafting import Drafter
from smcdecode.engine.draw import proposal_law
from smcdecode.engine.judging import Judge
from smcdecode.engine.slots import Slots


def forget_finished(monkeypatch):
    """A resampled slot keeps its own finished flag, unless it stands at the cap or is dead (or it would run on)."""
    select = Slots.select

    def forgetful(self, ancestors):
        before = self.finished.clone()
        select(self, ancestors)
        self.finished = before | self.dead | torch.from_numpy(self.left(torch.arange(len(before))) == 0)

    monkeypatch.setattr(Slots, "select", forgetful)


def scale_log_q(monkeypatch):
    """The density of drafted tokens is counted at nine tenths."""
    token = Drafter._token

    def scaled(self, block, going, k, logits):
        going = token(self, block, going, k, logits)
        block.log_q[:, k] *= 0.9
        return going

    monkeypatch.setattr(Drafter, "_token", scaled)


def unmasked_log_q(monkeypatch):
    """Tokens are drawn under the mask, but weighed as if it had not been there."""
    token = Drafter._token

    def unmasked(self, block, going, k, logits):
        behind = token(self, block, going, k, logits)
        law = proposal_law(logits, self.spec, going.heat, None).log_softmax(-1)
        block.log_q[going.at, k] = law.gather(-1, block.tokens[going.at, k, None])[:, 0].double()
        return behind

    monkeypatch.setattr(drafting.Drafter, "_token", unmasked)


def drop_bonus_log_z(monkeypatch):
    """The bonus token's log Z stays out of the weight; at strictness 0 the drafted positions' cancels anyway."""
    local_law = judging.local_law

    def without(*args):
        law, log_z = local_law(*args)
        return law, torch.zeros_like(log_z)

    monkeypatch.setattr(judging, "local_law", without)


def omit_refused_weight(monkeypatch):
    """A redrawn token carries no weight."""
    strict = Judge._strict

    def omitting(self, *args):
        ratio, refuse = strict(self, *args)
        return np.where(refuse, 0.0, ratio), refuse

    monkeypatch.setattr(Judge, "_strict", omitting)


CONTROLS = [
    (forget_finished, "twist", ("good", 1, 0.0, "systematic", 1.0)),
    (scale_log_q, "plain", ("good", 3, 0.0, "systematic", 0.5)),
    (unmasked_log_q, "mask", ("good", 3, 0.0, "systematic", 0.5)),
    (drop_bonus_log_z, "power 2", ("good", 1, 0.0, "systematic", 0.5)),
    (omit_refused_weight, "plain", ("bad", 3, 0.7, "systematic", 0.5)),
]


@pytest.mark.parametrize(("plant", "target", "method"), CONTROLS, ids=[plant.__name__ for plant, _, _ in CONTROLS])
def test_a_planted_mistake_is_seen(plant, target, method, monkeypatch):
    exact, method = oracle(target), method_of(*method)
    assert_unbiased(runs_of(TARGETS[target][0], method), exact)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"differs from|is no complete sequence"):
        assert_unbiased(runs_of(TARGETS[target][0], method), exact)
