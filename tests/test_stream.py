"""A stream's pieces together are the answer, none is taken back, and each comes as soon as nothing can change it."""

import gc
import itertools
import math

import pytest
import torch
from constraints import DeadEnds
from hypothesis import given
from hypothesis import strategies as st
from table import TableLM, random_table
from test_master import EOS, PROMPT, TARGETS, p, vowels

import smcdecode as smc
from smcdecode.infer.settled import settled
from smcdecode.potentials.stops import Stops
from smcdecode.potentials.vocabulary import Vocabulary
from smcdecode.report.pieces import Delay, Pieces
from smcdecode.sample import Call
from smcdecode.stream import Stream, news_of

q = TableLM(random_table(3, 4, floor=0.5), eos=[EOS], name="q")
ENDLESS = TableLM(p.table, name="endless")
DRAFT = smc.Draft(q, block=3, strictness=0.2)
CASES = {
    "one chain": (p, smc.Autoregressive()),
    "several samples": (p, smc.Autoregressive(samples=3)),
    "speculative": (p, smc.Speculative(q, block=3)),
    "many chains": (p, smc.MultiDraft(q, block=3, chains=3)),
    "power": (p**2, smc.SMC(DRAFT, 4)),
    "every uneven weight": (p * smc.Reward(vowels, prefix=vowels), smc.SMC(smc.Local(), 4, threshold=1.0)),
    "never": (p**2, smc.SMC(DRAFT, 4, threshold=0.0)),
    "deaths": (p * DeadEnds(), smc.SMC(DRAFT, 6)),
    "masks": (TARGETS["power and mask"][0], smc.SMC(smc.Local(), 4)),
    "checks": (p * smc.Predicate(lambda text: "ab" not in text, on="text"), smc.SMC(smc.Local(), 4)),
}


def stream(target, method, seed=0, **options):
    return smc.stream(target, list(PROMPT), method=method, seed=seed, **{"max_tokens": 10, **options})


def check(target, method, seed, stop):
    pieces = stream(target, method, seed, stop=stop)
    try:
        text = "".join(pieces)
    except smc.NoSurvivors:
        assert pieces.posterior.log_z == -math.inf
    else:
        assert text == pieces.posterior.text
    return pieces.posterior


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop", [(), ("ca", "b")])
def test_pieces_together_are_the_answer(case, stop):
    target, method = CASES[case]
    for seed in range(8):
        check(target, method, seed, stop)
    streamed = check(target, method, 8, stop)
    out = smc.sample(target, list(PROMPT), method=method, max_tokens=10, seed=8, stop=stop, progress=False)
    assert (streamed.tokens, streamed.log_w) == (out.tokens, out.log_w)
    assert sum(stream(target, method, 8, stop=stop, on="tokens"), ()) == out.sample(on="tokens")


def test_pieces_together_are_the_answer_for_many_seeds():
    for seed in range(200):
        check(p**2, smc.SMC(DRAFT, 4), seed, ())


