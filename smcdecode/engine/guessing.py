"""Where a draft's next-token laws come from: a model's passes, or a look back. Knows slots; no masks."""

from typing import Protocol

from torch import Tensor

from smcdecode.declare.proposal import Draft, PromptLookup
from smcdecode.engine.company import Company
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.infer import lookup

__all__ = ["Guesser", "LookBack", "ModelPass", "guesser_of"]


class Guesser(Protocol):
    """A source of next-token laws.

    Attributes:
        share: a draft ends where the masks do not leave more than this share of its law.
    """

    share: float

    def logits(self, company: Company, drafted: Tensor) -> tuple[Tensor | None, Tensor]:
        """Laws of the token after the text of each slot of a company and the tokens ``drafted`` (n, k) behind it.

        Returns:
            which of the slots it can guess for, (m,) int64, None for all; and their logits (m, V) float32.
        """


def guesser_of(spec: Draft, slots: Slots, passes: Passes) -> Guesser:
    """The guesser that a declared draft asks for."""
    if isinstance(spec.model, PromptLookup):
        return LookBack(spec.model, slots, passes.p.vocabulary.size)
    return ModelPass(slots, passes)


class ModelPass:
    """A draft model: one pass a token."""

    share = 0.0

    def __init__(self, slots: Slots, passes: Passes) -> None:
        self.slots, self.passes = slots, passes

    def logits(self, company: Company, drafted: Tensor) -> tuple[None, Tensor]:
        """One pass: over the unread tokens of each slot where nothing is drafted, else over the token just drafted."""
        if drafted.shape[1]:
            return None, self.passes.draft(*company.behind(drafted))
        return None, self.passes.draft(*company.unread(self.slots.tokens, self.slots.lag[company.slots]))


class LookBack:
    """Prompt lookup: the tokens that followed the last ``ngram`` ones, wherever those stood before."""

    share = 0.5  # where the masks forbid most of what was found, the rest is no guess

    def __init__(self, spec: PromptLookup, slots: Slots, size: int) -> None:
        self.spec, self.slots, self.size = spec, slots, size

    def logits(self, company: Company, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """Log q of the slots whose last tokens stood in their text before."""
        text = self.slots.contexts(company.slots, drafted)
        return lookup.law(text, self.spec.ngram, self.spec.floor, self.size)
