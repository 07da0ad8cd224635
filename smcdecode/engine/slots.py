"""A particle is a slot for life: its tokens, lengths, flags and table row. Knows page numbers, no models, no weights.

Slot-major arrays, S = lanes · N, the slots of a lane together. Lengths belong to slots: particles of a lane may stand
at different lengths. Between cycles, of an unfinished particle's tokens x_1…x_t the target has cached all but x_t, the
draft all but the last one or two (its ``lag``).
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.attention import Batch, Feed
from smcdecode.engine.draw import law_of
from smcdecode.engine.pages import BlockTable, Numbers
from smcdecode.engine.prefixes import Prefixes, piece_ends
from smcdecode.engine.request import Request
from smcdecode_kernels import reference

__all__ = ["Reading", "Slots"]

_COPIED = (
    "tokens", "length", "cached", "lag", "seen", "heard", "finished", "dead", "idle", "log_p", "log_psi", "next_row",
    "owed",
)  # fmt: skip
_ZERO_AT_FIRST = ("length", "cached", "seen", "heard", "finished", "dead", "idle", "log_p", "log_psi", "owed")


class Reading(NamedTuple):
    """The prompts of some lanes (n,), as passes over what is to be read of them."""

    kept: Feed | None  # pieces that are kept for other prompts too, which see them: no row of it is wanted
    ending: Feed  # what is behind them, a prompt's own; each one's last row is wanted
    lanes: Tensor

    @property
    def feed(self) -> Feed:
        """All of it, in one pass."""
        return self.ending if self.kept is None else self.kept.before(self.ending)


class Slots:
    """State of S particles, and of the lanes they belong to."""

    def __init__(self, lanes: int, particles: int, max_tokens: int, prefixes: Prefixes) -> None:
        self.prefixes, self.pool, self.page_size = prefixes, prefixes.pool, prefixes.page_size
        self.lanes, self.N, page_size = lanes, particles, self.page_size
        S = lanes * particles
        self.lane = torch.arange(lanes).repeat_interleave(particles)  # (S,) lane of each slot
        self.particle = torch.arange(particles).repeat(lanes)  # (S,) place of each slot in its lane
        self.tokens = torch.zeros(S, max_tokens, dtype=torch.int64)
        self.length = torch.zeros(S, dtype=torch.int64)
        self.cached = torch.zeros(S, dtype=torch.int64)  # own tokens whose keys and values the target has
        self.lag = torch.ones(S, dtype=torch.int64)  # own tokens the draft has not read
        self.seen = torch.zeros(S, dtype=torch.int64)  # own tokens the potentials have read
        self.heard = torch.zeros(S, dtype=torch.int64)  # own tokens that log_psi speaks of
        self.finished = torch.ones(S, dtype=torch.bool)  # complete or dead: writes no more
        self.dead = torch.zeros(S, dtype=torch.bool)  # weight zero
        self.idle = torch.zeros(S, dtype=torch.bool)  # no particle stands here: counts as dead and finished
        self.log_p = torch.zeros(S, dtype=torch.float64)  # log p of the own tokens
        self.log_psi = torch.zeros(S, dtype=torch.float64)  # log ψ last counted in the weight
        self.owed = torch.zeros(S, max_tokens, dtype=torch.float64)  # log-weight of own tokens, not counted yet
        self._owing = False  # whether anything was ever owed
        self.next_row = torch.full((S,), -1, dtype=torch.int64)  # which scored row its bonus token is drawn from
        self.table = BlockTable(self.pool, S, -(-max_tokens // page_size))
        self.prefix = [torch.empty(0, dtype=torch.int64)] * lanes  # pages of each lane's prompt
        self.prefix_len = torch.zeros(lanes, dtype=torch.int64)
        self.prompt = [torch.empty(0, dtype=torch.int64)] * lanes  # tokens of each lane's prompt
        self.seed = torch.zeros(lanes, dtype=torch.int64)
        self.cycle = torch.zeros(lanes, dtype=torch.int64)
        self.cap = torch.zeros(lanes, dtype=torch.int64)
        self.strictness = torch.zeros(lanes, dtype=torch.float64)  # s of each lane's next cycle
        self.block = torch.zeros(lanes, dtype=torch.int64)  # K of each lane's next cycle
        self.alpha = torch.ones(lanes, dtype=torch.float64)  # the target's exponent
        self.law = torch.ones(lanes, 3, dtype=torch.float64)  # the target's temperature, top_k and top_p, as in Slant

    def of(self, lanes: Tensor) -> Tensor:
        """The slots of some lanes, lane by lane: (n,) int64 → (n · N,) int64."""
        return (lanes[:, None] * self.N + torch.arange(self.N)).flatten()

    def open(
        self, lanes: Tensor, requests: Sequence[Request], models: Sequence[Hashable], particles: int | None = None
    ) -> list[Reading]:
        """Hand lanes (n,) to requests: pages for their prompts, and empty particles in each; by default N.

        Returns:
            What is to be read now, for each of ``models``, which share the pages.
        """
        slots, known = self.of(lanes), []
        for lane, request in zip(lanes.tolist(), requests, strict=True):
            self.prefix[lane], read = self.prefixes.open(request.prompt.tokens, models)
            self.prompt[lane] = torch.tensor(request.prompt.tokens)
            self.prefix_len[lane] = len(request.prompt.tokens)
            known.append(read)
        self.seed[lanes] = torch.tensor([request.seed for request in requests])
        self.cap[lanes] = torch.tensor([request.max_tokens for request in requests])
        self.cycle[lanes] = 0
        targets = [request.target for request in requests]
        self.alpha[lanes] = torch.tensor([target.alpha for target in targets], dtype=torch.float64)
        self.law[lanes] = torch.tensor([law_of(target) for target in targets], dtype=torch.float64)
        for name in _ZERO_AT_FIRST:
            getattr(self, name)[slots] = 0
        self.lag[slots] = 1
        self.next_row[slots] = -1
        if particles is not None:
            self.vacate(slots[self.particle[slots] >= particles])
        return [self._reading(lanes.tolist(), read) for read in zip(*known, strict=True)]

    def vacate(self, slots: Tensor) -> None:
        """Leave slots (n,) without a particle."""
        self.release(slots)
        for flag in (self.finished, self.dead, self.idle):
            flag[slots] = True
        self.next_row[slots] = -1

    def close(self, lanes: Tensor) -> None:
        """Free everything that lanes (n,) hold."""
        slots = self.of(lanes)
        self.release(slots)
        self.pool.release(torch.cat([self.prefix[lane] for lane in lanes.tolist()]))
        for lane in lanes.tolist():
            self.prefix[lane] = self.prefix[lane][:0]
        self.finished[slots] = True
        self.next_row[slots] = -1

    def release(self, slots: Numbers) -> None:
        """Give back the own pages of particles that write no more."""
        self.table.clear(slots)

    def write(self, slots: Numbers, tokens: Numbers, count: Numbers) -> None:
        """Append the first ``count[i]`` of ``tokens[i]`` to slot i: (n,), (n, K), (n,) int64."""
        slots, tokens, count, length = (np.asarray(x) for x in (slots, tokens, count, self.length))
        i, k = (np.arange(tokens.shape[1]) < count[:, None]).nonzero()
        self.tokens.numpy()[slots[i], length[slots[i]] + k] = tokens[i, k]
        length[slots] += count

    def put(self, slots: Numbers, tokens: Numbers) -> None:
        """Append one token to each slot: (n,) int64 each, all slots different."""
        slots, length = np.asarray(slots), self.length.numpy()
        self.tokens.numpy()[slots, length[slots]] = np.asarray(tokens)
        length[slots] += 1

    def owe(self, slots: Tensor, place: Tensor, log_w: Tensor) -> None:
        """Note weights of own tokens: (n,) int64 slots and places, (n,) float64."""
        self._owing = True
        self.owed.index_put_((slots, place), log_w, accumulate=True)

    def settle(self) -> Tensor:
        """Take what is owed up to the shortest text that is still being written in each lane: (S,) float64.

        Particles are resampled by weights of equally long beginnings, for a text of more tokens has less probability
        under any target. What they are resampled by changes no law, as long as nothing owed is lost.
        """
        if not self._owing:
            return torch.zeros_like(self.log_p)
        reach = torch.where(self.finished, self.owed.shape[1], self.length + (self.next_row >= 0))
        common = reach.view(self.lanes, self.N).amin(-1)[self.lane]
        due = torch.arange(self.owed.shape[1]) < common[:, None]
        taken = self.owed.masked_fill(~due, 0.0).sum(-1)
        self.owed.masked_fill_(due, 0.0)
        return taken

    def left(self, slots: Numbers) -> NDArray[np.int64]:
        """Tokens each slot may still write before its cap: (n,)."""
        slots = np.asarray(slots)
        return np.asarray(self.cap.numpy()[self.lane.numpy()[slots]] - self.length.numpy()[slots])

    def last(self, slots: Tensor) -> Tensor:
        """The last own token of each slot: (n,) int64."""
        at = slots.numpy()
        return torch.from_numpy(self.tokens.numpy()[at, self.length.numpy()[at] - 1])

    def contexts(self, slots: Tensor, drafted: Tensor) -> Tensor:
        """Prompt, own tokens and ``drafted`` ones (n, k) of each slot, flush right after −1s: (n, L) int64."""
        lengths = self.length[slots].tolist()
        rows = [
            torch.cat([self.prompt[lane], own[:length], more])
            for lane, own, length, more in zip(
                self.lane[slots].tolist(), self.tokens[slots], lengths, drafted, strict=True
            )
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")

    def texts(self, slots: Tensor) -> list[tuple[int, bytes]]:
        """What each slot has read, as a key: its lane, whose prompt it continues, and its tokens."""
        rows, lengths = self.tokens[slots].numpy(), self.length[slots].tolist()
        return [(g, row[:n].tobytes()) for g, row, n in zip(self.lane[slots].tolist(), rows, lengths, strict=True)]

    def unread(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens the potentials have not read: (n, most) int64, and how many of each row count, (n,) int64."""
        fresh = self.length[slots] - self.seen[slots]
        place = self.seen[slots][:, None] + torch.arange(int(fresh.max()))
        return self.tokens[slots[:, None], place.clamp(max=self.tokens.shape[1] - 1)], fresh

    def select(self, ancestors: Tensor) -> None:
        """Every slot becomes a copy of slot ``ancestors[slot]``, (S,) int64: table rows move, keys and values stay."""
        self.table.select(ancestors, -(-self.cached[ancestors] // self.page_size))
        for name in _COPIED:
            array: Tensor = getattr(self, name)
            array.copy_(array[ancestors])

    def make_room(self, slots: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Pages for own tokens up to ``length`` (n,), owned where they will be written.

        Returns:
            (source, copy): partly filled pages shared with other slots, to be copied in every store before writing.
        """
        source = copies = slots[:0]
        if self.page_size > 1:
            first = self.cached[slots]
            partial = (first % self.page_size != 0).nonzero()[:, 0]
            source, copies = self.table.own(slots[partial], first[partial] // self.page_size)
            length = -(-length // self.page_size)
        self.table.grow(slots, length)
        return source, copies

    def _reading(self, lanes: Sequence[int], known: Sequence[int]) -> Reading:
        """The prompts of some lanes from token ``known`` on, piece by piece: each follows from what is before it."""
        kept, ending = [], []
        for lane, begin in zip(lanes, known, strict=True):
            length = int(self.prefix_len[lane])
            for end in piece_ends(length - 1, self.page_size):
                if end > begin:
                    kept.append((lane, begin, end))
                    begin = end
            ending.append((lane, begin, length))
        nobodys = range(self.lanes, self.lanes + len(kept))  # how many rows a lane has is nothing to these
        whole = self._pass_over(kept, nobodys) if kept else None
        own = self._pass_over(ending, lanes)
        return Reading(whole, own._replace(rows=own.batch.q_len.cumsum(0) - 1), torch.tensor(lanes))

    def _pass_over(self, pieces: Sequence[tuple[int, int, int]], kin: Sequence[int]) -> Feed:
        """A pass over pieces of prompts: of a lane's, from a token to another; no row is wanted."""
        length = torch.tensor([e - b for _, b, e in pieces])
        pages = [self.prefix[lane][b // self.page_size : -(-e // self.page_size)] for lane, b, e in pieces]
        batch = Batch(
            q_len=length,
            own_pages=torch.nn.utils.rnn.pad_sequence(pages, batch_first=True),
            own_len=length,
            group=torch.arange(len(pieces)),
            prefix_pages=tuple(self.prefix[lane][: b // self.page_size] for lane, b, _ in pieces),
            prefix_len=tuple(b for _, b, _ in pieces),
            kin=torch.tensor(list(kin)),
        )
        tokens = torch.cat([self.prompt[lane][b:e] for lane, b, e in pieces])
        positions = torch.cat([torch.arange(b, e) for _, b, e in pieces])
        return Feed(tokens, positions, batch, length[:0])

    def uniform(self, slots: Numbers, place: int | Numbers, stream: int | Tensor) -> Tensor:
        """Float64 uniforms keyed by request seed, particle, cycle and place in the block, and nothing else.

        ``slots`` (n,) int64 and a place give (n,); slots (n, 1) and places (m,) give (n, m), and so do streams.
        """
        slots = np.asarray(slots)
        lane = self.lane.numpy()[slots]
        columns = (self.seed.numpy()[lane], self.particle.numpy()[slots], self.cycle.numpy()[lane])
        seed, particle, cycle = (torch.from_numpy(x) for x in columns)
        return reference.uniform(seed, particle, cycle, torch.as_tensor(place), stream)

    def holders(self) -> list[Tensor]:
        """All page numbers that are held here; AssertionError where a slot has lost pages with its keys and values."""
        lost = ~self.finished & (self.table.used * self.page_size < self.cached)
        assert not lost.any(), f"slot {int(lost.nonzero()[0, 0])} has lost pages that hold its keys and values"
        return [self.table.rows, *self.prefix]
