"""Target and draft behind one block table: passes over packed tokens, counted. Knows models and stores; no weights."""

import torch
from torch import Tensor

from smcdecode.engine.attention import Batch
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.stats import Stats

__all__ = ["Passes"]


class Passes:
    """Two models, two stores of keys and values, the same page numbers."""

    def __init__(self, p: LanguageModel, q: LanguageModel | None, pages: int, page_size: int, stats: Stats) -> None:
        self.p, self.q, self.stats = p, q, stats
        self.stats.pages = pages
        self.p_store = p.store(pages + 1, page_size)  # page 0 is the null page
        self.q_store = q.store(pages + 1, page_size) if q is not None else None

    def target(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits of the target at ``rows`` (R,) of the packed ``tokens`` (T,): (R, V) float32."""
        self.stats.target_passes += 1
        self.stats.target_positions += len(tokens)
        return self.p(tokens, positions, self.p.plan(batch, self.p_store), rows)

    def draft(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """Logits of the draft, cut or padded with −inf to the target's vocabulary; (0, 0) where there is no draft."""
        if self.q is None or self.q_store is None:
            return torch.empty(0, 0)
        self.stats.draft_passes += 1
        self.stats.draft_positions += len(tokens)
        known = tokens.clamp(max=self.q.vocabulary.size - 1)  # an id it lacks may spoil its guess, never the answer
        logits = self.q(known, positions, self.q.plan(batch, self.q_store), rows)
        missing = self.p.vocabulary.size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.p.vocabulary.size]

    def copy_pages(self, source: Tensor, copies: Tensor) -> None:
        """Copy whole pages in both stores."""
        if not len(source):
            return
        for store in (self.p_store, self.q_store):
            if store is not None:
                store.copy_pages(source, copies)
        self.stats.bytes_moved = sum(s.bytes_moved for s in (self.p_store, self.q_store) if s is not None)
