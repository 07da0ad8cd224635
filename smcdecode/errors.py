"""Every error this library raises on purpose. Each message says what is wrong and what to do instead.

Outcomes of a correct run are values, not errors: a run in which all particles died is a ``Posterior`` with
``log_z = -inf``; ``NoSurvivors`` is raised only where a text is asked of it.
"""

__all__ = [
    "DraftProcessError",
    "InvalidOption",
    "InvalidWeight",
    "NoSurvivors",
    "OutOfPages",
    "OutputError",
    "PotentialError",
    "PromptError",
    "RankError",
    "SMCDecodeError",
    "SupportError",
    "UnsupportedGrammar",
    "UnsupportedModel",
    "UnsupportedTarget",
    "VocabularyMismatch",
]


class SMCDecodeError(Exception):
    """Base of all errors of smcdecode."""


class InvalidOption(SMCDecodeError, ValueError):
    """An option has a value that means nothing; the message names the values that do."""


class PromptError(SMCDecodeError, ValueError):
    """A prompt cannot be decoded: it is empty, too long for the model, or of the wrong kind."""


class UnsupportedGrammar(SMCDecodeError):
    """A grammar, pattern or schema cannot be enforced exactly; the message names the part and what to write instead."""


class UnsupportedModel(SMCDecodeError):
    """The engine cannot run this model exactly; the message names the part of it that stands in the way."""


class UnsupportedTarget(SMCDecodeError):
    """This decoder cannot serve this target; the message names a decoder that can."""


class SupportError(SMCDecodeError):
    """The proposal gives probability zero to tokens that the target allows, so weights would be wrong."""


class DraftProcessError(SMCDecodeError):
    """The process that was to hold a draft could not begin, or is gone; the message says why."""


class RankError(SMCDecodeError):
    """One of the processes that hold a model together is gone, silent, or not where the others are."""


class VocabularyMismatch(SMCDecodeError):
    """Target and draft disagree on what a token id means."""


class InvalidWeight(SMCDecodeError):
    """A model or a potential produced NaN or +inf; the message names the culprit and the place."""


class PotentialError(SMCDecodeError):
    """A user's potential raised, returned something of the wrong kind, or broke its contract."""


class OutOfPages(SMCDecodeError):
    """A prompt can never fit the memory budget; the message gives the numbers and the options that change them."""


class OutputError(SMCDecodeError):
    """Answers cannot be written; the message says why, and how to go on."""


class NoSurvivors(SMCDecodeError):
    """A text was asked of a posterior in which every particle has weight zero."""
