"""The weighted particles of one prompt, and the questions one asks of them. Knows texts and weights; no models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch

from smcdecode.engine.drafting import Stream
from smcdecode.errors import InvalidOption, NoSurvivors, PromptError
from smcdecode.report import diagnostics, html, plot
from smcdecode.report.document import document
from smcdecode.report.record import Record
from smcdecode_kernels import reference

__all__ = ["Posterior"]

On = Literal["text", "tokens"]
Tokens = tuple[int, ...]


class Posterior(Record):
    """The posterior of one prompt: N continuations x^i with weights W^i, and how good they are.

    ``Σ_i W^i f(x^i)`` estimates the mean of f under the target (1), and ``exp(log_z)`` its evidence without bias. It is
    plain data: it holds no model, and can be pickled, compared, saved and loaded. Questions about continuations are
    asked of their texts, or with ``on="tokens"`` of their ids, which models without a tokenizer have only.

    Attributes:
        tokens: N tuples of ids as drawn, with the EOS, or the tokens of the stop string, that ended them.
        weights: (N,) float64 normalised; all zero if every particle died.
        log_w, log_p: (N,) log-weights since the last resampling, and log p of each continuation.
        log_z: estimate of the log evidence, −inf if every particle died.
        steps: one :class:`Cycle` a cycle, with ESS, χ², log-weights and ancestors, all before resampling.
        deaths: the particles whose weight became zero, with cause and text.
        stats: what the call cost.
        asked: what was asked.
    """

    # ---- answers

    @property
    def text(self) -> str:
        """One draw ~ W, by the request's own seed: the same seed gives the same text.

        Raises:
            NoSurvivors: every particle died; says what died where.
            PromptError: the model has no tokenizer.
        """
        return self.sample()

    @property
    def texts(self) -> list[str]:
        """The N continuations as texts, without the EOS or stop string that ended them; those of weight zero included.

        Raises:
            PromptError: the model has no tokenizer.
        """
        if self.decoded is None:
            raise PromptError(
                "the model has no tokenizer, so continuations have no text: read the ids in .tokens, or ask with "
                'on="tokens"'
            )
        return list(self.decoded)

    @overload
    def sample(self, n: None = None, *, on: Literal["text"] = "text", seed: int = 0) -> str: ...
    @overload
    def sample(self, n: None = None, *, on: Literal["tokens"], seed: int = 0) -> Tokens: ...
    @overload
    def sample(self, n: int, *, on: Literal["text"] = "text", seed: int = 0) -> list[str]: ...
    @overload
    def sample(self, n: int, *, on: Literal["tokens"], seed: int = 0) -> list[Tokens]: ...
    def sample(self, n: int | None = None, *, on: On = "text", seed: int = 0) -> Any:
        """Draw continuations ~ W, with replacement.

        Args:
            n: how many, as a list; None for one by itself.
            on: draw texts or ids.
            seed: the draws are a function of the request's seed, this one, and their place in the list.

        Raises:
            NoSurvivors: every particle died; says what died where.
            PromptError: texts are asked of a model without a tokenizer.
        """
        self._require_survivors()
        values, count = self._values(on), 1 if n is None else n
        words = torch.tensor([self.asked.request_seed, seed & 0xFFFFFFFF, seed >> 32])
        u = reference.uniform(words[0], words[1], torch.arange(count), words[2], Stream.ANSWER)
        log_w = torch.tensor(self.log_w, dtype=torch.float64).expand(count, -1)
        drawn = [values[i] for i in reference.draw(log_w, u)[0].tolist()]
        return drawn[0] if n is None else drawn

    @overload
    def best(self, *, on: Literal["text"] = "text") -> str: ...
    @overload
    def best(self, *, on: Literal["tokens"]) -> Tokens: ...
    def best(self, *, on: On = "text") -> Any:
        """The continuation of the largest weight, equal ones merged. A mode of a sample, not a sample.

        Raises:
            NoSurvivors: every particle died; says what died where.
            PromptError: texts are asked of a model without a tokenizer.
        """
        self._require_survivors()
        return next(iter(self.merged(self._values(on))))

    @overload
    def distribution(self, *, on: Literal["text"] = "text") -> dict[str, float]: ...
    @overload
    def distribution(self, *, on: Literal["tokens"]) -> dict[Tokens, float]: ...
    def distribution(self, *, on: On = "text") -> Any:
        """Continuations of positive weight → their weights, equal ones merged, the heaviest first. Empty if all died.

        Raises:
            PromptError: texts are asked of a model without a tokenizer.
        """
        return self.merged(self._values(on))

    @overload
    def expect(self, f: Callable[[str], float], *, on: Literal["text"] = "text") -> float: ...
    @overload
    def expect(self, f: Callable[[Tokens], float], *, on: Literal["tokens"]) -> float: ...
    def expect(self, f: Callable[[Any], float], *, on: On = "text") -> float:
        """``Σ_i W^i f(x^i)``: the estimated mean of a function of the continuation. f is called once for equal ones.

        Raises:
            NoSurvivors: every particle died; says what died where.
            PromptError: texts are asked of a model without a tokenizer.
        """
        self._require_survivors()
        return float(sum(weight * f(value) for value, weight in self.merged(self._values(on)).items()))

    # ---- how good they are

    @property
    def ess(self) -> float:
        """Effective sample size (ΣW)²/ΣW² of the answer, in [1, N]; 0 if all died.

        Nothing is resampled at the end, and copies that resampling made (the same ids from the same first particle)
        count once, so a late resampling does not flatter it. Copies that have parted since count as several: read it
        with ``ess_lowest`` and ``unique_ancestors``.
        """
        return diagnostics.ess(self)

    @property
    def ess_lowest(self) -> float:
        """The smallest ESS of any cycle, before resampling, or of the answer."""
        return min([self.ess, *(step.ess for step in self.steps)])

    @property
    def unique_ancestors(self) -> int:
        """How many of the N first-cycle particles have living descendants."""
        return diagnostics.unique_ancestors(self)

    @property
    def log_z_variance(self) -> float:
        """Relative variance of Ẑ, about the variance of log Ẑ, estimated from this one run (Lee & Whiteley 2018).

        At least this where ``saturated``; NaN for one particle, or if all died. It may be slightly negative: it
        estimates something that may be near zero.
        """
        return diagnostics.log_z_variance(self)

    @property
    def saturated(self) -> bool:
        """Whether all particles descend from one: ``log_z_variance`` is then a lower bound only."""
        return diagnostics.saturated(self)

    def summary(self) -> str:
        """A short, honest account of the run, a fact a line."""
        return diagnostics.summary(self)

    def plot(self) -> Any:
        """A matplotlib Figure: ESS and log-weights over cycles. Save it with ``.savefig(path)``.

        Raises:
            ImportError: matplotlib is missing; it comes with the extra ``plot``.
        """
        return plot.figure(self)

    def to_html(self, path: str | Path) -> None:
        """Write a report of the run to a file: one page that needs no network, for any browser.

        It shows the answers, the genealogy as a tree of text with weights and deaths, ESS and log Ẑ over cycles, and
        how far to trust the run.
        """
        Path(path).write_text(document(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.page(self)

    def __repr__(self) -> str:
        return f"<Posterior of {self.asked.target}: {self.N} particles, log Ẑ = {self.log_z:.4g}, ESS {self.ess:.3g}>"

    # ---- inside

    def _values(self, on: On) -> Sequence[Any]:
        if on not in ("text", "tokens"):
            raise InvalidOption(f"on={on!r}: continuations are read on='text' or on='tokens'")
        return self.texts if on == "text" else self.tokens

    def _require_survivors(self) -> None:
        if not self.alive:
            raise NoSurvivors(diagnostics.epitaph(self))
