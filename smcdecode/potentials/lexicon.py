"""Knows how llguidance sees a vocabulary: its tokenizer, compiled grammars and packed masks; no text and no weight.

Packed masks are rows of int32 words, bit ``i mod 32`` of word ``i div 32`` for token i, as llguidance writes them.
"""

import functools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from smcdecode.errors import PotentialError, UnsupportedGrammar
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["BYTES", "Lexicon", "Packed", "lexicon_of", "per_vocabulary", "why", "with_bytes"]

Packed = NDArray[np.int32]

_PATIENCE = 2e-3  # seconds after which the rows that are left are shared among threads
_MOST_GRAMMARS = 64  # compiled grammars kept a vocabulary, the least recently used one goes first
BYTES = Vocabulary(257, frozenset({256}), (*(bytes([b]) for b in range(256)), b""), frozenset({256}), "bytes")


class Greedy:
    """The tokenizer that llguidance asks for: longest token first. Masks do not depend on it."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), list(special), eos
        hidden = set(special)
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in hidden}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes | str) -> list[int]:
        """Some ids that spell ``data``; bytes that no token spells are left out."""
        rest = data.encode() if isinstance(data, str) else data
        ids = []
        while rest:
            n = next((n for n in range(self._longest, 0, -1) if rest[:n] in self._ids), 0)
            ids += [self._ids[rest[:n]]] if n else []
            rest = rest[n or 1 :]
        return ids


class Lexicon:
    """A vocabulary as llguidance sees it, and the grammars compiled for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.tokens is None:
            raise PotentialError(
                f"{vocabulary.name} has no tokenizer, so a grammar cannot read its tokens: give one, "
                "smc.load((model, tokenizer))"
            )
        hidden = sorted(vocabulary.special | vocabulary.eos)
        # llguidance wants a token to end with; a vocabulary without one gets it behind its last
        end = min(vocabulary.eos, default=vocabulary.size)
        tokens = (*vocabulary.tokens, *([b"<end>"] if end == vocabulary.size else []))
        wrapper = TokenizerWrapper(Greedy(tokens, sorted({*hidden, end}), end))
        self.tokenizer = LLTokenizer(wrapper, eos_token=sorted(vocabulary.eos) or [end])
        self.tokens, self.words = vocabulary.tokens, -(-vocabulary.size // 32)
        self._stride = 4 * -(-len(tokens) // 32)  # bytes a row that llguidance writes
        silent = {i for i, token in enumerate(tokens) if not token}
        self.ends, self.nothing = self._bits(set(vocabulary.eos)), self._bits(set())
        self.unreadable = frozenset(hidden) | silent
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def _bits(self, ids: set[int]) -> Packed:
        flags = np.zeros(self.words * 32, dtype=np.bool_)
        flags[sorted(ids)] = True
        return np.packbits(flags, bitorder="little").view(np.int32)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of a grammar in llguidance's dialect, at the beginning of a text; compiled once.

        Raises:
            UnsupportedGrammar: llguidance does not take the grammar.
        """
        with self._lock:
            if grammar not in self._grammars:
                self._grammars[grammar] = self._compile(grammar)
            self._grammars.move_to_end(grammar)
            if len(self._grammars) > _MOST_GRAMMARS:
                self._grammars.popitem(last=False)
            return self._grammars[grammar].deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UnsupportedGrammar(why(matcher))
        return matcher

    def fill(self, matchers: Sequence[LLMatcher]) -> Packed:
        """Tokens that may follow, (m, words) int32, one row a matcher. EOS is not among them.

        One after the other while that is quick, then in parallel: to hand a row to a thread costs more than most rows.
        """
        packed = np.zeros((len(matchers), self._stride // 4), dtype=np.int32)
        address, start = packed.ctypes.data, time.perf_counter()
        for i, matcher in enumerate(matchers):
            if i % 4 == 3 and time.perf_counter() - start > _PATIENCE:
                work = [(other, j) for j, other in enumerate(matchers[i:], i)]
                _executor().unsafe_compute_mask_ptr(work, address, self._stride, len(matchers))
                break
            matcher.unsafe_compute_mask_ptr(address + i * self._stride, self._stride)
        return packed[:, : self.words]


def why(matcher: LLMatcher) -> str:
    """The reason llguidance gives for giving up, without the dump of its state that follows it."""
    return matcher.get_error().split("\n<state>")[0].strip()


@functools.cache
def _executor() -> LLExecutor:
    """The threads that compute masks; started when first needed."""
    return LLExecutor()


Made = TypeVar("Made")


def per_vocabulary(make: Callable[[Vocabulary], Made]) -> Callable[[Vocabulary], Made]:
    """Remember what is made of a vocabulary as long as that vocabulary lives. What is made must not hold on to it."""
    known: dict[int, tuple[weakref.ref[Vocabulary], Made]] = {}

    @functools.wraps(make)
    def remembered(vocabulary: Vocabulary) -> Made:
        key = id(vocabulary)  # a hash of the vocabulary itself would read all its tokens
        if key not in known or known[key][0]() is not vocabulary:
            known[key] = weakref.ref(vocabulary, lambda _: known.pop(key, None)), make(vocabulary)
        return known[key][1]

    return remembered


@per_vocabulary
def lexicon_of(vocabulary: Vocabulary) -> Lexicon:
    """The lexicon of a vocabulary, made once.

    Raises:
        PotentialError: the vocabulary knows no bytes.
    """
    return Lexicon(vocabulary)


@per_vocabulary
def with_bytes(vocabulary: Vocabulary) -> Vocabulary:
    """A vocabulary that can also spell: behind its own ids, id ``size + b`` is the single byte b.

    Raises:
        PotentialError: the vocabulary knows no bytes.
    """
    single = tuple(bytes([b]) for b in range(256))
    tokens = (*(vocabulary.tokens or vocabulary.shown), *single)
    return Vocabulary(vocabulary.size + 256, vocabulary.eos, tokens, vocabulary.special, vocabulary.name)
