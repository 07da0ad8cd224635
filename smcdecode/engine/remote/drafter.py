"""Blocks that a draft in another process writes. Knows slots and messages; not how continuations are prepared.

It stands where a :class:`~smcdecode.engine.drafting.Drafter` stands. If the process dies or falls silent, it is ended,
said so once, and blocks come from the text itself (:mod:`smcdecode.infer.lookup`) or are empty: the law of the answer
is the same, because every block is judged by the law that wrote it.
"""

import math
import pickle
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smcdecode.engine.company import Company
from smcdecode.engine.drafting import Block, Drafter, Stream
from smcdecode.engine.remote.backup import backup_block
from smcdecode.engine.remote.channel import Broken
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Kind, Lanes, Setup, bits
from smcdecode.engine.remote.process import RemoteModel
from smcdecode.engine.remote.tuning import Tuning
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.infer.lookup import continuation

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
        self.prompts: list[list[int]] = [[] for _ in range(setup.lanes)]
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
        prompts = [torch.tensor(request.prompt.tokens) for request in requests]
        for lane, request in zip(lanes, requests, strict=True):
            self.prompts[lane] = list(request.prompt.tokens)
        temperature = self.heat(index * self.slots.N, 1)
        seeds, caps = self.slots.seed[index], self.slots.cap[index]
        payload = Lanes(index, seeds, caps, temperature, prompts).packed()
        self._tell(Kind.OPEN, [len(lanes), len(payload)], payload)

    def close(self, lanes: Sequence[int]) -> None:
        """Tell the draft of lanes that are done."""
        self._tell(Kind.CLOSE, [len(lanes), 0, *lanes])

    def select(self, ancestors: Tensor) -> None:
        """Slots become copies of others."""
        self.source, self.base = self.source[ancestors], self.base[ancestors]

    def stop(self) -> None:
        """End the run."""
        if not self._lost:
            self.remote.stop()

    # ---- blocks

    def write(self, slots: Tensor) -> Block:
        """A block for each of some slots (n,), and the pages that the target needs for it."""
        K = self.setup.block
        room = self.slots.room(slots).clamp(max=K)
        self.passes.copy_pages(*self.slots.make_room(slots, self.slots.length[slots] + room))
        backup = self.tuning.backup(len(slots))
        answer = self._ask(slots, backup)
        block = Block.empty(Company.of(self.slots, slots), K)
        if answer is None:
            if self.alone is not None:
                self._fill(block, *self._backed(slots, torch.ones_like(slots, dtype=torch.bool), self.alone))
        else:
            own = answer.count < 0
            tokens, count, law = self._backed(slots, own, backup)
            tokens, count = torch.where(own[:, None], tokens, answer.tokens), torch.where(own, count, answer.count)
            self._fill(block, tokens, count, law, answer)
        self.source[slots], self.base[slots] = slots, self.slots.length[slots]
        return block

    def _ask(self, slots: Tensor, backup: Backup) -> Answer | None:
        """What the draft answers to what became of the last blocks; None if it is gone."""
        if self._lost:
            return None
        kept = self.slots.length[slots] - self.base[slots] - 1
        cycle = self.slots.cycle[self.slots.lane[slots]]
        entries = Entries(
            slots, self.source[slots], kept, self.slots.last(slots), cycle, self.heat(slots, 0), self.heat(slots, 1),
        )  # fmt: skip
        share = bits(torch.tensor([self.tuning.share], dtype=torch.float64))
        start = time.perf_counter()
        self.tuning.asked(start)
        self._serial += 1
        self._tell(Kind.ASK, torch.cat([torch.tensor([len(slots), backup]), share, entries.words()]).tolist())
        try:
            answer = self._heard(len(slots))
        except Broken as error:
            self._lose(error)
            return None
        hits = answer.hit > 0
        self.stats.hits += int(hits.sum())
        self.stats.misses += int((~hits).sum())
        self.tuning.heard(answer, hits, time.perf_counter())
        return answer

    def _heard(self, n: int) -> Answer:
        words = self.remote.receive()
        if int(words[1]) != self._serial:
            raise Broken("an answer came out of turn")
        if int(words[0]) == Kind.FAILURE:
            failure: Exception = pickle.loads(self.remote.payload(int(words[2])).numpy().tobytes())
            raise failure
        K, V = self.setup.block, self.setup.size
        size = Answer.size(words, n, K, V)
        payload = self.remote.payload(size) if size else None
        return Answer.of(words, payload, n, K, V)

    def _tell(self, kind: Kind, words: list[int], payload: Tensor | None = None) -> None:
        if self._lost:
            return
        try:
            self.remote.send(torch.tensor([kind, self._serial, *words]), payload)
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
        slot = int(block.slots[0])
        guess = continuation(self._text(slot), 1)
        if guess:
            self.tuning.looked_up.add(float(law[row[0, 0]].double().softmax(-1)[guess[0]]))

    # ---- blocks from no model

    def _backed(self, slots: Tensor, which: Tensor, kind: Backup) -> tuple[Tensor, Tensor, Backup]:
        """Blocks of some of the slots by a backup: tokens (n, K), how many (n,), and whose they are."""
        K = self.setup.block
        tokens, count = torch.zeros(len(slots), K, dtype=torch.int64), torch.zeros_like(slots)
        room = self.slots.room(slots).clamp(max=K)
        for i in which.nonzero()[:, 0].tolist():
            slot = int(slots[i])
            u = self.slots.uniform(slots[i : i + 1, None], torch.arange(K), Stream.DRAFT)[0]
            block = backup_block(kind, self._text(slot), int(room[i]), u, self.endings.is_eos)
            tokens[i, : len(block)] = torch.tensor(block, dtype=torch.int64)
            count[i] = len(block)
        return tokens, count, kind

    def _text(self, slot: int) -> list[int]:
        """Prompt and own tokens of a slot."""
        return self.prompts[int(self.slots.lane[slot])] + self.slots.tokens[slot, : self.slots.length[slot]].tolist()

    def _fill(self, block: Block, tokens: Tensor, count: Tensor, kind: Backup, answer: Answer | None = None) -> None:
        """Put tokens and the laws they were drawn from into a block: the answer's, or else the backup's."""
        block.tokens = tokens
        block.count, block.ended = self.endings.cut(block.slots, tokens, count)  # the draft does not know of stops
        block.ended |= block.count == self.slots.room(block.slots)
        self._last = None if answer is None else (answer, (answer.count > 0).nonzero()[:, 0])
        if answer is not None:
            block.log_q = answer.log_q
        if answer is None or answer.laws is not None:
            block.laws = self._laws(tokens, kind, answer)

    def _laws(self, tokens: Tensor, kind: Backup, answer: Answer | None) -> Tensor:
        """The laws of the tokens (n, K) of a block, (n, K, V) float32 log q: the answer's, or else the backup's."""
        shape = (*tokens.shape, self.setup.size)
        if answer is not None and answer.laws is not None and len(answer.laws) == tokens.numel():
            return answer.laws.view(shape)
        if kind == Backup.UNIFORM:
            laws = torch.full(shape, -math.log(self.setup.size))
        else:
            laws = torch.full(shape, -torch.inf).scatter_(-1, tokens[..., None], 0.0)
        if answer is not None and answer.laws is not None:
            laws[torch.arange(tokens.shape[1]) < answer.count[:, None]] = answer.laws
        return laws


def _first_rows(answer: Answer) -> Tensor:
    """Where the laws of each row's block begin: (n,) int64."""
    count = answer.count.clamp(min=0)
    return count.cumsum(0) - count
