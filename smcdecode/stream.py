"""Text as it becomes final, while the particles still run: sample() piece by piece."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Generic, Literal, Protocol, Self, TypeVar, overload

from smcdecode.declare.target import Algebra
from smcdecode.declare.verification import Method
from smcdecode.engine.prompts import PromptLike, is_one
from smcdecode.errors import InvalidOption, PromptError
from smcdecode.report.pieces import Delay, Pieces
from smcdecode.report.posterior import Posterior
from smcdecode.sample import Call

__all__ = ["Stream", "stream"]

Piece = TypeVar("Piece", covariant=True)  # str, or a tuple of ids


@overload
def stream(
    target: Algebra,
    prompt: PromptLike,
    *,
    on: Literal["text"] = "text",
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
) -> "Stream[str]": ...
@overload
def stream(
    target: Algebra,
    prompt: PromptLike,
    *,
    on: Literal["tokens"],
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
) -> "Stream[tuple[int, ...]]": ...
def stream(
    target: Algebra,
    prompt: PromptLike,
    *,
    on: Literal["text", "tokens"] = "text",
    method: Method | None = None,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    memory: float = 0.5,
    page_size: int = 1,
) -> "Stream[str] | Stream[tuple[int, ...]]":
    """Sample one prompt and yield the answer piece by piece, each as soon as it is final.

    A token is final once every particle of positive weight shares it, because every later particle descends from one
    of them. So pieces are never taken back, and together they are exactly ``sample(…).text`` of the same seed; what is
    not final when the run ends (the particles still differ there) comes last, from the one that is drawn. Particles
    part where weights are even and agree where they are resampled: a single chain (``Autoregressive()``,
    ``Speculative``, ``MultiDraft``) waits for nothing, many calm particles agree late. ``delay`` says how late.

    Args:
        target: as for :func:`smcdecode.sample`.
        prompt: one prompt.
        on: yield pieces of text, or tuples of token ids as drawn.
        method: as for :func:`smcdecode.sample`.
        max_tokens: as for :func:`smcdecode.sample`.
        stop: as for :func:`smcdecode.sample`.
        seed: as for :func:`smcdecode.sample`.
        memory: as for :func:`smcdecode.sample`.
        page_size: as for :func:`smcdecode.sample`.

    Raises:
        InvalidOption, PromptError, and what else :func:`smcdecode.sample` raises before it runs: at once.
        NoSurvivors: at the end, if every particle died; what was yielded until then was final among those that lived.

    Example:
        for piece in smc.stream(p, "The sea is", stop="."):
            print(piece, end="", flush=True)
    """
    if on not in ("text", "tokens"):
        raise InvalidOption(f"on={on!r}: a stream yields on='text' or on='tokens'")
    if not is_one(prompt):
        raise PromptError("stream() takes one prompt: call it once for each")
    call = Call.of(
        target, [prompt], method=method, max_tokens=max_tokens, stop=stop, seed=seed, memory=memory,
        page_size=page_size,
    )  # fmt: skip
    if on == "tokens":
        return Stream(call, _Ids())
    if call.goal.model.vocabulary.tokens is None:
        raise PromptError(f'{call.goal.model.name} has no tokenizer: stream ids, on="tokens"')
    return Stream(call, Pieces(call.goal.model.vocabulary, call.requests[0].stops))


class Reader(Protocol[Piece]):
    """Turns the settled tokens of one request, which only grow, into pieces."""

    def push(self, tokens: Sequence[int], *, final: bool = False) -> Piece:
        """What is new in ``tokens``, all that is settled; perhaps nothing."""


class Stream(Generic[Piece]):
    """The pieces of one answer, in order; see :func:`stream`. Leaving it early, or ``close()``, ends the run.

    It is its own context manager: ``with smc.stream(…) as pieces`` closes it whatever happens.

    Attributes:
        delay: how many tokens had been written beyond each token when it became final: ``delay.mean``, ``delay.most``.
    """

    def __init__(self, call: Call, reader: Reader[Piece]) -> None:
        self.delay = Delay()
        self._posterior: Posterior | None = None
        self._pieces = self._run(call, reader)

    @property
    def posterior(self) -> Posterior:
        """All weighted particles, as :func:`smcdecode.sample` returns them; once the stream has been read to its end.

        Raises:
            InvalidOption: it has not.
        """
        if self._posterior is None:
            raise InvalidOption("this stream has not been read to its end; for the posterior alone call smc.sample(…)")
        return self._posterior

    def close(self) -> None:
        """End the run and free what it holds; nothing more is yielded."""
        self._pieces.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, call: Call, reader: Reader[Piece]) -> Generator[Piece, None, None]:
        scheduler = call.scheduler
        with closing(scheduler.run()) as cycles:
            for outcomes in cycles:
                for cycle, (_, tokens) in zip(scheduler.latest(), scheduler.settled(), strict=True):
                    self.delay.observe(cycle.tokens, len(tokens))
                    if piece := reader.push(tokens):
                        yield piece
                for outcome in outcomes:
                    self._posterior = call.posterior(outcome)
                    answer = self._posterior.sample(on="tokens")
                    self.delay.observe(max(map(len, outcome.tokens)), len(answer))
                    if piece := reader.push(answer, final=True):
                        yield piece


class _Ids:
    """A reader of ids as they are."""

    def __init__(self) -> None:
        self._read = 0

    def push(self, tokens: Sequence[int], *, final: bool = False) -> tuple[int, ...]:  # noqa: ARG002  see Reader
        """The ids that are new."""
        fresh = tuple(tokens[self._read :])
        self._read = len(tokens)
        return fresh
