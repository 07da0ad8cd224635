"""Many requests over one page budget: admit, run, finish. Knows queues and reservations, no weights.

A request is admitted when the most pages it can ever hold are unreserved, first come first served; so a run that has
begun can always end, and nothing is ever taken back from it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.engine.cache import bytes_per_page
from smcdecode.engine.memory import plan_memory
from smcdecode.engine.particles import ParticleEngine
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Death
from smcdecode.infer.resampling import SCHEMES
from smcdecode.infer.smc import Step, run
from smcdecode.infer.weights import chi2_plus_one

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
    tokens: int  # tokens of the longest particle
    ancestors: tuple[int, ...]
    log_w: tuple[float, ...]


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
        self, target: Target, method: SMC, requests: Sequence[Request], *, memory: int, page_size: int, stats: Stats
    ) -> None:
        self.method, self.stats = method, stats
        self._waiting = deque(requests)
        N, cap = method.particles, max(r.max_tokens for r in requests)
        self._page_size = page_size
        budget = plan_memory(
            memory, [self._need(r) for r in requests], _page_bytes(target, method, page_size), _lane_bytes(target, method)
        )
        self.engine = ParticleEngine(
            target, method, lanes=budget.lanes, max_tokens=cap, pages=budget.pages, page_size=page_size, stats=stats
        )
        self._lane: list[Request | None] = [None] * budget.lanes
        self._cycles: list[list[Cycle]] = [[] for _ in range(budget.lanes)]
        self._reserved = 0
        self._N = N

    def run(self) -> Iterator[Outcome]:
        """Outcomes as requests finish, in the order they do."""
        with self.stats.clock("total"):
            yield from self._outcomes()

    def _outcomes(self) -> Iterator[Outcome]:
        for step in run(self, SCHEMES[self.method.resampling], self.method.threshold):
            self.stats.cycles += 1
            self._record(step)
            for lane in step.done.nonzero()[:, 0].tolist():
                outcome = self._outcome(lane, step)
                self._free(lane)
                yield outcome

    def lengths(self) -> list[tuple[Request, int]]:
        """The running requests and the tokens of their longest particles."""
        longest = self.engine.slots.length.view(-1, self._N).amax(-1).tolist()
        return [(r, n) for r, n in zip(self._lane, longest, strict=True) if r is not None]

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
        return fresh

    def extend(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        return self.engine.extend().view(-1, self._N)

    def finished(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        return self.engine.slots.finished.view(-1, self._N)

    def uniforms(self) -> Tensor:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        return self.engine.uniforms()

    def select(self, ancestors: Tensor) -> None:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        first = torch.arange(len(ancestors))[:, None] * self._N
        self.engine.select((ancestors + first).flatten())

    def append(self) -> None:
        """See :class:`smcdecode.infer.smc.ParticleSystem`."""
        self.engine.append()

    # ---- bookkeeping

    def _need(self, request: Request) -> int:
        """Most pages a request can ever hold."""
        own = -(-request.max_tokens // self._page_size)
        return -(-len(request.prompt.tokens) // self._page_size) + self.method.particles * own

    def _record(self, step: Step) -> None:
        chi2 = chi2_plus_one(step.increments).tolist()
        alive = (~torch.isneginf(step.log_w)).sum(-1).tolist()
        longest = self.engine.slots.length.view(-1, self._N).amax(-1).tolist()
        for lane in step.running.nonzero()[:, 0].tolist():
            self._cycles[lane].append(
                Cycle(
                    float(step.ess[lane]), float(step.log_z[lane]), chi2[lane], bool(step.resampled[lane]),
                    len(step.origin[lane].unique()), alive[lane], longest[lane],
                    tuple(step.ancestors[lane].tolist()), tuple(step.log_w[lane].tolist()),
                )
            )  # fmt: skip

    def _outcome(self, lane: int, step: Step) -> Outcome:
        request, slots = self._lane[lane], self.engine.slots
        assert request is not None
        here = slots.of(lane)
        lengths = slots.length[here].tolist()
        tokens = [row[:n] for row, n in zip(slots.tokens[here].tolist(), lengths, strict=True)]
        self.stats.tokens += max(lengths)
        self.stats.particle_tokens += sum(lengths)
        return Outcome(
            request, tokens, step.log_w[lane].clone(), slots.log_p[here].clone(), float(step.log_z[lane]),
            step.origin[lane].clone(), float(step.resamplings[lane]), self._cycles[lane], self.engine.deaths[lane],
        )  # fmt: skip

    def _free(self, lane: int) -> None:
        request = self._lane[lane]
        assert request is not None
        self.engine.retire(lane)
        self._reserved -= self._need(request)
        self._lane[lane] = None
        self.stats.pages_peak = self.engine.slots.pool.peak


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
    return max(1, sum(bytes_per_page(model.layout, page_size) for model in models))  # type: ignore[attr-defined]


def _lane_bytes(target: Target, method: SMC) -> int:
    """Logits and laws: float32 rows of the target at K+1 positions three times over, of the draft at K twice."""
    block = method.proposal.block if isinstance(method.proposal, Draft) else 0
    return method.particles * target.model.vocabulary.size * 4 * (3 * (block + 1) + 2 * block)
