"""What a caller gives as a prompt → token ids. Knows tokenizers and chat templates; no models."""

from collections.abc import Mapping, Sequence
from typing import Any

from smcdecode.engine.model import LanguageModel
from smcdecode.errors import PromptError
from smcdecode.potentials.potential import Prompt

__all__ = ["is_one", "read_prompt"]

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]


def is_one(prompts: Any) -> bool:
    """Whether this is one prompt (a string, token ids, or chat messages) rather than a list of them."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or not len(prompts):
        raise PromptError(
            f"a prompt is a string, a list of token ids or of chat messages, or a list of those; got {prompts!r}"
        )
    return all(isinstance(part, int) for part in prompts) or all(isinstance(part, Mapping) for part in prompts)


def read_prompt(prompt: PromptLike, model: LanguageModel) -> Prompt:
    """Turn one prompt into token ids.

    Raises:
        PromptError: if it is empty, holds ids outside the vocabulary, or needs a tokenizer or chat template that is
            missing.
    """
    tokens = tuple(_tokens(prompt, model))
    if not tokens:
        raise PromptError("the prompt is empty: give at least one token (for free text, the tokenizer's BOS token)")
    size = model.vocabulary.size
    outside = next((t for t in tokens if not 0 <= t < size), None)
    if outside is not None:
        raise PromptError(f"token id {outside} in the prompt is outside {model.name}'s vocabulary of {size}")
    text = prompt if isinstance(prompt, str) else None
    messages = None if isinstance(prompt, str) or not isinstance(prompt[0], Mapping) else tuple(prompt)
    return Prompt(tokens, text, messages)  # type: ignore[arg-type]


def _tokens(prompt: PromptLike, model: LanguageModel) -> Sequence[int]:
    if not isinstance(prompt, Sequence):
        raise PromptError(f"a prompt is a string, token ids, or chat messages; got {prompt!r}")
    if not isinstance(prompt, str) and all(isinstance(part, int) for part in prompt):
        return prompt  # type: ignore[return-value]
    if isinstance(prompt, str) and not prompt:
        return []
    if model.tokenizer is None:
        raise PromptError(f"{model.name} has no tokenizer: give token ids, or smc.load((model, tokenizer))")
    if isinstance(prompt, str):
        return list(model.tokenizer(prompt)["input_ids"])
    if not all(isinstance(part, Mapping) for part in prompt):
        raise PromptError(f"a prompt is a string, token ids, or chat messages; got {prompt!r}")
    if not getattr(model.tokenizer, "chat_template", None):
        raise PromptError(f"the tokenizer of {model.name} has no chat template: give the prompt as one string")
    try:
        encoded = model.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    except Exception as error:  # whatever the checkpoint's own template raises
        raise PromptError(f"the chat template of {model.name} refuses these messages: {error}") from error
    return list(encoded["input_ids"])
