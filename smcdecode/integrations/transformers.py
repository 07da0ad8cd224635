"""transformers' generate() by particles: a ``custom_generate``. Ties its options to sample() and stream()."""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from smcdecode.declare.method import SMC, Autoregressive
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import Target
from smcdecode.declare.verification import Method
from smcdecode.engine.model import LanguageModel
from smcdecode.errors import InvalidOption
from smcdecode.integrations.options import (
    check_config,
    check_criteria,
    check_inputs,
    check_processors,
    eos_ids,
    prompts_of,
)
from smcdecode.integrations.wrapping import wrapped
from smcdecode.potentials.potential import Potential
from smcdecode.report.posterior import Posterior
from smcdecode.sample import sample
from smcdecode.stream import stream

__all__ = ["GenerateOutput", "generate", "padded"]


@dataclasses.dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What ``return_dict_in_generate=True`` returns.

    Attributes:
        sequences: (B, L) int64, prompts and continuations, padded.
        posteriors: of each row, all its particles with their weights.
    """

    posteriors: list[Posterior] | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: PreTrainedModel | None = None,
    num_particles: int = 8,
    draft_tokens: int | Literal["auto"] | None = None,
    strictness: float | Literal["auto"] = 0.2,
    alpha: float = 1.0,
    potential: Potential | None = None,
    stop: str | Sequence[str] = (),
    processing_class: Any = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """Generate with particles: ``model.generate(**inputs, custom_generate=smcdecode.generate, draft=small, …)``.

    transformers prepares the inputs, merges ``generation_config`` with the options, and calls this in place of its own
    loop. Each row is one request of :func:`smcdecode.sample`, and one draw from its posterior is the row's answer.
    Greedy generation (``do_sample=False``, transformers' default) has one answer, which the draft only makes faster.
    Options that cannot be honoured are errors.

    Args:
        model: the target p.
        input_ids: (B, L) int64 prompts, padded on the left.
        logits_processor: as transformers prepares it; others than temperature, top_k and top_p are refused.
        stopping_criteria: as transformers prepares it; others than length and EOS are refused.
        generation_config: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``max_new_tokens``, ``max_length``,
            ``num_return_sequences``, ``eos_token_id``, ``pad_token_id``, ``return_dict_in_generate`` are honoured.
        draft: a small model of the same vocabulary; ``assistant_model`` says the same.
        num_particles: N.
        draft_tokens: K, drafted tokens a cycle; 4 by default.
        strictness: s in [0, 1]; see :class:`smcdecode.Draft`.
        alpha: exponent of the target p^α.
        potential: Ψ of the target p^α · Ψ.
        stop: strings that end a text; the tokens that complete one are returned. Needs ``processing_class``.
        processing_class: the model's tokenizer, for ``stop`` and for potentials that read text.
        seed: the same seed gives the same tokens; None draws one. ``torch.manual_seed`` has no part in it.
        **model_kwargs: the attention mask, and what else transformers prepares for the model; anything that would
            change its predictions is refused.

    Returns:
        (B, L + most) int64 prompts and continuations, padded on the right; or a :class:`GenerateOutput`.

    Raises:
        InvalidOption: an option cannot be honoured; names it, and the remedy.
        SMCDecodeError: what :func:`smcdecode.sample` raises.
    """
    given = _kept_back(model)
    config = generation_config if generation_config is not None else model.generation_config
    check_config(config)
    check_processors(logits_processor or (), config)
    check_criteria(stopping_criteria or (), config)
    check_inputs(model_kwargs)
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    q = _draft(draft, given.get("assistant_model"))
    target = _target(_ending(wrapped(model, processing_class), frozenset(eos_ids(config))), config, alpha, potential)
    method = _method(target, None if q is None else wrapped(q), num_particles, draft_tokens, strictness)
    options: dict[str, Any] = {
        "method": method, "max_tokens": config.max_length - input_ids.shape[1], "stop": stop, "seed": seed,
    }  # fmt: skip
    streamer = given.get("streamer")
    if streamer is None:
        posteriors = sample(target, prompts, progress=False, **options)
    else:
        posteriors = [_streamed(streamer, target, prompts, options)]
    sequences = padded(input_ids, [posterior.sample(on="tokens") for posterior in posteriors], config)
    return GenerateOutput(sequences, posteriors=posteriors) if config.return_dict_in_generate else sequences


def _kept_back(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of the ``generate`` call above that transformers does not hand to a custom_generate.

    ``assistant_model`` and ``streamer`` are arguments of its own and stay there, so they are read off its frame: to
    ignore them would be to answer something else than was asked, and a reader of the streamer would wait forever.

    Raises:
        InvalidOption: what was kept back is something that cannot be honoured.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    if frame is None:
        return {}
    given = frame.f_locals
    refused = [n for n in ("negative_prompt_ids", "negative_prompt_attention_mask") if given.get(n) is not None]
    if refused or given.get("synced_gpus"):
        raise InvalidOption(f"smcdecode.generate cannot honour {', '.join(refused or ['synced_gpus'])}: leave it out")
    return {name: given.get(name) for name in ("assistant_model", "streamer")}


def _draft(draft: PreTrainedModel | None, assistant: PreTrainedModel | None) -> PreTrainedModel | None:
    if draft is not None and assistant is not None and draft is not assistant:
        raise InvalidOption("draft= and assistant_model= are two names of one thing: give one")
    return assistant if draft is None else draft


def _ending(model: LanguageModel, eos: frozenset[int]) -> LanguageModel:
    """The same model, with the EOS ids of this call."""
    if model.vocabulary.eos == eos:
        return model
    other, special = copy.copy(model), model.vocabulary.special | eos
    other.vocabulary = dataclasses.replace(model.vocabulary, eos=eos, special=special)
    return other


def _target(model: LanguageModel, config: GenerationConfig, alpha: float, potential: Potential | None) -> Target:
    law: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        k, most = config.top_k or 0, config.top_p
        law = {
            "temperature": float(config.temperature),
            "top_k": k if 0 < k < model.vocabulary.size else None,
            "top_p": None if most is None or most == 1 else most,
        }
    target = model.as_target().at(**law)
    target = target if alpha == 1 else target**alpha
    return target if potential is None else target * potential


def _method(
    target: Target, q: LanguageModel | None, particles: int, block: int | Literal["auto"] | None,
    strictness: float | Literal["auto"],
) -> Method:  # fmt: skip
    """The decoder: particles with the draft; for a law without weights and draft, or of one text, a single chain."""
    if q is None:
        if block is not None:
            raise InvalidOption("draft_tokens needs a draft: give draft=model, or leave it out")
        return Autoregressive() if target.plain else SMC(Local(), particles)
    block = 4 if block is None else block
    if target.plain and target.temperature == 0:
        return SMC(Draft(q, block, strictness=1.0), 1)
    return SMC(Draft(q, block, strictness=strictness), particles)


def _streamed(streamer: Any, target: Target, prompts: list[list[int]], options: dict[str, Any]) -> Posterior:
    """The posterior of one prompt, whose tokens were given to the streamer as they became final."""
    if len(prompts) != 1:
        raise InvalidOption(
            f"a streamer takes one sequence; this batch has {len(prompts)}: leave it out, or call for each"
        )
    with stream(target, prompts[0], on="tokens", **options) as pieces:
        for tokens in pieces:
            streamer.put(torch.tensor(tokens))
        streamer.end()
        return pieces.posterior


def padded(input_ids: Tensor, answers: list[tuple[int, ...]], config: GenerationConfig) -> Tensor:
    """Prompts (B, L) and their answers behind them, (B, L + most) int64.

    Raises:
        InvalidOption: answers differ in length, and neither ``pad_token_id`` nor ``eos_token_id`` is set.
    """
    most = max(map(len, answers))
    pad = next(iter([config.pad_token_id] if config.pad_token_id is not None else eos_ids(config)), None)
    if pad is None and any(len(answer) < most for answer in answers):
        raise InvalidOption("answers differ in length and there is nothing to pad them with: set pad_token_id")
    rows = [[*answer, *[pad or 0] * (most - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], -1)
