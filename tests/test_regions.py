"""Regions: a constraint begins at the very byte behind a delimiter, however text, delimiters and tokens are cut."""

import itertools
import math
import re

import pytest
import torch

from smcdecode.errors import InvalidOption, PotentialError
from smcdecode.potentials.delimiter import Delimiter
from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.potential import BasePotential, Prompt, allowed, evaluate
from smcdecode.potentials.predicate import Predicate
from smcdecode.potentials.reading import potential
from smcdecode.potentials.regex import Regex
from smcdecode.potentials.regions import After, Between
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.schema import JsonSchema
from smcdecode.potentials.vocabulary import Vocabulary

PROMPT = Prompt((), "")
TOKENS = (b"", b"a", b"b", b"<", b">", b"<>", b"><", b">a", b">b<", b"ab", b"<>ab", b"<|end|>", b"<>")
VOCABULARY = Vocabulary(len(TOKENS), frozenset({0}), TOKENS, frozenset({0, 11, 12}), "pieces")
LENGTH = 4


def spelled(ids, *delimiters):
    """What delimiters are found in, with a mark where a special token is none of them."""
    marked = [i in VOCABULARY.special and TOKENS[i] not in delimiters for i in ids]
    return b"".join(b"\0" if mark else TOKENS[i] for i, mark in zip(ids, marked, strict=True))


def split(data, delimiter):
    """What stands before and after a delimiter; None after where there is none."""
    before, found, rest = data.partition(delimiter)
    return before, rest if found else None


def log(value):
    return 0.0 if value else -math.inf


def after(ids, pattern):
    _, rest = split(spelled(ids, b"<>"), b"<>")
    return log(rest is not None and re.fullmatch(pattern, rest.decode()))


def between(ids, pattern, required, opening=b"<", closing=b">"):
    rest, regions = spelled(ids, opening, closing), 0
    while True:
        _, rest = split(rest, opening)
        if rest is None:
            return log(regions or not required)
        content, rest = split(rest, closing)
        regions += 1
        if rest is None or not re.fullmatch(pattern, content.decode()):
            return -math.inf


CASES = {
    "after": (After("<>", Regex("a(b|ab)*")), lambda ids: after(ids, "a(b|ab)*")),
    "after nothing": (After("<>", Regex("a*")), lambda ids: after(ids, "a*")),
    "after, predicate": (
        After("<>", Predicate(lambda text: text.count("b") <= 1, on="text")),
        lambda ids: after(ids, "[^b]*b?[^b]*"),
    ),
    "between": (Between("<", ">", Regex("a|ab")), lambda ids: between(ids, "a|ab", True)),
    "between, optional": (Between("<", ">", Regex("b?"), required=False), lambda ids: between(ids, "b?", False)),
    "between, overlapping": (
        Between("b", "aab", Regex("a*<?")),
        lambda ids: between(ids, "a*<?", True, b"b", b"aab"),
    ),
    "between, inside the content": (
        Between("a", "<>", Regex("[a<]*")),
        lambda ids: between(ids, "[a<]*", True, b"a", b"<>"),
    ),
}


def every(length):
    return itertools.chain.from_iterable(itertools.product(range(1, len(TOKENS)), repeat=n) for n in range(length + 1))


@pytest.mark.parametrize("case", CASES)
def test_every_text_is_weighed_and_masked_right(case):
    """Against a plain reading of the whole text: Ψ itself, ψ of all beginnings, and masks that say what ψ says."""
    psi, oracle = CASES[case]
    states = {(): psi.start(VOCABULARY, PROMPT)}
    for ids in every(LENGTH - 1):
        if ids:
            states[ids] = psi.advance(psi.fork(states[ids[:-1]]), ids[-1:])
    keys = list(states)
    prefix = dict(zip(keys, evaluate(psi, [states[k] for k in keys], [False] * len(keys)).tolist(), strict=True))
    final = dict(zip(keys, evaluate(psi, [states[k] for k in keys], [True] * len(keys)).tolist(), strict=True))
    rows = allowed(psi, [states[k] for k in keys], VOCABULARY.size)
    for ids in keys:
        expected = oracle(ids)
        assert final[ids] == expected, ids
        assert expected == -math.inf or all(prefix[ids[:n]] == 0 for n in range(len(ids))), ids
        assert rows is None or rows[keys.index(ids)][0] or expected == -math.inf, ids
    masked = case != "after, predicate"
    for ids, row in zip(keys, rows.tolist(), strict=True):
        for token in range(1, len(TOKENS)) if len(ids) < LENGTH - 1 and prefix[ids] == 0 else ():
            alive = prefix[(*ids, token)] > -math.inf
            assert row[token] == alive if masked else row[token] or not alive, (ids, token)
        assert not masked or prefix[ids] == -math.inf or row[0] == (final[ids] > -math.inf), ids


def test_tokens_in_a_block_are_tokens_one_by_one():
    psi, _ = CASES["between, overlapping"]
    for ids in itertools.islice(every(3), 0, None, 7):
        block = psi.advance(psi.start(VOCABULARY, PROMPT), ids)
        single = psi.start(VOCABULARY, PROMPT)
        for token in ids:
            single = psi.advance(single, (token,))
        for done in (False, True):
            assert psi.log_psi([block], [done]) == psi.log_psi([single], [done])


