"""Requests of one method, cycle by cycle: lanes of one engine. Knows lanes and what they went through; no queue."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.verification import Method, MultiDraft, Saguaro
from smcdecode.engine.chains import ChainEngine
from smcdecode.engine.cycles import Cycle, Seen, told
from smcdecode.engine.particles import ParticleEngine
from smcdecode.engine.passes import Passes, Stores
from smcdecode.engine.remote.engine import RemoteEngine
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Death
from smcdecode.infer.resampling import SCHEMES
from smcdecode.infer.settled import settled
from smcdecode.infer.smc import Step, run
from smcdecode.infer.variance import rebased

__all__ = ["Cycle", "Group", "Outcome", "packed"]

_AT_ONCE = 64  # cycles that are told of together
_PREFILL_TOKENS = 512  # prompts are read together up to this many tokens a pass


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A request that is done: its weighted particles and how they came about."""

    request: Request
    tokens: list[list[int]]  # N continuations, EOS included where drawn
    log_w: Tensor  # (N,) float64, since the last resampling
    log_p: Tensor  # (N,) float64, log p of each continuation
    log_z: float
    origin: Tensor  # (N,) int64
    resamplings: float  # in multinomial equivalents, for the variance estimate
    cycles: list[Cycle]
    deaths: list[Death]


