"""The draft writes a block, one token a slot at a time, (2). Knows the proposal's law; not the target's."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.engine.company import Company
from smcdecode.engine.draw import check_numbers, draw, log_norm, log_weight, proposal_law
from smcdecode.engine.endings import Endings
from smcdecode.engine.foresight import Foresight
from smcdecode.engine.guessing import Guesser
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Reading, Slots
from smcdecode.engine.twist import Twist

__all__ = ["Block", "Drafter", "Going", "Stream", "fates", "open_block"]


class Stream:
    """What a uniform is for: the fourth word of its counter."""

    DRAFT, ACCEPT, REDRAW, BONUS, RESAMPLE, ANSWER, CHAIN, CHECK, REPEAT = range(9)


_FATES = torch.tensor([Stream.ACCEPT, Stream.REDRAW])


def fates(slots: Slots, which: Tensor, K: int) -> Tensor:
    """The uniforms by which the drafted tokens of some slots (n,) are kept, and redrawn: (n, K, 2) float64."""
    return slots.uniform(which[:, None, None], torch.arange(K)[:, None], _FATES)


def _by_itself() -> None:
    """Run torch's kernels on the calling thread alone."""
    torch.get_num_threads()  # from here on the thread has a number of its own
    torch.set_num_threads(1)


@dataclasses.dataclass
class Block:
    """What one cycle drafted, a row for each slot that can write; its first ``count`` places mean something. K ≥ 0."""

    company: Company  # n slots
    tokens: Tensor  # (n, K) int64
    log_q: Tensor  # (n, K) float64, of the drafted tokens, where judging does not want the whole laws
    count: Tensor  # (n,) int64, tokens drafted
    ended: Tensor  # (n,) bool, the last drafted token ends the text or fills the cap: no bonus token follows
    laws: Tensor | None  # (n, K, C) float32 normalised log q, where judging needs whole laws
    columns: Tensor | None  # (n, K, C) int64, what token each column of the laws is, −1 none; None: token c is column c
    masks: list[Future[Tensor]]  # per position, bonus included: packed (n, ⌈V/32⌉) int32; empty if no slot is masked
    fates: Tensor | None = None  # see :func:`fates`, where there was time to make them
    prompts: Reading | None = None  # those of slots without a token, read in the pass that judges the block

    @classmethod
    def empty(cls, company: Company, K: int) -> "Block":
        """A block of no tokens yet."""
        n = len(company.slots)
        return cls(
            company, torch.zeros(n, K, dtype=torch.int64), torch.zeros(n, K, dtype=torch.float64),
            torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool), None, None, [],
        )  # fmt: skip

    @property
    def slots(self) -> Tensor:
        """(n,) int64."""
        return self.company.slots

    @property
    def drafted(self) -> Tensor:
        """Which places hold a token: (n, K) bool."""
        return torch.from_numpy(np.arange(self.tokens.shape[1]) < self.count.numpy()[:, None])

    def behind(self, going: "Going", k: int, ends: Tensor) -> "Going":
        """The rows that go on behind token k: not those whose text it ends (m,) bool, nor those it fills."""
        if k + 1 == self.tokens.shape[1]:
            self.ended[going.at] = ends
            return going
        stops = ends | (going.room == k + 1)
        if not bool(stops.any()):
            return going
        self.ended[going.at] = ends
        return going.some((~stops).nonzero()[:, 0])


@dataclasses.dataclass(frozen=True)
class Going:
    """The rows of a block that are still drafted: m of its n."""

    rows: Tensor  # (m,) int64, ascending
    company: Company
    heat: Tensor  # (m,) float64, temperatures
    u: Tensor  # (m, K) float64, the uniforms of the tokens
    room: Tensor  # (m,) int64, most tokens
    whole: bool  # whether they are all rows

    def some(self, which: Tensor) -> "Going":
        """Some of them, (l,) int64 ascending."""
        heat, u, room = (x[which] for x in (self.heat, self.u, self.room))
        return Going(self.rows[which], self.company.some(which), heat, u, room, whole=False)

    @property
    def at(self) -> Tensor | slice:
        """Their index in tensors over all rows."""
        return slice(None) if self.whole else self.rows


def open_block(every: Slots, passes: Passes, slots: Tensor) -> tuple[Block, Tensor, Tensor]:
    """An empty block with pages for it; how many tokens each slot (n,) has left, and may be drafted: (n,) each."""
    left, length = torch.from_numpy(every.left(slots)), every.block[every.lane[slots]]
    room = torch.minimum(left, length)
    passes.copy_pages(*every.make_room(slots, every.length[slots] + room))
    return Block.empty(Company.of(every, slots), int(length.max())), left, room


