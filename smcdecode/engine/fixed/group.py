"""Requests of one method on the recorded cycle: lanes, pages lent to it, reports read a cycle late. Knows no law.

The host admits requests, starts cycles, and reads what the last but one did while the last runs; it keeps a copy of all
texts by following the reports.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.engine.attention import Batch
from smcdecode.engine.cache import bytes_per_page
from smcdecode.engine.cycles import Cycle
from smcdecode.engine.fixed.admission import RESAMPLING, pages_of
from smcdecode.engine.fixed.cycle import FixedCycle, Rules
from smcdecode.engine.fixed.state import Report, State
from smcdecode.engine.graphs import Pending, Recorder
from smcdecode.engine.group import Outcome, packed
from smcdecode.engine.passes import Passes, Stores
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Death
from smcdecode.errors import InvalidWeight
from smcdecode.infer.settled import settled
from smcdecode_kernels import ops
from smcdecode_kernels.pages import take

__all__ = ["FixedGroup"]


class FixedGroup:
    """Requests that share a method; see :class:`~smcdecode.engine.group.Group`, whose place it takes.

    Args:
        request: the first; what is constant in a recorded cycle follows from it.
        stores: pages, which are lent to the cycle for as long as a request runs.
        lanes: requests that run at once.
        max_tokens: of the longest continuation.
        longest: tokens of the longest prompt and continuation.
        stats: counts what it costs.
    """

    def __init__(
        self, request: Request, stores: Stores, *, lanes: int, max_tokens: int, longest: int, stats: Stats
    ) -> None:
        self.decoder, self.stats, self.stores = request.method, stats, stores
        method = request.smc
        draft = method.proposal if isinstance(method.proposal, Draft) else None
        block = draft.block if draft is not None else 0
        assert isinstance(block, int)
        self.plain, self.longest, self._N, self._K = request.target.alpha == 1, longest, method.slots, block
        self.passes = Passes(draft.network if draft else None, stores, stats)  # type: ignore[arg-type]
        width = -(-(longest + block + 1) // stores.page_size)
        self.state = State.create(
            lanes, method.slots, block=block, max_tokens=max_tokens, width=width, pages=stores.pool.size,
            device=stores.p.device,
        )  # fmt: skip
        self.state.threshold.fill_(method.threshold)
        if draft is not None and isinstance(draft.strictness, (int, float)):
            self.state.strictness.fill_(draft.strictness)
        rules = Rules(
            draft, block, self.plain, RESAMPLING[method.resampling], tuple(sorted(stores.p.vocabulary.eos)),
            stores.page_size,
        )  # fmt: skip
        self.fixed = FixedCycle(rules, self.passes)
        self._recorder = Recorder(self.fixed, self.state)
        self._lanes = [_Lane(self._N) for _ in range(lanes)]
        self._placed: list[tuple[int, Request]] = []
        self._lent = torch.empty(0, dtype=torch.int64)  # pages that the cycle may use
        self._pending: tuple[Pending, list[Request | None]] | None = None

    # ---- requests

    @property
    def requests(self) -> list[Request]:
        """Those that have a lane."""
        return [lane.request for lane in self._lanes if lane.request is not None]

    def takes(self, request: Request) -> bool:
        """Whether a request's cycles are those of this group."""
        fits = len(request.prompt.tokens) + request.max_tokens <= self.longest
        return self.decoder == request.method and (request.target.alpha == 1) == self.plain and fits

    def place(self, request: Request) -> bool:
        """Give a request a lane, if there is an idle one; it begins with the next cycle."""
        for g, lane in enumerate(self._lanes):
            if lane.request is None:
                self._lanes[g] = _Lane(self._N, request)
                self._placed.append((g, request))
                return True
        return False

    def drop(self, index: int) -> Request | None:
        """End a request now and free its pages; None where it has no lane here."""
        for g, lane in enumerate(self._lanes):
            if lane.request is not None and lane.request.index == index:
                self._placed = [(other, r) for other, r in self._placed if other != g]
                self._free([g])
                return lane.request
        return None

    def latest(self) -> list[Cycle]:
        """The last cycle that is known of every running request."""
        return [lane.cycles[-1] for lane in self._running()]

    def settled(self) -> list[tuple[Request, list[int]]]:
        """Every running request and its tokens that are final: those that its living particles share."""
        return [(lane.request, lane.settled()) for lane in self._running() if lane.request is not None]

    def _running(self) -> list["_Lane"]:
        return [lane for lane in self._lanes if lane.request is not None and lane.cycles]

    def holders(self) -> list[Tensor]:
        """The pages lent to the cycle."""
        return [self._lent]

    def stop(self) -> None:
        """Free all lanes."""
        self._free([g for g, lane in enumerate(self._lanes) if lane.request is not None])
        self._pending = None

    # ---- cycles

    def cycle(self) -> list[Outcome]:
        """Begin one cycle of every request, and read the one before: the outcomes of those that finished in it."""
        for batch in packed(self._placed):
            self._admit(batch)
        self._placed = []
        requests = [lane.request for lane in self._lanes]
        most = max(g for g, request in enumerate(requests) if request is not None) + 1
        before = self._pending
        self._pending = self._recorder.run(most), requests
        return [] if before is None else self._read(*before)

    def _admit(self, batch: Sequence[tuple[int, Request]]) -> None:
        """Read prompts, and draw the first tokens behind them."""
        pages = [self._open(g, request) for g, request in batch]
        lengths = torch.tensor([len(request.prompt.tokens) for _, request in batch])
        tokens = torch.tensor([t for _, request in batch for t in request.prompt.tokens])
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        what = Batch(
            q_len=lengths, own_pages=torch.nn.utils.rnn.pad_sequence(pages, batch_first=True), own_len=lengths,
            group=torch.arange(len(batch)), prefix_pages=(pages[0][:0],) * len(batch), prefix_len=(0,) * len(batch),
        )  # fmt: skip
        with self.stats.clock("prefill"):
            logits = self.passes.target(tokens, positions, what, lengths.cumsum(0) - 1)
            self.passes.draft(tokens, positions, what, lengths[:0])
        self.stats.prompt_tokens += len(tokens)
        self.stats.prompt_tokens_read += len(tokens)
        for row, (g, _) in enumerate(batch):
            self.fixed.begin(self.state, g, logits[row : row + 1])

    @torch.inference_mode()
    def _open(self, g: int, request: Request) -> Tensor:
        """Hand a lane to a request, and lend the cycle all pages it may need; the prompt's, (n,) int64."""
        state, size, n = self.state, self.stores.page_size, len(request.prompt.tokens)
        lent = self.stores.pool.take(pages_of(request, size))
        self._lanes[g].pages = len(lent)
        self._lent = torch.cat([self._lent, lent])
        prompt, rest = lent[: -(-n // size)], lent[-(-n // size) :].int().to(state.device)
        slots = slice(g * self._N, (g + 1) * self._N)
        table, here = state.pages, prompt.to(state.device)
        at = table.left.long() + torch.arange(len(rest), device=state.device)
        table.free.index_copy_(0, at, rest)
        table.left.add_(len(rest))
        table.rows[slots, : len(prompt)].copy_(here.int().expand(self._N, -1))
        table.used[slots].fill_(len(prompt))
        table.counts.index_fill_(0, here, self._N)
        for numbers in (state.ints, state.floats):
            numbers[slots].zero_()
        state.lag[slots].fill_(1)
        state.origin[slots].copy_(torch.arange(self._N, device=state.device))
        first = {
            "seed": request.seed, "cap": request.max_tokens, "prompt": n, "alpha": request.target.alpha,
            "temperature": request.target.temperature, "log_z": 0.0, "resamplings": 0.0, "running": True, "cycle": 0,
        }  # fmt: skip
        for name, number in first.items():
            getattr(state, name)[g : g + 1].fill_(number)
        return prompt

    @torch.inference_mode()
    def _free(self, lanes: list[int]) -> None:
        """Take back everything that lanes hold."""
        state = self.state
        for g in lanes:
            lane = self._lanes[g]
            chosen = torch.zeros_like(state.running)
            chosen[g : g + 1].fill_(True)
            ops.clear(state.pages, state.close(chosen))
            back = take(state.pages, lane.pages).long()  # any that are free now, so many as were lent for it
            state.pages.counts.index_fill_(0, back, 0)
            self.stores.pool.release(back.cpu())
            self._lent = self._lent[~torch.isin(self._lent, back.cpu())]
            self._lanes[g] = _Lane(self._N)

    def _read(self, pending: Pending, requests: Sequence[Request | None]) -> list[Outcome]:
        """Take in a report; outcomes of the lanes that are done."""
        report = Report(pending.read(), self._N)
        self._count(report)
        done = []
        outcomes = []
        for g in report.running.nonzero()[:, 0].tolist():
            lane = self._lanes[g]
            if lane.request is None or lane.request is not requests[g]:
                continue  # it was dropped meanwhile
            if torch.isnan(report.log_w[g]).any():
                names = " or ".join(model.name for model in lane.request.models)
                raise InvalidWeight(f"{names} produced NaN or infinite logits: check the checkpoint and its dtype")
            lane.follow(report, g)
            if report.done[g]:
                done.append(g)
                outcomes.append(self._outcome(lane, report, g))
        self._free(done)
        return outcomes

    def _count(self, report: Report) -> None:
        stats, K = self.stats, self._K
        stats.cycles += 1
        stats.recorded += 1
        stats.target_passes += 1
        stats.draft_passes += K
        stats.target_positions += report.writing * (K + 1)
        stats.draft_positions += report.writing * K
        stats.drafted += report.judged
        stats.accepted += report.accepted
        page = sum(bytes_per_page(store.layout, store.page_size) for store in self.passes.own_stores)
        stats.bytes_moved += report.copied * page

    def _outcome(self, lane: "_Lane", report: Report, g: int) -> Outcome:
        assert lane.request is not None
        self.stats.tokens += max(map(len, lane.texts))
        self.stats.particle_tokens += sum(map(len, lane.texts))
        return Outcome(
            lane.request, [list(text) for text in lane.texts], report.log_w[g].clone(), report.log_p[g].clone(),
            float(report.log_z[g]), report.origin[g].clone(), float(report.resamplings[g]), lane.cycles, lane.deaths,
        )  # fmt: skip


@dataclasses.dataclass
class _Lane:
    """What the host knows of one request, by the reports."""

    N: int
    request: Request | None = None
    pages: int = 0  # lent to the cycle for it
    cycles: list[Cycle] = dataclasses.field(default_factory=list)
    deaths: list[Death] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts: list[tuple[int, ...]] = [()] * self.N
        self.dead = [False] * self.N

    def follow(self, report: Report, g: int) -> None:
        """What one cycle did: to the texts, and for the record."""
        if not self.cycles:
            self.cycles.append(self._first(float(report.first_log_z[g])))
        counts, rows = report.count[g].tolist(), report.written[g].tolist()
        written = [row[:n] for row, n in zip(rows, counts, strict=True)]
        self.texts = [(*text, *new) for text, new in zip(self.texts, written, strict=True)]
        dead = report.dead[g].tolist()
        for i in range(self.N):
            if dead[i] and not self.dead[i]:
                cause = "weight zero under the target's law"
                self.deaths.append(Death(len(self.cycles), i, cause, self.texts[i]))
        log_w, ancestors = report.log_w[g], report.ancestors[g].tolist()
        self.cycles.append(
            Cycle(
                float(report.ess[g]), float(report.log_z[g]), float(report.chi2[g]), bool(report.resampled[g]),
                len(report.origin[g].unique()), int((~torch.isneginf(log_w)).sum()), self.N,  # type: ignore[no-untyped-call]
                int(report.length[g].max()), ancestors, log_w.tolist(), counts, [t for new in written for t in new],
            )
        )  # fmt: skip
        self.texts = [self.texts[a] for a in ancestors]
        self.dead = [dead[a] for a in ancestors]

    def _first(self, log_z: float) -> Cycle:
        """The cycle that drew the first tokens: equal weights."""
        alive = self.N if log_z > -torch.inf else 0
        return Cycle(
            float(alive), log_z, 1.0 if alive else torch.inf, False, self.N, alive, self.N, int(alive > 0),
            list(range(self.N)), [log_z] * self.N, [0] * self.N, [],
        )  # fmt: skip

    def settled(self) -> list[int]:
        """The tokens that all living particles share."""
        length = torch.tensor([len(text) for text in self.texts])
        rows = [torch.tensor(text, dtype=torch.int64) for text in self.texts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return settled(tokens, length, ~torch.tensor(self.dead)).tolist()
