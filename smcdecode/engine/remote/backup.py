"""Blocks for misses that need no model, computed alike by both processes. Knows texts, no model and no law."""

from collections.abc import Sequence

from torch import Tensor

from smcdecode.engine.remote.messages import Backup
from smcdecode.infer.lookup import continuation

__all__ = ["backup_block"]


def backup_block(kind: Backup, text: Sequence[int], most: int, uniforms: Tensor, is_eos: Tensor) -> list[int]:
    """The block that is verified where none was prepared: up to ``most`` tokens, none behind the end of a text.

    Args:
        kind: LOOKUP, whose law is one-hot, or UNIFORM, with law 1/V.
        text: prompt and own tokens.
        most: tokens that fit.
        uniforms: (K,) float64 of the cycle's drafts.
        is_eos: (V,) bool.
    """
    uniform = (uniforms[:most] * len(is_eos)).long().tolist()
    block = continuation(text, most) if kind == Backup.LOOKUP else uniform
    for k, token in enumerate(block):
        if is_eos[token]:
            return block[: k + 1]
    return block
