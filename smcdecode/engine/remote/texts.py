"""The draft's own particles: texts with a block behind them, and branches that share their pages. Knows no target.

Slots of a lane: each particle is a *trunk*, followed by B *branches*. ``base`` is where a slot's last block begins;
``slots.cached`` is how many own tokens the draft has keys and values for. Branches are copies of their trunk up to the
tokens kept, so only table rows move.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.declare.method import Autoregressive
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.engine.attention import Batch
from smcdecode.engine.drafting import Stream
from smcdecode.engine.draw import check_numbers, proposal_law
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.pages import PagePool
from smcdecode.engine.prefixes import Prefixes
from smcdecode.engine.remote.messages import Lanes, Setup
from smcdecode.engine.request import Request
from smcdecode.engine.slots import Slots
from smcdecode.infer.saguaro import downweight
from smcdecode.potentials.potential import Prompt
from smcdecode_kernels import reference

__all__ = ["Texts"]

GUESSES = 64  # most tokens kept as guesses of one position


class Texts:
    """Trunks and branches of one run, on the draft's pages.

    Attributes:
        base: (S,) int64, own tokens before the last block; the block is what lies behind.
        ended: (S,) bool, the block ends the text: no token follows it.
        laws: for each slot the rows (V,) float32 of normalised log q that its block was drawn from.
        log_q: (S, K) float64, of the drafted tokens.
        guesses: (S, K+1, M) int64, the likeliest tokens of each position of the block, and of the one behind it.
    """

    def __init__(self, model: LanguageModel, setup: Setup) -> None:
        self.model, self.setup, self.B = model, setup, setup.budget
        each = setup.particles * (1 + self.B)
        pages = setup.pages + setup.slots * (1 + self.B) * (setup.block + 2)
        self.slots = Slots(setup.lanes, each, setup.max_tokens, Prefixes(PagePool(pages), 1))
        self.slots.particle = torch.arange(setup.particles).repeat_interleave(1 + self.B).repeat(setup.lanes)
        self.store = model.store(pages + 1, 1)
        self.spec = Draft(model, setup.block, strictness=1.0, top_k=setup.top_k, top_p=setup.top_p)
        self.is_eos = torch.zeros(setup.size, dtype=torch.bool)
        self.is_eos[sorted(setup.eos)] = True
        S, M = len(self.slots.length), min(GUESSES, self.B + 2, setup.size)
        self.base = torch.zeros(S, dtype=torch.int64)
        self.ended = torch.zeros(S, dtype=torch.bool)
        self.log_q = torch.zeros(S, setup.block, dtype=torch.float64)
        self.guesses = torch.zeros(S, setup.block + 1, M, dtype=torch.int64)
        self.laws: list[list[Tensor]] = [[] for _ in range(S)]
        self.prompts: list[list[int]] = [[] for _ in range(setup.lanes)]

    def trunk(self, slot: Tensor) -> Tensor:
        """Where the particles ``slot`` (n,) of the target's side stand here."""
        return slot * (1 + self.B)

    def count(self, slots: Tensor) -> Tensor:
        """Tokens in the blocks of some slots: (n,) int64."""
        return self.slots.length[slots] - self.base[slots]

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
        for lane, prompt in zip(lanes.lane.tolist(), lanes.prompts, strict=True):
            self.prompts[lane] = prompt.tolist()
        logits = self._pass(*reading)
        N = self.setup.particles
        trunks = (lanes.lane[:, None] * N + torch.arange(N)).flatten() * (1 + self.B)
        return trunks, logits.repeat_interleave(N, 0)

    def close(self, lanes: Tensor) -> None:
        """Forget lanes (n,)."""
        self.slots.close(lanes)
        for slot in self.slots.of(lanes).tolist():
            self.laws[slot] = []

    def text(self, slot: int) -> list[int]:
        """Prompt and own tokens of a slot."""
        return self.prompts[int(self.slots.lane[slot])] + self.slots.tokens[slot, : self.slots.length[slot]].tolist()

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
        for array in (self.base, self.ended, self.log_q, self.guesses):
            array[trunks] = array[origins]
        for trunk, laws in zip(trunks.tolist(), [self.laws[i] for i in origins.tolist()], strict=True):
            self.laws[trunk] = laws
        missed = trunks[cut]
        self._begin(missed, tokens[cut])

    def branch(self, branches: Tensor, trunks: Tensor, kept: Tensor, tokens: Tensor) -> None:
        """Each branch becomes its trunk's text up to ``kept`` of its block, and one token more: (n,) int64 each."""
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
        self.slots.release(branches)
        for branch in branches.tolist():
            self.laws[branch] = []

    def _begin(self, slots: Tensor, tokens: Tensor) -> None:
        """Write one token and begin an empty block behind it."""
        self.slots.write(slots, tokens[:, None], torch.ones_like(slots))
        self.base[slots] = self.slots.length[slots]
        self.ended[slots] = self.slots.room(slots) == 0
        for slot in slots.tolist():
            self.laws[slot] = []

    # ---- passes

    def draft(self, slots: Tensor, temperature: Tensor, share: float, wanted: Callable[[], Tensor | None]) -> None:
        """Up to K tokens of the draft behind each of some slots (n,) sorted, drawn by the uniforms of their cycle.

        Args:
            slots: (n,) int64; one whose text has ended gets none.
            temperature: (n,) float64.
            share: C of σ_{F,C}.
            wanted: asked before each pass: the slots still worth drafting, or None for all.
        """
        for k in range(self.setup.block):
            going = ~self.ended[slots] & (self.slots.length[slots] == self.base[slots] + k)
            if (still := wanted()) is not None:
                going &= torch.isin(slots, still)
            slots, temperature = slots[going], temperature[going]
            if not len(slots):
                return
            logits, _ = self.read(slots)
            self._token(slots, k, logits, temperature, share)

    def _token(self, slots: Tensor, k: int, logits: Tensor, temperature: Tensor, share: float) -> None:
        self.guesses[slots, k] = logits.topk(self.guesses.shape[-1]).indices
        law = downweight(self.law(logits, temperature), self.guesses[slots, k, : self.width], share)
        tokens, norm = reference.draw(law, self.slots.uniform(slots, k, Stream.DRAFT))
        check_numbers(norm, self.model.name)
        self.log_q[slots, k] = law.gather(-1, tokens[:, None])[:, 0].double() - norm
        self.slots.write(slots, tokens[:, None], torch.ones_like(slots))
        self.ended[slots] = self.is_eos[tokens] | (self.slots.room(slots) == 0)
        for slot, row in zip(slots.tolist(), (law - norm[:, None].float()).unbind(), strict=True):
            self.laws[slot].append(row)

    @property
    def width(self) -> int:
        """Tokens that σ down-weights: an even share of the budget, and one for the token that is refused."""
        return min(-(-self.B // (self.setup.block + 1)) + 1, self.guesses.shape[-1], self.setup.size - 1)

    def law(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """The draft's log-weights: (n, V) float32 logits, (n,) float64 → (n, V) float32."""
        return proposal_law(logits, self.spec, temperature, None)

    def put(self, slots: Tensor, blocks: list[list[int]]) -> None:
        """Write blocks that another law drew behind some slots (n,)."""
        count = torch.tensor([len(block) for block in blocks])
        padded = torch.zeros(len(blocks), max(1, int(count.max())), dtype=torch.int64)
        for row, block in zip(padded, blocks, strict=True):
            row[: len(block)] = torch.tensor(block, dtype=torch.int64)
        self.slots.write(slots, padded, count)
        self.ended[slots] = (self.slots.room(slots) == 0) | (self.is_eos[self.slots.last(slots)] & (count > 0))

    def read(self, slots: Tensor, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Read the tokens of some slots (n,) sorted that the draft has not read.

        Returns:
            logits behind the last token of each, (n, V) float32, and (n,) zeros; or for ``whole`` behind each token
            read, (T, V), slot by slot, and how many they are, (n,) int64.
        """
        s = self.slots
        fresh = s.length[slots] - s.cached[slots]
        owner = torch.arange(len(slots)).repeat_interleave(fresh)
        place = s.cached[slots][owner] + torch.arange(len(owner)) - (fresh.cumsum(0) - fresh)[owner]
        s.make_room(slots, s.length[slots])
        batch = s.batch(slots, fresh, s.length[slots])
        rows = torch.arange(len(owner)) if whole else fresh.cumsum(0) - 1
        logits = self._pass(s.tokens[slots[owner], place], s.position(slots[owner], place), batch, rows)
        s.cached[slots] = s.length[slots]
        return logits, fresh

    def _pass(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits at ``rows``, cut or padded with −inf to the target's vocabulary."""
        known = tokens.clamp(max=self.model.vocabulary.size - 1)
        logits = self.model(known, positions, self.model.plan(batch, self.store), rows).cpu()  # for the other process
        missing = self.setup.size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.setup.size]
