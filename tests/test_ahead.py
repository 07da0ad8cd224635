"""Tokens guessed ahead under a constraint: the same law in fewer passes. The law itself: test_constraints_master."""

import numpy as np
import pytest
import torch
from constraints import NoStutter
from test_master import CAP, PROMPT, N, V, assert_unbiased, oracle, p, runs_of

import smcdecode as smc
from smcdecode.engine import ahead
from smcdecode.engine.ahead import FEW, few_allowed
from smcdecode.engine.habits import Guess, Habits, Pieces
from smcdecode_kernels.reference import pack_bits

GUESSING = smc.SMC(smc.Local(ahead=4), particles=N)
PLAIN = smc.SMC(smc.Local(), particles=N)


@pytest.mark.parametrize("size", [1, 31, 40, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_few_allowed_tokens_are_listed(size, share):
    mask = torch.rand(1, size, generator=torch.Generator().manual_seed(size)) < share
    tokens = mask[0].nonzero()[:, 0].tolist()
    found = few_allowed(pack_bits(mask)[0].numpy().tobytes(), size)
    assert found == (tuple(tokens) if len(tokens) <= FEW else None)
    everything = np.full(-(-size // 32), -1, dtype=np.int32)  # bits beyond the vocabulary mean nothing
    assert few_allowed(everything.tobytes(), size) == (tuple(range(size)) if size <= FEW else None)


IDS = Pieces(None)


def learn(habits, text, allowed, law):
    habits.learn(Guess(text, allowed, habits.law(text, allowed)), np.array(law))


def test_habits_are_laws_that_lean_to_what_was_seen():
    habits = Habits([5, 6, 7, 5, 6], IDS)
    q = habits.law([5, 6], (6, 7, 8))
    assert q.sum() == pytest.approx(1) and (q > 0).all() and q.argmax() == 1  # 7 came behind 5, 6
    assert habits.law([9], (1, 2)).tolist() == [0.5, 0.5]
    for _ in range(5):
        learn(habits, [9], (1, 2), [0.1, 0.9])
    assert habits.law([9], (1, 2))[1] > 0.8
    assert habits.law([8], (1, 2))[1] > 0.7  # the same choice behind another text
    assert habits.law([9], (2,)).tolist() == [1.0]


def test_words_are_guessed_whole():
    pieces = Pieces([b"S", b"SE", b"SELECT", b"1", b"12", b"2", b"SE"])
    assert pieces.law((3, 5)).tolist() == [0.5, 0.5]
    q = pieces.law((0, 1, 2))
    assert q.argmax() == 2 and q[2] > 0.9 and q.sum() == pytest.approx(1) and (q > 0).all()
    assert pieces.law((1, 6)).tolist() == [0.5, 0.5], "two ids of the same bytes"
    assert pieces.law((0, 3, 4, 5)).argsort().tolist()[0] == 1  # 12 goes on from 1
    habits = Habits([], pieces)
    assert habits.kept((0, 1, 2)) > 0.9 > 0.8 > habits.kept((3, 5))
    for _ in range(3):
        learn(habits, [], (0, 1, 2), [0.9, 0.05, 0.05])
    assert habits.law([], (0, 1, 2)).argmax() == 0, "what the target did says more"


def test_habits_know_how_often_they_are_right():
    habits = Habits([], IDS)
    assert habits.kept((4,)) == 1 and habits.kept((4, 5)) == pytest.approx(0.5**0.5)
    learn(habits, [1], (4, 5), [1.0, 0.0])
    assert habits.kept((4, 5)) == pytest.approx((0.5**0.5 + 0.5) / 2)  # its guess was uniform: half of it was right
    for _ in range(20):
        learn(habits, [1], (4, 5), [1.0, 0.0])
    assert habits.kept((4, 5)) > 0.75
    for _ in range(40):
        learn(habits, [1], (6, 7), [0.0, 1.0])
        learn(habits, [1], (6, 7), [1.0, 0.0])
    assert 0.4 < habits.kept((6, 7)) < 0.7  # a coin that it cannot foresee


def test_rows_without_hope_are_not_written(monkeypatch):
    def positions(hope):
        monkeypatch.setattr(ahead, "_HOPE", hope)
        return runs_of(p * NoStutter(), GUESSING, runs=20)[0].stats.target_positions

    assert positions(0.0) > positions(0.5) > positions(1.0)


def alone(method, seed):
    run = {"method": method, "max_tokens": CAP, "seed": seed, "progress": False}
    return smc.sample(p * NoStutter(), [list(PROMPT)], **run)[0]


def test_passes_are_saved():
    passes = [sum(alone(method, seed).stats.target_passes for seed in range(10)) for method in (GUESSING, PLAIN)]
    assert passes[0] < 0.8 * passes[1]


def test_a_short_prompt_is_read_along_with_the_first_guesses():
    short, long = smc.sample(
        p * NoStutter(), [list(PROMPT), [0] * 300], method=GUESSING, max_tokens=CAP, seed=1, progress=False
    )
    assert "prefill" in long.stats.seconds
    assert "prefill" not in alone(GUESSING, 0).stats.seconds
    assert alone(GUESSING, 0).stats.prompt_tokens_read == len(PROMPT)
    assert len(short.tokens) == N


def test_texts_stay_their_own():
    """A request's answer is the same whatever else is in the batch: what is learnt is its own."""
    company = runs_of(p * NoStutter(), GUESSING, runs=20)[0]
    assert company.stats.acceptance > 0.5
    assert (alone(GUESSING, 0).tokens, alone(GUESSING, 0).log_z) == (company.tokens, company.log_z)


def test_a_wrong_law_of_guesses_is_seen(monkeypatch):
    """Drawn from one law, judged by another."""
    fill = ahead._fill

    def misreported(block, rows):
        fill(block, rows)
        if block.laws is not None:
            block.laws = block.laws.masked_fill(block.columns == 0, -5.0)

    assert_unbiased(runs_of(p * NoStutter(), GUESSING), oracle("mask"))
    monkeypatch.setattr(ahead, "_fill", misreported)
    with pytest.raises(AssertionError, match="differs from"):
        assert_unbiased(runs_of(p * NoStutter(), GUESSING), oracle("mask"))


def test_nothing_is_guessed_without_masks_or_beside_checks():
    predicate = smc.Predicate(lambda text: True, on="text", name="anything")
    for target in (p.as_target(), p * NoStutter() * smc.potential(lambda ids: 0.0, on="tokens") * predicate):
        assert np.isnan(runs_of(target, GUESSING, runs=1)[0].stats.acceptance)
    assert V <= FEW


@pytest.mark.parametrize("most", [-1, 2.0])
def test_nonsense_is_refused(most):
    with pytest.raises(smc.InvalidOption, match="ahead must be a number of tokens"):
        smc.Local(ahead=most)
