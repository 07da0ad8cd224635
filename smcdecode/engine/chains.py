"""N drafted chains a lane, verified together: one path of law exactly p. Knows slots and couplings; no weights.

The slots of a lane hold the same text between cycles. Each drafts its own chain, one target pass scores them all, a
coupling walks down the tree (:mod:`smcdecode.infer.descent`), and every slot becomes a copy of the chain it followed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smcdecode.declare.verification import MultiDraft
from smcdecode.engine.drafting import Block, Drafter, Going, Stream
from smcdecode.engine.particles import ParticleEngine
from smcdecode.engine.passes import Stores
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.infer.coupling.catalogue import Preference
from smcdecode.infer.coupling.drafting import INDEPENDENT
from smcdecode.infer.coupling.protocol import Coupling
from smcdecode.infer.descent import Path, descend

__all__ = ["ChainEngine"]

STREAMS = (Stream.ACCEPT, Stream.REDRAW)  # a branch of the coupling, and its residual or bonus token


class ChainEngine(ParticleEngine):
    """Runs :class:`~smcdecode.declare.method.MultiDraft`: particles are chains, their weights never move."""

    def __init__(self, method: MultiDraft, stores: Stores, *, lanes: int, max_tokens: int, stats: Stats) -> None:
        super().__init__(method.as_smc(), stores, lanes=lanes, max_tokens=max_tokens, stats=stats)
        self.couplings = method.couplings()
        self.preference = Preference.start(lanes)
        assert isinstance(self.drafter, Drafter)  # chains have a draft model
        self.drafter = _ChainDrafter(self.drafter, self.couplings, self._choice)

    def prefill(self, lanes: Sequence[int], requests: Sequence[Request]) -> None:
        """Read the prompts of new requests; nothing is known of their laws yet."""
        super().prefill(lanes, requests)
        self.preference = Preference(self.preference.seen.index_fill(0, torch.tensor(lanes), 0.0))

    def _choice(self, lanes: Tensor) -> Tensor:
        """Which coupling each lane uses this cycle, by what was measured in its past: (m,) int64."""
        return self.preference.choice[lanes] if len(self.couplings) > 1 else torch.zeros_like(lanes)

    def _write_block(self, writing: Tensor, increments: Tensor, offset: int) -> Tensor:  # noqa: ARG002  weights stay
        """One verified path in every lane of ``writing``: the token behind it is written with it."""
        slots, N = self.slots, self.slots.N
        with self.stats.clock("draft"):
            block = self.drafter.write(writing)
        with self.stats.clock("score"):
            law, _, row = self.judge.score(block, self._slant(writing))
        with self.stats.clock("coupling"):
            laws = _Laws(block, law, row, N)
            path = self._descend(block, laws)
        first = writing[::N]
        winner = first + path.chain
        room = torch.from_numpy(slots.left(first))
        at = torch.arange(len(first)) * N + path.chain  # the winner's row of the block
        count = torch.minimum(path.length, room)
        slots.log_p[winner] += laws.log_p(path, count)
        slots.write(winner, path.tokens, count)
        slots.cached[winner] = slots.length[winner] - 1
        slots.lag[winner] = torch.where(path.accepted == block.count[at], 2, 1)
        self._mark_finished(winner)
        ancestors = torch.arange(len(slots.length))
        ancestors[writing] = winner.repeat_interleave(N)
        slots.select(ancestors)
        self.stats.drafted += int((path.accepted + (path.accepted < block.count[at])).sum())
        self.stats.accepted += int(path.accepted.sum())
        return law[:0]

    def _descend(self, block: Block, laws: "_Laws") -> Path:
        """Walk down each lane's tree with the lane's coupling, then learn how good each coupling would have been."""
        N = self.slots.N
        first = block.slots[::N]
        lanes = self.slots.lane[first]
        K = block.tokens.shape[1]
        u = torch.stack([torch.stack([self.slots.uniform(first, k, s) for s in STREAMS], -1) for k in range(K + 1)], 1)
        drafts = block.tokens.view(-1, N, K)
        counts = block.count.view(-1, N)
        choice = self._choice(lanes)
        path = Path(
            torch.full((len(first), K + 1), -1),
            torch.zeros_like(first),
            torch.zeros_like(first),
            torch.zeros_like(first),
        )
        for c, coupling in enumerate(self.couplings):
            mine = (choice == c).nonzero()[:, 0]
            if len(mine):
                final = functools.partial(self._final, first[mine])
                part = descend(coupling, laws.of(mine), drafts[mine], counts[mine], u[mine], final)
                for field in dataclasses.fields(Path):
                    getattr(path, field.name)[mine] = getattr(part, field.name)
        if len(self.couplings) > 1:
            self._learn(lanes, laws, (counts[:, 0] > 0).nonzero()[:, 0])
        return path

    def _final(self, slots: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Whether the last of some ``tokens`` (m, depth + 1) ends the text of ``slots[rows]``: (m,) bool."""
        return self.endings.of(slots[rows], tokens[:, -1], tokens[:, :-1])

    def _learn(self, lanes: Tensor, laws: "_Laws", drafted: Tensor) -> None:
        """What each coupling would have accepted at the first position of lanes that drafted, for choices to come."""
        if len(drafted):
            zero = torch.zeros_like(drafted)
            p, q = laws.target(drafted, zero, 0), laws.draft(drafted, zero, 0)
            self.preference = self.preference.observe(lanes[drafted], p, q, self.slots.N)

    def _bonus_uniform(self, slots: Tensor) -> Tensor:
        """The first token is one for all chains of a lane."""
        return self.slots.uniform(slots - self.slots.particle[slots], 0, Stream.BONUS)


