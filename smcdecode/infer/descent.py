"""Down the tree of N drafted chains, one token a depth: knows laws and a coupling, no model and no page.

At each depth the chains still alive share their prefix, and the coupling turns their next tokens into one token of
law p. Chains whose token it is stay alive, however it was chosen; where none does, the path ends with that token, and a
path that reaches the end of its chains is given one bonus token from p. What a chain drafted next is independent of the
choice given the token, so positions compose and the path has exactly the target's law. Independent chains that survive
together are i.i.d. still; chains drafted distinct survive alone, where every coupling is ordinary rejection, n = 1.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from smcdecode.infer.coupling.drafting import at_quantiles
from smcdecode.infer.coupling.protocol import Coupling

__all__ = ["Path", "TreeLaws", "descend"]

Final = Callable[[Tensor, Tensor], Tensor]


class TreeLaws(Protocol):
    """The laws of the token behind ``depth`` tokens of a chain, as asked for: only paths still running ask."""

    def target(self, rows: Tensor, chain: Tensor, depth: int) -> Tensor:
        """The law p there: rows (m,) and one of their chains (m,) int64 each -> (m, V) float64, rows summing to 1."""

    def draft(self, rows: Tensor, chain: Tensor, depth: int) -> Tensor:
        """The law q there, which the chains' tokens were made of: (m, V) float64, rows summing to 1."""


@dataclasses.dataclass(frozen=True)
class Path:
    """The tokens emitted: ``accepted`` drafted ones, the first of ``chain``, and one more unless the text ended."""

    tokens: Tensor  # (B, K+1) int64, −1 past the end
    length: Tensor  # (B,) int64
    accepted: Tensor  # (B,) int64, ≤ length ≤ accepted + 1
    chain: Tensor  # (B,) int64, a chain that begins with the accepted tokens


def descend(
    coupling: Coupling, laws: TreeLaws, drafts: Tensor, counts: Tensor, u: Tensor, final: Final | None = None
) -> Path:
    """Emit one path of each row's chains.

    Args:
        coupling: chains that share a prefix must be drafted by its ``drafting``.
        laws: p and q at every position.
        drafts: (B, N, K) int64, chains of drafted tokens.
        counts: (B, N) int64 ≤ K, how many tokens each chain has; chains that share a prefix end together behind it.
        u: (B, K+1, 2) float64 uniforms in (0, 1) that had no part in drafting.
        final: from rows (m,) and the tokens emitted on each so far, (m, depth + 1), to whether the last of them ends
            the text, (m,) bool; the path ends there, and what a chain drafted behind it is not read.
    """
    state = _State.start(drafts)
    for depth in range(drafts.shape[2] + 1):
        running = state.running.nonzero()[:, 0]
        if not len(running):
            break
        whole = counts[running, state.chain[running]] == depth
        state.finish(running[whole], laws, depth, u)
        state.advance(running[~whole], coupling, laws, depth, u, final)
    return Path(state.tokens, state.length, state.accepted, state.chain)


@dataclasses.dataclass
class _State:
    """Paths on their way down."""

    drafts: Tensor  # (B, N, K)
    alive: Tensor  # (B, N) bool
    running: Tensor  # (B,) bool
    tokens: Tensor  # (B, K+1)
    length: Tensor  # (B,)
    accepted: Tensor  # (B,)
    chain: Tensor  # (B,)

    @classmethod
    def start(cls, drafts: Tensor) -> "_State":
        B, N, K = drafts.shape
        zeros = torch.zeros(B, dtype=torch.int64, device=drafts.device)
        alive = torch.ones(B, N, dtype=torch.bool, device=drafts.device)
        tokens = drafts.new_full((B, K + 1), -1)
        return cls(drafts, alive, alive[:, 0].clone(), tokens, zeros, zeros.clone(), zeros.clone())

    def finish(self, rows: Tensor, laws: TreeLaws, depth: int, u: Tensor) -> None:
        """Give paths at the end of their chains the bonus token."""
        if len(rows):
            p = laws.target(rows, self.chain[rows], depth)
            self._emit(rows, at_quantiles(p, u[rows, depth, 1:])[:, 0])
            self.running[rows] = False

    def advance(
        self, rows: Tensor, coupling: Coupling, laws: TreeLaws, depth: int, u: Tensor, final: Final | None
    ) -> None:
        """One token further, chosen among the chains alive."""
        if not len(rows):
            return
        p, q = (law(rows, self.chain[rows], depth) for law in (laws.target, laws.draft))
        alive = self.alive[rows]
        out = coupling.prepare(p, q, alive.sum(-1)).resolve(self.drafts[rows, :, depth], alive, u[rows, depth])
        goes_on = out.branch >= 0
        self._emit(rows, out.token)
        self.alive[rows] = out.survivors
        self.accepted[rows] += goes_on
        self.chain[rows] = torch.where(goes_on, out.branch, self.chain[rows])
        self.running[rows] = goes_on if final is None else goes_on & ~final(rows, self.tokens[rows, : depth + 1])

    def _emit(self, rows: Tensor, token: Tensor) -> None:
        self.tokens[rows, self.length[rows]] = token
        self.length[rows] += 1
