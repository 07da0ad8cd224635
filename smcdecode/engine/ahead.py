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
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.drafting import Block, Stream, open_block
from smcdecode.engine.endings import Endings
from smcdecode.engine.foresight import done
from smcdecode.engine.habits import ORDER, Allowed, Guess, Habits, Pieces
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.engine.twist import States, Twist
from smcdecode_kernels.bits import list_bits

__all__ = ["FEW", "Ahead", "few_allowed"]

FEW = 256  # most tokens that a mask may leave for one of them to be guessed
_HOPE = 0.1  # least probability that a guess is kept with all before it: a position costs about that share of a pass

Words = NDArray[np.int32]


class Ahead:
    """Writes blocks of guesses, each row up to the first position with more than ``FEW`` tokens to choose from.

    It stands where a :class:`~smcdecode.engine.drafting.Drafter` does.
    """

    def __init__(self, slots: Slots, passes: Passes, twist: Twist, endings: Endings) -> None:
        self.slots, self.passes, self.twist, self.endings = slots, passes, twist, endings
        self.pieces = Pieces(twist.vocabulary.tokens)
        self.habits = [Habits((), self.pieces)] * self.slots.lanes
        self._rows: list[_Row] = []  # of the last block

    def begin(self, lane: int, prompt: Sequence[int]) -> None:
        """Learn from the prompt of a new request."""
        self.habits[lane] = Habits(prompt, self.pieces)

    def write(self, slots: Tensor) -> Block:
        """Guess up to K tokens in each slot (n,)."""
        block, left, room = open_block(self.slots, self.passes, slots)
        u = self.slots.uniform(slots[:, None], torch.arange(block.tokens.shape[1]), Stream.DRAFT)
        begin = (slots.tolist(), self.slots.texts(slots), left.tolist(), room.tolist(), u.tolist())
        self._rows = [self._row(*row) for row in zip(*begin, strict=True)]
        if not bool(self.twist.masked[slots].any()):
            return block
        going = self._rows
        while going:
            masks = self.twist.masks([row.states for row in going], [row.read for row in going])
            for row, words in zip(going, masks.numpy(), strict=True):
                row.masks.append(words)
            going = [row for row in going if len(row.tokens) < row.room and self._goes_on(row)]
        _fill(block, self._rows)
        return block

    def _row(self, slot: int, read: Hashable, left: int, room: int, u: list[float]) -> "_Row":
        """How a slot begins a block."""
        habits, length = self.habits[int(self.slots.lane[slot])], int(self.slots.length[slot])
        own = self.slots.tokens[slot, max(length - ORDER, 0) : length].tolist()
        states = self.twist.fork([slot])[0] if room else self.twist.states[slot]
        return _Row(slot, left, room, u, habits, [*habits.tail, *own][-ORDER:], states, read)

    def _goes_on(self, row: "_Row") -> bool:
        """Guess a row's next token, if its last mask leaves few; whether another may follow."""
        allowed = few_allowed(row.masks[-1].tobytes(), self.twist.vocabulary.size)
        if not allowed:
            return False
        guess = Guess(row.text, allowed, row.habits.law(row.text, allowed))
        row.guesses.append(guess)
        row.hope *= row.habits.kept(allowed)
        if row.hope < _HOPE:
            return False
        token = guess.draw(row.u[len(row.tokens)])
        row.ended = self.endings.completes(row.slot, row.tokens, token) or len(row.tokens) + 1 == row.left
        row.tokens.append(token)
        if row.ended:
            return False
        row.text, row.read = [*row.text, token][-ORDER:], (row.read, token)
        row.states = self.twist.step(row.states, [token])
        return True

    def learn(self, block: Block, law: Tensor, row: Tensor) -> None:  # noqa: ARG002  it is the one just written
        """Remember the target's laws where it chose among few tokens, be a guess kept, refused, or not made."""
        choices = [(mine, guess, at) for mine, places in zip(self._rows, row.tolist(), strict=True)
                   for guess, at in zip(mine.guesses, places, strict=False) if len(guess.allowed) > 1]  # fmt: skip
        if not choices:
            return
        sizes = [len(guess.allowed) for _, guess, _ in choices]
        at = torch.tensor([at for _, _, at in choices]).repeat_interleave(torch.tensor(sizes))
        tokens = torch.tensor([token for _, guess, _ in choices for token in guess.allowed])
        chosen = law[at.to(law.device), tokens.to(law.device)].cpu().double().numpy()
        for (mine, guess, _), log_r in zip(choices, np.split(chosen, np.cumsum(sizes)[:-1]), strict=True):
            top = log_r.max()
            if top > -math.inf:
                r = np.exp(log_r - top)
                mine.habits.learn(guess, r / r.sum())


@dataclasses.dataclass
class _Row:
    """A row of the block under way."""

    slot: int
    left: int  # tokens before its cap
    room: int  # most tokens
    u: list[float]  # the uniforms of as many
    habits: Habits
    text: list[int]  # the last tokens: of its prompt, its own and guessed ones
    states: States  # of its potentials, behind all of its tokens
    read: Hashable  # what those have read
    hope: float = 1.0  # that all its guesses so far are kept
    ended: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    guesses: list[Guess] = dataclasses.field(default_factory=list)  # of its tokens, and perhaps one that is not made
    masks: list[Words] = dataclasses.field(default_factory=list)


def _fill(block: Block, rows: Sequence[_Row]) -> None:
    """Write what was guessed into a block."""
    places = max(len(row.masks) for row in rows)
    masks = np.empty((places, len(rows), len(rows[0].masks[0])), dtype=np.int32)  # nobody reads what is not filled
    tokens, count = block.tokens.numpy(), block.count.numpy()
    for i, row in enumerate(rows):
        masks[: len(row.masks), i] = row.masks
        tokens[i, : len(row.tokens)], count[i] = row.tokens, len(row.tokens)
    block.ended = torch.tensor([row.ended for row in rows])
    block.masks = [done(mask) for mask in torch.from_numpy(masks)]
    made = [guess for row in rows for guess in row.guesses[: len(row.tokens)]]
    if made:
        laws, columns = np.full((*tokens.shape, FEW), -np.inf, dtype=np.float32), np.full((*tokens.shape, FEW), -1)
        place = np.repeat(np.flatnonzero(block.drafted.numpy()), [len(guess.allowed) for guess in made])
        column = np.concatenate([np.arange(len(guess.allowed)) for guess in made])
        laws.reshape(-1, FEW)[place, column] = np.log(np.concatenate([guess.law for guess in made]))
        columns.reshape(-1, FEW)[place, column] = np.concatenate([guess.allowed for guess in made])
        block.laws, block.columns = torch.from_numpy(laws), torch.from_numpy(columns)


@functools.lru_cache(maxsize=256)
def few_allowed(words: bytes, V: int) -> Allowed | None:
    """The tokens that a packed mask (⌈V/32⌉ int32 words) allows of V, ascending; None for more than ``FEW``."""
    packed = np.frombuffer(words, dtype=np.int32)[None]
    if np.count_nonzero(packed) > FEW:
        return None
    tokens = list_bits(packed, V)[1]
    return tuple(tokens.tolist()) if len(tokens) <= FEW else None
