"""Tokens guessed ahead where the masks leave few, from how the target chose before. Knows slots and masks; no model.

Under a tight constraint most next tokens are forced, or one of a handful. An n-gram model of the prompt and of the
target's own laws at the positions scored so far guesses among them; the target then judges the guesses as it judges a
draft's at strictness 1, so every token keeps the law it would have had alone (Leviathan et al. 2023; Chen et al. 2023).
A row stops where the target would hardly come to see its guess, because one before is likely to be refused.
What is learnt in a cycle is used from the next one on: a guess, and whether there is one, depends on the past of its
own request, on the masks and on the guesses before it alone.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.drafting import Block, Drafter, Going
from smcdecode_kernels import reference

__all__ = ["FEW", "Ahead", "Habits", "few_allowed"]

FEW = 256  # most tokens that a mask may leave for one of them to be guessed
_ORDER = 4  # tokens of context at most
_PROMPT = 0.3  # what an occurrence in the prompt counts, beside 1 for a law of the target
_PRIOR = 1.0  # what the law of a shorter context counts, in a longer one
_LEAST = 1e-3  # probabilities below are not learnt
_HOPE = 0.15  # least probability that a guess is kept with all before it: a position costs about that share of a pass

Allowed = tuple[int, ...]
Words = NDArray[np.int32]


class Ahead(Drafter):
    """Writes blocks of guesses, each row up to the first position with more than ``FEW`` tokens to choose from."""

    def __init__(self, plain: Drafter) -> None:
        super().__init__(None, None, plain.slots, plain.passes, plain.twist, plain.endings, plain.temperature)
        self.habits = [Habits(())] * self.slots.lanes
        self._guessed: list[
            list[tuple[list[int], Allowed]]
        ] = []  # of the last block, per row: texts and what may follow

    def begin(self, lane: int, prompt: Sequence[int]) -> None:
        """Learn from the prompt of a new request."""
        self.habits[lane] = Habits(prompt)

    def write(self, slots: Tensor) -> Block:
        """Guess up to K tokens in each slot (n,)."""
        self._guessed = [[] for _ in range(len(slots))]
        self._hope = [1.0] * len(slots)
        return super().write(slots)

    def _place(self, block: Block, going: Going, k: int) -> Going:
        words = block.masks[k].result().numpy()
        allowed = [(j, few_allowed(words[i], self.twist.vocabulary.size)) for j, i in enumerate(going.rows.tolist())]
        few = [(j, tokens) for j, tokens in allowed if tokens and self._hopeful(block, int(going.rows[j]), tokens)]
        going = going.some(torch.tensor([j for j, _ in few], dtype=torch.int64))
        law = torch.full((len(few), FEW), -torch.inf)
        columns = torch.full((len(few), FEW), -1)
        for j, (i, (_, tokens)) in enumerate(zip(going.rows.tolist(), few, strict=True)):
            text = self._text(block, i, k)
            self._guessed[i].append((text, tokens))
            law[j, : len(tokens)] = torch.from_numpy(np.log(self._habits(block, i).law(text, tokens)))
            columns[j, : len(tokens)] = torch.tensor(tokens)
        if not len(few):
            return going
        at, norm = reference.draw(law, going.u[:, k])
        tokens_ = columns.gather(-1, at[:, None])[:, 0]
        if block.laws is None or block.columns is None:
            block.laws = torch.zeros(*block.tokens.shape, FEW)
            block.columns = torch.full(block.laws.shape, -1)
        block.tokens[going.rows, k] = tokens_
        block.count[going.rows] = k + 1
        block.laws[going.rows, k] = law - norm[:, None].float()
        block.columns[going.rows, k] = columns
        ends = self.endings.of(going.company.slots, tokens_, block.tokens[going.rows, :k])
        return block.behind(going, k, ends)

    def _hopeful(self, block: Block, i: int, few: Allowed) -> bool:
        """Whether row i may go on with one of a few tokens."""
        self._hope[i] *= self._habits(block, i).kept(few)
        return self._hope[i] >= _HOPE

    def learn(self, block: Block, law: Tensor, row: Tensor) -> None:
        """Remember the target's laws wherever it chose among few tokens, guesses that it refused included."""
        for i, guessed in enumerate(self._guessed):
            for k, (text, few) in enumerate(guessed):
                log_r = law[row[i, k], list(few)].cpu().double()
                if log_r.max() > -torch.inf:
                    self._habits(block, i).learn(text, few, log_r.softmax(-1).tolist())

    def _habits(self, block: Block, i: int) -> "Habits":
        return self.habits[int(self.slots.lane[block.slots[i]])]

    def _text(self, block: Block, i: int, k: int) -> list[int]:
        """The last tokens before place k of a row: of its prompt, its own and guessed ones."""
        slot, habits = block.slots[i], self._habits(block, i)
        own = self.slots.tokens[slot, : self.slots.length[slot]][-_ORDER:].tolist()
        return [*habits.tail, *own, *block.tokens[i, :k].tolist()][-_ORDER:]


