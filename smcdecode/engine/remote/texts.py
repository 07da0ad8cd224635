"""The draft's own particles: texts with a block behind them, and branches that share their pages. Knows no target.

Slots of a lane: each particle is a *trunk*, followed by B *branches* and a *spare* one, for an outcome that no branch
foresaw. ``base`` is where a slot's last block begins; ``cached`` is how many own tokens the draft has keys and values
for. Branches are copies of their trunk up to the tokens kept, so only table rows move.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smcdecode.declare.method import Autoregressive
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.engine.attention import Batch
from smcdecode.engine.company import Company
from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import check_numbers, draw, log_norm, log_weight, proposal_law
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.pages import PagePool
from smcdecode.engine.prefixes import Prefixes
from smcdecode.engine.remote.messages import Flags, Floats, Ints, Lanes, Setup
from smcdecode.engine.request import Request
from smcdecode.engine.slots import Slots
from smcdecode.infer.saguaro import downweight
from smcdecode.potentials.potential import Prompt

__all__ = ["Texts"]

GUESSES = 64  # most tokens kept as guesses of one position


class Texts:
    """Trunks and branches of one run, on the draft's pages.

    Attributes:
        tokens, length, cached: of ``slots``, the same memory.
        base: (S,) int64, own tokens before the last block; the block is what lies behind.
        ended: (S,) bool, the block ends the text: no token follows it.
        heat: (S,) float64, the temperature that the block was drawn at.
        backed: (S,) bool, the block was written by a backup.
        guesses: most guesses of one position.
    """

    def __init__(self, model: LanguageModel, setup: Setup) -> None:
        self.model, self.setup, self.B = model, setup, setup.budget + setup.ancestors
        self.each = 2 + self.B  # slots of a particle
        pages = setup.pages + setup.slots * self.each * (setup.block + 2)
        self.slots = Slots(setup.lanes, setup.particles * self.each, setup.max_tokens, Prefixes(PagePool(pages), 1))
        self.slots.particle = torch.arange(setup.particles).repeat_interleave(self.each).repeat(setup.lanes)
        self.tokens, self.length, self.cached = (
            x.numpy() for x in (self.slots.tokens, self.slots.length, self.slots.cached)
        )
        self.lane, self.cycle, self.cap = (x.numpy() for x in (self.slots.lane, self.slots.cycle, self.slots.cap))
        self.store = model.store(pages + 1, 1)
        self.spec = Draft(model, setup.block, strictness=1.0, top_k=setup.top_k, top_p=setup.top_p)
        self.is_eos = np.zeros(setup.size, dtype=bool)
        self.is_eos[sorted(setup.eos)] = True
        self.guesses = min(GUESSES, setup.budget + 2, setup.size)
        S = len(self.length)
        self.base = np.zeros(S, dtype=np.int64)
        self.ended, self.backed = np.zeros((2, S), dtype=bool)
        self.heat = np.ones(S)
        self._written: list[_Written | None] = [None] * S  # where each block's logits are, and which row of it
        self._row = np.zeros(S, dtype=np.int64)

    def trunk(self, particle: Ints) -> Ints:
        """Where the particles (n,) of the target's side stand here."""
        return particle * self.each

    def spare(self, particle: Ints) -> Ints:
        """The branches (n,) that are free for what no other foresaw."""
        return particle * self.each + self.each - 1

    def count(self, slots: Ints) -> Ints:
        """Tokens in the blocks of some slots: (n,)."""
        return np.asarray(self.length[slots] - self.base[slots])

    def blocks(self, slots: Ints, width: int | None = None) -> Ints:
        """The tokens of the blocks of some slots (n,), and whatever lies behind: (n, K), or as wide as asked."""
        place = self.base[slots][:, None] + np.arange(width or self.setup.block)
        return np.asarray(self.tokens[slots[:, None], np.minimum(place, self.tokens.shape[1] - 1)])

    # ---- lanes

    def open(self, lanes: Lanes) -> tuple[Ints, Tensor]:
        """Read the prompts of lanes that begin, ascending: their trunks (m,), and the logits (m, V) behind them."""
        requests = [
            Request(0, Prompt(tuple(prompt.tolist())), Target(self.model), Autoregressive(), seed, cap)
            for prompt, seed, cap in zip(lanes.prompts, lanes.seed.tolist(), lanes.cap.tolist(), strict=True)
        ]
        index = torch.from_numpy(lanes.lane)
        [reading] = self.slots.open(index, requests, [id(self.model)])
        here = self.slots.of(index).numpy()
        self.base[here], self.ended[here], self.backed[here] = 0, False, False
        logits = self._pass(*reading.feed)
        N = self.setup.particles
        return self.trunk((lanes.lane[:, None] * N + np.arange(N)).ravel()), logits.repeat_interleave(N, 0)

    def close(self, lanes: Ints) -> None:
        """Forget lanes (n,)."""
        index = torch.from_numpy(lanes)
        self.slots.close(index)
        self._forget(self.slots.of(index).numpy())

    # ---- moves

    def follow(self, trunks: Ints, branches: Ints) -> None:
        """Each trunk becomes the text of one of its branches: (n,) each."""
        self._copy(trunks, branches, self.length[branches], self.cached[branches])
        for array in (self.base, self.ended, self.heat, self.backed, self._row):
            array[trunks] = array[branches]
        for trunk, branch in zip(trunks.tolist(), branches.tolist(), strict=True):
            self._written[trunk] = self._written[branch]

    def branch(self, branches: Ints, trunks: Ints, kept: Ints, tokens: Ints) -> None:
        """Each branch becomes a trunk's text up to ``kept`` of its block, and one token more: (n,) each."""
        end = self.base[trunks] + kept
        self._copy(branches, trunks, end, np.minimum(self.cached[trunks], end))
        self.slots.put(branches, tokens)
        self.base[branches] = end + 1
        self.ended[branches] = self.slots.left(branches) == 0
        self.backed[branches] = False
        self._forget(branches)

    def _copy(self, slots: Ints, ancestors: Ints, length: Ints, cached: Ints) -> None:
        """Slots become the first ``length`` tokens of others, of which the draft has read ``cached``: (n,) each."""
        self.slots.table.copy(slots, ancestors, cached)
        tokens = self.tokens[:, : int(length.max(initial=0))]
        tokens[slots] = tokens[ancestors]
        self.length[slots], self.cached[slots] = length, cached

    def prune(self, trunks: Ints) -> None:
        """Give back the pages of all branches of some trunks."""
        branches = (trunks[:, None] + np.arange(1, self.each)).ravel()
        branches = branches[self.slots.table.used.numpy()[branches] > 0]
        self.slots.release(branches)
        self._forget(branches)

    def _forget(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self._written[slot] = None

    # ---- passes

    def draft(self, slots: Ints, temperature: Floats, share: float, wanted: Callable[[], Ints | None]) -> None:
        """Up to K tokens of the draft behind each of some slots (n,) sorted, drawn by the uniforms of their cycle.

        Args:
            slots: (n,); one whose text has ended gets none.
            temperature: (n,).
            share: C of σ_{F,C}.
            wanted: asked before each pass: the slots still worth drafting, or None for all.
        """
        s, K = self.slots, self.setup.block
        if self.ended[slots].any():
            slots, temperature = slots[~self.ended[slots]], temperature[~self.ended[slots]]
        if not len(slots):
            return
        room, lag = s.left(slots), self.length[slots] - self.cached[slots]
        s.table.grow(slots, self.length[slots] + np.minimum(room, K) - 1)
        u = s.uniform(slots[:, None], np.arange(K), Stream.DRAFT).numpy()
        company = Company.of(s, torch.from_numpy(slots))
        tokens, count = np.zeros((len(slots), K), dtype=np.int64), np.zeros_like(slots)
        written = _Written([], np.zeros((len(slots), K), dtype=np.int64), share)
        at = np.arange(len(slots))  # those that are still drafted
        for k in range(K):
            if (still := wanted()) is not None:
                company, at = _some(company, at, np.isin(slots[at], still))
            if not len(at):
                break
            feed = company.behind(torch.from_numpy(tokens[at, :k])) if k else company.unread(s.tokens, lag[at])
            logits = self._pass(*feed)
            written.logits.append(logits)
            written.row[at, k] = np.arange(len(at))
            law = self._weights(logits, temperature[at], share)
            next_, norm = draw(law, torch.from_numpy(u[at, k]))
            check_numbers(norm, self.model.name)
            drawn = next_.numpy()
            tokens[at, k], count[at] = drawn, k + 1
            if k + 1 < K:
                company, at = _some(company, at, ~self.is_eos[drawn] & (room[at] > k + 1))
        self._keep(slots, tokens, count, temperature, written)

    def _keep(self, slots: Ints, tokens: Ints, count: Ints, temperature: Floats, written: "_Written") -> None:
        """Put drafted blocks behind their slots; the draft has read all but the last token of each."""
        self.put(slots, tokens, count)
        self.cached[slots] = np.where(count > 0, self.length[slots] - 1, self.cached[slots])
        self.heat[slots] = temperature
        self._row[slots] = np.arange(len(slots))
        for slot in slots.tolist():
            self._written[slot] = written

    def put(self, slots: Ints, tokens: Ints, count: Ints) -> None:
        """Write blocks behind some slots: (n,), (n, K), (n,)."""
        self.slots.write(slots, tokens, count)
        last = self.tokens[slots, self.length[slots] - 1]
        self.ended[slots] = (self.slots.left(slots) == 0) | (self.is_eos[last] & (count > 0))

    def logits(self, slots: Ints) -> tuple[Tensor, Floats]:
        """What the tokens of the blocks of some slots (n,) were drawn from: (R, V) float32 block by block, and C."""
        count = self.count(slots)
        first = count.cumsum() - count
        written = [self._written[slot] for slot in slots.tolist()]
        parts, places, shares = [], [], np.ones(int(count.sum()))
        for source in {id(x): x for x in written if x is not None}.values():
            here = np.array([x is source for x in written])
            for k in range(int(count[here].max())):
                rows = np.flatnonzero(here & (count > k))
                parts.append(source.logits[k][torch.from_numpy(source.row[self._row[slots[rows]], k])])
                places.append(first[rows] + k)
                shares[places[-1]] = source.share
        if not parts:
            return torch.empty(0, self.setup.size, device=self.model.layout.device), shares
        logits = torch.cat(parts)
        if len(slots) == 1:
            return logits, shares
        return logits[torch.from_numpy(np.concatenate(places).argsort()).to(logits.device)], shares

    def laws(self, slots: Ints, logits: Tensor, shares: Floats) -> tuple[Tensor, Floats]:
        """The laws that the tokens of some blocks were drawn from.

        Args:
            slots: (n,), whose blocks the draft wrote.
            logits: (R, V) float32, of :meth:`logits`.
            shares: (R,), C of each row.

        Returns:
            normalised log q (R, V) float32, and log q of the tokens (R,); both on the host.
        """
        if not len(shares):
            return logits.cpu(), shares
        count = self.count(slots)
        owner = np.arange(len(slots)).repeat(count)
        place = (self.length[slots] - count.cumsum())[owner] + np.arange(len(owner))
        heat = self.heat[slots][owner]
        if (shares == shares[0]).all():
            law = self._weights(logits, heat, float(shares[0]))
        else:
            law = torch.empty_like(logits)
            for C in set(shares.tolist()):
                rows = np.flatnonzero(shares == C)
                law[rows] = self._weights(logits[rows], heat[rows], C)
        norm = log_norm(law)
        log_q = log_weight(law, torch.from_numpy(self.tokens[slots[owner], place])) - norm
        return (law - norm[:, None].float().to(law.device)).cpu(), log_q.numpy()

    def _weights(self, logits: Tensor, heat: Floats, share: float) -> Tensor:
        """Log-weights of σ_{F,C} (n, V) at some temperatures (n,)."""
        law = self.law(logits, heat)
        return law if share == 1 else downweight(law, logits.topk(self.width).indices, share)

    @property
    def width(self) -> int:
        """Tokens that σ down-weights: an even share of the budget, and one for the token that is refused."""
        return min(-(-self.setup.budget // (self.setup.block + 1)) + 1, self.guesses, self.setup.size - 1)

    def law(self, logits: Tensor, temperature: Floats) -> Tensor:
        """The draft's log-weights: (n, V) float32 logits, (n,) → (n, V) float32."""
        return proposal_law(logits, self.spec, torch.from_numpy(temperature), None)

    def read(self, slots: Ints) -> tuple[Tensor, Ints]:
        """Read the tokens of some slots (n,) sorted that the draft has not read.

        Returns:
            logits behind each token read, (T, V), slot by slot; and how many they are, (n,).
        """
        fresh = self.length[slots] - self.cached[slots]
        self.slots.table.grow(slots, self.length[slots])
        feed = Company.of(self.slots, torch.from_numpy(slots)).unread(self.slots.tokens, fresh)
        logits = self._pass(*feed._replace(rows=torch.arange(len(feed.tokens))))
        self.cached[slots] = self.length[slots]
        return logits, fresh

    def _pass(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits at ``rows``, cut or padded with −inf to the target's vocabulary."""
        missing = self.setup.size - self.model.vocabulary.size
        if missing > 0:
            tokens = tokens.clamp(max=self.model.vocabulary.size - 1)
        logits = self.model(tokens, positions, self.model.plan(batch, self.store), rows)
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.setup.size]


@dataclasses.dataclass(frozen=True)
class _Written:
    """The logits that the blocks of some slots were drawn from."""

    logits: list[Tensor]  # per place: (m, V) float32, of the rows drafted there
    row: Ints  # (n, K), which of those is a slot's
    share: float  # C


def _some(company: Company, at: Ints, stay: Flags) -> tuple[Company, Ints]:
    """The rows of a company, and where they are, that stay: (n,) bool."""
    if stay.all():
        return company, at
    return company.some(torch.from_numpy(np.flatnonzero(stay))), at[stay]
