"""What the two processes say to each other, as words: lanes opened and closed, outcomes told, blocks answered.

Knows how they are laid out; not what is done with them. Floats travel as their bits, so nothing is rounded.
"""

import dataclasses
import enum
import functools
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.declare.proposal import Draft

__all__ = ["Answer", "Backup", "Entries", "Flags", "Floats", "Ints", "Kind", "Lanes", "Setup", "packed", "unpacked"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Kind(enum.IntEnum):
    """What a message is: its first word."""

    START, OPEN, CLOSE, ASK, STOP, ANSWER, FAILURE, REPORT = range(1, 9)


class Backup(enum.IntEnum):
    """What is verified where no continuation was prepared."""

    REDRAFT, LOOKUP, UNIFORM = range(3)


def packed(thing: object) -> Tensor:
    """Anything as bytes, (n,) uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def unpacked(payload: Tensor | None) -> Any:
    """What :func:`packed` made ``payload`` of."""
    assert payload is not None
    return pickle.loads(payload.numpy().tobytes())


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the draft must know of a run."""

    lanes: int
    particles: int
    max_tokens: int
    pages: int  # tokens of prompts and continuations that are held at most at once
    size: int  # tokens of the target's vocabulary
    eos: frozenset[int]  # of the target
    block: int
    budget: int  # outcomes of its own block that are prepared for each particle
    ancestors: int  # and how many other particles' blocks it may be prepared to go on with
    strict: bool  # whole laws are wanted for judging
    top_k: int | None
    top_p: float | None

    @classmethod
    def of(cls, spec: Draft, budget: int, ancestors: int, **sizes: int | frozenset[int]) -> "Setup":
        """The setup of a declared draft."""
        return cls(
            block=spec.longest, budget=budget, ancestors=ancestors, strict=spec.strict, top_k=spec.top_k,
            top_p=spec.top_p, **sizes,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """Particles of all lanes."""
        return self.lanes * self.particles


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Requests that begin: one row of each field a lane."""

    lane: Ints  # (n,)
    seed: Ints  # (n,)
    cap: Ints  # (n,)
    temperature: Floats  # (n,), of the draft in the first cycle that drafts
    prompts: list[Ints]  # each (length,)

    def packed(self) -> Tensor:
        """As bytes."""
        lengths = np.array([len(prompt) for prompt in self.prompts])
        head = np.stack([self.lane, self.seed, self.cap, self.temperature.view(np.int64), lengths], 1).ravel()
        return torch.from_numpy(np.concatenate([head, *self.prompts]).view(np.uint8))

    @staticmethod
    def unpacked(payload: Tensor, n: int) -> "Lanes":
        """The lanes that :meth:`packed` made ``payload`` of."""
        words = payload.numpy().view(np.int64)
        lane, seed, cap, temperature, lengths = words[: 5 * n].reshape(n, 5).T.copy()
        prompts = np.split(words[5 * n :], lengths.cumsum()[:-1])
        return Lanes(lane, seed, cap, temperature.view(np.float64), prompts)


@dataclasses.dataclass(frozen=True)
class Entries:
    """What became of the last blocks, a row for each slot that writes on: (n,) each."""

    slot: Ints
    source: Ints  # the slot whose block it continues: itself, unless particles were resampled
    kept: Ints  # k, drafted tokens of that block that stand
    token: Ints  # t, the token behind them
    cycle: Ints
    temperature: Floats  # of the draft now
    following: Floats  # of the draft in the next cycle
    weight: Floats  # the log-weight it carries

    WORDS = 8

    def words(self) -> Ints:
        """(n · WORDS,)."""
        table = np.empty((len(self.slot), self.WORDS), np.int64)
        for column, field in enumerate((self.slot, self.source, self.kept, self.token, self.cycle)):
            table[:, column] = field
        for column, number in enumerate((self.temperature, self.following, self.weight), 5):
            table[:, column] = number.view(np.int64)
        return table.ravel()

    @classmethod
    def of(cls, words: Ints) -> "Entries":
        """The entries that :meth:`words` wrote."""
        columns = words.reshape(-1, cls.WORDS).T.copy()
        return cls(*columns[:5], *columns[5:].view(np.float64))


@dataclasses.dataclass(frozen=True)
class Answer:
    """Blocks, a row for each entry; (n, …)."""

    hit: Flags  # (n,), whether the continuation was prepared
    count: Ints  # (n,), tokens drafted by the draft model; −1 where the backup needs no model
    tokens: Ints  # (n, K)
    log_q: Floats  # (n, K)
    laws: Tensor | None  # (R, V) float32 normalised log q of the Σ count drafted tokens, entry by entry; None: not sent
    top: Tensor | None  # (R, F) int64, the tokens that σ down-weights; None where it does not
    prepared: float  # seconds the last preparation took
    redrafted: float  # seconds the re-drafting in this answer took; 0 where none was

    _HEAD = 7

    def words(self, serial: int) -> Ints:
        """All but laws and top, whose shapes they tell."""
        n, K = self.tokens.shape
        words = np.empty(self._HEAD + n * (2 + 2 * K), np.int64)
        top = 0 if self.top is None else self.top.shape[1]
        words[:5] = Kind.ANSWER, serial, self._width, top, 0 if self.laws is None else len(self.laws)
        words[5:7] = np.array([self.prepared, self.redrafted]).view(np.int64)
        table = words[7:].reshape(n, -1)
        table[:, 0], table[:, 1], table[:, 2 : 2 + K] = self.hit, self.count, self.tokens
        table[:, 2 + K :] = self.log_q.view(np.int64)
        return words

    def packed(self) -> Tensor | None:
        """Laws and top as bytes: whole rows, or where most tokens have none, the ids and values of those that have."""
        if self.laws is None or not len(self.laws):
            return None
        parts: list[Tensor] = []
        if self._width == self.laws.shape[1]:
            parts.append(self.laws.contiguous())
        elif self._width > 1:
            values, ids = self.laws.topk(self._width)
            parts += [values, ids.int()]
        parts += [] if self.top is None else [self.top.int()]
        flat = [part.view(torch.uint8).flatten() for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat) if flat else None

    def of_rows(self, which: Flags) -> "Answer":
        """The answer to some of the entries, (n,) bool."""
        drafted = which.repeat(self.count.clip(min=0))
        laws, top = (None if x is None else x[torch.from_numpy(drafted)] for x in (self.laws, self.top))
        hit, count, tokens, log_q = self.hit[which], self.count[which], self.tokens[which], self.log_q[which]
        return dataclasses.replace(self, hit=hit, count=count, tokens=tokens, log_q=log_q, laws=laws, top=top)

    @functools.cached_property
    def _width(self) -> int:
        """Numbers sent of each row: −1 none; 1 where every law is one-hot, which the token tells; V whole rows."""
        if self.laws is None:
            return -1
        V = self.laws.shape[1]
        if not len(self.laws):
            return 1
        if float(self.laws.amin()) > -np.inf:
            return V
        support = int((~torch.isneginf(self.laws)).sum(-1).max())
        return support if 2 * support < V else V

    @staticmethod
    def of(told: Ints, payload: Tensor | None, block: int, V: int) -> "Answer":
        """The answer that was sent."""
        table = told[7:].reshape(-1, 2 + 2 * block)
        hit, count, tokens = table[:, 0] > 0, table[:, 1], table[:, 2 : 2 + block].copy()
        width, top_width, rows = told[2:5].tolist()
        laws: Tensor | None = None
        top: Tensor | None = None
        if width >= 0:
            drafted = tokens[np.arange(block) < count[:, None]]  # (R,)
            laws, rest = _unpacked_laws(payload, torch.from_numpy(drafted), width, V)
            top = rest.view(torch.int32).view(rows, top_width).long() if top_width else None
        prepared, redrafted = told[5:7].view(np.float64).tolist()
        log_q = table[:, 2 + block :].copy().view(np.float64)
        return Answer(hit, count, tokens, log_q, laws, top, prepared, redrafted)


def _unpacked_laws(payload: Tensor | None, drafted: Tensor, width: int, V: int) -> tuple[Tensor, Tensor]:
    """Whole rows again, and what lies behind them in the payload."""
    rows = len(drafted)
    held = torch.empty(0, dtype=torch.uint8) if payload is None else payload
    if width == V:
        return held[: 4 * rows * V].view(torch.float32).view(rows, V), held[4 * rows * V :]
    laws = torch.full((rows, V), -torch.inf)
    if width == 1:
        return laws.scatter_(1, drafted[:, None], 0.0), held
    cut = 4 * rows * width
    values, ids = held[:cut].view(torch.float32), held[cut : 2 * cut].view(torch.int32)
    return laws.scatter_(1, ids.view(rows, width).long(), values.view(rows, width)), held[2 * cut :]
