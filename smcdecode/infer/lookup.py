"""Blocks that need no model: what followed the same tokens before, or uniform tokens. Knows ids; no model, no page."""

from collections.abc import Sequence

__all__ = ["continuation"]

_LONGEST = 4  # tokens a match is looked for with


def continuation(tokens: Sequence[int], block: int) -> list[int]:
    """The tokens that followed the latest earlier occurrence of the text's last few tokens, the longest match first.

    Prompt lookup decoding (Saxena 2023). A pure function of the text, so as a proposal its law is one-hot.

    Args:
        tokens: the text, prompt included.
        block: how many tokens are wanted.

    Returns:
        At most ``block`` ids; none where the last token never occurred before.
    """
    text = list(tokens)
    for length in range(min(_LONGEST, len(text) - 1), 0, -1):
        last = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == last:
                return text[start + length : start + length + block]
    return []
