"""Next tokens checked one at a time by the potentials, with weights. Knows slots and potential states; no model."""

import functools

import torch
from torch import Tensor

from smcdecode.declare.proposal import Local
from smcdecode.engine.drafting import Stream
from smcdecode.engine.endings import Endings
from smcdecode.engine.slots import Slots
from smcdecode.engine.twist import Twist
from smcdecode.infer.awrs import draw_checked

__all__ = ["Checker"]

_STREAMS = (Stream.CHECK, Stream.REPEAT)
_HAND = 8  # uniforms made at once: one costs as much as these


class Checker:
    """Draws tokens by adaptive weighted rejection: a token may stand where no potential gives it ψ = 0."""

    def __init__(self, spec: Local, slots: Slots, twist: Twist, endings: Endings) -> None:
        self.spec, self.slots, self.twist, self.endings = spec, slots, twist, endings

    def draw(self, slots: Tensor, law: Tensor) -> tuple[Tensor, Tensor, dict[int, str]]:
        """A token of each of some slots (n,), from its row of ``law`` (n, V) log-weights; their states are read up.

        Returns:
            tokens (n,) int64; log_w (n,) float64, of the share of the row's weight that passes, unbiased; and for each
            slot that was refused anything the potential that refused last.
        """
        refusals: dict[int, str] = {}
        known: dict[tuple[int, int], bool] = {}  # an accepted token may come up again

        def check(rows: Tensor, tokens: Tensor) -> Tensor:
            pairs = list(zip(slots[rows].tolist(), tokens.tolist(), strict=True))
            fresh = [i for i, pair in enumerate(pairs) if pair not in known]
            for i, refusal in zip(fresh, self._refusals(slots[rows[fresh]], tokens[fresh]), strict=True):
                known[pairs[i]] = refusal is None
                if refusal is not None:
                    refusals[pairs[i][0]] = refusal
            return torch.tensor([known[pair] for pair in pairs], dtype=torch.bool)

        @functools.cache
        def several(kind: int, hand: int) -> Tensor:
            places = torch.arange(hand * _HAND, (hand + 1) * _HAND)
            return self.slots.uniform(slots[:, None], places, _STREAMS[kind])  # (n, _HAND)

        def uniforms(rows: Tensor, draw: int, kind: int) -> Tensor:
            return several(kind, draw // _HAND)[rows, draw % _HAND]

        spec = self.spec
        tokens, log_w = draw_checked(law, uniforms, check, most=spec.rejections, acceptances=spec.acceptances)
        return tokens, log_w, refusals

    def _refusals(self, slots: Tensor, tokens: Tensor) -> list[str | None]:
        """For a next token of each of some slots, the first potential with ψ = 0 behind it, if any."""
        complete = self.endings.of(slots, tokens) | torch.from_numpy(self.slots.left(slots) == 1)
        silent = self.endings.is_eos[tokens]
        nexts = [[] if eos else [token] for token, eos in zip(tokens.tolist(), silent.tolist(), strict=True)]
        return self.twist.refusals(slots.tolist(), nexts, complete.tolist())
