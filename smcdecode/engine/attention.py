"""What a pass attends to, and how attention is asked for. Knows page numbers and shapes; no kernel, no particle."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from smcdecode.engine.cache import KVStore

__all__ = ["Attention", "Batch", "Feed", "Frame", "Padded", "Rule", "View"]


@dataclass(frozen=True)
class Batch:
    """What one pass attends to, in page numbers: B rows, T = Σ q_len packed tokens, rows ordered by group.

    Attributes:
        q_len: (B,) int64, new tokens of each row; they are the last of its suffix.
        own_pages: (B, M) int64, the pages of each row's suffix; page 0 is padding.
        own_len: (B,) int64, tokens in the suffix, new ones included.
        group: (B,) int64, nondecreasing; the group whose prompt precedes the suffix.
        prefix_pages: per group, the (n,) int64 pages of the shared prompt.
        prefix_len: per group, tokens in the shared prompt; 0 for none.
        kin: (B,) int64, rows of one number may be computed together, so that how many they are may decide how their
            results are rounded; None for those of a group.
    """

    q_len: Tensor
    own_pages: Tensor
    own_len: Tensor
    group: Tensor
    prefix_pages: tuple[Tensor, ...]
    prefix_len: tuple[int, ...]
    kin: Tensor | None = None

    @property
    def kin_of_tokens(self) -> Tensor:
        """That of each packed token: (T,) int64."""
        return (self.group if self.kin is None else self.kin).repeat_interleave(self.q_len)

    def beside(self, other: "Batch") -> "Batch":
        """One pass over the rows of this batch and, behind them, those of another; both say who is kin."""
        assert self.kin is not None and other.kin is not None
        both, most = (self, other), max(self.own_pages.shape[1], other.own_pages.shape[1])
        return Batch(
            q_len=torch.cat([x.q_len for x in both]),
            own_pages=torch.cat([torch.nn.functional.pad(x.own_pages, (0, most - x.own_pages.shape[1])) for x in both]),
            own_len=torch.cat([x.own_len for x in both]),
            group=torch.cat([self.group, other.group + len(self.prefix_len)]),
            prefix_pages=self.prefix_pages + other.prefix_pages,
            prefix_len=self.prefix_len + other.prefix_len,
            kin=torch.cat([self.kin, other.kin]),
        )


class Feed(NamedTuple):
    """What a pass reads: packed tokens (T,), their positions (T,), what they attend to, and the rows wanted of it."""

    tokens: Tensor
    positions: Tensor
    batch: Batch
    rows: Tensor

    def before(self, other: "Feed") -> "Feed":
        """One pass that reads this and, behind it, what another would."""
        tokens, positions = torch.cat([self.tokens, other.tokens]), torch.cat([self.positions, other.positions])
        rows = torch.cat([self.rows, len(self.tokens) + other.rows])
        return Feed(tokens, positions, self.batch.beside(other.batch), rows)


@dataclass(frozen=True)
class Frame:
    """S rows of Q packed tokens each: the last Q of ``length`` tokens, over pages that hold a row's whole text.

    Attributes:
        pages: (S, M) int32, the pages of each row's text in order; page 0 behind them.
        length: (S,) int64, at least Q.
        live: (S, Q) bool: tokens whose keys and values are kept. What the others see and give means nothing; none of
            them stands between live ones of its row.
        page_size: tokens a page.
    """

    pages: Tensor
    length: Tensor
    live: Tensor
    page_size: int

    @property
    def positions(self) -> Tensor:
        """The place of each token in its row's text: (S, Q) int64."""
        width = self.live.shape[1]
        return self.length[:, None] - width + torch.arange(width, device=self.length.device)


class View(Protocol):
    """One pass's way into keys and values. Planned once, then called once a layer.

    Attributes:
        kin: (T,) int64, see :class:`Batch`, of each packed token.
    """

    kin: Tensor

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the new keys and values of a layer, attend, and return (T, heads, value_dim).

        Args:
            layer: index of the attention layer.
            query: (T, heads, key_dim), packed as the batch's rows.
            key: (T, kv_heads, key_dim).
            value: (T, kv_heads, value_dim).
            scaling: factor of the scores.
            window: a query at position p sees positions above p − window only; None for all.
            softcap: scores s become softcap · tanh(s / softcap); None for no cap.
        """


class Padded:
    """A view of a pass that carries ``more`` rows behind its own: they store nothing, see nothing and mean nothing."""

    def __init__(self, view: View, more: int) -> None:
        self.view, self.more, self.kin = view, more, view.kin

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **rule: Any) -> Tensor:
        """See :class:`View`."""
        out = self.view.attend(layer, *(x[: -self.more] for x in (query, key, value)), **rule)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, self.more))


class Attention(Protocol):
    """A way to attend.

    Attributes:
        name: what ``load(attention=…)`` calls it.
    """

    name: str

    def plan(self, batch: Batch, store: KVStore) -> View:
        """The view of a batch on a store; good for one pass."""

    def fixed(self, frame: Frame, store: KVStore) -> View:
        """The view of a pass of fixed shape on a store, planned without waiting for the device."""


class Rule(NamedTuple):
    """How one layer scores; see :meth:`View.attend`."""

    scaling: float
    window: int | None
    softcap: float | None
