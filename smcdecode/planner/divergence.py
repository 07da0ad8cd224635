"""How far the draft is from the target along texts that the target writes. Knows laws and masks; no clock."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import Target
from smcdecode.engine.attention import Batch
from smcdecode.engine.draw import Slant, law_of, local_law, proposal_law
from smcdecode.engine.passes import Passes, Stores
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Factors, Twist
from smcdecode.errors import UnsupportedTarget
from smcdecode.infer.forecast import Positions
from smcdecode.infer.strictness import kept, moments, overlap
from smcdecode.potentials.potential import Prompt
from smcdecode.report.posterior import Posterior
from smcdecode_kernels import reference

__all__ = ["SAMPLES", "Text", "laws_along", "measure_divergence", "reference_method", "split", "texts_of", "twist_of"]

_ROWS = 32  # laws compared at once
SAMPLES, _TWISTED = 4, 16  # texts a prompt, and particles where weights must be estimated from them
_FLOOR = 1e-37  # of a draft's probability, below which float32 says 0

Text = tuple[Prompt, tuple[int, ...]]


def split(target: Target) -> tuple[Target, Target]:
    """The target with the potentials that tell allowed next tokens, and the one with the others."""
    masked = tuple(target.potentials[f] for f in Factors.of(target.potentials, "mask").masked)
    others = tuple(psi for psi in target.potentials if not any(psi is m for m in masked))
    base = Target(target.model, target.alpha, target.temperature, target.top_k, target.top_p, masked)
    return base, Target(target.model, potentials=others)


def reference_method(base: Target, twisted: bool) -> SMC:
    """How the texts are written that everything is measured on: by the target itself."""
    if base.plain:
        return SMC(Local(), _TWISTED if twisted else SAMPLES, threshold=0.0)
    return SMC(Local(check="mask"), _TWISTED)


def texts_of(prompts: Sequence[Prompt], posteriors: Sequence[Posterior]) -> list[Text]:
    """A few texts a prompt, of the target's law.

    Raises:
        UnsupportedTarget: no particle of any prompt survived.
    """
    found: list[Text] = []
    for prompt, posterior in zip(prompts, posteriors, strict=True):
        if posterior.alive:
            rows = _systematic(posterior.weights, SAMPLES)
            found += [(prompt, posterior.tokens[i]) for i in rows]
    if not found:
        raise UnsupportedTarget(
            "every particle of every prompt died, so there is no text to measure on: raise max_tokens=, or give "
            "prompts that the constraint can be satisfied behind"
        )
    return found


def _systematic(W: NDArray[np.float64], n: int) -> list[int]:
    """Indices of n particles by weight, at the middles of n strata."""
    edges = np.cumsum(W) / W.sum()
    return [int(i) for i in np.searchsorted(edges, (np.arange(n) + 0.5) / n).clip(max=len(W) - 1)]


def twist_of(others: Target, prompts: Sequence[Prompt], posteriors: Sequence[Posterior]) -> float:
    """χ² of the potentials without masks over the target's texts without them: the mean over prompts.

    Raises:
        UnsupportedTarget: they give weight zero to every text that was written.
    """
    if not others.potentials:
        return 0.0
    found = [_twist(others, prompt, posterior) for prompt, posterior in zip(prompts, posteriors, strict=True)]
    known = [chi2 for chi2 in found if chi2 is not None]
    if not known:
        raise UnsupportedTarget(
            f"none of the texts that the target wrote has positive weight under {others}: its potentials are too rare "
            "an event to plan for. Give them masks or a value of unfinished texts, and try smc.sample directly"
        )
    return float(np.mean(known))


def _twist(others: Target, prompt: Prompt, posterior: Posterior) -> float | None:
    eos = others.model.vocabulary.eos
    twist = Twist(posterior.N, others.model.vocabulary)
    twist.start(range(posterior.N), prompt, others.potentials)
    twist.advance(range(posterior.N), [[t for t in tokens if t not in eos] for tokens in posterior.tokens])
    log_psi, _ = twist.log_psi(range(posterior.N), [True] * posterior.N)
    psi = np.exp(log_psi.numpy() - max(float(log_psi.max()), -1e300))
    W = posterior.weights
    mean = float(W @ psi)
    return float(W @ psi**2) / mean**2 - 1 if mean > 0 and posterior.alive else None


def measure_divergence(
    base: Target, draft: Draft, texts: Sequence[Text], strictness: Sequence[float], tick: Callable[[], object]
) -> dict[float, Positions]:
    """Compare both models' laws at every position of some texts, at each strictness.

    Args:
        base: the target, with potentials that have masks only.
        draft: with its temperature and truncation.
        texts: of the target's law.
        strictness: values of s.
        tick: called after each text.
    """
    columns: dict[float, list[Tensor]] = {s: [] for s in strictness}
    for prompt, tokens in texts:
        log_r, log_z, log_q = laws_along(base, draft, prompt, tokens)
        for s in strictness:
            parts = [
                _compare(log_q[i : i + _ROWS], log_r[i : i + _ROWS], torch.tensor(tokens[i : i + _ROWS]), s)
                for i in range(0, len(tokens), _ROWS)
            ]
            columns[s].append(torch.cat([torch.cat(parts, -1), log_z[None]]))
        tick()
    text = np.repeat(np.arange(len(texts)), [len(tokens) for _, tokens in texts])
    return {s: Positions(text, *torch.cat(rows, -1).numpy()) for s, rows in columns.items()}


def laws_along(base: Target, draft: Draft, prompt: Prompt, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Along one text: log r (T, V), log Z (T,) and log q (T, V), where q has no token left a row of NaN."""
    ids = torch.tensor([*prompt.tokens, *tokens[:-1]])
    n, T = len(ids), len(tokens)
    passes = Passes(draft.model, Stores(base.model, [draft.model], n, 1), Stats())  # type: ignore[arg-type, list-item]
    length = torch.tensor([n])
    empty = torch.empty(0, dtype=torch.int64)
    batch = Batch(length, torch.arange(1, n + 1)[None], length, torch.zeros(1, dtype=torch.int64), (empty,), (0,))
    asked = (ids, torch.arange(n), batch, torch.arange(n - T, n))
    mask = _masks(base, prompt, tokens)
    ones = torch.ones(T, dtype=torch.float64)
    slant = Slant(
        ones[:, None] * torch.tensor(law_of(base), dtype=torch.float64),
        base.alpha * ones,
        torch.full((T,), mask is not None),
    )
    law, log_z = local_law(passes.target(*asked).cpu(), slant, mask, base.model.name)
    temperature = base.temperature / base.alpha if draft.temperature is None else draft.temperature
    log_q = proposal_law(passes.draft(*asked).cpu(), draft, temperature * ones, mask)
    return law - log_z[:, None].float(), log_z, log_q - reference.log_norm(log_q)[:, None].float()


