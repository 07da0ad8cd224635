"""Text as it becomes final, while the particles still run: sample() piece by piece."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar, overload

from smcdecode.declare.target import Algebra
from smcdecode.declare.verification import Method
from smcdecode.engine.prompts import PromptLike, is_one
from smcdecode.engine.ranks import ranks_of
from smcdecode.errors import InvalidOption, PromptError
from smcdecode.potentials.stops import Stops
from smcdecode.report.pieces import Delay, Pieces
from smcdecode.report.posterior import Posterior
from smcdecode.report.record import describe
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
    terms: dict[str, Any] = {
        "max_tokens": max_tokens, "stop": stop, "seed": seed, "memory": memory, "page_size": page_size,
    }  # fmt: skip

    def begin() -> Generator[News, None, None]:
        call = Call.of(target, [prompt], method=method, **terms)
        if on == "text" and call.goal.model.vocabulary.tokens is None:
            raise PromptError(f'{call.goal.model.name} has no tokenizer: stream ids, on="tokens"')
        return news_of(call)

    asked = {"prompt": prompt, "method": describe(method), "on": on, **terms}
    ranks = ranks_of(target)
    news = begin() if ranks is None else ranks.relay(begin, {"target": str(target.as_target()), **asked})
    if on == "tokens":
        return Stream(news, _Ids())
    vocabulary = target.as_target().model.vocabulary
    return Stream(news, Pieces(vocabulary, Stops.of(stop, vocabulary)))


class News(NamedTuple):
    """What became of a request in a cycle."""

    longest: int  # tokens of the longest particle
    settled: list[int]  # tokens that are final
    posterior: Posterior | None  # at the end


def news_of(call: Call) -> Generator[News, None, None]:
    """The news of the one request of a call, cycle by cycle."""
    scheduler = call.scheduler
    with closing(scheduler), closing(scheduler.run()) as cycles:
        for outcomes in cycles:
            for cycle, (_, tokens) in zip(scheduler.latest(), scheduler.settled(), strict=True):
                yield News(cycle.tokens, tokens, None)
            for outcome in outcomes:
                yield News(max(map(len, outcome.tokens)), [], call.posterior(outcome))


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

    def __init__(self, news: Generator[News, None, None], reader: Reader[Piece]) -> None:
        self.delay = Delay()
        self._posterior: Posterior | None = None
        self._pieces = self._run(news, reader)

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

    def _run(self, news: Generator[News, None, None], reader: Reader[Piece]) -> Generator[Piece, None, None]:
        with closing(news):
            for longest, tokens, posterior in news:
                self._posterior = posterior
                settled = tokens if posterior is None else posterior.sample(on="tokens")
                self.delay.observe(longest, len(settled))
                if piece := reader.push(settled, final=posterior is not None):
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
