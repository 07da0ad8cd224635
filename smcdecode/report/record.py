"""What a run left behind, as plain data: ids, texts, weights, cycles, costs. Knows no model, no page, no tensor."""

import dataclasses
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from smcdecode.declare.target import Target
from smcdecode.declare.verification import Method
from smcdecode.engine.scheduler import Cycle, Outcome
from smcdecode.engine.stats import Stats
from smcdecode.engine.twist import Death
from smcdecode.errors import InvalidOption, PotentialError
from smcdecode.infer.weights import normalise
from smcdecode.potentials.potential import Prompt
from smcdecode.potentials.stops import Stops
from smcdecode.potentials.text import shorten
from smcdecode.potentials.vocabulary import Vocabulary
from smcdecode.report import plain

__all__ = ["Asked", "Obituary", "Record"]

FORMAT = "smcdecode.posterior"
VERSION = 2
T = TypeVar("T", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was asked: target, method and prompt, in words and numbers."""

    target: str  # as mathematics: "demo ** 4 * polite"
    plain: bool  # the target is p itself: log Z = 0
    alpha: float
    potentials: tuple[str, ...]
    method: str
    block: int | str  # drafted tokens a cycle; 0 without a draft
    strictness: float | str
    threshold: float  # resampled when ESS < threshold·N
    prompt: str | None  # None where only ids were given to a model without a tokenizer
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    seed: int  # of the call
    request_seed: int  # of this prompt: a function of the call's seed and the prompt
    stop: tuple[str, ...] = ()  # stop strings

    @classmethod
    def of(cls, outcome: Outcome, target: Target, method: Method, seed: int) -> "Asked":
        """Describe a request that is done."""
        request, proposal = outcome.request, getattr(method, "proposal", None)
        strictness = getattr(proposal, "strictness", 0.0)
        return cls(
            str(target), target.plain, float(target.alpha), tuple(psi.name for psi in target.potentials),
            describe(method), getattr(proposal, "block", 0), strictness if strictness == "auto" else float(strictness),
            float(getattr(method, "threshold", 0.0)), _prompt_text(request.prompt, target.model.vocabulary),
            request.prompt.tokens, request.max_tokens, seed, request.seed,
            tuple(s.decode() for s in request.stops.strings),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Obituary:
    """A particle whose weight became zero: when, by what, and how its text ended then."""

    cycle: int
    particle: int
    cause: str
    tokens: tuple[int, ...]
    text: str | None  # its last 80 characters; None for a model without a tokenizer
    why: str | None = None  # in the words of the potential that killed it, where it has some

    @classmethod
    def of(cls, death: Death, vocabulary: Vocabulary) -> "Obituary":
        """Describe a death."""
        text = _text(death.tokens, vocabulary)
        return cls(
            death.cycle, death.particle, death.cause, death.tokens, None if text is None else shorten(text), death.why
        )

    @property
    def last(self) -> str:
        """How its text or its ids ended, for messages."""
        return repr(self.text) if self.text is not None else shorten(repr(list(self.tokens)))


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """Weighted particles and how they came about. N particles; weights in natural logs, float64."""

    asked: Asked
    tokens: tuple[tuple[int, ...], ...]  # N continuations as drawn: with the EOS or the stop string that ended them
    decoded: tuple[str, ...] | None  # their texts, without either; None for a model without a tokenizer
    log_w: tuple[float, ...]  # (N,) since the last resampling
    log_p: tuple[float, ...]  # (N,) log p of each continuation
    log_z: float  # estimate of the log evidence; -inf if all particles died
    origin: tuple[int, ...]  # (N,) each particle's ancestor in the first cycle
    resamplings: float  # in multinomial equivalents, for the variance estimate
    steps: tuple[Cycle, ...]  # what each cycle did; weights and ESS are those before resampling
    deaths: tuple[Obituary, ...]  # of the whole run, also of particles that were replaced later
    spelling: dict[int, bytes] | None  # what each id that was written adds to a text; None without a tokenizer
    stats: Stats  # of the whole call, over all its prompts

    @classmethod
    def of(cls, outcome: Outcome, target: Target, method: Method, stats: Stats, seed: int) -> Self:
        """Everything worth keeping of a request that is done."""
        vocabulary = target.model.vocabulary
        texts = [_text(row, vocabulary, outcome.request.stops) for row in outcome.tokens]
        return cls(
            Asked.of(outcome, target, method, seed),
            tuple(map(tuple, outcome.tokens)),
            None if vocabulary.tokens is None else tuple(text for text in texts if text is not None),
            tuple(outcome.log_w.tolist()),
            tuple(outcome.log_p.tolist()),
            outcome.log_z,
            tuple(outcome.origin.tolist()),
            float(outcome.resamplings),
            tuple(outcome.cycles),
            tuple(Obituary.of(death, vocabulary) for death in outcome.deaths),
            _spelling(outcome.cycles, vocabulary),
            stats,
        )

    @property
    def N(self) -> int:  # noqa: N802  the letter of the mathematics
        """Particles."""
        return len(self.log_w)

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """(N,) float64 normalised weights W; all zero if no particle survived. Read-only."""
        W = normalise(torch.tensor(self.log_w, dtype=torch.float64)).numpy()
        W.setflags(write=False)
        return W

    @property
    def alive(self) -> bool:
        """Whether any particle has a positive weight."""
        return bool(self.weights.any())

    def merged(self, values: Sequence[T]) -> dict[T, float]:
        """Values of the N particles → their weights: equal ones merged, the heaviest first, none of weight zero."""
        mass: Counter[T] = Counter()
        for value, weight in zip(values, self.weights.tolist(), strict=True):
            mass[value] += weight
        return {value: weight for value, weight in mass.most_common() if weight > 0}

    # ---- to and from JSON

    def to_json(self, *, indent: int | None = None) -> str:
        """All of it as JSON; :meth:`from_json` gives it back exactly, floats to the last bit."""
        held = {"format": FORMAT, "version": VERSION, "posterior": plain.dump(self)}
        return json.dumps(held, ensure_ascii=False, allow_nan=False, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` wrote.

        Raises:
            InvalidOption: the text is something else, or of another version of the format.
        """
        try:
            held = json.loads(text)
            _check_version(held)
            found: Self = plain.read(cls, held["posterior"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InvalidOption):
                raise
            raise InvalidOption(f"this is no JSON of a posterior, as Posterior.save writes it: {error!r}") from error
        return found

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            InvalidOption: the file holds something else, or another version of the format.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _check_version(held: dict[str, Any]) -> None:
    if held["format"] == FORMAT and held["version"] != VERSION:
        raise InvalidOption(
            f"this posterior has version {held['version']!r} of the format; this smcdecode reads version {VERSION}: "
            "read it with the smcdecode that wrote it, or a newer one"
        )
    if held["format"] != FORMAT:
        raise ValueError(f"format is {held['format']!r}")


def describe(value: Any) -> str:
    """A declaration as it would be written, models by their names and options left at None left out."""
    if hasattr(value, "vocabulary"):
        return str(value.name)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    options = ", ".join(f"{name}={describe(part)}" for name, part in held.items() if part is not None)
    return f"{type(value).__name__}({options})"


def _spelling(cycles: Sequence[Cycle], vocabulary: Vocabulary) -> dict[int, bytes] | None:
    """The bytes of every id that any particle wrote, those that were replaced included."""
    if vocabulary.tokens is None:
        return None
    written = sorted({i for cycle in cycles for i in cycle.written})
    return {i: b"" if i in vocabulary.eos else vocabulary.shown[i] for i in written}


def _text(ids: Sequence[int], vocabulary: Vocabulary, stops: Stops = Stops()) -> str | None:  # noqa: B008  frozen
    """The text of a continuation, without the EOS or the stop string that ended it."""
    if vocabulary.tokens is None:
        return None
    return stops.cut(vocabulary.bytes_of(i for i in ids if i not in vocabulary.eos)).decode("utf-8", "replace")


def _prompt_text(prompt: Prompt, vocabulary: Vocabulary) -> str | None:
    try:
        return prompt.as_text(vocabulary)
    except PotentialError:  # ids of a model without a tokenizer
        return None
