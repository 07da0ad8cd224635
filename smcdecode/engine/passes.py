"""Target and draft behind one block table: passes over packed tokens, counted. Knows models and stores; no weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from smcdecode.engine.attention import Batch, Frame
from smcdecode.engine.cache import KVStore
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.pages import PagePool
from smcdecode.engine.prefixes import Prefixes
from smcdecode.engine.slots import Reading
from smcdecode.engine.stats import Stats

__all__ = ["Passes", "Stores"]


class Stores:
    """One pool of pages, and under its page numbers the keys and values of a target's model and of some drafts."""

    def __init__(self, p: LanguageModel, drafts: Sequence[LanguageModel], pages: int, page_size: int) -> None:
        self.p, self.pool, self.page_size = p, PagePool(pages), page_size
        self.prefixes = Prefixes(self.pool, page_size)
        self.target = p.store(pages + 1, page_size)  # page 0 is the null page
        self.drafts = {id(q): q.store(pages + 1, page_size) for q in drafts}

    def close(self) -> None:
        """Let the keys and values go."""
        for store in (self.target, *self.drafts.values()):
            store.close()

    @property
    def bytes_moved(self) -> int:
        """Bytes copied because of resampling."""
        return self.target.bytes_moved + sum(store.bytes_moved for store in self.drafts.values())


class Passes:
    """The target and perhaps a draft, over stores that other drafts use too."""

    def __init__(self, q: LanguageModel | None, stores: Stores, stats: Stats) -> None:
        self.p, self.q, self.stores, self.stats = stores.p, q, stores, stats
        self.q_store = stores.drafts[id(q)] if q is not None else None

    def target(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits of the target at ``rows`` (R,) of the packed ``tokens`` (T,): (R, V) float32."""
        self.stats.target_passes += 1
        self.stats.target_positions += len(tokens)
        return self.p(tokens, positions, self.p.plan(batch, self.stores.target), rows)

    def draft(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits of the draft, cut or padded with −inf to the target's vocabulary; (0, 0) where there is no draft."""
        if self.q is None or self.q_store is None:
            return torch.empty(0, 0, device=self.p.layout.device)
        self.stats.draft_passes += 1
        self.stats.draft_positions += len(tokens)
        known = tokens.clamp(max=self.q.vocabulary.size - 1)  # an id it lacks may spoil its guess, never the answer
        return self._fitted(self.q(known, positions, self.q.plan(batch, self.q_store), rows))

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits of the draft for the target's vocabulary."""
        missing = self.p.vocabulary.size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.p.vocabulary.size]

    def target_fixed(self, tokens: Tensor, frame: Frame, rows: Tensor) -> Tensor:
        """As :meth:`target`, of a pass of fixed shape on the device; not counted."""
        return self.p.fixed(tokens, frame, self.stores.target, rows)

    def draft_fixed(self, tokens: Tensor, frame: Frame, rows: Tensor) -> Tensor:
        """As :meth:`draft`, of a pass of fixed shape on the device; not counted."""
        assert self.q is not None and self.q_store is not None
        return self._fitted(self.q.fixed(tokens, frame, self.q_store, rows))

    @property
    def readers(self) -> list[int]:
        """Who reads a prompt: the target, and the draft where there is one."""
        return [id(self.p)] if self.q is None else [id(self.p), id(self.q)]

    def read(self, readings: Sequence[Reading]) -> Tensor:
        """Each of :attr:`readers` reads what it has not of some prompts: the target's logits behind them, (n, V)."""
        logits = self.target(*readings[0].feed)
        for reading in readings[1:]:
            tokens, positions, batch, rows = reading.feed
            self.draft(tokens, positions, batch, rows[:0])
        return logits

    @property
    def own_stores(self) -> list[KVStore]:
        """The target's, and the draft's where there is one."""
        return [self.stores.target] if self.q_store is None else [self.stores.target, self.q_store]

    def copy_pages(self, source: Tensor, copies: Tensor) -> None:
        """Copy whole pages in both stores, and count the bytes."""
        if not len(source):
            return
        before = self.stores.bytes_moved
        for store in self.own_stores:
            store.copy_pages(source, copies)
        self.stats.bytes_moved += self.stores.bytes_moved - before

    def move_pages(self, source: Tensor, copies: Tensor) -> None:
        """As :meth:`copy_pages`, on the device and not counted; page 0 may be copied to page 0."""
        for store in self.own_stores:
            store.move_pages(source, copies)
