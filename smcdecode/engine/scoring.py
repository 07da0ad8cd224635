"""The log-probability of each token of a finished text, by passes of its own. Knows one text; no particle."""

from collections.abc import Sequence

import torch

from smcdecode.declare.target import Target
from smcdecode.engine.attention import Batch
from smcdecode.engine.draw import Slant, law_of, local_law, log_weight
from smcdecode.engine.passes import Passes, Stores
from smcdecode.engine.stats import Stats

__all__ = ["log_probs"]

_CHUNK = 128  # tokens a pass: their laws are held at once


@torch.inference_mode()
def log_probs(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The log p(x_t | prompt, x_<t) of each token, where p is the target's model, tempered and truncated as declared.

    Neither α nor potentials have a part in it: their law is one of whole texts.

    Args:
        target: whose p.
        prompt: ids, at least one.
        tokens: ids behind it.
    """
    if not tokens:
        return []
    ids = torch.tensor([*prompt, *tokens])
    n, first = len(ids) - 1, len(prompt) - 1
    passes = Passes(None, Stores(target.model, [], n, 1), Stats())  # type: ignore[arg-type]
    found: list[float] = []
    for start in range(0, n, _CHUNK):
        at = torch.arange(start, min(start + _CHUNK, n))
        rows = (at >= first).nonzero()[:, 0]
        length, pages = torch.tensor([len(at)]), torch.arange(1, int(at[-1]) + 2)[None]
        batch = Batch(length, pages, at[-1:] + 1, torch.zeros(1, dtype=torch.int64), (pages[0, :0],), (0,))
        logits = passes.target(ids[at], at, batch, rows)
        if len(rows):
            ones = torch.ones(len(rows), dtype=torch.float64)
            law = ones[:, None] * torch.tensor(law_of(target), dtype=torch.float64)
            log_p, _ = local_law(logits, Slant(law, ones, ones != 1), None, target.model.name)
            found += log_weight(log_p, ids[at[rows] + 1]).tolist()
    return found
