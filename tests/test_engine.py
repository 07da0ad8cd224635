"""The engine on tiny random transformers: pages, packing, waiting and resampling change no law and no text."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from constraints import NoStutter, log_psi
from engines import EOS, assert_empty, exact_answer, finish, law_of, lm, outcomes_of, scheduler_of
from stats import assert_frequencies, assert_mean

import smcdecode as smc
from smcdecode.engine.cache import bytes_per_page
from smcdecode.errors import PotentialError

V, CAP, PROMPT = 5, 4, (2, 3, 4, 0, 2, 2, 3)
RUNS, COMMON = 400, 0.08
P_MODULE, P = lm("llama")
_, Q = lm("qwen2", seed=1, spread=0.1)
PAIRS = {"llama": (P_MODULE, P), "gemma3": lm("gemma3", seed=3)}


def no_zero_twice(x):
    return -0.8 * sum(t == 0 for t in x)


TARGETS = {
    "plain": (lambda p: p.as_target(), {}, lambda x: 0.0),
    "power": (lambda p: p**2, {"alpha": 2.0}, lambda x: 0.0),
    "truncated": (lambda p: p.at(temperature=0.7, top_k=3), {"temperature": 0.7, "top_k": 3}, lambda x: 0.0),
    "mask": (lambda p: p * NoStutter(), {}, log_psi(NoStutter())),
    "product": (
        lambda p: p**1.5 * smc.potential(no_zero_twice, on="tokens") * NoStutter(),
        {"alpha": 1.5},
        lambda x: no_zero_twice(x) + log_psi(NoStutter())(x),
    ),
}
CASES = [  # target, model, block (0: Local), strictness, page size, bridge
    ("plain", "llama", 0, 0.0, 3, 0),
    ("plain", "gemma3", 3, 0.0, 4, 0),
    ("plain", "llama", 3, 0.7, 3, 0),
    ("power", "llama", 0, 0.0, 1, 2),
    ("power", "llama", 1, 0.0, 2, 2),
    ("power", "gemma3", 3, 0.3, 1, 3),
    ("power", "llama", 3, 1.0, 3, 0),
    ("truncated", "llama", 3, 0.0, 1, 0),
    ("truncated", "llama", 1, 0.3, 3, 0),
    ("mask", "llama", 0, 0.0, 3, 0),
    ("mask", "gemma3", 3, 0.0, 3, 0),
    ("mask", "llama", 3, 0.7, 4, 0),
    ("product", "llama", 1, 0.7, 3, 2),
    ("product", "llama", 3, 1.0, 1, 1),
]


def proposal(block, strictness):
    return smc.Draft(Q, block=block, strictness=strictness) if block else smc.Local()


def events(x):
    return [
        1.0,
        *(x[0] == v for v in range(V)),
        *(x[-1] == v for v in range(V)),
        *(len(x) == n for n in range(1, CAP + 1)),
    ]


@pytest.mark.parametrize(("target", "model", "block", "strictness", "page_size", "bridge"), CASES)
def test_evidence_and_posterior_are_unbiased(target, model, block, strictness, page_size, bridge):
    module, p = PAIRS[model]
    make, law, psi = TARGETS[target]
    exact = exact_answer(module, PROMPT, psi, vocab=V, max_tokens=CAP, **law)
    table = np.array([events(x) for x in exact.sequences], dtype=float)
    table = table[:, exact.probabilities @ table > COMMON]
    method = smc.SMC(proposal(block, strictness), particles=4, threshold=0.8, bridge=bridge)
    outcomes = outcomes_of(make(p), method, [PROMPT] * RUNS, max_tokens=CAP, page_size=page_size)
    mass = np.zeros((RUNS, len(exact.sequences)))
    for row, outcome in zip(mass, outcomes, strict=True):
        log_w = outcome.log_w - outcome.log_w.logsumexp(0) + outcome.log_z
        for tokens, weight in zip(outcome.tokens, log_w.exp().nan_to_num().tolist(), strict=True):
            if weight > 0:
                row[exact.index[tuple(tokens)]] += weight
    assert_mean(mass @ table, np.exp(exact.log_gamma) @ table)


# ---- company


LONG = [tuple(int(t) for t in np.random.default_rng(n).integers(2, V, n)) for n in (1, 40, 7, 90, 3, 17, 2, 61)]


def texts(outcomes):
    return [(o.request.prompt.tokens, o.tokens, [round(w, 4) for w in o.log_w.tolist()]) for o in outcomes]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("strictness", [0.0, 0.3])
def test_prompts_that_wait_get_the_texts_they_get_alone(strictness, page_size):
    target = P**1.5 * NoStutter()
    method = smc.SMC(proposal(3, strictness), particles=4, threshold=0.9)
    options = {"max_tokens": 12, "page_size": page_size, "seed": 5}
    alone = [texts(outcomes_of(target, method, [prompt], **options))[0] for prompt in LONG]
    page = sum(bytes_per_page(m.layout, page_size) for m in (P, Q))
    scheduler = scheduler_of(target, method, LONG, memory=page * (150 // page_size) + 20_000, **options)
    admitted = []
    admit = scheduler._admit
    scheduler._admit = lambda: (admit(), admitted.append(scheduler.running))[0]
    assert texts(finish(scheduler)) == alone
    assert 1 <= max(admitted) < len(LONG), "the budget was to force waiting"
    assert scheduler.stats.pages_peak <= scheduler.stores.pool.size
    backwards = outcomes_of(target, method, LONG[::-1], **options)
    assert texts(backwards[::-1]) == alone


def test_two_occurrences_of_a_prompt_differ_and_a_seed_repeats():
    run = lambda seed: [o.tokens for o in outcomes_of(P, smc.SMC(), [PROMPT] * 2, max_tokens=12, seed=seed)]  # noqa: E731
    first, second = run(1)
    assert first != second
    assert run(1) == [first, second]
    assert run(2) != [first, second]


# ---- greedy


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_a_greedy_target_writes_what_transformers_writes(family):
    module, p = lm(family, vocab=12, seed=7, spread=0.3)
    _, q = lm("llama", vocab=12, seed=8, spread=0.3)
    prompts, n = [(2, 3, 4), (5, 6, 7, 8, 9, 10, 11, 2), (11,)], 24
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = module.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0
        )
        expected.append(whole[0, len(prompt) :].tolist())
    greedy = p.at(temperature=0)
    for method in (
        smc.Autoregressive(samples=2),
        smc.SMC(smc.Draft(q, block=3, strictness=1), particles=2),
        smc.SMC(smc.Draft(q, block=4, strictness=0.4, temperature=1.0), particles=2),
    ):
        outcomes = outcomes_of(greedy, method, prompts, max_tokens=n, page_size=4)
        assert [o.tokens for o in outcomes] == [[x, x] for x in expected]
        assert all(o.log_z == 0.0 for o in outcomes) or method.proposal.strictness < 1


# ---- what resampling costs


ALWAYS = {"particles": 6, "threshold": 1.0, "resampling": "multinomial"}


def restless(x):
    return 2.0 * (sum(x) % 2)


def moved_and_allowed(strictness, page_size, block=3):
    target = P * smc.potential(restless, on="tokens")
    scheduler = scheduler_of(
        target, smc.SMC(proposal(block, strictness), **ALWAYS), LONG[:3], max_tokens=30, page_size=page_size
    )  # fmt: skip
    outcomes = finish(scheduler)
    copies = sum(sum(a != i for i, a in enumerate(c.ancestors)) for o in outcomes for c in o.cycles if c.resampled)
    models = (P, Q) if block else (P,)
    return scheduler.stats.bytes_moved, copies * sum(bytes_per_page(m.layout, page_size) for m in models)


@pytest.mark.parametrize(("strictness", "page_size"), [(0.0, 1), (0.3, 1), (1.0, 1), (0.0, 4)])
def test_resampling_moves_no_byte(strictness, page_size):
    moved, allowed = moved_and_allowed(strictness, page_size)
    assert allowed > 0, "nothing was resampled"
    assert moved == 0


@pytest.mark.parametrize(("strictness", "page_size"), [(0.0, 3), (0.3, 4), (1.0, 8)])
def test_otherwise_it_moves_at_most_one_page_a_duplicate(strictness, page_size):
    moved, allowed = moved_and_allowed(strictness, page_size)
    assert 0 < moved <= allowed


def test_a_cycle_is_k_draft_passes_and_one_target_pass():
    _, p = lm("llama", ends=False)
    _, q = lm("qwen2", seed=1, spread=0.1, ends=False)
    N, K, cycles = 3, 3, 5
    method = smc.SMC(smc.Draft(q, block=K, strictness=0), particles=N, threshold=0.5)
    scheduler = scheduler_of(p, method, [PROMPT], max_tokens=1 + cycles * (K + 1))
    [outcome] = finish(scheduler)
    stats = scheduler.stats
    assert {len(x) for x in outcome.tokens} == {1 + cycles * (K + 1)}
    assert stats.draft_passes == 1 + K * cycles  # the first is the prompt's
    assert stats.target_passes == 1 + cycles
    assert stats.target_positions == len(PROMPT) + N * cycles * (K + 1)
    # of every block but the first the draft's first pass takes two tokens: the last drafted one, and the bonus
    assert stats.draft_positions == len(PROMPT) + N * (K + (cycles - 1) * (K + 1))


# ---- endings


def test_strictness_one_on_a_plain_target_carries_no_weight():
    for outcome in outcomes_of(P, smc.SMC(smc.Draft(Q, block=3, strictness=1), particles=5), LONG, max_tokens=20):
        assert outcome.log_z == 0.0
        assert outcome.log_w.tolist() == [0.0] * 5


class Bomb(smc.BasePotential):
    """Goes off when a continuation reaches a length."""

    def __init__(self, error, at):
        self.error, self.at = error, at

    def log_psi(self, states, complete):
        if max(map(len, states)) >= self.at:
            raise self.error
        return [0.1 * sum(ids) for ids in states]


class MaskBomb(Bomb, NoStutter):
    """The same while a block is being drafted: pages are taken, nothing is written yet."""

    def __init__(self, error, at):
        Bomb.__init__(self, error, at)
        self.least, self.given = 1, 0

    def log_psi(self, states, complete):
        return NoStutter.log_psi(self, states, complete)

    def mask(self, states):
        Bomb.log_psi(self, states, [])
        return NoStutter.mask(self, states)


@pytest.mark.parametrize("proposal", [smc.Draft(Q, block=3, strictness=0.3), smc.Local(ahead=3)])
@pytest.mark.parametrize("bomb", [Bomb, MaskBomb])
@pytest.mark.parametrize(
    ("error", "seen"), [(ValueError("boom"), PotentialError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
@pytest.mark.parametrize("page_size", [1, 3])
def test_an_error_in_a_potential_leaves_no_page_behind(proposal, bomb, error, seen, page_size):
    target = P * bomb(error, 6)
    method = smc.SMC(proposal, particles=4, threshold=1.0)
    scheduler = scheduler_of(target, method, LONG, max_tokens=12, page_size=page_size)
    with pytest.raises(seen):
        list(scheduler.run())
    assert scheduler.stores.pool.peak > 0
    assert_empty(scheduler)


def test_a_consumer_that_stops_listening_leaves_no_page_behind():
    scheduler = scheduler_of(P, smc.SMC(), LONG, max_tokens=12)
    run = scheduler.run()
    next(run)
    run.close()
    assert_empty(scheduler)


# ---- independence


def test_first_tokens_of_particles_are_independent():
    runs = 2000
    outcomes = outcomes_of(P, smc.Autoregressive(samples=2), [PROMPT] * runs, max_tokens=1)
    pairs = Counter((a[0], b[0]) for a, b in (o.tokens for o in outcomes))
    law = np.exp(law_of(P_MODULE, PROMPT)(()))
    assert_frequencies([pairs[a, b] for a in range(V) for b in range(V)], np.outer(law, law).ravel())


def test_copies_of_one_ancestor_draw_their_next_tokens_independently():
    target = P * smc.potential(lambda x: 3.0 * (x[:1] == (2,)), on="tokens", name="first is 2")
    method = smc.SMC(smc.Local(), particles=2, threshold=1.0, resampling="multinomial")
    outcomes = outcomes_of(target, method, [PROMPT] * 2000, max_tokens=2)
    pairs = Counter()
    for outcome in outcomes:
        copied = len(set(outcome.cycles[1].ancestors)) == 1 if len(outcome.cycles) > 1 else False
        if copied and outcome.tokens[0][0] == 2:
            pairs[tuple(x[1] for x in outcome.tokens)] += 1
    assert sum(pairs.values()) > 200
    law = np.exp(law_of(P_MODULE, PROMPT)((2,)))
    assert_frequencies([pairs[a, b] for a in range(V) for b in range(V)], np.outer(law, law).ravel())


def test_a_mask_is_asked_for_and_spares_the_dead():
    constraint = NoStutter()
    outcomes = outcomes_of(P * constraint, smc.SMC(proposal(3, 0.0), particles=4), LONG, max_tokens=12)
    assert constraint.given > 0
    assert all(constraint.good([t for t in x if t != EOS], True) for o in outcomes for x in o.tokens)
    assert not any(o.deaths for o in outcomes)


def test_uneven_prompts_share_no_page():
    scheduler = scheduler_of(P, smc.SMC(proposal(3, 0.3), particles=4, threshold=1.0), LONG, max_tokens=12, page_size=3)
    step = iter(scheduler.run())
    next(step)
    next(step)
    [group] = scheduler.groups
    held = [set(prefix.tolist()) for prefix in group.engine.slots.prefix]
    rows = group.engine.slots.table.rows.view(len(LONG), -1)
    held += [set(row.tolist()) - {0} for row in rows]
    assert sum(map(len, held)) == len(set().union(*held))
    step.close()
    assert dataclasses.asdict(scheduler.stats)["pages_peak"] > 0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("guessed", "length"), [(False, 3), (True, 3), (True, 70)])
def test_keys_and_values_follow_their_text_where_particles_of_unlike_length_take_over_from_each_other(
    guessed, length, page_size
):
    """The draft's tokens or guessed ones; these with a prompt that is read along, of one piece and of two."""
    (module, p), (_, q) = (lm("llama", vocab=11, seed=seed, spread=0.5, ends=False) for seed in (0, 1))
    prompt = (3, 4, 5) * length
    prompt = prompt[:length]
    law = law_of(module, prompt)
    proposal = smc.Local(ahead=3) if guessed else smc.Draft(q, block=3, strictness=0.5)
    method = smc.SMC(proposal, particles=4, threshold=1.0)
    target = p * NoStutter(least=0) if guessed else p.as_target()
    for seed in range(3):
        [outcome] = outcomes_of(target, method, [prompt], max_tokens=16, seed=seed, page_size=page_size)
        exact = [sum(law(tuple(x[:i]))[token] for i, token in enumerate(x)) for x in outcome.tokens]
        torch.testing.assert_close(outcome.log_p, torch.tensor(exact), rtol=1e-4, atol=1e-4)