TEXT = Vocabulary(257, frozenset({256}), (*(bytes([b]) for b in range(256)), b""), frozenset({256}), "bytes")
PIECES = (
    b"Let me think",
    b"</",
    b"th",
    b"ink",
    b">{",
    b'>{"n',
    b'":',
    b" 1",
    b"2}",
    b"}",
    b"</think",
    b">",
    b"{",
    b'"n',
    b"\n",
)
THINKING = Vocabulary(len(PIECES) + 1, frozenset({15}), (*PIECES, b"<end>"), frozenset({15}), "thinking")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def ids_of(*pieces):
    return [PIECES.index(piece) for piece in pieces]


def test_reasoning_then_json():
    psi = After("</think>", JsonSchema(SCHEMA))
    free = psi.advance(psi.start(THINKING, PROMPT), ids_of(b"Let me think", b"{", b"</", b"th", b"ink"))
    row = psi.mask([free])[0]
    assert not row[15]  # the text may not end before its JSON
    assert row[ids_of(b">{", b'>{"n', b">", b"Let me think", b"</")].all()
    begun = psi.advance(psi.fork(free), ids_of(b'>{"n'))
    assert psi.mask([begun])[0].nonzero()[:, 0].tolist() == ids_of(b'":')
    done = psi.advance(begun, ids_of(b'":', b" 1", b"2}"))
    assert psi.mask([done])[0].nonzero()[:, 0].tolist() == [15]
    assert psi.log_psi([done, free], [True, True]) == [0.0, -math.inf]
    wrong = psi.advance(free, ids_of(b">", b"\n", b"}"))
    assert psi.log_psi([wrong], [False]) == [-math.inf]


def test_fenced_code_closes_where_the_content_is_complete():
    psi = Between("```\n", "\n```", Grammar('start: "x" ("+" "x")*'))
    state = psi.advance(psi.start(TEXT, PROMPT), list(b"So:\n```\nx+x"))
    row = psi.mask([state])[0].nonzero()[:, 0].tolist()
    assert row == [ord("\n"), ord("+")]
    state = psi.advance(state, list(b"\n```"))
    assert psi.mask([state])[0].all()
    assert psi.log_psi([state], [True]) == [0.0]
    again = psi.advance(state, list(b"\n```\nx+"))
    assert psi.mask([again])[0].nonzero()[:, 0].tolist() == [ord("x")]
    assert psi.log_psi([again], [True]) == [-math.inf]


def test_characters_split_over_tokens_and_regions():
    psi = Between("é", "è", Regex("[à-ü]"))
    good = psi.advance(psi.start(TEXT, PROMPT), list("xéöèy".encode()))
    bad = psi.advance(psi.start(TEXT, PROMPT), list("xéoè".encode()))
    assert psi.log_psi([good, bad], [True, True]) == [0.0, -math.inf]


def test_soft_potentials_weigh_each_region():
    psi = Between("<", ">", Reward(len, beta=2.0))
    state = psi.advance(psi.start(TEXT, PROMPT), list(b"a<bc>d<efg>"))
    assert evaluate(psi, [state, psi.fork(state)], [True, False]).tolist() == [10.0, 10.0]


def test_nested_and_multiplied():
    psi = After(":", Between("<", ">", Regex("a+")) * Regex("[a<>]*"))
    good, bad = (psi.advance(psi.start(TEXT, PROMPT), list(text)) for text in (b"<b>:a<aa>", b"<b>:<aa>b"))
    assert psi.log_psi([good, bad], [True, True]) == [0.0, -math.inf]
    assert psi.mask([good])[0].nonzero()[:, 0].tolist() == sorted([*b"a<>", 256])


def test_each_text_of_a_batch_has_its_own_mask():
    psi = Between("<", ">", Regex("ab?"))
    texts = [b"", b"<", b"<a", b"<ab", b"<ab>", b"<a><"]
    states = [psi.advance(psi.start(TEXT, PROMPT), list(text)) for text in texts]
    together = psi.mask(states)
    assert all(torch.equal(row, psi.mask([state])[0]) for row, state in zip(together, states, strict=True))
    assert together[2].nonzero()[:, 0].tolist() == [ord(">"), ord("b")]


class Ids(BasePotential):
    def log_psi(self, states, complete):
        return [0.0] * len(states)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: After("", Regex("a")), "at least one character"),
        (lambda: Between("<", "", Regex("a")), "at least one character"),
        (lambda: After("x", "a"), "a potential is wanted"),
        (lambda: After("x", potential(len, on="tokens")), "reads ids"),
        (lambda: After("x", Regex("a") * potential(len, on="tokens")), "reads ids"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InvalidOption, match=message):
        make()


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(PotentialError, match="no tokenizer"):
        After("x", Regex("a")).start(Vocabulary(5, frozenset({0}), None, frozenset(), "ids"), PROMPT)


def test_delimiters_are_found_at_every_overlap():
    delimiter, seen, found = Delimiter("aab"), 0, []
    for i, byte in enumerate(b"aaabaab"):
        seen = delimiter.after(seen, byte)
        if seen == 3:
            found.append(i)
            seen = 0
    assert found == [3, 6]
