"""Knows rewards, ``Ψ(x) = exp(β R(x))``; knows no potential that has a grammar or a mask."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from smcdecode.errors import InvalidOption
from smcdecode.potentials.function import Judge, UserFunction
from smcdecode.potentials.reading import Reading
from smcdecode.potentials.text import Prompt

__all__ = ["Classifier", "Reward"]


class Reward(Reading):
    """Reward weighting: ``Ψ(x) = exp(β R(x))``, and ``ψ_t = 1`` or ``exp(β prefix(x_1:t))`` before x is finished.

    ``π ∝ p · exp(β R)`` is the optimum of ``E[R] − KL(π‖p)/β``: what RLHF with base p aims at (Korbak, Perez & Buckley
    2022), with no fine-tuning.

    Args:
        fn: R, a function of the text, ``fn(text) → number``. A parameter of it named ``prompt`` (not its first)
            receives the prompt's text.
        beta: β, a finite number; larger follows the reward more, at the price of more weight variance.
        prefix: an estimate of R from an unfinished text, called as ``fn`` is; it steers early and leaves the target
            unchanged. −inf forbids a text, so it may be given only to what no continuation can mend.
        batched: both functions take a list of texts (and of prompts) and return as many numbers.
        name: the name in reports and messages; by default the function's.

    Raises:
        InvalidOption: ``beta`` is not finite.
        PotentialError: ``fn`` or ``prefix`` is no function, or takes the prompt first.

    Example:
        >>> short = Reward(lambda text: -len(text), beta=0.1)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        beta: float = 1.0,
        prefix: Callable[..., Any] | None = None,
        *,
        batched: bool = False,
        name: str | None = None,
    ) -> None:
        name = name or str(getattr(fn, "__name__", type(fn).__name__))
        before = None if prefix is None else UserFunction(prefix, f"{name} (prefix)", batched)
        self._set(UserFunction(fn, name, batched), beta, before, name)

    def _set(self, final: Judge, beta: float, prefix: Judge | None, name: str) -> None:
        if not math.isfinite(beta):
            raise InvalidOption(f"beta={beta!r}: a finite number is wanted; to forbid texts let the reward be -inf")
        super().__init__(final, prefix, as_ids=False, scale=beta, name=name)
        self.beta = beta

    @classmethod
    def from_classifier(
        cls,
        model: Any,
        tokenizer: Any,
        beta: float = 1.0,
        *,
        label: int | str | None = None,
        batch_size: int = 16,
        name: str | None = None,
    ) -> Self:
        """The reward of a loaded sequence classifier of transformers, such as a reward model.

        R is the logit of a model with one output, the log-probability of ``label`` where there are several. Where the
        tokenizer has a chat template the model reads the whole conversation: the prompt's messages (a plain prompt is
        the user's message) and the continuation as the assistant's. Otherwise it reads the continuation alone.

        Args:
            model: an ``AutoModelForSequenceClassification``, in ``eval()`` mode.
            tokenizer: its tokenizer.
            beta: β.
            label: which output is the reward: its number, or its name in ``model.config.id2label``.
            batch_size: texts a pass. Without a padding token they pass one by one.
            name: the name in reports and messages; by default the model's.

        Raises:
            InvalidOption: the label does not exist or is missing, the model is in training mode, or ``beta`` or
                ``batch_size`` means nothing.
        """
        reward = cls.__new__(cls)
        name = name or str(getattr(model, "name_or_path", "") or type(model).__name__)
        reward._set(Classifier(model, tokenizer, label, batch_size), beta, None, name)
        return reward

    def __repr__(self) -> str:
        return f"Reward({self.name}, beta={self.beta})"


class Classifier:
    """A sequence classifier's judgement of texts; see ``Reward.from_classifier``."""

    def __init__(self, model: Any, tokenizer: Any, label: int | str | None, batch_size: int) -> None:
        if model.training:
            raise InvalidOption("the classifier is in training mode, so its rewards would be random: call model.eval()")
        if batch_size < 1:
            raise InvalidOption(f"batch_size={batch_size}: at least 1 is wanted")
        pads = tokenizer.pad_token_id is not None and model.config.pad_token_id is not None
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size if pads else 1
        self.label = _label(model.config, label)
        self.wants_prompt = bool(getattr(tokenizer, "chat_template", None))

    def values(self, readings: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
        """The reward of each text."""
        pairs = zip(readings, prompts, strict=True)
        texts = [self._conversation(p, text) if self.wants_prompt else text for text, p in pairs]
        batches = (texts[i : i + self.batch_size] for i in range(0, len(texts), self.batch_size))
        return [value for batch in batches for value in self._rewards(batch)]

    def _conversation(self, prompt: Prompt, text: str) -> str:
        messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        messages.append({"role": "assistant", "content": text})
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    @torch.inference_mode()
    def _rewards(self, texts: list[str]) -> list[float]:
        """One pass over a batch."""
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=not self.wants_prompt
        )
        logits = self.model(**inputs.to(self.model.device)).logits.double()  # (n, labels)
        rewards = logits if logits.shape[1] == 1 else logits.log_softmax(-1)
        return [float(value) for value in rewards[:, self.label].tolist()]


def _label(config: Any, label: int | str | None) -> int:
    """The number of the output that is the reward."""
    names: dict[int, str] = config.id2label
    if label is None and len(names) == 1:
        return 0
    found = [i for i, name in names.items() if label in (i, name)]
    if len(found) != 1:
        raise InvalidOption(f"label={label!r}: give the output that is the reward, one of {names}")
    return found[0]
