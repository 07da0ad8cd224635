"""Loaded models, wrapped once: the same wrap again while the weights are the same. Knows weights as bytes, no decoding.

A wrapped model holds copies of weights, packed for fast passes, so one that was trained since must be wrapped anew. To
know, every weight is read: a sum over 64-bit words, about the time of one decoding pass.
"""

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smcdecode.engine.load import load
from smcdecode.engine.model import LanguageModel

__all__ = ["wrapped"]

_WORD = 8  # bytes


@dataclasses.dataclass(frozen=True)
class _Wrap:
    weights: tuple[object, ...]
    tokenizer: Any
    model: LanguageModel


_wraps: "weakref.WeakKeyDictionary[PreTrainedModel, _Wrap]" = weakref.WeakKeyDictionary()


def wrapped(model: PreTrainedModel, tokenizer: Any = None) -> LanguageModel:
    """The model as :func:`smcdecode.load` wraps it; forgotten with the model itself.

    Raises:
        UnsupportedModel, InvalidOption: as :func:`smcdecode.load`.
    """
    known, weights = _wraps.get(model), _weights(model)
    if known is not None and known.tokenizer is tokenizer and known.weights == weights:
        return known.model
    fresh = load(model if tokenizer is None else (model, tokenizer))
    _wraps[model] = _Wrap(weights, tokenizer, fresh)
    return fresh


def _weights(model: PreTrainedModel) -> tuple[object, ...]:
    """What changes when any weight does, in place, by ``.data`` or by replacement; or the kind of any module."""
    kinds = tuple((name, type(module)) for name, module in model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return kinds, tuple((name, t.dtype, t.shape, t.data_ptr(), _sum(t)) for name, t in tensors.items())


def _sum(tensor: Tensor) -> int:
    """The sum of a tensor's bits as 64-bit words, the last few bytes by themselves."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = data.clone() if data.data_ptr() % _WORD or data.storage_offset() % _WORD else data
    whole = len(data) // _WORD * _WORD
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
