"""The target π ∝ p^α · Ψ as a value, and its algebra. Knows no tensors.

Equation (1) of the mathematics: γ(x) = p(x)^α · Ψ(x), where p is a language model as it is, tempered (``temperature``)
or truncated (``top_k``, ``top_p``), α an exponent over whole sequences, and Ψ a product of potentials.
"""

import dataclasses
import math
from typing import Protocol

from smcdecode.errors import InvalidOption
from smcdecode.potentials.potential import Potential, Product
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Algebra", "Model", "Target", "check_truncation"]


VERBS = ("start", "advance", "fork", "log_psi", "mask")  # what makes an object a potential


class Model(Protocol):
    """What a target or proposal must tell of its language model before it runs."""

    @property
    def name(self) -> str:
        """How messages call this model."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What each token id means, and which ids end a text."""

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and continuation together; None if unlimited."""


def check_truncation(temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    """Raise InvalidOption for a temperature, top_k or top_p that means nothing."""
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidOption(f"temperature must be a finite number ≥ 0 (0 is greedy); got {temperature!r}")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise InvalidOption(f"top_k must be an integer ≥ 1, or None for all tokens; got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidOption(f"top_p must lie in (0, 1], or be None for all tokens; got {top_p!r}")


class Algebra:
    """``p ** alpha``, ``p * psi`` and ``p.at(temperature=…)`` for everything that can stand as a target."""

    def as_target(self) -> "Target":
        """This object as a :class:`Target`."""
        raise NotImplementedError

    def __pow__(self, alpha: float) -> "Target":
        """p^α: sharpen whole sequences (α > 1), or flatten them (α < 1); not the same as a temperature."""
        target = self.as_target()
        if not (isinstance(alpha, (int, float)) and math.isfinite(alpha) and alpha > 0):
            raise InvalidOption(f"p ** alpha needs a finite alpha > 0; got {alpha!r}")
        if target.potentials:
            raise InvalidOption("raise the model before multiplying by potentials: p ** alpha * psi")
        return dataclasses.replace(target, alpha=target.alpha * alpha)

    def __mul__(self, psi: Potential) -> "Target":
        """Weight sequences by a potential: p · Ψ."""
        factors = psi.factors if isinstance(psi, Product) else (psi,)
        for factor in factors:
            if not all(callable(getattr(factor, verb, None)) for verb in VERBS):
                raise InvalidOption(
                    f"a target can be multiplied by potentials only; got {factor!r}. "
                    "Wrap a Python function of the text with smc.potential(fn)."
                )
        target = self.as_target()
        return dataclasses.replace(target, potentials=(*target.potentials, *factors))

    def at(self, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> "Target":
        """The model tempered and truncated at each token; *this* law is then the p of the target.

        Args:
            temperature: logits are divided by it; 0 is greedy decoding.
            top_k: keep the k likeliest tokens.
            top_p: then keep the smallest set of likeliest tokens with this probability.

        Raises:
            InvalidOption: for values that mean nothing, or when p has been raised to a power already.
        """
        check_truncation(temperature, top_k, top_p)
        target = self.as_target()
        if target.alpha != 1:
            raise InvalidOption("temper the model before raising it: p.at(temperature=…) ** alpha")
        return dataclasses.replace(target, temperature=temperature, top_k=top_k, top_p=top_p)


@dataclasses.dataclass(frozen=True)
class Target(Algebra):
    """π ∝ p^α · Ψ. Made by the algebra (``p ** 4 * psi``) rather than by hand."""

    model: Model
    alpha: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    potentials: tuple[Potential, ...] = ()

    def as_target(self) -> "Target":
        """Itself."""
        return self

    @property
    def psi(self) -> Product | None:
        """Ψ, the product of all potentials; None where Ψ = 1."""
        return Product.of(*self.potentials) if self.potentials else None

    @property
    def plain(self) -> bool:
        """Whether π is p itself (tempered or truncated, perhaps): α = 1 and Ψ = 1."""
        return self.alpha == 1 and not self.potentials

    def __str__(self) -> str:
        """The target as mathematics, for summaries and messages."""
        law = [f"temperature={self.temperature:g}"] if self.temperature != 1 else []
        law += [f"top_k={self.top_k}"] if self.top_k is not None else []
        law += [f"top_p={self.top_p:g}"] if self.top_p is not None else []
        base = self.model.name + (f".at({', '.join(law)})" if law else "")
        power = f" ** {self.alpha:g}" if self.alpha != 1 else ""
        return base + power + "".join(f" * {psi.name}" for psi in self.potentials)
