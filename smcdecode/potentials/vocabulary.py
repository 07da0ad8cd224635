"""Knows what each token id means in bytes and which ids end a text; knows no model, no particle and no weight.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) and SentencePiece pieces (``▁`` for a space, ``<0x0A>`` for a byte) are
read exactly, byte by byte, so that a character split over several tokens is put together again. Any other tokenizer
is read through its own ``decode``.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smcdecode.errors import PotentialError, UnsupportedModel, VocabularyMismatch

__all__ = ["Vocabulary", "check_same"]

SPACE = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Token ids and their bytes.

    Attributes:
        size: ids are ``0 … size − 1``; logit rows of the model are cut to it.
        eos: ids that end a continuation. They are never part of its text.
        tokens: the bytes of each id, in order; a special token's are those of its name (``b"<|im_end|>"``). None for
            a model without a tokenizer.
        special: ids that are not shown in a text, EOS ids among them.
        name: whose vocabulary it is, for messages.
    """

    size: int
    eos: frozenset[int]
    tokens: tuple[bytes, ...] | None
    special: frozenset[int]
    name: str

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.tokens) != self.size:
            raise ValueError(f"{self.name}: {len(self.tokens)} tokens for a vocabulary of {self.size}")

    def __repr__(self) -> str:
        kind = "ids only" if self.tokens is None else "with bytes"
        return f"Vocabulary({self.name!r}, size={self.size}, eos={sorted(self.eos)}, {kind})"

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, eos: Iterable[int], logits_size: int, *, name: str | None = None
    ) -> "Vocabulary":
        """The vocabulary of a Hugging Face tokenizer under a model with ``logits_size`` logits.

        Its size is that of the tokenizer with its added tokens, or ``logits_size`` where that is smaller: padded
        logits have no id. Ids that the tokenizer leaves out count as special tokens without a name. ``name`` is whose
        vocabulary it is, for messages; by default the tokenizer's.

        Raises:
            UnsupportedModel: the tokenizer does not tell what its tokens mean.
        """
        added = tokenizer.added_tokens_decoder
        names = {i: piece for piece, i in tokenizer.get_vocab().items()} | {i: t.content for i, t in added.items()}
        size = min(max(names, default=-1) + 1, logits_size)
        ends = frozenset(i for i in eos if 0 <= i < size)
        hidden = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        hidden |= set(range(size)).difference(names)
        read = _reader(tokenizer, names, frozenset(added))
        tokens = tuple(names.get(i, "").encode() if i in hidden else read(i) for i in range(size))
        special = frozenset(i for i in hidden if i < size) | ends
        name = name or str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        return cls(size, ends, tokens, special, name)

    @cached_property
    def shown(self) -> tuple[bytes, ...]:
        """The bytes that each id adds to a text; none for a special token.

        Raises:
            PotentialError: the model has no tokenizer.
        """
        if self.tokens is None:
            raise PotentialError(
                f"{self.name} has no tokenizer, so its continuations have no text: give one, "
                'smc.load((model, tokenizer)), or read ids, smc.potential(fn, on="tokens")'
            )
        return tuple(b"" if i in self.special else token for i, token in enumerate(self.tokens))

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids spell; special tokens spell nothing."""
        shown = self.shown
        return b"".join([shown[i] for i in ids])

    def text(self, ids: Iterable[int], final: bool = True) -> str:
        """The text that the ids spell, as far as it is known.

        Bytes that are no UTF-8 become U+FFFD. Of a character that is unfinished at the end nothing is shown, unless
        the text is ``final``: then it becomes U+FFFD too.
        """
        return codecs.utf_8_decode(self.bytes_of(ids), "replace", final)[0]

    def cut(self, size: int) -> "Vocabulary":
        """The first ``size`` ids of this vocabulary; itself where it has no more."""
        if size >= self.size:
            return self
        tokens = None if self.tokens is None else self.tokens[:size]
        eos, special = (frozenset(i for i in ids if i < size) for ids in (self.eos, self.special))
        return Vocabulary(size, eos, tokens, special, self.name)

    def differences(self, other: "Vocabulary", limit: int = 5) -> list[str]:
        """The first ``limit`` ids that mean different things here and in ``other``, a readable line each.

        Only ids that both have, and only where both know bytes, can differ.
        """
        if self.tokens is None or other.tokens is None:
            return []
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        found = (f"id {i}: {a!r} in {self.name}, {b!r} in {other.name}" for i, (a, b) in pairs if a != b)
        return [line for line, _ in zip(found, range(limit), strict=False)]


def check_same(target: Vocabulary, draft: Vocabulary) -> Vocabulary:
    """Check that each id means the same to target and draft. Which ids end a text is the target's to say.

    A draft may have more ids than the target. Where it has fewer, those it lacks must be special tokens (a multimodal
    target's image token, say): it never proposes them.

    Returns:
        What both have in common: the target's vocabulary, or its first ids.

    Raises:
        VocabularyMismatch: they disagree; the message lists the first differences.
    """
    lines = target.differences(draft)
    lacking = range(draft.size, target.size)
    known = target.tokens is not None and draft.tokens is not None
    if (not known and lacking) or not target.special.issuperset(lacking):
        lines.append(f"ids {draft.size} to {target.size - 1} of {target.name} are unknown to {draft.name}")
    if lines:
        raise VocabularyMismatch(
            "target and draft must agree on what each token id means; choose a draft of the target's family "
            "(and load both with their tokenizers). First differences:\n  " + "\n  ".join(lines)
        )
    return target.cut(draft.size)


Reader = Callable[[int], bytes]


def _reader(tokenizer: Any, names: Mapping[int, str], added: frozenset[int]) -> Reader:
    """How this tokenizer's tokens are turned into bytes. Added tokens are plain text to a byte-level tokenizer."""
    kind = _kind(tokenizer, [name for i, name in names.items() if i not in added])
    if kind == "byte level":
        return lambda i: names[i].encode() if i in added else _from_alphabet(names[i])
    if kind == "sentencepiece":
        return lambda i: _from_piece(names[i])
    return _by_decoding(tokenizer, names)


def _kind(tokenizer: Any, pieces: Sequence[str]) -> str:
    """What the tokenizer says of its decoder; where it says nothing, what the characters of its pieces say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        decoder = "" if backend.decoder is None else json.dumps(json.loads(backend.decoder.__getstate__()))
        if '"ByteLevel"' in decoder:
            return "byte level"
        return "sentencepiece" if '"ByteFallback"' in decoder or json.dumps(SPACE) in decoder else "other"
    if any(SPACE in piece for piece in pieces):
        return "sentencepiece"
    return "byte level" if all(ord(c) in ALPHABET for piece in pieces for c in piece) else "other"


def _alphabet() -> dict[int, int]:
    """GPT-2's alphabet: code point → byte. Printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {b: b for b in printable} | {256 + n: b for n, b in enumerate(others)}


ALPHABET = _alphabet()


def _from_alphabet(piece: str) -> bytes:
    """The bytes of a byte-level piece; one with a character outside the alphabet is plain text."""
    if any(ord(c) not in ALPHABET for c in piece):
        return piece.encode()
    return piece.translate(ALPHABET).encode("latin-1")


def _from_piece(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: ``▁`` is a space, ``<0x0A>`` a byte."""
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


def _by_decoding(tokenizer: Any, names: Mapping[int, str]) -> Reader:
    """What the tokenizer's own ``decode`` adds when the token follows another one."""

    def decode(*ids: int) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    special = set(tokenizer.all_special_ids)
    anchor = next(([i] for i in sorted(names) if i not in special and decode(i)), [])
    before = decode(*anchor)

    def read(i: int) -> bytes:
        after = decode(*anchor, i)
        if not after.startswith(before) or "\N{REPLACEMENT CHARACTER}" in after:
            raise UnsupportedModel(
                f"the tokenizer {type(tokenizer).__name__} does not tell which bytes token {i} ({names[i]!r}) stands "
                "for; use its fast version (tokenizer.json), or load the model without a tokenizer and give token ids"
            )
        return after[len(before) :].encode()

    return read
