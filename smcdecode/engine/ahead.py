"""Tokens guessed ahead where the masks leave few, from how the target chose before. Knows slots and masks; no model.

Under a tight constraint most next tokens are forced, or one of a handful. What the target chose where it was scored so
far, and the prompt, say which is likely (:mod:`smcdecode.engine.habits`). The target then judges the guesses as it does
a draft's at strictness 1, so every token keeps the law it would have had alone (Leviathan et al. 2023; Chen et al.
2023).
A row stops where the target would hardly come to see its guess, because one before is likely to be refused.
What is learnt in a cycle is used from the next one on: a guess, and whether there is one, depends on the past of its
own request, on the masks and on the guesses before it alone.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.drafting import Block, Drafter, Going
from smcdecode.engine.foresight import AtOnce
from smcdecode.engine.habits import ORDER, Allowed, Guess, Habits, Pieces
from smcdecode_kernels import reference

__all__ = ["FEW", "Ahead", "few_allowed"]

FEW = 256  # most tokens that a mask may leave for one of them to be guessed
_HOPE = 0.1  # least probability that a guess is kept with all before it: a position costs about that share of a pass


class Ahead(Drafter):
    """Writes blocks of guesses, each row up to the first position with more than ``FEW`` tokens to choose from."""

    def __init__(self, plain: Drafter) -> None:
        super().__init__(None, None, plain.slots, plain.passes, plain.twist, plain.endings, plain.temperature)
        self.worker = AtOnce()  # a guess needs its mask, and no pass comes between
        self.pieces = Pieces(plain.twist.vocabulary.tokens)
        self.habits = [Habits((), self.pieces)] * self.slots.lanes
        self._guesses: dict[tuple[int, int], Guess] = {}  # of the last block, by row and place
        self._rows: list[_Row] = []  # of the last block

    def begin(self, lane: int, prompt: Sequence[int]) -> None:
        """Learn from the prompt of a new request."""
        self.habits[lane] = Habits(prompt, self.pieces)

    def write(self, slots: Tensor) -> Block:
        """Guess up to K tokens in each slot (n,)."""
        self._guesses, self._rows = {}, [self._row(slot) for slot in slots.tolist()]
        return super().write(slots)

    def _place(self, block: Block, going: Going, k: int) -> Going:
        words = block.masks[k].result().numpy()
        guesses = [self._guess(i, k, words[i].tobytes()) for i in going.rows.tolist()]
        few = [guess for guess in guesses if guess is not None]
        if len(few) < len(guesses):
            going = going.some(torch.tensor([j for j, guess in enumerate(guesses) if guess], dtype=torch.int64))
        if not few:
            return going
        log_q, columns = _laws(few), _columns(few)
        at, norm = reference.draw(log_q, going.u[:, k])
        tokens = columns.gather(-1, at[:, None])[:, 0]
        if block.laws is None or block.columns is None:
            block.laws = torch.zeros(*block.tokens.shape, FEW)
            block.columns = torch.full(block.laws.shape, -1)
        block.tokens[going.rows, k] = tokens
        block.count[going.rows] = k + 1
        block.laws[going.rows, k] = log_q - norm[:, None].float()
        block.columns[going.rows, k] = columns
        for i, token in zip(going.rows.tolist(), tokens.tolist(), strict=True):
            self._rows[i].text = [*self._rows[i].text, token][-ORDER:]
        ends = self.endings.of(going.company.slots, tokens, block.tokens[going.rows, :k])
        return block.behind(going, k, ends)

    def _row(self, slot: int) -> "_Row":
        """How a slot begins a block."""
        habits, length = self.habits[int(self.slots.lane[slot])], int(self.slots.length[slot])
        own = self.slots.tokens[slot, max(length - ORDER, 0) : length].tolist()
        return _Row(habits, [*habits.tail, *own][-ORDER:])

    def _guess(self, i: int, k: int, words: bytes) -> Guess | None:
        """What may be guessed at place k of row i, under the mask of these packed words; None to stop there."""
        allowed = few_allowed(words, self.twist.vocabulary.size)
        if not allowed:
            return None
        row = self._rows[i]
        guess = self._guesses[i, k] = Guess(row.text, allowed, row.habits.law(row.text, allowed))
        row.hope *= row.habits.kept(allowed)
        return guess if row.hope >= _HOPE else None

    def learn(self, block: Block, law: Tensor, row: Tensor) -> None:  # noqa: ARG002  it is the one just written
        """Remember the target's laws where it chose among few tokens, be a guess kept, refused, or not made."""
        if not self._guesses:
            return
        i, k = torch.tensor(list(self._guesses)).T
        columns = _columns(list(self._guesses.values())).clamp_(min=0).to(law.device)
        chosen = law[row[i, k][:, None].to(law.device), columns].cpu().double().numpy()
        for (place, guess), log_r in zip(self._guesses.items(), chosen, strict=True):
            log_r = log_r[: len(guess.allowed)]
            top = log_r.max()
            if top > -math.inf:
                r = np.exp(log_r - top)
                self._rows[place[0]].habits.learn(guess, r / r.sum())


@dataclasses.dataclass
class _Row:
    """A row of the block under way."""

    habits: Habits
    text: list[int]  # the last tokens: of its prompt, its own and guessed ones
    hope: float = 1.0  # that all its guesses so far are kept


def _laws(guesses: Sequence[Guess]) -> Tensor:
    """Log-laws of some guesses, a row each, padded by −∞: (m, FEW) float32."""
    rows = np.full((len(guesses), FEW), -np.inf, dtype=np.float32)
    for row, guess in zip(rows, guesses, strict=True):
        row[: len(guess.law)] = np.log(guess.law)
    return torch.from_numpy(rows)


def _columns(guesses: Sequence[Guess]) -> Tensor:
    """Which tokens they were drawn from, padded by −1: (m, FEW) int64."""
    rows = np.full((len(guesses), FEW), -1, dtype=np.int64)
    for row, guess in zip(rows, guesses, strict=True):
        row[: len(guess.allowed)] = guess.allowed
    return torch.from_numpy(rows)


@functools.lru_cache(maxsize=256)
def few_allowed(words: bytes, V: int) -> Allowed | None:
    """The tokens that a packed mask (⌈V/32⌉ int32 words) allows of V, ascending; None for more than ``FEW``."""
    bits = np.frombuffer(words, dtype=np.uint8)
    filled = np.flatnonzero(bits)
    if len(filled) > FEW:
        return None
    byte, bit = np.unpackbits(bits[filled, None], axis=1, bitorder="little").nonzero()
    tokens = filled[byte] * 8 + bit
    tokens = tokens[tokens < V]
    return tuple(tokens.tolist()) if len(tokens) <= FEW else None
