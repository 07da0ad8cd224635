"""Many requests over one page budget: admit, run, finish. Knows queues and reservations, no weights.

A request is admitted when the most pages it can ever hold are unreserved, first come first served; so a run that has
begun can always end, and nothing is ever taken back from it.
"""

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.declare.verification import Method, MultiDraft
from smcdecode.engine.cache import bytes_per_page
from smcdecode.engine.chains import ChainEngine
from smcdecode.engine.memory import plan_memory
from smcdecode.engine.particles import ParticleEngine
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Death
from smcdecode.infer.resampling import SCHEMES
from smcdecode.infer.settled import settled
from smcdecode.infer.smc import Step, run
from smcdecode.infer.variance import rebased

__all__ = ["Cycle", "Outcome", "Scheduler"]

_PREFILL_TOKENS = 512  # prompts are read together up to this many tokens a pass


@dataclasses.dataclass(frozen=True)
class Cycle:
    """What one cycle did to one request's particles; weights are those before resampling."""

    ess: float
    log_z: float  # estimate so far
    chi2: float  # 1 + χ²(p‖q) of this cycle's incremental weights, estimated
    resampled: bool
    survivors: int  # distinct first-cycle ancestors of the particles
    alive: int  # particles with positive weight
    particles: int  # N in this cycle; the other slots were idle, of weight zero
    tokens: int  # tokens of the longest particle
    ancestors: list[int]  # by slot; -1: idle from now on
    log_w: list[float]
    counts: list[int]  # tokens that each particle wrote since its ancestor's last cycle
    written: list[int]  # those tokens, particle by particle


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


