"""The draft's side of a run: answers with prepared continuations, then prepares the next. Knows no target, no process.

One round: what became of the last blocks is told (k kept, token t behind them); where that was prepared the answer is
there, elsewhere it is drafted now, or needs no model. Then, while the target verifies, the likeliest outcomes of the
new blocks get branches, and each branch its K tokens. Uniforms are keyed by request, particle, cycle and place, so a
continuation is the same tokens whether it was prepared or not.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from smcdecode.engine.drafting import Stream
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.remote.backup import backup_block
from smcdecode.engine.remote.messages import Answer, Backup, Entries, Lanes, Setup
from smcdecode.engine.remote.texts import Texts
from smcdecode.infer.fanout import Outcomes
from smcdecode_kernels import reference

__all__ = ["Speculator"]

Outcome = tuple[int, int, int]  # trunk, tokens kept, the token behind them


class Speculator:
    """Texts of a run and the outcomes prepared for them.

    Args:
        model: the draft.
        setup: the run.
        next_entries: a look at the next request: its entries if it has come already, else None.
    """

    def __init__(self, model: LanguageModel, setup: Setup, next_entries: Callable[[], Entries | None]) -> None:
        self.setup, self.next_entries = setup, next_entries
        self.texts = Texts(model, setup)
        self.prepared: dict[Outcome, int] = {}  # → branch
        most = self.texts.guesses.shape[-1]
        self.outcomes = {
            False: Outcomes(setup.block, most),
            True: Outcomes(setup.block, most, acceptance=0.0),  # behind a backup block
        }
        self.backed = torch.zeros_like(self.texts.ended)  # trunks whose last block was a backup's
        self._guessed: dict[int, list[list[int]]] = {}  # trunk → guesses at each k, the likeliest first
        self._fanouts: dict[tuple[bool, int, bool], list[int]] = {}
        self._seconds = 0.0

    # ---- messages

    def open(self, lanes: Lanes) -> None:
        """Read the prompts of lanes that begin, and prepare for their first tokens."""
        trunks, logits = self.texts.open(lanes)
        temperature = lanes.temperature.repeat_interleave(self.setup.particles)
        self._prepare(trunks, logits, torch.ones_like(trunks), temperature, temperature, 1.0)

    def close(self, lanes: Tensor) -> None:
        """Forget lanes."""
        self._forget((lanes[:, None] * self.setup.particles + torch.arange(self.setup.particles)).flatten())
        self.texts.close(lanes)

    def answer(self, entries: Entries, backup: Backup, share: float) -> Answer:
        """Blocks for what the entries tell, sorted by slot; :meth:`prepare` is to be called behind it.

        Args:
            entries: outcomes of the last blocks.
            backup: what is done where they were not prepared.
            share: C of σ_{F,C}, for what is drafted from now on.
        """
        texts = self.texts
        trunks, sources = texts.trunk(entries.slot), texts.trunk(entries.source)
        self._observe(sources, entries)
        found = self._found(entries)
        hit = torch.tensor([branch is not None for branch in found], dtype=torch.bool)
        origins = torch.tensor([s if b is None else b for s, b in zip(sources.tolist(), found, strict=True)])
        texts.follow(trunks, origins, entries.kept, entries.token)
        self._forget(entries.slot)
        texts.slots.cycle[texts.slots.lane[trunks]] = entries.cycle
        start = time.perf_counter()
        missed = (~hit).nonzero()[:, 0]
        if backup == Backup.REDRAFT:
            texts.draft(trunks[missed], entries.temperature[missed], share, lambda: None)
        elif len(missed):
            self._back_up(trunks[missed], backup)
        seconds = time.perf_counter() - start if len(missed) and backup == Backup.REDRAFT else 0.0
        return self._read_off(trunks, hit, share, seconds)

    def prepare(self, entries: Entries, share: float) -> None:
        """Branches for the likeliest outcomes of the blocks just answered, and their continuations."""
        texts = self.texts
        trunks = texts.trunk(entries.slot)
        unread = (texts.slots.length > texts.slots.cached)[trunks]
        reading = unread & (~texts.ended | self.backed)[trunks]
        logits, fresh = torch.empty(0, self.setup.size), torch.zeros_like(trunks)
        if reading.any():
            logits, fresh[reading] = texts.read(trunks[reading], whole=True)
        self._prepare(trunks, logits, fresh, entries.temperature, entries.following, share)

    # ---- what became of the last blocks

    def _found(self, entries: Entries) -> list[int | None]:
        columns = (entries.slot, entries.source, entries.kept, entries.token)
        return [
            self.prepared.get((slot, kept, token)) if slot == source else None
            for slot, source, kept, token in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _observe(self, sources: Tensor, entries: Entries) -> None:
        """Learn how often each k comes, and at which place among the guesses its token."""
        counts = self.texts.count(sources).tolist()
        for trunk, count, kept, token in zip(
            sources.tolist(), counts, entries.kept.tolist(), entries.token.tolist(), strict=True
        ):
            outcomes = self.outcomes[bool(self.backed[trunk])]
            guesses = self._guessed.get(trunk, [])
            here = guesses[kept] if kept < len(guesses) else []
            place = here.index(token) if token in here else outcomes.most
            outcomes.observe(self.setup.block if kept == count else kept, min(place, outcomes.most))

    def _forget(self, slots: Tensor) -> None:
        """Drop what was prepared for some particles."""
        gone = set(slots.tolist())
        self.prepared = {key: branch for key, branch in self.prepared.items() if key[0] not in gone}
        trunks = self.texts.trunk(slots)
        for trunk in trunks.tolist():
            self._guessed.pop(trunk, None)
        self.backed[trunks] = False
        self.texts.prune(trunks)

    def _back_up(self, trunks: Tensor, backup: Backup) -> None:
        """Blocks that need no model; the target's side computes the same."""
        texts, K = self.texts, self.setup.block
        room = texts.slots.room(trunks).clamp(max=K).tolist()
        uniforms = texts.slots.uniform(trunks[:, None], torch.arange(K), Stream.DRAFT)
        texts.put(
            trunks,
            [
                backup_block(backup, texts.text(trunk), most, u, texts.is_eos)
                for trunk, most, u in zip(trunks.tolist(), room, uniforms, strict=True)
            ],
        )
        self.backed[trunks] = True

    def _read_off(self, trunks: Tensor, hit: Tensor, share: float, seconds: float) -> Answer:
        """The blocks that stand behind some trunks now."""
        texts, K = self.texts, self.setup.block
        place = (texts.base[trunks][:, None] + torch.arange(K)).clamp(max=texts.slots.tokens.shape[1] - 1)
        backed = self.backed[trunks]
        count = texts.count(trunks).masked_fill(backed, -1)
        drafted = torch.arange(K) < count[:, None]
        rows = [row for trunk in trunks[~backed].tolist() for row in texts.laws[trunk]]
        laws = torch.stack(rows) if rows else torch.empty(0, self.setup.size)
        wanted = self.setup.strict or bool(torch.isneginf(laws).any())
        top = texts.guesses[trunks][:, :K][drafted][:, : texts.width] if share < 1 else None
        tokens = texts.slots.tokens[trunks[:, None], place].masked_fill(~drafted, 0)
        log_q = texts.log_q[trunks]
        return Answer(hit.long(), count, tokens, log_q, laws if wanted else None, top, self._seconds, seconds)

    # ---- the next outcomes

    def _prepare(
        self, trunks: Tensor, logits: Tensor, fresh: Tensor, temperature: Tensor, following: Tensor, share: float
    ) -> None:
        """Guess, then branch.

        Args:
            trunks: (n,) int64.
            logits: (T, V) float32 behind the tokens just read, trunk by trunk.
            fresh: (n,) int64, how many those are of each.
            temperature: (n,) float64, of the laws that guesses are made of.
            following: (n,) float64, of the continuations.
            share: C of the continuations.
        """
        start = time.perf_counter()
        texts, slots = self.texts, self.texts.slots
        count = texts.count(trunks)
        owner = torch.arange(len(trunks)).repeat_interleave(fresh)
        place = (count + 1 - fresh.cumsum(0))[owner] + torch.arange(len(owner))
        texts.guesses[trunks[owner], place] = logits.topk(texts.guesses.shape[-1]).indices
        bonus = (~texts.ended[trunks]).nonzero()[:, 0]
        likely = torch.full_like(trunks, -1)
        if len(bonus):  # what the target would draw, were its law the draft's, by the same uniform
            law = texts.law(logits[fresh.cumsum(0)[bonus] - 1], temperature[bonus])
            likely[bonus] = reference.draw(law, slots.uniform(trunks[bonus], 0, Stream.BONUS))[0]
        heat = dict(zip(trunks.tolist(), following.tolist(), strict=True))
        columns = (trunks, count, likely, texts.base[trunks], slots.cap[slots.lane[trunks]], self.backed[trunks])
        guesses, tokens = texts.guesses[trunks].tolist(), slots.tokens[trunks].tolist()
        plan: list[Outcome] = []
        for (trunk, n, first, base, cap, backed), rows, text in zip(
            zip(*(column.tolist() for column in columns), strict=True), guesses, tokens, strict=True
        ):
            wanted = rows[: n + (first >= 0)]
            if first >= 0:
                wanted[n] = [first, *(guess for guess in rows[n] if guess != first)]
            for k, drafted in enumerate(text[base : base + n]):  # refused, it has no share of the residual
                if k < len(wanted):
                    wanted[k] = [token for token in wanted[k] if token != drafted]
            self._guessed[trunk] = wanted
            fanout = self._fanout(backed, n, first >= 0)
            plan += [
                (trunk, k, token)
                for k, (here, F) in enumerate(zip(wanted, fanout, strict=False))
                for token in here[:F]
                if token not in self.setup.eos and base + k + 1 < cap
            ]
        self._fanouts.clear()
        if plan:
            self._branch(plan, heat, share)
        self._seconds = time.perf_counter() - start

    def _fanout(self, backed: bool, count: int, bonus: bool) -> list[int]:
        """How many guesses at each k; computed once a round for each kind of block."""
        kind = (backed, count, bonus)
        if kind not in self._fanouts:
            self._fanouts[kind] = self.outcomes[backed].fanout(self.setup.budget, count, bonus).tolist()
        return self._fanouts[kind]

    def _branch(self, plan: list[Outcome], temperature: dict[int, float], share: float) -> None:
        """A branch for each outcome, and its continuation; outcomes that turn out otherwise meanwhile are left."""
        texts, used = self.texts, dict.fromkeys((trunk for trunk, _, _ in plan), 0)
        branches = []
        for trunk, _, _ in plan:
            used[trunk] += 1
            branches.append(trunk + used[trunk])
        trunks, kept, tokens = torch.tensor(plan).T
        at = torch.tensor(branches)
        texts.branch(at, trunks, kept, tokens)
        degrees = torch.tensor([temperature[trunk] for trunk, _, _ in plan], dtype=torch.float64)
        step = 1 + texts.B
        self.prepared |= {(t // step, k, v): branch for (t, k, v), branch in zip(plan, branches, strict=True)}
        lanes = torch.unique_consecutive(texts.slots.lane[trunks])
        texts.slots.cycle[lanes] += 1
        texts.draft(at, degrees, share, self._wanted)
        texts.slots.cycle[lanes] -= 1

    def _wanted(self) -> Tensor | None:
        """The branches that the next request asks for, once it has come."""
        entries = self.next_entries()
        if entries is None:
            return None
        return torch.tensor([branch for branch in self._found(entries) if branch is not None], dtype=torch.int64)
