"""Outcomes → what OpenAI's clients read. Knows posteriors and JSON objects; no engine, no HTTP."""

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from smcdecode.engine.request import Request
from smcdecode.engine.scheduler import Outcome
from smcdecode.engine.stats import Stats
from smcdecode.report import diagnostics
from smcdecode.report.posterior import Posterior

__all__ = ["Answer", "Envelope", "usage"]

_RUN = ("target", "method", "cost")  # facts of a summary that say what was run, not how good it is


@dataclasses.dataclass(frozen=True)
class Answer:
    """One draw of one request's posterior, and how far to trust it."""

    request: Request
    tokens: tuple[int, ...]  # as drawn, EOS and stop string included; none where every particle died
    text: str
    finish: str
    trust: dict[str, Any]
    epitaph: str | None  # what died where, if all did
    posterior: Posterior

    @classmethod
    def of(cls, outcome: Outcome, stats: Stats, seed: int) -> "Answer":
        """Draw it."""
        request = outcome.request
        posterior = Posterior.of(outcome, request.target, request.method, stats, seed)
        if not posterior.alive:
            return cls(request, (), "", "no_survivors", _trust(posterior), diagnostics.epitaph(posterior), posterior)
        tokens = posterior.sample(on="tokens")
        return cls(request, tokens, posterior.text, _finish(request, tokens), _trust(posterior), None, posterior)

    def shown(self) -> list[int]:
        """The tokens without EOS."""
        eos = self.request.target.model.vocabulary.eos
        return [token for token in self.tokens if token not in eos]


def _finish(request: Request, tokens: Sequence[int]) -> str:
    """``stop`` for a text that ended by itself or by a stop string, ``length`` for one that was cut."""
    vocabulary = request.target.model.vocabulary
    spelt = vocabulary.bytes_of(token for token in tokens if token not in vocabulary.eos)
    ended = tokens[-1] in vocabulary.eos or request.stops.cut(spelt) != spelt
    return "stop" if ended else "length"


def _trust(posterior: Posterior) -> dict[str, Any]:
    """The extension field of a choice: what the weights say of the answer."""
    V = posterior.log_z_variance
    numbers = {
        "log_z": posterior.log_z,
        "log_z_error": math.sqrt(V) if V > 0 else math.nan,
        "ess": posterior.ess,
        "ess_lowest": posterior.ess_lowest,
    }
    facts = {name: fact for name, fact in diagnostics.facts(posterior) if name not in _RUN}
    return {
        "particles": posterior.N,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "seed": posterior.asked.seed,
        "trust": facts,
    }


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens read, once a prompt, and tokens of the answers; what the other particles wrote is not counted."""
    written = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The objects of one response, all of one id: of a chat, or of a plain completion."""

    chat: bool
    model: str
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def whole(
        self, answers: Sequence[Answer], used: dict[str, int], log_probs: Sequence[list[float] | None]
    ) -> dict[str, Any]:
        """The response to a request without ``stream``."""
        choices = []
        for i, (answer, scores) in enumerate(zip(answers, log_probs, strict=True)):
            text = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            choices.append(
                {
                    "index": i,
                    **(text if self.chat else {"text": answer.text}),
                    "finish_reason": answer.finish,
                    "logprobs": None if scores is None else self._log_probs(answer, scores),
                    "smc": answer.trust,
                }
            )
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": used}

    def piece(self, index: int, text: str, *, first: bool = False, answer: Answer | None = None) -> dict[str, Any]:
        """A chunk of a stream: text, and of a finished answer how it ended."""
        delta = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
        finish = None if answer is None else answer.finish
        choice = {"index": index, **(delta if self.chat else {"text": text}), "finish_reason": finish, "logprobs": None}
        if answer is not None:
            choice["smc"] = answer.trust
        return self._chunk([choice])

    def bill(self, used: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream that was asked to include usage."""
        return self._chunk([]) | {"usage": used}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {
            "id": prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _log_probs(self, answer: Answer, scores: list[float]) -> dict[str, Any]:
        vocabulary = answer.request.target.model.vocabulary
        spelt = [vocabulary.bytes_of([token]) for token in answer.shown()]
        texts = [data.decode("utf-8", "replace") for data in spelt]
        finite = [max(score, -9999.0) for score in scores[: len(texts)]]  # as OpenAI writes −∞
        if not self.chat:
            offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
            return {"tokens": texts, "token_logprobs": finite, "top_logprobs": None, "text_offset": offsets}
        content = [
            {"token": text, "logprob": score, "bytes": list(data), "top_logprobs": []}
            for text, score, data in zip(texts, finite, spelt, strict=True)
        ]
        return {"content": content, "refusal": None}
