"""Blocks that a draft in another process writes. Knows slots and messages; not how continuations are prepared.

It stands where a :class:`~smcdecode.engine.drafting.Drafter` stands. If the process dies or falls silent, it is ended,
said so once, and blocks come from the text itself (:mod:`smcdecode.infer.lookup`) or are empty: the law of the answer
is the same, because every block is judged by the law that wrote it.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from smcdecode.engine.company import Company
from smcdecode.engine.drafting import Block, Drafter, Stream, fates
from smcdecode.engine.remote.backup import LOOKUP, backed
from smcdecode.engine.remote.channel import Broken
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Ints, Kind, Lanes, Setup, unpacked
from smcdecode.engine.remote.process import RemoteModel
from smcdecode.engine.remote.tuning import Tuning
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.errors import SMCDecodeError
from smcdecode.infer import lookup

__all__ = ["RemoteDrafter"]


class RemoteDrafter(Drafter):
    """The target's side of a run.

    Args:
        plain: the engine's own drafter, in whose place this stands.
        remote: the process.
        setup: the run.
        tuning: the backup and C of each cycle.
        heat: the draft's temperature in some slots so many cycles from now: (n,) float64.
        alone: what is verified once the process is gone; None for no drafted tokens at all.
        stats: of the engine.
    """

    def __init__(
        self, plain: Drafter, remote: RemoteModel, setup: Setup, tuning: Tuning,
        heat: Callable[[Tensor, int], Tensor], alone: Backup | None, stats: Stats,
    ) -> None:  # fmt: skip
        super().__init__(
            plain.spec, plain.guesser, plain.slots, plain.passes, plain.twist, plain.endings, plain.temperature
        )
        self.remote, self.setup, self.tuning, self.alone = remote, setup, tuning, alone
        self.heat, self.stats = heat, stats
        self.source = torch.arange(setup.slots)  # whose last block each slot continues
        self.base = torch.zeros(setup.slots, dtype=torch.int64)  # own tokens before that block
        self.log_w = torch.zeros(setup.slots, dtype=torch.float64)  # since the last resampling
        self.bonus = np.full(setup.slots, np.nan)  # uniforms of the bonus tokens of this cycle, where they are made
        self._asked: tuple[Ints, Backup] | None = None  # slots that an answer will be about, and the backup told
        self._last: tuple[Answer, Tensor] | None = None  # an answer, and its slots' rows that it drafted for
        self._serial = 0
        self._lost = False
        remote.start(setup)

    # ---- lanes

    def open(self, lanes: Sequence[int], requests: Sequence[Request]) -> None:
        """Tell the draft of requests that begin, so that it reads their prompts beside the target."""
        index = torch.tensor(lanes)
        self.base[self.slots.of(index)] = 0
        self.source[self.slots.of(index)] = self.slots.of(index)
        self.log_w[self.slots.of(index)] = 0.0
        prompts = [np.array(request.prompt.tokens) for request in requests]
        temperature = self.heat(index * self.slots.N, 1).numpy()
        seeds, caps = self.slots.seed[index].numpy(), self.slots.cap[index].numpy()
        payload = Lanes(index.numpy(), seeds, caps, temperature, prompts).packed()
        self._tell(Kind.OPEN, [len(lanes)], payload)

    def close(self, lanes: Sequence[int]) -> None:
        """Tell the draft of lanes that are done."""
        self._tell(Kind.CLOSE, [len(lanes), *lanes])

    def select(self, ancestors: Tensor) -> None:
        """Slots become copies of others."""
        self.source, self.base = self.source[ancestors], self.base[ancestors]
        moved = (ancestors != torch.arange(len(ancestors))).view(self.setup.lanes, -1).any(1)
        self.log_w.view(self.setup.lanes, -1)[moved] = 0.0

    def stop(self) -> None:
        """End the run; an answer that is on its way is taken first, so that the next run does not hear it."""
        if self._asked is not None:
            with contextlib.suppress(SMCDecodeError):  # of a draft that failed, whom nobody asks any more
                self._hear(self._asked[0])
        if not self._lost:
            self.remote.stop()

    # ---- blocks

    def ask(self, slots: Tensor) -> None:
        """Tell what became of the last blocks of some slots (n,), for which :meth:`write` will want others."""
        if self._lost or not len(slots):
            return
        at, backup = slots.numpy(), self.tuning.backup(len(slots))
        self._asked = at, backup
        kept = self.slots.length.numpy()[at] - self.base.numpy()[at] - 1
        cycle, source = self.slots.cycle.numpy()[self.slots.lane.numpy()[at]], self.source.numpy()[at]
        now, following = (self.heat(slots, ahead).numpy() for ahead in (0, 1))
        last, log_w = self.slots.last(slots).numpy(), self.log_w.numpy()[at]
        entries = Entries(at, source, kept, last, cycle, now, following, log_w)
        self.tuning.asked(time.perf_counter())
        self._serial += 1
        share = np.array([self.tuning.share], np.float64).view(np.int64)
        self._tell(Kind.ASK, np.concatenate([[len(at), backup], share, entries.words()]))

    def write(self, slots: Tensor) -> Block:
        """A block for each of some slots (n,) that were asked for, and the pages that the target needs for it."""
        K, at = self.setup.block, slots.numpy()
        length = self.slots.length.numpy()[at]  # while the draft finds its answer
        room = np.minimum(self.slots.left(at), K)
        self.passes.copy_pages(*self.slots.make_room(slots, torch.from_numpy(length + room)))
        block = Block.empty(Company.of(self.slots, slots), K)
        block.fates = fates(self.slots, slots, K)
        self.bonus[at] = self.slots.uniform(slots, 0, Stream.BONUS).numpy()
        self.source.numpy()[at], self.base.numpy()[at] = at, length
        answer, backup = self._hear(at)
        if answer is not None:
            self._fill(block, answer, backup)
        elif self.alone is not None:
            blocks = backed(self.alone, self.slots, slots, K, self.endings.is_eos)
            self._set(block, blocks.tokens, blocks.count, blocks.laws)
        return block

    def _hear(self, slots: Ints) -> tuple[Answer | None, Backup]:
        """What the draft answers for some slots (n,), and the backup that it was told; None if it is gone."""
        if self._lost or self._asked is None:
            return None, Backup.REDRAFT
        (asked, backup), self._asked = self._asked, None
        n = len(asked)
        try:
            answer = self._heard()
        except Broken as error:
            self._lose(error)
            return None, backup
        if n > len(slots):  # a request was ended meanwhile
            answer = answer.of_rows(np.isin(asked, slots))
            n = len(slots)
        hits = int(answer.hit.sum())
        self.stats.hits += hits
        self.stats.misses += n - hits
        self.tuning.heard(answer, hits / n, time.perf_counter())
        return answer, backup

    def _heard(self) -> Answer:
        words, payload = self.remote.receive()
        kind, serial = words[:2].tolist()
        if serial != self._serial:
            raise Broken("an answer came out of turn")
        if kind == Kind.FAILURE:
            failure: Exception = unpacked(payload)
            raise failure
        return Answer.of(words, payload, self.setup.block, self.setup.size)

    def _tell(self, kind: Kind, words: Sequence[int] | Ints, payload: Tensor | None = None) -> None:
        if self._lost:
            return
        try:
            self.remote.send(np.concatenate([[kind, self._serial], words]), payload)
        except Broken as error:
            self._lose(error)

    def _lose(self, error: Broken) -> None:
        """The draft is gone: end what is left of it, say so once, and go on."""
        if self._lost:
            return
        self._lost = True
        self.remote.close()
        self.stats.draft_lost = str(error)
        warnings.warn(
            f"the draft process of {self.remote.name} is gone ({error}); decoding goes on without it, with the same "
            "law and fewer tokens a cycle",
            RuntimeWarning,
            stacklevel=2,
        )

    def watch(self, block: Block, law: Tensor, row: Tensor) -> None:
        """Let the tuning see the laws of first drafted tokens, and what a lookup would have guessed there.

        Args:
            block: the last one written.
            law: (R, V) float32 log p of the scored positions.
            row: (n, K+1) which of them is position k of each row.
        """
        if self._last is None:
            return
        answer, rows = self._last
        if answer.laws is not None and len(rows):
            first = _first_rows(answer)[rows]
            p, q = law[row[rows, 0]].double().softmax(-1), answer.laws[first].double().exp()
            self.tuning.compare(p, q, None if answer.top is None else answer.top[first])
        known, q = lookup.law(
            self.slots.contexts(block.slots[:1], block.tokens[:1, :0]), LOOKUP.ngram, LOOKUP.floor, self.setup.size
        )
        p = law[row[:1, 0]][known].cpu().double().softmax(-1)
        self.tuning.looked_up.add(float(torch.minimum(p, q.double().exp()).sum()))

    # ---- laws

    def _fill(self, block: Block, answer: Answer, backup: Backup) -> None:
        """Put the blocks of an answer in, and where it has none those of the backup."""
        self._last = answer, torch.from_numpy(np.flatnonzero(answer.count > 0))
        tokens, count, laws = torch.from_numpy(answer.tokens), torch.from_numpy(answer.count), self._spread(answer)
        own = torch.from_numpy(np.flatnonzero(answer.count < 0))
        if len(own):
            assert laws is not None
            blocks = backed(backup, self.slots, block.slots[own], self.setup.block, self.endings.is_eos)
            tokens, count = tokens.index_copy(0, own, blocks.tokens), count.index_copy(0, own, blocks.count)
            laws[own] = blocks.laws
        block.log_q = torch.from_numpy(answer.log_q)
        self._set(block, tokens, count, laws)

    def _set(self, block: Block, tokens: Tensor, count: Tensor, laws: Tensor | None) -> None:
        """Tokens, and the laws they were drawn from, up to the text's end: the draft does not know of stops."""
        block.tokens, block.laws = tokens, laws
        block.count, block.ended = self.endings.cut(block.slots, tokens, count)
        block.ended.numpy()[:] |= block.count.numpy() == self.slots.left(block.slots)

    def _spread(self, answer: Answer) -> Tensor | None:
        """The laws of an answer, where they were sent, by entry and place: (n, K, V) float32."""
        if answer.laws is None:
            return None
        shape = (*answer.tokens.shape, self.setup.size)
        if len(answer.laws) == answer.tokens.size:
            return answer.laws.view(shape)
        laws = torch.zeros(shape)
        laws.numpy()[np.arange(shape[1]) < answer.count[:, None]] = answer.laws.numpy()
        return laws


def _first_rows(answer: Answer) -> Tensor:
    """Where the laws of each row's block begin: (n,) int64."""
    count = answer.count.clip(min=0)
    return torch.from_numpy(count.cumsum() - count)