class _Laws:
    """The tree's laws, read from a block's scored and drafted rows; see :class:`~smcdecode.infer.descent.TreeLaws`."""

    def __init__(self, block: Block, log_p: Tensor, row: Tensor, N: int, rows: Tensor | None = None) -> None:
        self.block, self.log_p_rows, self.row, self.N = block, log_p, row, N
        self.lanes = torch.arange(len(block.slots) // N) if rows is None else rows

    def of(self, rows: Tensor) -> "_Laws":
        """The laws of some lanes."""
        return _Laws(self.block, self.log_p_rows, self.row, self.N, rows)

    def target(self, rows: Tensor, chain: Tensor, depth: int) -> Tensor:
        """P behind ``depth`` tokens of a chain; a row past the cap was not scored, and what is drawn there is cut."""
        at = self.row[self.lanes[rows] * self.N + chain, depth].clamp(min=0)
        return self.log_p_rows[at].cpu().double().softmax(-1)

    def draft(self, rows: Tensor, chain: Tensor, depth: int) -> Tensor:
        """Q there."""
        assert self.block.laws is not None
        return self.block.laws[self.lanes[rows] * self.N + chain, depth].cpu().double().softmax(-1)

    def log_p(self, path: Path, count: Tensor) -> Tensor:
        """The log-probability of the first ``count`` tokens of each path under the target: (B,) float64."""
        total = torch.zeros(len(count), dtype=torch.float64)
        for depth in range(int(count.max())):
            here = (count > depth).nonzero()[:, 0]
            at = self.row[self.lanes[here] * self.N + path.chain[here], depth]
            total[here] += self.log_p_rows[at, path.tokens[here, depth]].cpu().double()
        return total


class _ChainDrafter(Drafter):
    """Chains that share a prefix are drafted jointly, as their lane's coupling asks; then each goes on alone."""

    def __init__(self, plain: Drafter, couplings: tuple[Coupling, ...], choice: Callable[[Tensor], Tensor]) -> None:
        super().__init__(
            plain.spec, plain.guesser, plain.slots, plain.passes, plain.twist, plain.endings, plain.temperature
        )
        self.couplings, self.choice = couplings, choice

    def _draw(self, law: Tensor, going: Going, k: int) -> tuple[Tensor, Tensor]:
        tokens, norm = super()._draw(law, going, k)
        if k:
            return tokens, norm
        N = self.slots.N
        chosen = self.choice(self.slots.lane[going.company.slots[::N]])
        u = going.u[:, 0].view(-1, N)
        for c, coupling in enumerate(self.couplings):
            lanes = (chosen == c).nonzero()[:, 0]
            if len(lanes) and coupling.drafting is not INDEPENDENT:
                q = law[lanes * N].cpu().double().softmax(-1)
                tokens.view(-1, N)[lanes] = coupling.drafting.draw(q, u[lanes])
        return tokens, norm
