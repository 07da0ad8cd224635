"""Who writes the next tokens: a draft in blocks, or the target itself. Knows no tensors."""

import dataclasses
import math
from typing import Literal, get_args

from smcdecode.declare.target import Model, check_truncation
from smcdecode.errors import InvalidOption
from smcdecode.infer.adapt import LONGEST

__all__ = ["Draft", "Guess", "Local", "LookAhead", "PromptLookup", "Proposal", "check_guess"]

LookAhead = Literal["auto", "mask", "rejection"]


@dataclasses.dataclass(frozen=True)
class Local:
    """The target as its own proposal: each token is drawn from r(·) = p(·)^α m(·)/Z, one target pass a token.

    The weight of a step is log Z, which does not depend on the token drawn: the least variance a proposal that sees
    only the prefix can have. Where a potential has no mask m, tokens are drawn by adaptive weighted rejection instead
    (AWRS; Lipkin et al. 2025): only drawn tokens are checked, by whether ψ = 0 behind them, and the weight is an
    unbiased estimate of Z. The law of the answer is the same in every case.

    Args:
        check: how potentials are asked about a token before it is written. "mask": by their masks; those without one
            only see tokens that are written. "rejection": all of them, by checks of single tokens. "auto": by its mask
            where a potential has one, by checks where it has none and says that it forbids texts (``hard = True``, as
            :class:`~smcdecode.potentials.predicate.Predicate` does).
        rejections: tokens that may be refused at one place before the particle dies; weights stay right for every
            number.
        acceptances: accepted draws that a weight is estimated from. 1 takes the fewest checks; more make the weights
            calmer.
        ahead: most tokens that are guessed before each pass where the masks leave few to choose from, and judged by it
            as a draft's are at strictness 1: several tokens a pass under a tight constraint, and the law of each is the
            same. They are written before particles are resampled. Where a potential has no mask nothing is guessed.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    _: dataclasses.KW_ONLY
    check: LookAhead = "auto"
    rejections: int = 1024
    acceptances: int = 1
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.check not in get_args(LookAhead):
            raise InvalidOption(f'check must be "auto", "mask" or "rejection"; got {self.check!r}')
        for name, value in (("rejections", self.rejections), ("acceptances", self.acceptances)):
            if not isinstance(value, int) or value < 1:
                raise InvalidOption(f"{name} must be an integer ≥ 1; got {value!r}")
        if not isinstance(self.ahead, int) or self.ahead < 0:
            raise InvalidOption(f"ahead must be a number of tokens ≥ 0; got {self.ahead!r}")


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """A draft without a model: what followed the last tokens where they stood before, in the prompt or the text itself.

    Where the last ``ngram`` tokens occurred before, its law is q(v) = (1 − floor) · c(v) / Σ c + floor / V, with c(v)
    how often v followed them and V the size of the vocabulary. Where they did not, it drafts nothing: the block ends,
    and the target writes. It costs no pass, and serves wherever the answer repeats the prompt: summaries, edits,
    extraction, code (Saxena 2023, "Prompt Lookup Decoding"; there without a law, for greedy decoding).

    Args:
        ngram: tokens that must recur.
        floor: probability that is spread over the whole vocabulary. It keeps q positive, so that weights are right at
            strictness 0 as well; they are calmer there with a larger one.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    ngram: int = 3
    _: dataclasses.KW_ONLY
    floor: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.ngram, int) or self.ngram < 1:
            raise InvalidOption(f"ngram must be an integer ≥ 1; got {self.ngram!r}")
        if not (isinstance(self.floor, (int, float)) and 0 < self.floor <= 1):
            raise InvalidOption(f"floor must lie in (0, 1]: a probability; got {self.floor!r}")

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"prompt lookup of {self.ngram} tokens"


Guess = Model | PromptLookup  # what a draft's tokens are drawn from


def check_guess(guess: object, whose: str) -> None:
    """Raise InvalidOption for what ``whose`` cannot draft from."""
    if not isinstance(guess, PromptLookup) and not hasattr(guess, "vocabulary"):
        raise InvalidOption(
            f"{whose} needs a language model from smc.load(…), or smc.PromptLookup(…); got {type(guess).__name__}"
        )


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft q writes blocks of K tokens; the target scores each block in one pass.

    Args:
        model: the draft: from :func:`smcdecode.load`, with a vocabulary that agrees with the target's; the target's own
            first layers, :class:`~smcdecode.engine.layers.LayerSkip`; or :class:`PromptLookup`.
        block: K, drafted tokens a cycle. "auto" begins with 4 and moves it between 1 and 16 from cycle to cycle, for
            each prompt by itself: to the K that would have written most tokens a second, by the refusals of the past,
            among those whose weights leave half the particles effective.
        strictness: s in [0, 1], how much of a bad guess is redrawn instead of being carried as weight. 0 is pure
            reweighting (SMC speculative decoding, arXiv 2604.15672: fastest, roughest); 1 is lossless speculative
            decoding inside every particle; in between weights stay correct and are far calmer for few refusals.
            "auto" moves it from cycle to cycle by the weights of the past, for each prompt by itself.
        temperature: of the draft. None means the target's temperature divided by α, which minimises the variance
            of the weights among tempered drafts of the same model.
        top_k, top_p: truncate the draft's law. A truncated draft misses tokens the target allows, so it needs
            ``strictness > 0``, whose redraw covers them.
        cost: for block="auto": what one more drafted token adds to a cycle, over the time of a cycle with none. None
            takes the ratio of the models' parameters; ``smc.plan`` measures it.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    model: Guess
    block: int | Literal["auto"] = 4
    _: dataclasses.KW_ONLY
    strictness: float | Literal["auto"] = 0.2
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        if self.block != "auto" and (not isinstance(self.block, int) or self.block < 1):
            raise InvalidOption(
                f'block must be an integer ≥ 1 (without a draft use Local()), or "auto"; got {self.block!r}'
            )
        if self.cost is not None and not (isinstance(self.cost, (int, float)) and 0 < self.cost < math.inf):
            raise InvalidOption(f"cost must be a positive ratio of times; got {self.cost!r}")
        if self.cost is not None and self.block != "auto":
            raise InvalidOption(f'cost serves block="auto" only; the block here is {self.block!r}')
        s = self.strictness
        if s != "auto" and not (isinstance(s, (int, float)) and 0 <= s <= 1):
            raise InvalidOption(f'strictness must lie in [0, 1], or be "auto"; got {s!r}')
        check_guess(self.model, "Draft")
        check_truncation(self.temperature, self.top_k, self.top_p)

    @property
    def longest(self) -> int:
        """The most tokens a block can have."""
        return LONGEST if self.block == "auto" else self.block

    @property
    def network(self) -> Model | None:
        """The language model that drafts; None for one that needs no passes."""
        return None if isinstance(self.model, PromptLookup) else self.model

    @property
    def strict(self) -> bool:
        """Whether some drafted tokens may be redrawn: s > 0."""
        return self.strictness != 0

    @property
    def truncated(self) -> bool:
        """Whether the draft's law gives probability zero to some tokens by declaration."""
        return self.temperature == 0 or self.top_k is not None or (self.top_p is not None and self.top_p < 1)


Proposal = Local | Draft
