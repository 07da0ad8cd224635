"""Rows of logits → laws → tokens. Knows temperature, truncation, exponents and masks; no model, no page.

Rows of a vocabulary stay on the device that made them; what is one number a row (slants, uniforms, tokens, log-norms)
lies on the host, where slots are kept. They cross here. On a CPU both are one place and nothing is copied.
"""

import dataclasses
import math

import torch
from torch import Tensor

from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.errors import InvalidWeight
from smcdecode_kernels import reference
from smcdecode_kernels.restrict import restrict

__all__ = ["Slant", "check_numbers", "draw", "law_of", "local_law", "log_norm", "log_weight", "proposal_law"]


def check_numbers(x: Tensor, name: str) -> None:
    """Raise InvalidWeight if x, a number of each row of a model's logits, shows a NaN in one."""
    if math.isnan(float(x.sum())):
        raise InvalidWeight(f"{name} produced NaN or infinite logits: check the checkpoint and its dtype")


@dataclasses.dataclass(frozen=True)
class Slant:
    """What the targets of some rows make of a model's logits; rows of one batch may belong to different targets.

    On the host.
    """

    law: Tensor  # (n, 3) float64: temperature, top_k (inf keeps all), top_p (1 keeps all); they define p
    alpha: Tensor  # (n,) float64 exponents
    masked: Tensor  # (n,) bool: rows whose target masks tokens

    def __getitem__(self, rows: Tensor) -> "Slant":
        """That of some rows, (m,) int64."""
        at = rows.numpy()
        return Slant(*(torch.from_numpy(x.numpy()[at]) for x in (self.law, self.alpha, self.masked)))


def law_of(target: Target) -> tuple[float, float, float]:
    """The numbers by which a target's p is made of logits, as in :class:`Slant`."""
    return target.temperature, target.top_k or math.inf, 1.0 if target.top_p is None else target.top_p


@torch.inference_mode()
def local_law(logits: Tensor, slant: Slant, mask: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The targets' local laws r ∝ p^α m at some positions, (5).

    Args:
        logits: (n, V) float32 of the target model; they are used up.
        slant: the rows' temperature, truncation and exponents.
        mask: (n, ⌈V/32⌉) int32 tokens allowed by the potentials, packed, all of them in rows that are not masked;
            or None.
        name: of the model, for messages.

    Returns:
        log (p^α m), (n, V) float32, not normalised, where the logits lie, and log Z (n,) float64 on the host; exactly 0
        where α = 1 and there is no mask.
    """
    log_p = _log_p(logits, slant.law, name)
    free = torch.from_numpy((slant.alpha.numpy() == 1) & ~slant.masked.numpy())
    if bool(free.numpy().all()):
        return log_p, torch.zeros(len(logits), dtype=torch.float64)
    if bool((slant.alpha != 1).any()):
        log_p *= slant.alpha[:, None].float().to(log_p.device)
    log_z = log_norm(log_p) if mask is None else restrict(log_p, mask.to(log_p.device)).cpu()
    return log_p, log_z.masked_fill_(free, 0.0)


def log_norm(law: Tensor) -> Tensor:
    """Log of the sum of weights of each row of a law (n, V): (n,) float64 on the host."""
    return reference.log_norm(law).cpu()


def log_weight(law: Tensor, tokens: Tensor) -> Tensor:
    """The log-weight of one token (n,) of each row of a law (n, V): (n,) float64 on the host."""
    return law.gather(-1, tokens[:, None].to(law.device))[:, 0].cpu().double()


def draw(law: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of a law (n, V) by its uniform (n,), and the rows' log-norms; see ``reference.draw``."""
    tokens, norm = reference.draw(law, u.to(law.device))
    return tokens.cpu(), norm.cpu()


def _log_p(logits: Tensor, law: Tensor, name: str) -> Tensor:
    """Each row's log p under its own temperature and truncation: (n, V) float32."""
    if len(law) and bool((law.numpy() == law.numpy()[0]).all()):
        return _truncated(logits, law[0].tolist(), name)
    kinds = law.unique(dim=0)  # type: ignore[no-untyped-call]
    log_p = torch.empty_like(logits)
    for kind in kinds:
        rows = (law == kind).all(-1).nonzero()[:, 0]
        log_p[rows] = _truncated(logits[rows], kind.tolist(), name)
    return log_p


def _truncated(logits: Tensor, law: list[float], name: str) -> Tensor:
    """Logits made log p; they are used up."""
    temperature, top_k, top_p = law
    if law == [1.0, math.inf, 1.0] and logits.device.type == "cpu":
        log_p = reference.log_softmax_(logits)
        check_numbers(log_p[:, 0], name)
        return log_p
    if temperature == 0:
        check_numbers(logits.amax(-1), name)
    kept, parts = None if math.isinf(top_k) else int(top_k), reference.parts(logits)
    if len(parts) == 1:
        log_p = reference.log_law(logits, temperature, kept, top_p)
    else:
        log_p = logits
        for part in parts:
            part.copy_(reference.log_law(part, temperature, kept, top_p))
    check_numbers(log_p[:, 0], name)
    return log_p


def proposal_law(logits: Tensor, draft: Draft, temperature: Tensor, mask: Tensor | None) -> Tensor:
    """The law a draft samples from, not normalised: temperature first, then truncation, then the mask.

    Args:
        logits: (n, V) float32 of the draft model.
        draft: gives the truncation.
        temperature: (n,) float64; 0 is greedy.
        mask: (n, ⌈V/32⌉) int32 tokens allowed by the potentials, packed; or None.

    Returns:
        (n, V) float32 log-weights; draw() normalises them.
    """
    law = logits
    heat = temperature.numpy()
    low, high = (float(heat.min()), float(heat.max())) if len(heat) else (1.0, 1.0)
    if low == 0:
        law = logits / temperature.masked_fill(temperature == 0, 1.0)[:, None].float().to(logits.device)
    elif low == high != 1:
        law = logits / low
    elif low != high:
        law = logits / temperature[:, None].float().to(logits.device)
    if draft.top_k is not None or draft.top_p is not None:
        check_numbers(logits.amax(-1), draft.model.name)  # a NaN would look like the largest
        law = reference.log_law(law, 1.0, draft.top_k, draft.top_p)
    if low == 0:
        greedy = temperature == 0
        check_numbers(logits.amax(-1), draft.model.name)
        law = torch.where(greedy[:, None].to(logits.device), reference.log_law(logits, 0.0, None, None), law)
    return law if mask is None else reference.apply_bitmask(law.clone() if law is logits else law, mask.to(law.device))
