"""Knows how a text moves through an llguidance grammar, state by state; no Lark, no regex and no schema.

A state is a node: what has been read so far. Particles that have read the same share a node, so a mask is computed
once for each distinct text. A matcher wanders down with the first reader; a reader that diverges gets a copy of it,
rolled back. EOS never reaches the matcher: it is allowed where the matcher accepts.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from smcdecode.errors import UnsupportedGrammar
from smcdecode.potentials.lexicon import BYTES, Lexicon, Packed, lexicon_of, why
from smcdecode.potentials.potential import BasePotential
from smcdecode.potentials.text import Prompt, shorten
from smcdecode.potentials.vocabulary import Vocabulary

__all__ = ["Constraint", "Node"]

Oracle = Callable[[str], str | None]  # of a finished text: None where it is in the language, else why not

_OPTIONS = '%llguidance {"no_forcing": true, "allow_initial_skip": true}\n'


class Node:
    """A text so far, under one grammar. It never changes in what it says, only in what it remembers."""

    __slots__ = ("__weakref__", "children", "final", "ids", "lent", "lexicon", "matcher", "reason", "row")

    def __init__(self, lexicon: Lexicon, ids: tuple[int, ...], matcher: LLMatcher | None, reason: str | None) -> None:
        self.lexicon, self.ids = lexicon, ids
        self.matcher = matcher  # stands at this text; None once a child took it, or where the text is impossible
        self.lent: Node | None = None  # the child that took the matcher
        self.reason = reason  # why no text of the language begins so
        self.children: dict[int, Node] = {}
        self.row: Packed | None = None  # (words,) int32, EOS bits included
        self.final: tuple[str | None] | None = None  # why this is no finished text of the language; (None,) if it is

    def __repr__(self) -> str:
        return f"the grammar's state after {len(self.ids)} tokens"

    def at(self, grammar: str) -> LLMatcher:
        """The matcher that stands at this text, fetched back or copied where it went on with a child."""
        if self.matcher is None:
            self.matcher = self._recalled() or self._replayed(grammar)
            self.lent = None
        return self.matcher

    def _recalled(self) -> LLMatcher | None:
        """A copy of the matcher that went on, rolled back to this text."""
        node, steps = self, 0
        while node.matcher is None and node.lent is not None:
            node, steps = node.lent, steps + 1
        if node.matcher is None or node.matcher.is_error():
            return None
        copy = node.matcher.deep_copy()
        return copy if copy.rollback(steps) and not copy.is_error() else None

    def _replayed(self, grammar: str) -> LLMatcher:
        matcher = self.lexicon.matcher(grammar)
        matcher.try_consume_tokens(list(self.ids))
        return matcher

    def child(self, token: int, grammar: str) -> "Node":
        """The text with one more token."""
        known = self.children.get(token)
        if known is None:
            known = self.children[token] = self._grown(token, grammar)
        return known

    def _grown(self, token: int, grammar: str) -> "Node":
        ids = (*self.ids, token)
        if self.reason is not None:
            return Node(self.lexicon, ids, None, self.reason)
        if token in self.lexicon.unreadable:
            return Node(self.lexicon, ids, None, f"token {token} has no text")
        matcher = self.at(grammar)
        if not matcher.try_consume_tokens([token]):
            reason = report(matcher) if matcher.is_error() else "the grammar does not allow what was written"
            self.matcher = None if matcher.is_error() else matcher
            return Node(self.lexicon, ids, None, reason)
        node = Node(self.lexicon, ids, matcher, None)
        self.matcher, self.lent = None, node
        return node


def report(matcher: LLMatcher) -> str:
    """Why llguidance gave up on a text; the user is told, for the text may have been a good one."""
    reason = f"llguidance gave up: {why(matcher)}"
    warnings.warn(f"{reason}; the text gets weight zero, though it may belong to the language", stacklevel=2)
    return reason


class Constraint(BasePotential):
    """``Ψ(x) = 1[x is accepted by the matcher] · 1[the oracle accepts x]``; ``ψ_t = 1`` while the matcher lives.

    Args:
        grammar: in llguidance's dialect, without options.
        oracle: has the last word on finished texts: None, or why the text does not belong.
        name: in reports and messages.

    Attributes:
        source: the grammar as given.

    Raises:
        UnsupportedGrammar: llguidance does not take the grammar, or it has no text at all.
    """

    def __init__(self, grammar: str, oracle: Oracle, name: str) -> None:
        self.source, self.oracle, self.name = grammar, oracle, name
        self.grammar = _OPTIONS + grammar
        self._roots: weakref.WeakValueDictionary[int, Node] = weakref.WeakValueDictionary()
        self._check()

    def _check(self) -> None:
        """Compile the grammar for single bytes, so that errors come at declaration time."""
        lexicon = lexicon_of(BYTES)
        try:
            matcher = lexicon.matcher(self.grammar)
        except UnsupportedGrammar as error:
            raise UnsupportedGrammar(f"{self.name} cannot be turned into token masks: {error}") from error
        found = lexicon.fill([matcher]).any() or matcher.is_accepting()
        if matcher.is_error() and "NoExtension" not in matcher.get_error():
            raise UnsupportedGrammar(f"{self.name} is too large for token masks: {why(matcher)}")
        if matcher.is_error() or not found:
            raise UnsupportedGrammar(f"{self.name}: no text satisfies it, so every particle would die")

    def start(self, vocabulary: Vocabulary, prompt: Prompt) -> Node:  # noqa: ARG002  part of the protocol
        """The state of the empty text, shared by all that have read nothing yet."""
        lexicon = lexicon_of(vocabulary)
        root = self._roots.get(id(lexicon))
        if root is None or root.lexicon is not lexicon:
            root = self._roots[id(lexicon)] = Node(lexicon, (), lexicon.matcher(self.grammar), None)
        return root

    def advance(self, state: Node, tokens: Sequence[int]) -> Node:
        """The state after ``tokens``."""
        for token in tokens:
            state = state.child(int(token), self.grammar)
        return state

    def fork(self, state: Node) -> Node:
        """The same node: matchers are copied only when readers diverge."""
        return state

    def log_psi(self, states: Sequence[Node], complete: Sequence[bool]) -> list[float]:
        """0 or −inf."""
        whys = [self._final(s) if done else s.reason for s, done in zip(states, complete, strict=True)]
        return [0.0 if reason is None else -math.inf for reason in whys]

    def mask(self, states: Sequence[Node]) -> torch.Tensor:
        """The tokens that may follow, and EOS where a text may end: packed (n, ⌈V/32⌉) int32; not to be written to."""
        rows = self._look([node for node in dict.fromkeys(states) if node.row is None])
        return torch.from_numpy(rows if len(rows) == len(states) else np.stack([node.row for node in states]))  # type: ignore[misc]

    def why(self, state: Node, complete: bool) -> str | None:
        """Why ψ is zero there, for reports; None where it is not."""
        return self._final(state) if complete else state.reason

    def _look(self, nodes: Sequence[Node]) -> Packed:
        """Compute the rows of some distinct nodes: (m, words) int32, of the m whose texts are possible."""
        alive = [node for node in nodes if node.reason is None]
        for node in nodes if len(alive) < len(nodes) else ():
            node.row = node.lexicon.nothing
        if not alive:
            return np.zeros((0, 0), dtype=np.int32)
        lexicon = alive[0].lexicon
        matchers = [node.at(self.grammar) for node in alive]
        rows = lexicon.fill(matchers)
        for node, matcher, row in zip(alive, matchers, rows, strict=True):
            node.row = row
            if matcher.is_error():
                node.reason, node.matcher = report(matcher), None
                row[:] = 0
            elif matcher.is_accepting():
                row |= lexicon.ends
        return rows

    def _final(self, node: Node) -> str | None:
        """Why the text of a node is not in the language; None where it is."""
        if node.final is None:
            node.final = (self._judged(node),)
        return node.final[0]

    def _judged(self, node: Node) -> str | None:
        if node.reason is not None:
            return node.reason
        if not node.at(self.grammar).is_accepting():
            return "the text is unfinished"
        return self.oracle(self.text(node))

    def text(self, node: Node) -> str:
        """What a node has read."""
        return b"".join([node.lexicon.tokens[i] for i in node.ids]).decode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shorten(self.name)!r})"