class Habits:
    """An n-gram model of one request over the tokens that a mask allows.

    From one context to the next longer one, the first being the set of allowed tokens itself, it is
    ``q(v) = (c(v) + q'(v)) / (Σ c + 1)``: c was learnt there, q' is the law of the one before, uniform at first.

    Args:
        prompt: its ids.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tail = list(prompt[-_ORDER:])
        self._counts: dict[Hashable, dict[int, float]] = {}
        self._kept: dict[Allowed, tuple[float, int]] = {}  # sum and number of the probabilities that a guess was right
        for place, token in enumerate(prompt):
            for context in _contexts(prompt[max(place - _ORDER, 0) : place]):
                self._add(context, token, _PROMPT)

    def law(self, text: Sequence[int], allowed: Allowed) -> NDArray[np.float64]:
        """Probabilities of the allowed tokens behind a text, all positive: (len(allowed),)."""
        q = np.full(len(allowed), 1 / len(allowed))
        for context in (allowed, *_contexts(text)):
            counts = self._counts.get(context)
            if counts:
                c = np.array([counts.get(token, 0.0) for token in allowed])
                q = (c + _PRIOR * q) / (c.sum() + _PRIOR)
        return q

    def kept(self, allowed: Allowed) -> float:
        """How likely the target is to keep a guess among some tokens: Σ min(q, r) on average, ½ at first."""
        if len(allowed) == 1:
            return 1.0
        total, seen = self._kept.get(allowed, (0.0, 0))
        return (total + 0.5) / (seen + 1)

    def learn(self, text: Sequence[int], allowed: Allowed, law: Sequence[float]) -> None:
        """Remember the target's probabilities r of the allowed tokens behind a text, and how near q was to them."""
        if len(allowed) > 1:
            total, seen = self._kept.get(allowed, (0.0, 0))
            self._kept[allowed] = total + float(np.minimum(self.law(text, allowed), law).sum()), seen + 1
        for context in (allowed, *_contexts(text)):
            for token, probability in zip(allowed, law, strict=True):
                if probability > _LEAST:
                    self._add(context, token, probability)

    def _add(self, context: Hashable, token: int, weight: float) -> None:
        counts = self._counts.setdefault(context, {})
        counts[token] = counts.get(token, 0.0) + weight


def _contexts(text: Sequence[int]) -> Iterator[Hashable]:
    """The last token, the last two, …; the negative length keeps them apart from tuples of allowed tokens."""
    for n in range(1, min(len(text), _ORDER) + 1):
        yield -n, *text[-n:]


def few_allowed(words: Words, V: int) -> Allowed | None:
    """The tokens that a packed mask (⌈V/32⌉,) allows of V, ascending; None for more than ``FEW``."""
    filled = np.flatnonzero(words)
    if len(filled) > FEW:
        return None
    bits = np.unpackbits(words[filled, None].astype("<i4").view(np.uint8), axis=1, bitorder="little")
    word, bit = bits.nonzero()
    tokens = filled[word] * 32 + bit
    tokens = tokens[tokens < V]
    return tuple(tokens.tolist()) if len(tokens) <= FEW else None