def _masks(base: Target, prompt: Prompt, tokens: Sequence[int]) -> Tensor | None:
    """(T, ⌈V/32⌉) int32, packed: what the potentials allow before each token of a text."""
    twist = Twist(1, base.model.vocabulary)
    twist.start([0], prompt, base.potentials)
    if not bool(twist.masked.any()):
        return None
    rows = []
    for i, token in enumerate(tokens):
        rows.append(twist.masks(twist.states, [tuple(tokens[:i])]))
        if token not in base.model.vocabulary.eos:
            twist.advance([0], [[token]])
    return torch.cat(rows)


def _compare(log_q: Tensor, log_r: Tensor, tokens: Tensor, s: float) -> Tensor:
    """Rows kept, acceptance, ended, went_on, onward of :class:`Positions`: (5, n) float64."""
    barren = torch.isnan(log_q[:, 0]) | torch.isneginf(log_q).all(-1)  # the block stops, and the target draws
    log_q = log_q.masked_fill(barren[:, None], -torch.inf)
    ones, zeros = torch.ones(len(tokens), dtype=torch.float64), torch.zeros(len(tokens), dtype=torch.float64)
    if s == 0:
        went_on = (2 * log_r.double() - log_q.double().clamp(min=np.log(_FLOOR))).exp().sum(-1)
        rows = torch.stack([ones, ones, zeros, went_on, ones])
    else:
        both = overlap(log_q, log_r, torch.full((len(tokens),), s, dtype=torch.float64))
        rows = torch.stack([kept(both, tokens), 1.0 - both.refused, *moments(both)])
    return torch.where(barren, torch.stack([zeros, zeros, ones, zeros, zeros]), rows)
