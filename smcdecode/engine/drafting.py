"""The draft writes a block, one token a slot at a time, (2). Knows the proposal's law; not the target's."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.engine.draw import check_numbers, draw, log_norm, log_weight, proposal_law
from smcdecode.engine.endings import Endings
from smcdecode.engine.foresight import Foresight
from smcdecode.engine.guessing import Guesser
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.engine.twist import Twist

__all__ = ["Block", "Drafter", "Stream"]


class Stream:
    """What a uniform is for: the fourth word of its counter."""

    DRAFT, ACCEPT, REDRAW, BONUS, RESAMPLE, ANSWER, CHAIN, CHECK, REPEAT = range(9)


@dataclasses.dataclass
class Block:
    """What one cycle drafted, a row for each slot that can write. K = 0 without a draft."""

    slots: Tensor  # (n,) int64
    tokens: Tensor  # (n, K) int64
    log_q: Tensor  # (n, K) float64, of the drafted tokens
    count: Tensor  # (n,) int64, tokens drafted
    ended: Tensor  # (n,) bool, the last drafted token ends the text or fills the cap: no bonus token follows
    rows: list[Tensor]  # per position: (m,) int64, the rows drafted there
    laws: list[Tensor | None]  # per position: (m, V) float32 normalised log q, where judging needs the whole law
    columns: list[Tensor | None]  # per position: (m, C) int64, what token each column of its law is, −1 none; None: all
    masks: list[Future[Tensor]]  # per position, bonus included: packed (n, ⌈V/32⌉) int32; empty if no slot is masked

    @classmethod
    def empty(cls, slots: Tensor, K: int) -> "Block":
        """A block of no tokens yet."""
        n = len(slots)
        return cls(
            slots, torch.zeros(n, K, dtype=torch.int64), torch.zeros(n, K, dtype=torch.float64),
            torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool), [], [], [], [],
        )  # fmt: skip


class Drafter:
    """Writes blocks of a guesser's tokens, under the potentials' masks."""

    def __init__(
        self, spec: Draft | None, guesser: Guesser | None, slots: Slots, passes: Passes, twist: Twist,
        endings: Endings, temperature: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        self.spec, self.guesser, self.slots, self.passes, self.twist = spec, guesser, slots, passes, twist
        self.endings, self.temperature = endings, temperature  # of the draft in some slots: (n,) int64 → (n,) float64
        self.worker = ThreadPoolExecutor(1, "masks")  # its thread starts with the first mask

    def write(self, slots: Tensor) -> Block:
        """Draft up to K tokens in each slot (n,).

        A row stops at the text's end, at its cap, where its guesser knows nothing, and where the masks leave too little
        of its law: these are functions of what was written before, and so change no law.
        """
        length = self.slots.block[self.slots.lane[slots]]  # (n,) K of each slot's lane
        K = int(length.max())
        block = Block.empty(slots, K)
        room = torch.minimum(self.slots.room(slots), length)
        self.passes.copy_pages(*self.slots.make_room(slots, self.slots.length[slots] + room))
        foresight = self._foresight(block, K)
        going = torch.arange(len(slots))
        for k in range(K):
            going = going[(room[going] > k) & ~block.ended[going] & (block.count[going] == k)]
            if not len(going):
                break
            self._place(block, going, k)
            if not bool((block.count > k).any()):
                break
            if foresight is not None:
                self._mask_next(block, k, foresight)
        block.ended |= block.count == self.slots.room(slots)
        return block

    def _foresight(self, block: Block, K: int) -> Foresight | None:
        """Potential states to look ahead with, if anything is masked; the masks of the first position are begun."""
        if not bool(self.twist.masked[block.slots].any()):
            return None
        foresight = Foresight(self.worker, self.twist, self.slots, block.slots, ahead=K > 0)
        block.masks.append(foresight.look())
        return foresight

    def _place(self, block: Block, going: Tensor, k: int) -> None:
        """Token k of some rows, of as many as can be guessed for."""
        assert self.guesser is not None
        known, logits = self.guesser.logits(block.slots[going], block.tokens[going, :k])
        going = going if known is None else going[known]
        if len(going):
            self._token(block, going, k, logits)

    def begin(self, lane: int, prompt: Sequence[int]) -> None:
        """A lane has a new request; a draft model reads its prompt in a pass."""

    def learn(self, block: Block, law: Tensor, row: Tensor) -> None:
        """What the target made of a block, see :class:`~smcdecode.engine.judging.Verdict`; a draft model knows all."""

    def _token(self, block: Block, going: Tensor, k: int, logits: Tensor) -> None:
        """Draw token k of some rows; where the mask leaves the draft too little the block stops: the target draws."""
        assert self.spec is not None and self.guesser is not None
        slots = block.slots[going]
        mask = block.masks[k].result()[going] if block.masks else None
        law = proposal_law(logits, self.spec, self.temperature(slots), mask)
        least = torch.full((len(slots),), -torch.inf, dtype=torch.float64)
        if mask is not None and self.guesser.share:
            free = proposal_law(logits, self.spec, self.temperature(slots), None)
            least = log_norm(free) + math.log(self.guesser.share)
        tokens, norm = self._draw(law, slots, k)
        check_numbers(norm, self.spec.model.name)
        alive = (norm > least).nonzero()[:, 0]
        log_q = (log_weight(law, tokens) - norm)[alive]
        going, tokens, norm = going[alive], tokens[alive], norm[alive]
        block.tokens[going, k] = tokens
        block.log_q[going, k] = log_q
        block.count[going] = k + 1
        block.ended[going] = self.endings.of(block.slots[going], tokens, block.tokens[going, :k])
        block.rows.append(going)
        whole = self.spec.strict or bool(torch.isneginf(logits.amin()))
        block.laws.append(law[alive] - norm[:, None].float().to(law.device) if whole else None)
        block.columns.append(None)

    def _draw(self, law: Tensor, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Token k of some slots, and the log-norm of each row of ``law``."""
        return draw(law, self.slots.uniform(slots, k, Stream.DRAFT))

    def _mask_next(self, block: Block, k: int, foresight: Foresight) -> None:
        """Begin the masks behind the tokens just drafted; nothing reads those of rows that stopped."""
        moved = ((block.count == k + 1) & ~block.ended).nonzero()[:, 0]
        block.masks.append(foresight.step(moved.tolist(), block.tokens[moved, k].tolist()))
