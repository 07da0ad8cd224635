"""check_potential: every built-in potential passes, and each clause finds the potential that breaks it."""

import math

import pytest
import torch

from smcdecode.errors import InvalidOption, InvalidWeight, PotentialError
from smcdecode.potentials.contract import check_potential
from smcdecode.potentials.potential import BasePotential
from smcdecode.potentials.reading import potential
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.vocabulary import Vocabulary

SMILE = "😀".encode()
TOKENS = (b"<eos>", b"(", b")", b"()", SMILE[:2], SMILE[2:], b"!")
WORDS = Vocabulary(len(TOKENS), frozenset({0}), TOKENS, frozenset({0}), "brackets")
CONTEXTS = [(), (1, 2), (1, 3, 2, 0), (1, 1, 2), (2, 1), (4, 5), (1, 2, 6, 4), (3, 3, 3)]
DEPTH = torch.tensor([0, 1, -1, 0, 0, 0, 0])  # (V,) what each token adds


class Matcher:
    """A mutable parser of brackets."""

    def __init__(self) -> None:
        self.depth, self.valid = 0, True

    def feed(self, tokens) -> None:
        for token in tokens:
            self.depth += int(DEPTH[token])
            self.valid = self.valid and token < 4 and self.depth >= 0


class Brackets(BasePotential):
    """Balanced brackets, as a grammar potential: mutable states, forks that copy, masks."""

    def start(self, vocabulary, prompt):
        return Matcher()

    def advance(self, state, tokens):
        state.feed(tokens)
        return state

    def log_psi(self, states, complete):
        return [
            0.0 if state.valid and not (done and state.depth) else -math.inf
            for state, done in zip(states, complete, strict=True)
        ]

    def mask(self, states):
        return torch.stack([self.row(state) for state in states])

    def row(self, state):
        if not state.valid:
            return torch.zeros(7, dtype=torch.bool)
        row = torch.arange(7) < 4
        row[0] = state.depth == 0
        return row & (DEPTH + state.depth >= 0)


def judge(text):
    return -float(len(text))


GOOD = [
    potential(judge),
    potential(lambda texts: [-0.5 * len(t) for t in texts], batched=True),
    potential(lambda ids: -0.1 * sum(ids), on="tokens"),
    potential(lambda text: 0.0 if text.count("(") == text.count(")") else -math.inf, on="final"),
    Reward(judge, beta=2.0),
    Reward(judge, beta=2.0, prefix=judge),
    Brackets(),
    Brackets() * Reward(judge, beta=1.0) * potential(judge),
]


@pytest.mark.parametrize("psi", GOOD, ids=lambda psi: psi.name)
def test_good_potentials_pass(psi):
    check_potential(psi, WORDS, CONTEXTS)


def test_ids_are_enough():
    check_potential(
        potential(lambda ids: -1.0 * len(ids), on="tokens"),
        Vocabulary(9, frozenset(), None, frozenset(), "ids"),
        [(1, 2)],
    )


class Restless(BasePotential):
    """Says something else each time."""

    asked = 0

    def log_psi(self, states, complete):
        self.asked += 1
        return [float(self.asked)] * len(states)


class Shared(Brackets):
    """Forks that are no copies."""

    def fork(self, state):
        return state


class Relative(BasePotential):
    """A value relative to the batch."""

    def log_psi(self, states, complete):
        mean = sum(len(ids) for ids in states) / len(states)
        return [len(ids) - mean for ids in states]


class Counting(BasePotential):
    """Counts blocks and not tokens."""

    def start(self, vocabulary, prompt):
        return 0

    def advance(self, state, tokens):
        return state + 1

    def log_psi(self, states, complete):
        return [-float(state) for state in states]


class Impatient(Brackets):
    """Forbids what is still open."""

    def log_psi(self, states, complete):
        return super().log_psi(states, [True] * len(states))


class Wide(Brackets):
    """A mask that forbids a token that ψ allows."""

    def row(self, state):
        return super().row(state) & (torch.arange(7) != 3)


class Endless(Brackets):
    """A mask that never lets a text end."""

    def row(self, state):
        return super().row(state) & (torch.arange(7) != 0)


@pytest.mark.parametrize(
    ("psi", "clause"),
    [
        (Restless(), "repeatable"),
        (Shared(), "fork"),
        (Relative(), "company"),
        (Counting(), "block"),
        (Impatient(), "positive"),
        (potential(lambda text: 0.0 if len(text) == 2 else -math.inf, name="two"), "positive"),
        (Wide(), "mask"),
        (Endless(), "mask"),
        (Impatient() * potential(judge), "positive"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_each_clause_finds_its_breach(psi, clause):
    with pytest.raises(PotentialError, match=f'breaks the clause "{clause}"'):
        check_potential(psi, WORDS, CONTEXTS)


def test_messages_say_where_and_what():
    with pytest.raises(PotentialError, match=r"Ψ > 0 for '\(\)' \(log Ψ = 0.0\), but its beginning '\('"):
        check_potential(Impatient(), WORDS, [(1, 2)])
    with pytest.raises(PotentialError, match=r"token 3 is forbidden after '\(', yet log ψ = 0.0 after it"):
        check_potential(Wide(), WORDS, [(1, 3)])
    with pytest.raises(PotentialError, match=r"every EOS is forbidden after '', yet"):
        check_potential(Endless(), WORDS, [()])


def test_numbers_come_first():
    with pytest.raises(InvalidWeight, match="log ψ = nan"):
        check_potential(potential(lambda text: math.nan), WORDS, [(1,)])


def test_contexts_are_needed():
    with pytest.raises(InvalidOption, match="at least one continuation"):
        check_potential(potential(judge), WORDS, [])


def test_tolerance_is_for_rounding():
    class Rounded(BasePotential):
        def log_psi(self, states, complete):
            return [-1.0 - 1e-6 * len(states)] * len(states)

    check_potential(Rounded(), WORDS, CONTEXTS)
    with pytest.raises(PotentialError, match="company"):
        check_potential(Rounded(), WORDS, CONTEXTS, tolerance=1e-8)