class Drafter:
    """Writes blocks of a guesser's tokens, under the potentials' masks."""

    def __init__(
        self, spec: Draft | None, guesser: Guesser | None, slots: Slots, passes: Passes, twist: Twist,
        endings: Endings, temperature: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.spec, self.guesser, self.slots, self.passes, self.twist = spec, guesser, slots, passes, twist
        self.endings, self.temperature = endings, temperature  # of the draft in some slots: (n,) int64 → (n,) float64

    @functools.cached_property
    def worker(self) -> Executor:
        """The thread that masks are computed on, started with the first mask.

        It must not start OpenMP threads of its own: where a process has more of them than the machine has cores, all of
        them go to sleep between kernels, for good, and passes take twice as long.
        """
        threads = torch.get_num_threads()
        worker = ThreadPoolExecutor(1, "masks", initializer=_by_itself)
        worker.submit(torch.get_num_threads).result()
        torch.set_num_threads(threads)  # of the threads that are still to come
        return worker

    def write(self, slots: Tensor) -> Block:
        """Draft up to K tokens in each slot (n,).

        A row stops at the text's end, at its cap, where its guesser knows nothing, and where the masks leave too little
        of its law: these are functions of what was written before, and so change no law.
        """
        block, left, room = open_block(self.slots, self.passes, slots)
        K = block.tokens.shape[1]
        foresight = self._foresight(block, K)
        if K == 0:
            return block
        going = self._start(block, room)
        for k in range(K):
            if not len(going.rows):
                break
            going = self._place(block, going, k)
            if foresight is not None and bool((block.count > k).any()):
                self._mask_next(block, k, foresight)
        block.ended |= block.count == left
        return block

    def _start(self, block: Block, room: Tensor) -> Going:
        """The rows of a block that may have a token."""
        slots, K = block.slots, block.tokens.shape[1]
        u = self.slots.uniform(slots[:, None], torch.arange(K), Stream.DRAFT)
        every = Going(torch.arange(len(slots)), block.company, self.temperature(slots), u, room, whole=True)
        return every if bool((room > 0).all()) else every.some((room > 0).nonzero()[:, 0])

    def _foresight(self, block: Block, K: int) -> Foresight | None:
        """Potential states to look ahead with, if anything is masked; the masks of the first position are begun."""
        if not bool(self.twist.masked[block.slots].any()):
            return None
        foresight = Foresight(self.worker, self.twist, self.slots, block.slots, ahead=K > 0)
        block.masks.append(foresight.look())
        return foresight

    def _place(self, block: Block, going: Going, k: int) -> Going:
        """Token k of some rows, of as many as can be guessed for; the rows that go on behind it."""
        assert self.guesser is not None
        known, logits = self.guesser.logits(going.company, block.tokens[going.at, :k])
        going = going if known is None else going.some(known)
        return self._token(block, going, k, logits) if len(going.rows) else going

    def begin(self, lane: int, prompt: Sequence[int]) -> None:
        """A lane has a new request; a draft model reads its prompt in a pass."""

    def learn(self, block: Block, law: Tensor, row: Tensor) -> None:
        """What the target made of a block, see :class:`~smcdecode.engine.judging.Verdict`; a draft model knows all."""

    def _token(self, block: Block, going: Going, k: int, logits: Tensor) -> Going:
        """Draw token k of some rows; where the mask leaves the draft too little the block stops: the target draws."""
        assert self.spec is not None and self.guesser is not None
        mask = block.masks[k].result()[going.at] if block.masks else None
        law = proposal_law(logits, self.spec, going.heat, mask)
        tokens, norm = self._draw(law, going, k)
        alive = norm > self._least(logits, going.heat, mask)
        if not bool(alive.all()):
            check_numbers(norm, self.spec.model.name)
            stay = alive.nonzero()[:, 0]
            going, logits, law, tokens, norm = going.some(stay), logits[stay], law[stay], tokens[stay], norm[stay]
        block.tokens[going.at, k] = tokens
        block.count[going.at] = k + 1
        self._note(block, going, k, logits, law, norm)
        ends = self.endings.of(going.company.slots, tokens, block.tokens[going.at, :k])
        return block.behind(going, k, ends)

    def _least(self, logits: Tensor, heat: Tensor, mask: Tensor | None) -> Tensor | float:
        """The log-weight above which a row of a law is a guess: (m,) float64, or one for all."""
        assert self.spec is not None and self.guesser is not None
        if mask is None or not self.guesser.share:
            return -math.inf
        free = proposal_law(logits, self.spec, heat, None)
        return log_norm(free) + math.log(self.guesser.share)

    def _draw(self, law: Tensor, going: Going, k: int) -> tuple[Tensor, Tensor]:
        """Token k of some rows, and the log-norm of each row of ``law``."""
        return draw(law, going.u[:, k])

    def _note(self, block: Block, going: Going, k: int, logits: Tensor, law: Tensor, norm: Tensor) -> None:
        """Keep of the laws (m, V) that tokens k were drawn from what judging wants to see."""
        assert self.spec is not None
        if not self.spec.strict:
            block.log_q[going.at, k] = log_weight(law, block.tokens[going.at, k]) - norm
        if self.spec.strict or (len(logits) and bool(torch.isneginf(logits.amin()))):
            if block.laws is None:
                block.laws = law.new_zeros(*block.tokens.shape, law.shape[-1])
            block.laws[going.at, k] = law - norm[:, None].float().to(law.device)

    def _mask_next(self, block: Block, k: int, foresight: Foresight) -> None:
        """Begin the masks behind the tokens just drafted; nothing reads those of rows that stopped."""
        moved = ((block.count == k + 1) & ~block.ended).nonzero()[:, 0]
        block.masks.append(foresight.step(moved.tolist(), block.tokens[moved, k].tolist()))
