"""Softmax attention over plain tensors, with its log-sum-exp. Knows masks and windows; no page, no row of a batch."""

import torch
from torch import Tensor

from smcdecode.engine.attention import Rule

__all__ = ["LENGTH_STEP", "additive", "attention", "causal"]

LENGTH_STEP = 32  # own lengths are padded to a multiple, so that a kernel's vector tails do not depend on the padding


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What scores are masked by: 0, and −inf where ``hidden``."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Softmax attention of q (b, h, n, D) over k, v (b, h, L, D): output (b, h, n, Dv), log-sum-exp (b, h, n) float32.

    A query that sees nothing gives a finite output and an arbitrary log-sum-exp.
    """
    if _fused(q, v, rule):
        out, lse = _kernel(q, k, v, attn_mask=mask, scale=rule.scaling)
        return out, lse
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(v.dtype)
    return torch.matmul(weights, v), lse


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # unlike its public face, it returns the sums


def _fused(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether torch's kernel can do it."""
    return rule.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def causal(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Causal attention of one row's T new tokens among themselves: (T, heads, value_dim) and log-sum-exp (T, heads).

    Where masks have to be made queries go in blocks, each against the keys it can see, so that the masks stay small for
    prompts of any length.
    """
    if rule.window is None and _fused(query, value, rule):
        q = query.transpose(0, 1)[None]
        k, v = (_heads(x, query.shape[1])[None] for x in (key, value))
        out, lse = _kernel(q, k, v, is_causal=True, scale=rule.scaling)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    total = len(query)
    step = 512 if rule.window is None else min(512, max(rule.window, LENGTH_STEP))
    parts = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        low = 0 if rule.window is None else max(start - rule.window + 1, 0)
        at, seen = torch.arange(start, stop, device=query.device)[:, None], torch.arange(low, stop, device=query.device)
        hidden = seen > at
        if rule.window is not None:
            hidden |= seen <= at - rule.window
        q = query[start:stop].transpose(0, 1)[None]  # (1, heads, n, D)
        k, v = (_heads(x[low:stop], query.shape[1])[None] for x in (key, value))
        parts.append(attention(q, k, v, additive(hidden, query.dtype), rule))
    out, lse = (torch.cat(part, 2)[0].transpose(0, 1) for part in zip(*parts, strict=True))
    return out, lse


def _heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (n, kv_heads, D) as their queries' heads want them: (heads, n, D)."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)
