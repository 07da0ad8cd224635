"""Rows of logits → laws → tokens. Knows temperature, truncation, exponents and masks; no model, no page."""

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.errors import InvalidWeight
from smcdecode_kernels import reference

__all__ = ["check_numbers", "local_law", "proposal_law"]


def check_numbers(x: Tensor, name: str) -> None:
    """Raise InvalidWeight if x, a number of each row of a model's logits, shows a NaN in one."""
    if torch.isnan(x).any():
        raise InvalidWeight(f"{name} produced NaN or infinite logits: check the checkpoint and its dtype")


def local_law(logits: Tensor, target: Target, alpha: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's local law r ∝ p^α m at some positions, (5).

    Args:
        logits: (n, V) float32 of the target model.
        target: gives temperature and truncation, which define p.
        alpha: (n,) float64 exponents; None for α = 1 at every row.
        mask: (n, ⌈V/32⌉) int32 tokens allowed by the potentials, packed; or None.

    Returns:
        log (p^α m), (n, V) float32, not normalised, and log Z (n,) float64; exactly 0 where α = 1 and there is no mask.
    """
    log_p = reference.log_law(logits, target.temperature, target.top_k, target.top_p)
    check_numbers(logits.amax(-1) if target.temperature == 0 else log_p[:, 0], target.model.name)
    if alpha is None and mask is None:
        return log_p, torch.zeros(len(logits), dtype=torch.float64)
    if alpha is not None:
        log_p = log_p * alpha[:, None].float()
    if mask is not None:
        log_p = reference.apply_bitmask(log_p, mask)
    return log_p, reference.log_norm(log_p)


def proposal_law(logits: Tensor, draft: Draft, temperature: Tensor | float, mask: Tensor | None) -> Tensor:
    """The law a draft samples from, not normalised: temperature first, then truncation, then the mask.

    Args:
        logits: (n, V) float32 of the draft model.
        draft: gives the truncation.
        temperature: one for all rows, or (n,) float64; 0 is greedy.
        mask: (n, ⌈V/32⌉) int32 tokens allowed by the potentials, packed; or None.

    Returns:
        (n, V) float32 log-weights; draw() normalises them.
    """
    if isinstance(temperature, Tensor):
        logits, temperature = logits / temperature[:, None].float(), 1.0
    if temperature == 0 or draft.top_k is not None or draft.top_p is not None:
        check_numbers(logits.amax(-1), draft.model.name)  # a NaN would look like the largest
        law = reference.log_law(logits, temperature, draft.top_k, draft.top_p)
    else:
        law = logits if temperature == 1 else logits / temperature
    return law if mask is None else reference.apply_bitmask(law.clone() if law is logits else law, mask)
