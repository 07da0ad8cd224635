"""Pages of prompts kept by content, for prompts that begin alike. Knows tokens and page numbers; no keys, no model.

A prompt is read in pieces that end at the same places in every prompt. The keys and values of a piece follow from the
tokens up to its end alone, so whoever begins with the same tokens may use them; where passes are batch invariant they
are the same bits. What nobody holds any more is kept until its pages are wanted, the least recently used piece first.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smcdecode.engine.pages import PagePool

__all__ = ["Prefixes", "piece_ends"]

FIRST, PIECE = 64, 128  # tokens: short common beginnings count, and long prompts are read in passes of many rows


@dataclass
class _Piece:
    """A piece of a prompt that lies in the stores of some models."""

    pages: Tensor  # (n,) int64
    end: int  # tokens of a prompt up to its end
    models: set[Hashable] = field(default_factory=set)


class Prefixes:
    """The prompts' pages of one pool.

    Args:
        pool: where pages come from, and go when nobody holds them.
        page_size: tokens a page.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()  # least recently used first
        self._reserved: Counter[bytes] = Counter()  # by how many prompts
        pool.reclaim = self._evict

    def open(self, tokens: Sequence[int], models: Sequence[Hashable]) -> tuple[Tensor, list[int]]:
        """Pages for a prompt that is read next by some models, in the order in which prompts are opened.

        Args:
            tokens: ids, at least one.
            models: who reads it.

        Returns:
            Its pages, in order, each held once more; and how many of its tokens each model has read already. At least
            one is left to read, whose law is wanted.

        Raises:
            OutOfPages: there are too few.
        """
        keys = list(self._keys(tokens))
        found = self._found(keys)
        held = torch.cat([piece.pages for piece in found]) if found else torch.empty(0, dtype=torch.int64)
        self.pool.hold(held)
        pages = torch.cat([held, self.pool.take(self.pages(len(tokens)) - len(held))])
        known = [next((a.end for a, b in _pairs(found) if model not in b.models), _end(found)) for model in models]
        for key, end in keys[len(found) :]:
            if key not in self._pieces:
                begin = _end(found) // self.page_size
                found.append(_Piece(pages[begin : end // self.page_size], end))
                self._pieces[key] = found[-1]
                self.pool.keep(found[-1].pages)
        for piece in found:
            piece.models.update(models)
        for key, _ in reversed(keys):  # so that what begins alike outlives how it went on
            self._pieces.move_to_end(key)
        return pages, known

    def pages(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page_size)

    def clear(self) -> None:
        """Forget everything, where a run fails: reservations count on what is held being found."""
        for piece in self._pieces.values():
            self.pool.forget(piece.pages)
        self._pieces.clear()

    # ---- reservations

    def cost(self, tokens: Sequence[int]) -> int:
        """Pages that a prompt adds to those that the reserved ones can hold: what they share counts once."""
        shared = [end for key, end in self._keys(tokens) if self._reserved[key]]
        return self.pages(len(tokens)) - max(shared, default=0) // self.page_size

    def reserve(self, tokens: Sequence[int]) -> int:
        """Count a prompt as one that may be opened; returns its :meth:`cost`."""
        cost = self.cost(tokens)
        self._reserved.update(key for key, _ in self._keys(tokens))
        return cost

    def settle(self, tokens: Sequence[int]) -> int:
        """Take a reservation back; returns what the prompt cost beyond the others."""
        self._reserved -= Counter(key for key, _ in self._keys(tokens))
        return self.cost(tokens)

    # ---- what is kept

    @property
    def idle(self) -> int:
        """Pages that are kept and held by nobody."""
        return int((self.pool.kept & (self.pool.counts == 0)).sum())

    def audit(self) -> None:
        """AssertionError unless exactly the pages of the pieces are kept, each page by one piece."""
        lists = [piece.pages for piece in self._pieces.values()]
        held = torch.cat(lists) if lists else torch.empty(0, dtype=torch.int64)
        kept = self.pool.kept.nonzero()[:, 0]
        assert torch.equal(held.sort().values, kept), f"{len(held)} pages are in pieces but {len(kept)} are kept"

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """A key for each piece that ends before the last token, of all tokens up to its end; and that end."""
        digest, begin = hashlib.blake2b(digest_size=16), 0
        for end in piece_ends(len(tokens) - 1, self.page_size):
            digest.update(array("q", tokens[begin:end]).tobytes())
            begin = end
            yield digest.digest(), end

    def _found(self, keys: Sequence[tuple[bytes, int]]) -> list[_Piece]:
        found: list[_Piece] = []
        for key, _ in keys:
            if key not in self._pieces:
                break
            found.append(self._pieces[key])
        return found

    def _evict(self, pages: int) -> None:
        """Forget pieces that nobody holds until so many pages are free of them."""
        for key, piece in list(self._pieces.items()):
            if pages <= 0:
                return
            if not self.pool.counts[piece.pages].any():
                self.pool.forget(piece.pages)
                del self._pieces[key]
                pages -= len(piece.pages)


def piece_ends(length: int, page_size: int) -> list[int]:
    """Where the whole pieces of ``length`` tokens end, the same for every prompt, at the end of pages."""
    ends = [FIRST, *range(PIECE, length + 1, PIECE)]
    return [end for end in dict.fromkeys(-(-end // page_size) * page_size for end in ends) if end <= length]


def _end(pieces: Sequence[_Piece]) -> int:
    return pieces[-1].end if pieces else 0


def _pairs(pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, _Piece]]:
    """Each piece behind the one before it, the first behind an empty one."""
    return zip([_Piece(torch.empty(0, dtype=torch.int64), 0), *pieces], pieces, strict=False)