def shared(rows):
    """The common prefix of some lists, empty of none."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in columns]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.booleans()), min_size=1, max_size=4))
def test_the_settled_tokens_are_those_that_all_the_living_share(rows):
    tokens = torch.tensor([[*x, *[0] * (5 - len(x))] for x, _ in rows])
    lengths, alive = torch.tensor([len(x) for x, _ in rows]), torch.tensor([lives for _, lives in rows])
    assert settled(tokens, lengths, alive).tolist() == shared([x for x, lives in rows if lives])


def call_of(target, prompt, method, **options):
    options = {"max_tokens": 30, "seed": 1, "page_size": 1, **options}
    return Call.of(target, [prompt], method=method, stop=(), memory=1 << 20, **options)


def test_nothing_is_withheld_that_could_not_change():
    """Every cycle the settled tokens are those that the living share, the bonus token just drawn included."""
    call = call_of(ENDLESS**2, [0], smc.SMC(smc.Local(), 3, threshold=1.0))
    seen = []
    for _ in call.scheduler.run():
        slots = call.scheduler.groups[0].engine.slots
        for _, tokens in call.scheduler.settled():
            assert tokens == shared(
                [slots.tokens[i, : slots.length[i]].tolist() for i in range(3) if not slots.dead[i]]
            )
            assert tokens[: len(seen)] == seen
            seen = tokens
    assert len(seen) > 5


def test_a_single_chain_waits_for_nothing_and_particles_do():
    single = stream(ENDLESS, smc.Autoregressive(), on="tokens")
    assert [len(piece) for piece in single] == [1] * 10
    assert (single.delay.mean, single.delay.most) == (0.0, 0)
    many = stream(p**2, smc.SMC(DRAFT, 8), seed=1)
    list(many)
    assert many.delay.most >= many.delay.mean > 0


def test_delay_counts_tokens_written_since():
    delay = Delay()
    assert math.isnan(delay.mean)
    for longest, final in ((3, 0), (6, 1), (5, 4), (9, 9)):
        delay.observe(longest, final)
    # written when the longest had 3 3 3 6 6 6 9 9 9; final when it had had 6 6 6 6 9 9 9 9 9
    assert delay.mean == (3 + 3 + 3 + 0 + 3 + 3 + 0 + 0 + 0) / 9
    assert delay.most == 3


@pytest.mark.parametrize("leave", ["close", "with", "forget"])
def test_a_consumer_that_leaves_early_frees_the_pages(leave):
    call = call_of(ENDLESS, [0, 1, 2], smc.SMC(DRAFT, 4), page_size=4)
    pool, pieces = call.scheduler.stores.pool, Stream(news_of(call), Pieces(p.vocabulary))
    del call
    if leave == "with":
        with pieces:
            next(pieces)
            assert pool.used > 0
    else:
        next(pieces)
        assert pool.used > 0
    if leave == "close":
        pieces.close()
    if leave == "forget":
        del pieces
        gc.collect()
    else:
        assert list(pieces) == []
    assert pool.used == 0


def test_the_posterior_comes_at_the_end():
    pieces = stream(ENDLESS, smc.Autoregressive())
    next(pieces)
    with pytest.raises(smc.InvalidOption, match="not been read to its end"):
        _ = pieces.posterior
    list(pieces)
    assert pieces.posterior.stats.seconds["total"] > 0


def test_when_all_die_the_stream_ends_with_the_reason():
    short = smc.potential(lambda text: -math.inf if len(text) > 3 else 0.0, name="short")
    pieces = stream(ENDLESS * short, smc.SMC(DRAFT, 4))
    with pytest.raises(smc.NoSurvivors, match="short"):
        list(pieces)
    assert pieces.posterior.log_z == -math.inf


# ---- text


WORDS = [b"a", b"b", "é".encode()[:1], "é".encode()[1:], "€".encode()[:2], "€".encode()[2:], b"<s>", b"</s>"]
TEXTS = Vocabulary(8, frozenset([7]), tuple(WORDS), frozenset([6, 7]), "bytes")


@given(
    st.lists(st.integers(0, 7), max_size=20),
    st.lists(st.integers(0, 20)),
    st.lists(st.text("abé€", min_size=1, max_size=3), max_size=2),
)
def test_pieces_are_the_text_however_it_is_cut(tokens, cuts, strings):
    """Characters in parts, bytes that are none, special tokens, stop strings: whatever is settled when."""
    stops = Stops(tuple(s.encode() for s in strings))
    pieces, shown = Pieces(TEXTS, stops), ""
    whole = stops.cut(TEXTS.bytes_of(tokens)).decode("utf-8", "replace")
    for n in sorted(min(cut, len(tokens)) for cut in cuts):
        shown += pieces.push(tokens[:n])
        assert whole.startswith(shown)
    assert shown + pieces.push(tokens, final=True) == whole


def test_an_unfinished_character_is_held_back():
    pieces = Pieces(TEXTS)
    assert [pieces.push([0, 2][:n]) for n in (1, 2)] == ["a", ""]
    assert pieces.push([0, 2, 3]) == "é"
    assert pieces.push([0, 2, 3, 4]) == ""
    assert pieces.push([0, 2, 3, 4, 7], final=True) == "\N{REPLACEMENT CHARACTER}"


# ---- what is refused, at once


def test_what_cannot_be_streamed_is_refused_before_anything_runs():
    with pytest.raises(smc.PromptError, match="one prompt"):
        smc.stream(p, [[0], [1]])
    with pytest.raises(smc.InvalidOption, match="on='words'"):
        smc.stream(p, [0], on="words")
    with pytest.raises(smc.InvalidOption, match="max_tokens"):
        smc.stream(p, [0], max_tokens=0)
    ids = TableLM(p.table, eos=[EOS], name="ids only")
    ids.vocabulary = Vocabulary(4, frozenset([EOS]), None, frozenset(), "ids only")
    with pytest.raises(smc.PromptError, match='on="tokens"'):
        smc.stream(ids, [0])
    assert sum(smc.stream(ids, [0], on="tokens", seed=1), ()) == smc.sample(ids, [0], seed=1, progress=False).tokens[0]
