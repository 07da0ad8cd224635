"""Knows constraints that begin or end inside a text: after a delimiter, or between two."""

from smcdecode.potentials.delimited import Delimited
from smcdecode.potentials.potential import Potential

__all__ = ["After", "Between"]


class After(Delimited):
    """Free text up to a delimiter, then ψ of all that follows it, from the very next byte.

    ``Ψ(x) = Ψ_inner(what follows the first delimiter)``; 0 where the delimiter never comes.

    Args:
        delimiter: where the constraint begins, such as ``"</think>"``. A special token of that name counts.
        psi: a potential that reads text, such as ``smc.Grammar(…)``; potentials of token ids cannot begin inside a
            token.

    Raises:
        InvalidOption: the delimiter is empty, or ``psi`` is no potential or reads ids.

    Example:
        >>> from smcdecode.potentials.regex import Regex
        >>> After("</think>", Regex("yes|no"))
        After("after '</think>': yes|no")
    """

    def __init__(self, delimiter: str | bytes, psi: Potential) -> None:
        super().__init__(delimiter, None, psi, required=True, name=f"after {delimiter!r}")


class Between(Delimited):
    """Free text with regions between two delimiters, each of which ψ weighs.

    A region is what stands between an opening delimiter and the first closing one behind it; the delimiters
    themselves belong to the free text. ``Ψ(x)`` is the product of Ψ_inner over regions; 0 where one is not closed.

    Args:
        open: where a region begins. A special token of that name counts.
        close: where it ends; its first occurrence, so ψ never sees it.
        psi: a potential that reads text, such as ``smc.JsonSchema(…)``.
        required: a text without any region has Ψ = 0.

    Raises:
        InvalidOption: a delimiter is empty, or ``psi`` is no potential or reads ids.

    Example:
        >>> from smcdecode.potentials.regex import Regex
        >>> Between("<b>", "</b>", Regex("[0-9]+"))
        Between("between '<b>' and '</b>': [0-9]+")
    """

    def __init__(self, open: str | bytes, close: str | bytes, psi: Potential, *, required: bool = True) -> None:
        super().__init__(open, close, psi, required, name=f"between {open!r} and {close!r}")
