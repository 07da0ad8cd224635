"""The draft's own particles: texts with a block behind them, and branches that share their pages. Knows no target.

Slots of a lane: each particle is a *trunk*, followed by B *branches*. ``base`` is where a slot's last block begins;
``slots.cached`` is how many own tokens the draft has keys and values for. Branches are copies of their trunk up to the
tokens kept, so only table rows move.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.declare.method import Autoregressive
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.engine.attention import Batch
from smcdecode.engine.company import Company
from smcdecode.engine.drafting import Going, Stream
from smcdecode.engine.draw import check_numbers, draw, log_norm, log_weight, proposal_law
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.pages import PagePool
from smcdecode.engine.prefixes import Prefixes
from smcdecode.engine.remote.messages import Lanes, Setup
from smcdecode.engine.request import Request
from smcdecode.engine.slots import Slots
from smcdecode.infer.saguaro import downweight
from smcdecode.potentials.potential import Prompt

__all__ = ["Texts"]

GUESSES = 64  # most tokens kept as guesses of one position


class Texts:
    """Trunks and branches of one run, on the draft's pages.

    Attributes:
        base: (S,) int64, own tokens before the last block; the block is what lies behind.
        ended: (S,) bool, the block ends the text: no token follows it.
        heat: (S,) float64, the temperature that the block was drawn at.
        guesses: most guesses of one position.
    """

    def __init__(self, model: LanguageModel, setup: Setup) -> None:
        self.model, self.setup, self.B = model, setup, setup.budget + setup.ancestors
        each = setup.particles * (1 + self.B)
        pages = setup.pages + setup.slots * (1 + self.B) * (setup.block + 2)
        self.slots = Slots(setup.lanes, each, setup.max_tokens, Prefixes(PagePool(pages), 1))
        self.slots.particle = torch.arange(setup.particles).repeat_interleave(1 + self.B).repeat(setup.lanes)
        self.store = model.store(pages + 1, 1)
        self.spec = Draft(model, setup.block, strictness=1.0, top_k=setup.top_k, top_p=setup.top_p)
        self.is_eos = torch.zeros(setup.size, dtype=torch.bool)
        self.is_eos[sorted(setup.eos)] = True
        self.guesses = min(GUESSES, setup.budget + 2, setup.size)
        S = len(self.slots.length)
        self.base = torch.zeros(S, dtype=torch.int64)
        self.ended = torch.zeros(S, dtype=torch.bool)
        self.heat = torch.ones(S, dtype=torch.float64)
        self._written: list[tuple[_Written, int] | None] = [None] * S  # where each block's logits are, and which row

    def trunk(self, slot: Tensor) -> Tensor:
        """Where the particles ``slot`` (n,) of the target's side stand here."""
        return slot * (1 + self.B)

    def count(self, slots: Tensor) -> Tensor:
        """Tokens in the blocks of some slots: (n,) int64."""
        return self.slots.length[slots] - self.base[slots]

    def blocks(self, slots: Tensor, width: int | None = None) -> Tensor:
        """The tokens of the blocks of some slots (n,), and whatever lies behind: (n, K) int64, or as wide as asked."""
        place = self.base[slots][:, None] + torch.arange(width or self.setup.block)
        return self.slots.tokens[slots[:, None], place.clamp_(max=self.slots.tokens.shape[1] - 1)]

    # ---- lanes

    def open(self, lanes: Lanes) -> tuple[Tensor, Tensor]:
        """Read the prompts of lanes that begin, ascending: their trunks (m,), and the logits (m, V) behind them."""
        requests = [
            Request(0, Prompt(tuple(prompt.tolist())), Target(self.model), Autoregressive(), seed, cap)
            for prompt, seed, cap in zip(lanes.prompts, lanes.seed.tolist(), lanes.cap.tolist(), strict=True)
        ]
        [reading] = self.slots.open(lanes.lane, requests, [id(self.model)])
        self.base[self.slots.of(lanes.lane)] = 0
        self.ended[self.slots.of(lanes.lane)] = False
        logits = self._pass(*reading)
        N = self.setup.particles
        trunks = (lanes.lane[:, None] * N + torch.arange(N)).flatten() * (1 + self.B)
        return trunks, logits.repeat_interleave(N, 0)

    def close(self, lanes: Tensor) -> None:
        """Forget lanes (n,)."""
        self.slots.close(lanes)
        self._forget(self.slots.of(lanes))

    # ---- moves

    def follow(self, trunks: Tensor, origins: Tensor, kept: Tensor, tokens: Tensor) -> None:
        """Each trunk becomes what it is now: the text of ``origins`` up to ``kept`` of its block, and one token more.

        Args:
            trunks: (n,) int64.
            origins: (n,) int64: a branch that foresaw it, whose text has all of that already, or a trunk.
            kept: (n,) int64; of no meaning for branches.
            tokens: (n,) int64, the same.
        """
        slots, cut = self.slots, origins % (1 + self.B) == 0
        end = torch.where(cut, self.base[origins] + kept, slots.length[origins])
        cached = torch.minimum(slots.cached[origins], end)
        ancestors = torch.arange(len(slots.length))
        ancestors[trunks] = origins
        keep = slots.cached.clone()
        keep[trunks] = cached
        slots.table.select(ancestors, keep)
        slots.tokens[trunks] = slots.tokens[origins]
        slots.length[trunks], slots.cached[trunks] = end, cached
        for array in (self.base, self.ended, self.heat):
            array[trunks] = array[origins]
        written = [self._written[i] for i in origins.tolist()]
        for trunk, whose in zip(trunks.tolist(), written, strict=True):
            self._written[trunk] = whose
        if bool(cut.any()):
            self._begin(trunks[cut], tokens[cut])

    def branch(self, branches: Tensor, trunks: Tensor, kept: Tensor, tokens: Tensor) -> None:
        """Each branch becomes a trunk's text up to ``kept`` of its block, and one token more: (n,) int64 each."""
        slots = self.slots
        end = self.base[trunks] + kept
        ancestors = torch.arange(len(slots.length))
        ancestors[branches] = trunks
        keep = slots.cached.clone()
        keep[branches] = end
        slots.table.select(ancestors, keep)
        slots.tokens[branches] = slots.tokens[trunks]
        slots.length[branches] = slots.cached[branches] = end
        self._begin(branches, tokens)

    def prune(self, trunks: Tensor) -> None:
        """Give back the pages of all branches of some trunks."""
        branches = (trunks[:, None] + torch.arange(1, 1 + self.B)).flatten()
        branches = branches[self.slots.table.used[branches] > 0]
        self.slots.release(branches)
        self._forget(branches)

    def _forget(self, slots: Tensor) -> None:
        for slot in slots.tolist():
            self._written[slot] = None

    def _begin(self, slots: Tensor, tokens: Tensor) -> None:
        """Write one token and begin an empty block behind it."""
        self.slots.put(slots, tokens)
        self.base[slots] = self.slots.length[slots]
        self.ended[slots] = self.slots.room(slots) == 0
        self._forget(slots)

    # ---- passes

    def draft(self, slots: Tensor, temperature: Tensor, share: float, wanted: Callable[[], Tensor | None]) -> None:
        """Up to K tokens of the draft behind each of some slots (n,) sorted, drawn by the uniforms of their cycle.

        Args:
            slots: (n,) int64; one whose text has ended gets none.
            temperature: (n,) float64.
            share: C of σ_{F,C}.
            wanted: asked before each pass: the slots still worth drafting, or None for all.
        """
        s, K = self.slots, self.setup.block
        if bool(self.ended[slots].any()):
            slots, temperature = slots[~self.ended[slots]], temperature[~self.ended[slots]]
        if not len(slots):
            return
        room, lag = s.room(slots), s.length[slots] - s.cached[slots]
        s.make_room(slots, s.length[slots] + room.clamp(max=K) - 1)
        u = s.uniform(slots[:, None], torch.arange(K), Stream.DRAFT)
        every = torch.arange(len(slots))
        going = Going(every, Company.of(s, slots), temperature, u, room, whole=True)
        tokens, count = torch.zeros(len(slots), K, dtype=torch.int64), torch.zeros_like(slots)
        written = _Written([], torch.zeros(len(slots), K, dtype=torch.int64), share)
        for k in range(K):
            if (still := wanted()) is not None:
                going = going.some(torch.isin(going.company.slots, still).nonzero()[:, 0])
            if not len(going.rows):
                break
            company = going.company
            feed = company.behind(tokens[going.at, :k]) if k else company.unread(s.tokens, lag[going.at])
            logits = self._pass(*feed)
            written.logits.append(logits)
            written.row[going.at, k] = every[: len(logits)]
            drawn, norm = draw(self._weights(logits, going.heat, share), going.u[:, k])
            check_numbers(norm, self.model.name)
            tokens[going.at, k] = drawn
            count[going.at] = k + 1
            stops = self.is_eos[drawn] | (going.room == k + 1)
            if k + 1 < K and bool(stops.any()):
                going = going.some((~stops).nonzero()[:, 0])
        self._keep(slots, tokens, count, room, temperature, written)

    def _keep(
        self, slots: Tensor, tokens: Tensor, count: Tensor, room: Tensor, temperature: Tensor, written: "_Written"
    ) -> None:
        """Put drafted blocks behind their slots; the draft has read all but the last token of each."""
        s = self.slots
        s.write(slots, tokens, count)
        s.cached[slots] = torch.where(count > 0, s.length[slots] - 1, s.cached[slots])
        last = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.ended[slots] = (room == count) | (self.is_eos[last] & (count > 0))
        self.heat[slots] = temperature
        for i, slot in enumerate(slots.tolist()):
            self._written[slot] = (written, i)

    def logits(self, trunks: Tensor) -> tuple[Tensor, list[float]]:
        """What the tokens of the blocks of some trunks (n,) were drawn from: (R, V) float32 block by block, and C."""
        rows, shares = [], []
        for trunk, count in zip(trunks.tolist(), self.count(trunks).tolist(), strict=True):
            found = self._written[trunk]
            if found is not None:
                written, i = found
                rows += [written.logits[k][row] for k, row in enumerate(written.row[i, :count].tolist())]
                shares += [written.share] * count
        return torch.stack(rows) if rows else torch.empty(0, self.setup.size, device=self.model.layout.device), shares

    def laws(self, trunks: Tensor, logits: Tensor, shares: list[float]) -> tuple[Tensor, Tensor]:
        """The laws that the tokens of some blocks were drawn from.

        Args:
            trunks: (n,) int64, whose blocks the draft wrote.
            logits: (R, V) float32, of :meth:`logits`.
            shares: C of each row.

        Returns:
            normalised log q (R, V) float32, and log q of the tokens (R,) float64; both on the host.
        """
        if not shares:
            return logits.cpu(), torch.empty(0, dtype=torch.float64)
        count = self.count(trunks)
        owner = torch.arange(len(trunks)).repeat_interleave(count)
        place = (self.slots.length[trunks] - count.cumsum(0))[owner] + torch.arange(len(owner))
        heat, kinds = self.heat[trunks][owner], set(shares)
        if len(kinds) == 1:
            law = self._weights(logits, heat, *kinds)
        else:
            law, share = torch.empty_like(logits), torch.tensor(shares, dtype=torch.float64)
            for C in kinds:
                rows = (share == C).nonzero()[:, 0]
                law[rows] = self._weights(logits[rows], heat[rows], C)
        norm = log_norm(law)
        log_q = log_weight(law, self.slots.tokens[trunks[owner], place]) - norm
        return (law - norm[:, None].float().to(law.device)).cpu(), log_q

    def _weights(self, logits: Tensor, heat: Tensor, share: float) -> Tensor:
        """Log-weights of σ_{F,C} (n, V) at some temperatures (n,)."""
        law = self.law(logits, heat)
        return law if share == 1 else downweight(law, logits.topk(self.width).indices, share)

    @property
    def width(self) -> int:
        """Tokens that σ down-weights: an even share of the budget, and one for the token that is refused."""
        return min(-(-self.setup.budget // (self.setup.block + 1)) + 1, self.guesses, self.setup.size - 1)

    def law(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """The draft's log-weights: (n, V) float32 logits, (n,) float64 → (n, V) float32."""
        return proposal_law(logits, self.spec, temperature, None)

    def put(self, slots: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Write blocks that another law drew behind some slots: (n,), (n, K), (n,) int64."""
        self.slots.write(slots, tokens, count)
        self.ended[slots] = (self.slots.room(slots) == 0) | (self.is_eos[self.slots.last(slots)] & (count > 0))

    def read(self, slots: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Read the tokens of some slots (n,) sorted that the draft has not read.

        Returns:
            logits behind the last token of each, (n, V) float32, and (n,) zeros; or for ``whole`` behind each token
            read, (T, V), slot by slot, and how many they are, (n,) int64.
        """
        s = self.slots
        fresh = s.length[slots] - s.cached[slots]
        s.make_room(slots, s.length[slots])
        feed = Company.of(s, slots).unread(s.tokens, fresh)
        logits = self._pass(*(feed._replace(rows=torch.arange(len(feed.tokens))) if whole else feed))
        s.cached[slots] = s.length[slots]
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
    row: Tensor  # (n, K) int64, which of those is a slot's
    share: float  # C