class Group:
    """Requests that share a method, all in one batch; a ParticleSystem for :func:`smcdecode.infer.smc.run`.

    Their targets may differ, and requests come and go between cycles.
    """

    def __init__(self, decoder: Method, stores: Stores, *, lanes: int, max_tokens: int, stats: Stats) -> None:
        method = decoder if isinstance(decoder, SMC) else decoder.as_smc()
        self.decoder, self.stats, self._N = decoder, stats, method.slots
        self._population = method.population
        self.engine = _engine(decoder, method, stores, lanes=lanes, max_tokens=max_tokens, stats=stats)
        self._answers = 1 if isinstance(decoder, MultiDraft) else self._N  # the chains of a lane end as one text
        self._lane: list[Request | None] = [None] * lanes
        self._cycles: list[list[Cycle]] = [[] for _ in range(lanes)]
        self._seen: list[list[Seen]] = [[] for _ in range(lanes)]  # cycles behind those
        self._placed: list[tuple[int, Request]] = []  # begin with the next cycle
        self._told = torch.zeros_like(self.engine.slots.length)  # own tokens of each slot that cycles have told of
        self._news = (self._told, self._told)  # counts and tokens of this cycle, see Seen
        self._steps = run(self, SCHEMES[method.resampling], method.threshold, method.population)

    # ---- requests

    @property
    def requests(self) -> list[Request]:
        """Those that have a lane."""
        return [request for request in self._lane if request is not None]

    @property
    def passes(self) -> Passes:
        """Its target and draft."""
        return self.engine.passes

    def takes(self, request: Request) -> bool:
        """Whether a request belongs here: its method is this group's."""
        return self.decoder == request.method

    def place(self, request: Request) -> bool:
        """Give a request a lane, if there is an idle one; it begins with the next cycle."""
        lane = next((lane for lane, holder in enumerate(self._lane) if holder is None), None)
        if lane is None:
            return False
        self._lane[lane], self._cycles[lane], self._seen[lane] = request, [], []
        self._placed.append((lane, request))
        return True

    def drop(self, index: int) -> Request | None:
        """End a request now, between two cycles, and free its pages; None where it has no lane here."""
        for lane, request in enumerate(self._lane):
            if request is not None and request.index == index:
                self._placed = [(other, r) for other, r in self._placed if other != lane]
                self._free([lane])
                return request
        return None

    def holders(self) -> list[Tensor]:
        """All page numbers that are held here."""
        return self.engine.slots.holders()

    def cycle(self) -> list[Outcome]:
        """One cycle of every request; the outcomes of those that finished in it."""
        step = next(self._steps)
        self.stats.cycles += 1
        self._record(step)
        done = [lane for lane in np.flatnonzero(step.done.numpy()).tolist() if self._lane[lane] is not None]
        outcomes = self._close(done, step)
        self._free(done)
        return outcomes

    def latest(self) -> list[Cycle]:
        """The last cycle of every running request."""
        lanes = [lane for lane, _ in self._running()]
        self._tell(lanes)
        return [self._cycles[lane][-1] for lane in lanes]

    def settled(self) -> list[tuple[Request, list[int]]]:
        """Every running request and its tokens that are final: those that its living particles share."""
        slots = self.engine.slots
        tokens, length, dead = (x.view(slots.lanes, self._N, -1) for x in (slots.tokens, slots.length, slots.dead))
        running = self._running()
        return [(r, settled(tokens[g], length[g, :, 0], ~dead[g, :, 0]).tolist()) for g, r in running]

    def _running(self) -> list[tuple[int, Request]]:
        """Lanes whose request has been through a cycle."""
        begun = (bool(seen or told) for seen, told in zip(self._seen, self._cycles, strict=True))
        return [(lane, r) for lane, (r, has) in enumerate(zip(self._lane, begun, strict=True)) if r is not None and has]

    def stop(self) -> None:
        """Free all lanes, and the engine."""
        self._free([lane for lane, request in enumerate(self._lane) if request is not None])
        self.engine.close()

    # ---- ParticleSystem

    def admit(self) -> Tensor | None:
        """Read the prompts of the requests that were placed since the last cycle."""
        fresh = torch.zeros(len(self._lane), dtype=torch.bool)
        if self._placed:
            fresh[[lane for lane, _ in self._placed]] = True
            for batch in packed(self._placed):
                self.engine.prefill([lane for lane, _ in batch], [request for _, request in batch])
            self._placed = []
            self._told.view(-1, self._N)[fresh] = 0
        return fresh if self.requests else None

    def extend(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        increments = self.engine.extend().view(-1, self._N)
        self._news = self._read()  # before a resampling replaces particles
        return increments

    def finished(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        return self.engine.slots.finished.view(-1, self._N)

    def uniforms(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        return self.engine.uniforms()

    def select(self, ancestors: Tensor) -> None:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        first = torch.arange(len(ancestors))[:, None] * self._N
        self.engine.select(torch.where(ancestors < 0, -1, ancestors + first).flatten())

    def append(self) -> None:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        self._told = self.engine.slots.length.clone()  # the bonus token is the next cycle's news
        self.engine.append()

    # ---- bookkeeping

    def _read(self) -> tuple[Tensor, Tensor]:
        """What the particles of each lane wrote since the last cycle: how many tokens each, and which."""
        slots = self.engine.slots
        told, tokens = self._told.numpy(), slots.tokens.numpy()
        news = slots.length.numpy() - told
        place = np.minimum(told[:, None] + np.arange(int(news.max())), tokens.shape[1] - 1)
        count, written = torch.from_numpy(news), torch.from_numpy(np.take_along_axis(tokens, place, 1))
        lanes = len(self._lane)
        count, written = count.view(lanes, self._N), written.view(lanes, self._N, written.shape[1])
        return count[:, : self._answers], written[:, : self._answers]

    def _record(self, step: Step) -> None:
        seen = Seen(step, self.engine.slots.length.view(-1, self._N).amax(-1), *self._news)
        running = [lane for lane, request in enumerate(self._lane) if request is not None]
        for lane in running:
            self._seen[lane].append(seen)
        self._tell([lane for lane in running if len(self._seen[lane]) == _AT_ONCE])

    def _tell(self, lanes: list[int]) -> None:
        """Turn what was seen of some lanes into cycles; lanes that saw the same at once."""
        together: dict[int, list[int]] = {}
        for lane in lanes:
            if self._seen[lane]:
                together.setdefault(id(self._seen[lane][0]), []).append(lane)  # up to the last, so the first says all
        for alike in together.values():
            for lane, cycles in zip(alike, told(self._seen[alike[0]], alike), strict=True):
                self._cycles[lane] += cycles
                self._seen[lane] = []

    def _close(self, lanes: list[int], step: Step) -> list[Outcome]:
        """What came out of lanes that are done."""
        slots = self.engine.slots
        held = ~slots.idle.view(-1, self._N)
        held[:, self._answers :] = False
        outcomes = []
        self._tell(lanes)
        for lane in lanes:
            request = self._lane[lane]
            assert request is not None
            here = lane * self._N + held[lane].nonzero()[:, 0]
            tokens = [row[:n] for row, n in zip(slots.tokens[here].tolist(), slots.length[here].tolist(), strict=True)]
            self.stats.tokens += max(map(len, tokens))
            self.stats.particle_tokens += sum(map(len, tokens))
            origin, r = step.origin[lane, held[lane]], float(step.resamplings[lane])
            if self._population is not None:  # for the variance estimate both count in the final N
                origin = torch.unique(origin, return_inverse=True)[1]
                r = rebased(r, self._N, self._population.first, len(here))
            outcomes.append(
                Outcome(
                    request, tokens, step.log_w[lane, held[lane]], slots.log_p[here], float(step.log_z[lane]), origin,
                    r, self._cycles[lane], self.engine.deaths[lane],
                )
            )  # fmt: skip
        return outcomes

    def _free(self, lanes: list[int]) -> None:
        """Give back everything that lanes hold."""
        if lanes:
            self.engine.retire(lanes)
        for lane in lanes:
            self._lane[lane] = None


def _engine(decoder: Method, method: SMC, stores: Stores, **options: Any) -> ParticleEngine:
    """What runs a method."""
    if isinstance(decoder, MultiDraft):
        return ChainEngine(decoder, stores, **options)
    if isinstance(decoder, Saguaro) or method.overlap:
        return RemoteEngine(decoder if isinstance(decoder, Saguaro) else method, stores, **options)
    return ParticleEngine(method, stores, **options)


def packed(started: list[tuple[int, Request]]) -> Iterator[list[tuple[int, Request]]]:
    """Requests whose prompts are read in one pass."""
    batch: list[tuple[int, Request]] = []
    size = 0
    for lane, request in started:
        n = len(request.prompt.tokens)
        if batch and size + n > _PREFILL_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append((lane, request))
        size += n
    if batch:
        yield batch
