"""What a pass attends to, and how attention is asked for. Knows page numbers and shapes; no kernel, no particle."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from smcdecode.engine.cache import KVStore

__all__ = ["Attention", "Batch", "Frame", "Padded", "Rule", "View"]


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
    """

    q_len: Tensor
    own_pages: Tensor
    own_len: Tensor
    group: Tensor
    prefix_pages: tuple[Tensor, ...]
    prefix_len: tuple[int, ...]


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
        groups: (T,) int64, the group of each packed token.
    """

    groups: Tensor

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
        self.view, self.more, self.groups = view, more, view.groups

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
