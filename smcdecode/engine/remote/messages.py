"""What the two processes say to each other, as words: lanes opened and closed, outcomes told, blocks answered.

Knows how they are laid out; not what is done with them. Floats travel as their bits, so nothing is rounded.
"""

import dataclasses
import enum
import pickle

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft

__all__ = ["CONTROL_WORDS", "Answer", "Backup", "Entries", "Kind", "Lanes", "Setup", "bits", "numbers"]

CONTROL_WORDS = 8  # of a message outside a run


class Kind(enum.IntEnum):
    """What a message is: its first word."""

    START, OPEN, CLOSE, ASK, STOP, ANSWER, FAILURE = range(1, 8)


class Backup(enum.IntEnum):
    """What is verified where no continuation was prepared."""

    REDRAFT, LOOKUP, UNIFORM = range(3)


def bits(x: Tensor) -> Tensor:
    """The bits of float64 numbers as int64."""
    return x.contiguous().view(torch.int64)


def numbers(x: Tensor) -> Tensor:
    """The float64 numbers of int64 bits."""
    return x.contiguous().view(torch.float64)


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

    @property
    def words(self) -> int:
        """Words that hold any message of the run."""
        return 9 + max(self.lanes, self.slots * max(Entries.WORDS, 2 + 2 * self.block))

    def packed(self) -> Tensor:
        """As bytes."""
        return torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)

    @staticmethod
    def unpacked(payload: Tensor) -> "Setup":
        """The setup that :meth:`packed` made ``payload`` of."""
        setup: Setup = pickle.loads(payload.numpy().tobytes())
        return setup


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Requests that begin: one row of each field a lane."""

    lane: Tensor  # (n,) int64
    seed: Tensor  # (n,) int64
    cap: Tensor  # (n,) int64
    temperature: Tensor  # (n,) float64, of the draft in the first cycle that drafts
    prompts: list[Tensor]  # each (length,) int64

    def packed(self) -> Tensor:
        """As bytes."""
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        head = torch.stack([self.lane, self.seed, self.cap, bits(self.temperature), lengths], 1).flatten()
        return torch.cat([head, *self.prompts]).view(torch.uint8)

    @staticmethod
    def unpacked(payload: Tensor, n: int) -> "Lanes":
        """The lanes that :meth:`packed` made ``payload`` of."""
        words = payload.view(torch.int64)
        lane, seed, cap, temperature, lengths = words[: 5 * n].view(n, 5).T
        return Lanes(lane, seed, cap, numbers(temperature), list(torch.split(words[5 * n :], lengths.tolist())))


@dataclasses.dataclass(frozen=True)
class Entries:
    """What became of the last blocks, a row for each slot that writes on: (n,) each."""

    slot: Tensor
    source: Tensor  # the slot whose block it continues: itself, unless particles were resampled
    kept: Tensor  # k, drafted tokens of that block that stand
    token: Tensor  # t, the token behind them
    cycle: Tensor
    temperature: Tensor  # float64, of the draft now
    following: Tensor  # float64, of the draft in the next cycle
    weight: Tensor  # float64, the log-weight it carries

    WORDS = 8

    def words(self) -> Tensor:
        """(n · WORDS,) int64."""
        columns = [self.slot, self.source, self.kept, self.token, self.cycle, bits(self.temperature)]
        return torch.stack([*columns, bits(self.following), bits(self.weight)], 1).flatten()

    @classmethod
    def of(cls, words: Tensor, n: int) -> "Entries":
        """The entries that :meth:`words` wrote."""
        slot, source, kept, token, cycle, now, following, weight = words[: n * cls.WORDS].view(n, cls.WORDS).T
        return cls(slot, source, kept, token, cycle, numbers(now), numbers(following), numbers(weight))


@dataclasses.dataclass(frozen=True)
class Answer:
    """Blocks, a row for each entry; (n, …)."""

    hit: Tensor  # (n,) int64, 1 where the continuation was prepared
    count: Tensor  # (n,) int64, tokens drafted by the draft model; −1 where the backup needs no model
    tokens: Tensor  # (n, K) int64
    log_q: Tensor  # (n, K) float64
    laws: Tensor | None  # (R, V) float32 normalised log q of the Σ count drafted tokens, entry by entry; None: not sent
    top: Tensor | None  # (R, F) int64, the tokens that σ down-weights; None where it does not
    prepared: float  # seconds the last preparation took
    redrafted: float  # seconds the re-drafting in this answer took; 0 where none was

    def words(self, serial: int) -> Tensor:
        """All but laws and top, whose sizes they tell."""
        K = self.tokens.shape[1]
        times = torch.tensor([self.prepared, self.redrafted], dtype=torch.float64)
        width = 0 if self.top is None else self.top.shape[1]
        rows = 0 if self.laws is None else len(self.laws)
        head = torch.tensor([Kind.ANSWER, serial, _width(self.laws), width, rows])
        table = torch.cat([self.hit[:, None], self.count[:, None], self.tokens, bits(self.log_q).view(-1, K)], 1)
        return torch.cat([head, bits(times), table.flatten()])

    def packed(self) -> Tensor | None:
        """Laws and top as bytes: whole rows, or where most tokens have none, the ids and values of those that have."""
        if self.laws is None or not len(self.laws):
            return None
        width = _width(self.laws)
        parts: list[Tensor] = []
        if width == self.laws.shape[1]:
            parts.append(self.laws.contiguous())
        elif width > 1:
            values, ids = self.laws.topk(width)
            parts += [values, ids.int()]
        parts += [] if self.top is None else [self.top.int()]
        return torch.cat([part.view(torch.uint8).flatten() for part in parts]) if parts else None

    @staticmethod
    def size(words: Tensor, V: int) -> int:
        """Bytes of the payload behind the words of an answer."""
        width, top, rows = words[2:5].tolist()
        each = 0 if width <= 1 else 4 * V if width == V else 8 * width
        return rows * (each + 4 * top) if width >= 0 else 0

    @staticmethod
    def of(words: Tensor, payload: Tensor | None, n: int, block: int, V: int) -> "Answer":
        """The answer that was sent."""
        table = words[7 : 7 + n * (2 + 2 * block)].view(n, -1)
        hit, count, tokens, log_q = table[:, 0], table[:, 1], table[:, 2 : 2 + block], numbers(table[:, 2 + block :])
        width, top_width = words[2:4].tolist()
        laws: Tensor | None = None
        top: Tensor | None = None
        if width >= 0:
            drafted = tokens[torch.arange(block) < count[:, None]]  # (R,)
            rows = len(drafted)
            laws, rest = _unpacked_laws(payload, drafted, width, V)
            top = rest.view(torch.int32).view(rows, top_width).long() if top_width else None
        prepared, redrafted = numbers(words[5:7]).tolist()
        return Answer(hit, count, tokens, log_q, laws, top, prepared, redrafted)


def _width(laws: Tensor | None) -> int:
    """Numbers sent of each row: −1 none at all; 1 where every law is one-hot, which the token tells; V whole rows."""
    if laws is None:
        return -1
    support = int((~torch.isneginf(laws)).sum(-1).max()) if len(laws) else 1
    return support if 2 * support < laws.shape[-1] else laws.shape[-1]


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
