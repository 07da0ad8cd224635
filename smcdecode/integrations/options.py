"""What transformers' generate() is asked: every option is honoured or refused by name. Knows options; no decoding.

Nothing is listed that is refused: whatever is not known to be honoured is, so that options of later versions are too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from smcdecode.errors import InvalidOption

__all__ = ["check_config", "check_criteria", "check_inputs", "check_processors", "eos_ids", "prompts_of"]

Known = dict[type, Callable[[Any], bool]]

HONOURED = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "num_return_sequences",
        "eos_token_id", "pad_token_id", "bos_token_id", "return_dict_in_generate", "use_cache", "transformers_version",
    }
)  # fmt: skip
CACHES = ("cache", "past_key_values")
INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHES})
INSTEAD = {
    "stop_strings": "say stop=[…] and processing_class=tokenizer",
    "num_assistant_tokens": "say draft_tokens=…",
    "max_time": "say max_new_tokens=…",
}


def check_config(config: GenerationConfig) -> None:
    """Refuse every option that is set and cannot be honoured.

    Raises:
        InvalidOption: names them all.
    """
    neutral = config._get_default_generation_params()
    asked = {name: value for name, value in vars(config).items() if not name.startswith("_") and name not in HONOURED}
    refused = [name for name, value in asked.items() if value not in (None, neutral.get(name)) and value is not False]
    refused += [name for name, value in asked.items() if value is False and neutral.get(name, False)]
    if refused:
        _refuse([f"{name}={asked[name]!r}" for name in refused], [INSTEAD[n] for n in refused if n in INSTEAD])


def check_processors(processors: Iterable[Any], config: GenerationConfig) -> None:
    """Refuse logits processors, those aside that stand for the config's own temperature, top_k and top_p.

    Raises:
        InvalidOption: names their classes.
    """
    known: Known = {
        TemperatureLogitsWarper: lambda p: p.temperature == config.temperature,
        TopKLogitsWarper: lambda p: p.top_k == config.top_k,
        TopPLogitsWarper: lambda p: p.top_p == config.top_p,
    }
    others = [p for p in processors if type(p) not in known or not known[type(p)](p)]
    if others:
        _refuse(
            [f"logits_processor {type(p).__name__}" for p in others],
            ["weigh texts with potential=smcdecode.potential(fn)"],
        )


def check_criteria(criteria: Iterable[Any], config: GenerationConfig) -> None:
    """Refuse stopping criteria, those aside that stand for the config's own length and EOS ids.

    Raises:
        InvalidOption: names their classes.
    """
    known: Known = {
        MaxLengthCriteria: lambda c: c.max_length == config.max_length,
        EosTokenCriteria: lambda c: set(c.eos_token_id.tolist()) == set(eos_ids(config)),
    }
    others = [c for c in criteria if type(c) not in known or not known[type(c)](c)]
    if others:
        _refuse([f"stopping_criteria {type(c).__name__}" for c in others], [INSTEAD["stop_strings"]])


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Refuse what the model would be given besides ids and their mask.

    Raises:
        InvalidOption: names it.
    """
    others = [name for name, value in inputs.items() if name not in INPUTS and value is not None]
    others += [name for name in CACHES if (cache := inputs.get(name)) is not None and cache.get_seq_length()]
    if others:
        _refuse(others, [])


def prompts_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """The prompts of a left-padded batch (B, L), without their padding.

    Raises:
        InvalidOption: the mask is not one of left padding, or positions are not counted from the first token.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.shape != ids.shape or bool((mask.long().diff(dim=-1) < 0).any()):
        raise InvalidOption(
            "prompts of a batch must be padded on the left, 0 in attention_mask: tokenizer.padding_side = 'left'"
        )
    count = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not torch.equal(positions.masked_fill(mask == 0, 0), count.masked_fill(mask == 0, 0)):
        raise InvalidOption(
            "position_ids other than 0, 1, 2, … from the first token cannot be honoured: leave them out"
        )
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def eos_ids(config: GenerationConfig) -> list[int]:
    """The ids that end a text; with the first, transformers pads where there is no other id to pad with."""
    eos = config.eos_token_id
    return [] if eos is None else [int(eos)] if isinstance(eos, int) else [int(i) for i in eos]


def _refuse(what: list[str], remedies: list[str]) -> None:
    remedy = "; ".join(dict.fromkeys(remedies)) or "leave it out, or generate without custom_generate"
    raise InvalidOption(f"smcdecode.generate cannot honour {', '.join(what)}: {remedy}")