class Scheduler:
    """Runs requests on a particle engine; a ParticleSystem for :func:`smcdecode.infer.smc.run`."""

    def __init__(
        self, target: Target, decoder: Method, requests: Sequence[Request], *, memory: int, page_size: int, stats: Stats
    ) -> None:
        method = decoder if isinstance(decoder, SMC) else decoder.as_smc()
        self.method, self.stats = method, stats
        self._waiting = deque(requests)
        N, cap = method.slots, max(r.max_tokens for r in requests)
        self._page_size = page_size
        needs = [self._need(r) for r in requests]
        budget = plan_memory(memory, needs, _page_bytes(target, method, page_size), _lane_bytes(target, method))
        sizes = {"lanes": budget.lanes, "max_tokens": cap, "pages": budget.pages, "page_size": page_size}
        self.engine = (
            ChainEngine(target, decoder, **sizes, stats=stats)
            if isinstance(decoder, MultiDraft)
            else ParticleEngine(target, method, **sizes, stats=stats)
        )
        self._answers = 1 if isinstance(decoder, MultiDraft) else method.slots  # the chains of a lane end as one text
        self._lane: list[Request | None] = [None] * budget.lanes
        self._cycles: list[list[Cycle]] = [[] for _ in range(budget.lanes)]
        self._told = torch.zeros_like(self.engine.slots.length)  # own tokens of each slot that cycles have told of
        self._news: list[tuple[list[int], list[int]]] = []  # counts and tokens of this cycle, a pair a lane
        self._reserved = 0
        self._N = N

    def run(self) -> Generator[list[Outcome], None, None]:
        """Cycle by cycle, the outcomes of the requests that finished in it: often none."""
        with self.stats.clock("total"):
            try:
                yield from self._outcomes()
            finally:
                self._free([lane for lane, request in enumerate(self._lane) if request is not None])

    def _outcomes(self) -> Iterator[list[Outcome]]:
        for step in run(self, SCHEMES[self.method.resampling], self.method.threshold, self.method.population):
            self.stats.cycles += 1
            self._record(step)
            done = step.done.nonzero()[:, 0].tolist()
            outcomes = self._close(done, step)
            self._free(done)
            yield outcomes

    def latest(self) -> list[Cycle]:
        """The last cycle of every running request."""
        return [cycles[-1] for r, cycles in zip(self._lane, self._cycles, strict=True) if r is not None and cycles]

    def settled(self) -> list[tuple[Request, list[int]]]:
        """Every running request and its tokens that are final: those that its living particles share."""
        slots = self.engine.slots
        tokens, length, dead = (x.view(slots.lanes, self._N, -1) for x in (slots.tokens, slots.length, slots.dead))
        running = [(lane, request) for lane, request in enumerate(self._lane) if request is not None]
        return [(r, settled(tokens[g], length[g, :, 0], ~dead[g, :, 0]).tolist()) for g, r in running]

    # ---- ParticleSystem

    def admit(self) -> Tensor | None:
        """Start waiting requests while lanes and pages last."""
        started: list[tuple[int, Request]] = []
        idle = (lane for lane, request in enumerate(self._lane) if request is None)
        for lane in idle:
            if not self._waiting or self._reserved + self._need(self._waiting[0]) > self.engine.slots.pool.size:
                break
            request = self._waiting.popleft()
            self._reserved += self._need(request)
            self._lane[lane], self._cycles[lane] = request, []
            started.append((lane, request))
        for batch in _packed(started):
            self.engine.prefill([lane for lane, _ in batch], [request for _, request in batch])
        if all(request is None for request in self._lane):
            return None
        fresh = torch.zeros(len(self._lane), dtype=torch.bool)
        fresh[[lane for lane, _ in started]] = True
        self._told.view(-1, self._N)[fresh] = 0
        return fresh

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

    def _need(self, request: Request) -> int:
        """Most pages a request can ever hold."""
        own = -(-request.max_tokens // self._page_size)
        return -(-len(request.prompt.tokens) // self._page_size) + self.method.slots * own

    def _read(self) -> list[tuple[list[int], list[int]]]:
        """What the particles of each lane wrote since the last cycle: how many tokens each, and all of them."""
        slots = self.engine.slots
        count = (slots.length - self._told).view(-1, self._N)
        count[:, self._answers :] = 0
        every = count.flatten()
        owner = torch.arange(len(every)).repeat_interleave(every)
        place = self._told[owner] + torch.arange(len(owner)) - (every.cumsum(0) - every)[owner]
        written = torch.split(slots.tokens[owner, place], count.sum(-1).tolist())
        return [(c[: self._answers], w.tolist()) for c, w in zip(count.tolist(), written, strict=True)]

    def _record(self, step: Step) -> None:
        lanes = step.running.nonzero()[:, 0]
        columns = (
            step.ess, step.log_z, step.chi2, step.resampled, _distinct(step.origin),
            (~torch.isneginf(step.log_w)).sum(-1), step.count, self.engine.slots.length.view(-1, self._N).amax(-1),
            step.ancestors, step.log_w,
        )  # fmt: skip
        for lane, *numbers in zip(lanes.tolist(), *(c[lanes].tolist() for c in columns), strict=True):
            self._cycles[lane].append(Cycle(*numbers, *self._news[lane]))

    def _close(self, lanes: list[int], step: Step) -> list[Outcome]:
        """What came out of lanes that are done."""
        slots = self.engine.slots
        held = ~slots.idle.view(-1, self._N)
        held[:, self._answers :] = False
        outcomes = []
        for lane in lanes:
            request = self._lane[lane]
            assert request is not None
            here = lane * self._N + held[lane].nonzero()[:, 0]
            tokens = [row[:n] for row, n in zip(slots.tokens[here].tolist(), slots.length[here].tolist(), strict=True)]
            self.stats.tokens += max(map(len, tokens))
            self.stats.particle_tokens += sum(map(len, tokens))
            origin, r = step.origin[lane, held[lane]], float(step.resamplings[lane])
            if self.method.population is not None:  # for the variance estimate both count in the final N
                origin = torch.unique(origin, return_inverse=True)[1]
                r = rebased(r, self._N, self.method.population.first, len(here))
            outcomes.append(
                Outcome(
                    request, tokens, step.log_w[lane, held[lane]], slots.log_p[here], float(step.log_z[lane]), origin,
                    r, self._cycles[lane], self.engine.deaths[lane],
                )
            )  # fmt: skip
        return outcomes

    def _free(self, lanes: list[int]) -> None:
        """Give back the pages and reservations of lanes."""
        if not lanes:
            return
        self.engine.retire(lanes)
        self._reserved -= sum(self._need(request) for lane in lanes if (request := self._lane[lane]) is not None)
        for lane in lanes:
            self._lane[lane] = None
        self.stats.pages_peak = self.engine.slots.pool.peak


def _distinct(x: Tensor) -> Tensor:
    """How many different values each row has, -1 not counted: (G, N) int64 → (G,) int64."""
    return (x.sort(-1).values.diff() != 0).sum(-1) + 1 - (x < 0).any(-1).long()


def _packed(started: list[tuple[int, Request]]) -> Iterator[list[tuple[int, Request]]]:
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


def _page_bytes(target: Target, method: SMC, page_size: int) -> int:
    models = [target.model, *([method.proposal.model] if isinstance(method.proposal, Draft) else [])]
    sizes = [bytes_per_page(model.layout, page_size) for model in models]  # type: ignore[attr-defined]
    return max(1, sum(sizes))


def _lane_bytes(target: Target, method: SMC) -> int:
    """Logits and laws: float32 rows of the target at K+1 positions three times over, of the draft at K twice."""
    block = method.proposal.longest if isinstance(method.proposal, Draft) else 0
    return method.slots * target.model.vocabulary.size * 4 * (3 * (block + 1) + 2 * block)
