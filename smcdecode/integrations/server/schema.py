"""What clients may send, in OpenAI's words: fields, types and ranges. Knows no engine.

A field of OpenAI's that would change the answer and has no meaning here is refused by name unless it has the value
that changes nothing; fields nobody knows are refused too.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

__all__ = ["ChatRequest", "CompletionRequest", "ResponseFormat", "Smc"]

INT64 = 2**63
LEAST_TEMPERATURE = 0.01
Text = Annotated[str, StringConstraints(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


def _only(*values: Any) -> AfterValidator:
    """For a field that may say one of these values, or be left out: nothing else is supported."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            allowed = f" or set it to {values[0]!r}" if values else ""
            raise ValueError(f"this server does not support it, and it would change the answer: leave it out{allowed}")
        return value

    return AfterValidator(check)


def _calm(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"a temperature is 0 (greedy) or at least {LEAST_TEMPERATURE}, where float32 still holds logits"
        )
    return temperature


class Smc(_Body):
    """What other servers do not have."""

    alpha: float = Field(default=1.0, gt=0, le=64, description="α of the target p^α over whole sequences")
    top_k: int | None = Field(default=None, ge=1, lt=INT64, description="p keeps the k likeliest tokens")
    grammar: Text | None = Field(default=None, description="a Lark grammar that every answer satisfies")
    parser: Literal["lalr", "earley"] = Field(default="lalr", description="how Lark reads the grammar")
    regex: Text | None = Field(default=None, description="a Python pattern that every answer matches")
    particles: int | Literal["auto"] | None = Field(default=None, description="N; the server's by default")
    block: int | Literal["auto"] | None = Field(default=None, description="K, drafted tokens a cycle")
    strictness: float | Literal["auto"] | None = Field(default=None, description="s in [0, 1]")


class _JsonSchema(_Body):
    name: str = "schema"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """``text``, ``json_object``, or ``json_schema`` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # there is none


class _Sampling(_Body):
    """Fields that completions and chats share."""

    model: str
    n: int = Field(default=1, ge=1, lt=INT64, description="independent runs, one answer of each")
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, AfterValidator(_calm)] | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    response_format: ResponseFormat | None = None
    smc: Smc = Smc()
    user: str | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: Annotated[Any, _only(0)] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    logit_bias: Annotated[Any, _only({})] = None


class CompletionRequest(_Sampling):
    """A body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1, lt=INT64)
    logprobs: Annotated[Any, _only(0)] = Field(default=None, description="0: log-probabilities, of no alternatives")
    best_of: Annotated[Any, _only(1)] = None
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None


class _Part(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a chat."""

    role: Text
    content: str | list[_Part]
    name: str | None = None


class ChatRequest(_Sampling):
    """A body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1, lt=INT64)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: Annotated[Any, _only(0)] = None
    store: bool | None = None
    modalities: Annotated[Any, _only(["text"])] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    audio: Annotated[Any, _only()] = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    verbosity: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
