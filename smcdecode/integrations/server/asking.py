"""A client's body → requests for the engine: target, method, constraints. Knows OpenAI's words and ours; no HTTP."""

import dataclasses
import json
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.prompts import PromptLike, is_one, read_prompt
from smcdecode.engine.request import Request
from smcdecode.errors import InvalidOption
from smcdecode.integrations.server.limits import Limits
from smcdecode.integrations.server.sandbox import Sandbox
from smcdecode.integrations.server.schema import ChatRequest, CompletionRequest
from smcdecode.potentials.llg import Constraint
from smcdecode.sample import requests_of

__all__ = ["Asked", "Asking"]

Body = CompletionRequest | ChatRequest


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one body asks for."""

    requests: list[Request]  # prompts times n, the answers to one prompt together
    seed: int
    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Asking:
    """Reads bodies for one server."""

    p: LanguageModel
    method: SMC
    limits: Limits
    sandbox: Sandbox
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # tokenizers are not for many threads

    def read(self, body: Body) -> Asked:
        """Blocks while a constraint is read.

        Raises:
            SMCDecodeError: a child of it; the message says what to ask for instead.
        """
        self._check(body)
        prompts = self._prompts(body)
        most = min(self.limits.choices, self.limits.queue)
        if len(prompts) * body.n > most:
            raise InvalidOption(f"at most {most} answers are given to a request, over all its prompts")
        method, target = self._method(body), self._target(body)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        repeated = [prompt for prompt in prompts for _ in range(body.n)]
        with self.lock:
            length = self._max_tokens(body, prompts)
            requests = requests_of(target, repeated, method=method, max_tokens=length, stop=body.stop or (), seed=seed)
        read = [request.prompt for request in requests[:: body.n]]
        return Asked(requests, seed, sum(len(prompt.tokens) for prompt in read))

    def _check(self, body: Body) -> None:
        if body.stream and body.logprobs is not None and body.logprobs is not False:
            raise InvalidOption("logprobs are computed when an answer is complete: ask for them without stream")
        if body.stream_options is not None and not body.stream:
            raise InvalidOption("stream_options mean something with stream=true only")

    def _prompts(self, body: Body) -> list[PromptLike]:
        if isinstance(body, ChatRequest):
            messages = [message.model_dump(exclude_none=True) for message in body.messages]
            return [[{**message, "content": _joined(message["content"])} for message in messages]]
        return [body.prompt] if is_one(body.prompt) else list(body.prompt)  # type: ignore[list-item, arg-type]

    def _max_tokens(self, body: Body, prompts: Sequence[PromptLike]) -> int:
        """As asked; a chat that does not say gets what the server and the context allow."""
        asked = body.max_tokens
        if isinstance(body, ChatRequest):
            asked = body.max_completion_tokens if body.max_completion_tokens is not None else asked
            if asked is None:
                longest = max(len(read_prompt(prompt, self.p).tokens) for prompt in prompts)
                room = self.limits.max_tokens if self.p.context is None else self.p.context - longest
                return max(1, min(self.limits.max_tokens, room))
        asked = 16 if asked is None else asked
        if asked > self.limits.max_tokens:
            raise InvalidOption(f"max_tokens is at most {self.limits.max_tokens} here; got {asked}")
        return asked

    def _target(self, body: Body) -> Target:
        own, temperature = body.smc, 1.0 if body.temperature is None else body.temperature
        target = self.p.at(temperature=temperature, top_k=own.top_k, top_p=body.top_p) ** own.alpha
        for constraint in self._constraints(body):
            target = target * constraint
        return target

    def _constraints(self, body: Body) -> list[Constraint]:
        own, made = body.smc, []
        if own.grammar is not None:
            made.append(self.sandbox.constraint("earley" if own.parser == "earley" else "grammar", own.grammar))
        if own.regex is not None:
            made.append(self.sandbox.constraint("regex", own.regex))
        schema = _schema(body)
        if schema is not None:
            made.append(self.sandbox.constraint("schema", json.dumps(schema, ensure_ascii=False), schema))
        return made

    def _method(self, body: Body) -> SMC:
        own, method = body.smc, self.method
        particles = method.particles if own.particles is None else own.particles
        proposal = method.proposal
        if isinstance(proposal, Draft):
            block = proposal.block if own.block is None else own.block
            strictness = proposal.strictness if own.strictness is None else own.strictness
            cost = proposal.cost if block == "auto" else None
            proposal = dataclasses.replace(proposal, block=block, strictness=strictness, cost=cost)
        elif own.block is not None or own.strictness is not None:
            raise InvalidOption("this server has no draft model, so block and strictness mean nothing: leave them out")
        method = dataclasses.replace(method, proposal=proposal, particles=particles)
        if method.slots > self.limits.particles:
            raise InvalidOption(f"particles are at most {self.limits.particles} here; got {method.slots}")
        if isinstance(proposal, Draft) and proposal.longest > self.limits.block:
            raise InvalidOption(f"block is at most {self.limits.block} here; got {proposal.longest}")
        return method


def _schema(body: Body) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"title": "JSON object", "type": "object"}
    if wanted.json_schema is None:
        raise InvalidOption("response_format of type json_schema needs a json_schema")
    return wanted.json_schema.json_schema


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
