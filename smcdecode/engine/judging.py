"""The target judges a block: one pass, then each drafted token is kept, redrawn or carried as weight, (3)–(5)."""

import dataclasses

import torch
from torch import Tensor

from smcdecode.engine.drafting import Block, Stream
from smcdecode.engine.draw import Slant, draw, local_law, log_weight
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.engine.stats import Stats
from smcdecode.errors import SupportError
from smcdecode.infer.strictness import overlap

__all__ = ["Judge", "Verdict"]


@dataclasses.dataclass
class Verdict:
    """What becomes of a block."""

    kept: Tensor  # (n,) int64, tokens that stand, a redrawn one included
    refused: Tensor  # (n,) bool, the last token that stands was redrawn: the block ends there
    log_w: Tensor  # (n, K+1) float64, weight of each token that stands, and of the bonus token behind them
    log_p: Tensor  # (n,) float64, log p of the tokens that stand
    bonus: Tensor  # (m,) int64, rows of the block that get a bonus token
    bonus_law: Tensor  # (m, V) float32, log (p^α m) there
    law: Tensor  # (R, V) float32, log (p^α m) at all positions that were scored
    row: Tensor  # (n, K+1) int64, which of them scored a position of the block, −1 for none


class Judge:
    """Scores blocks with the target model and weighs them at a strictness."""

    def __init__(self, strict: bool, slots: Slots, passes: Passes, stats: Stats) -> None:
        self.strict, self.slots, self.passes, self.stats = strict, slots, passes, stats

    def judge(self, block: Block, slant: Slant) -> Verdict:
        """Score a block and decide on its tokens; redrawn ones are replaced in ``block.tokens``.

        Args:
            block: what was drafted.
            slant: what the targets of its n slots make of the logits.
        """
        law, log_z, row = self.score(block, slant)
        n = len(block.slots)
        verdict = Verdict(
            torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool),
            torch.zeros(row.shape, dtype=torch.float64), torch.zeros(n, dtype=torch.float64),
            torch.empty(0, dtype=torch.int64), law[:0], law, row,
        )  # fmt: skip
        for k, rows in enumerate(block.rows):
            standing = ~verdict.refused[rows]
            log_q, columns = (x[standing] if x is not None else None for x in (block.laws[k], block.columns[k]))
            rows = rows[standing]
            if len(rows):
                at = row[rows, k]
                self._position(block, verdict, k, rows, law[at], log_z[at], log_q, columns, slant.alpha)
        verdict.bonus = (~verdict.refused & ~block.ended).nonzero()[:, 0]
        at = row[verdict.bonus, block.count[verdict.bonus]]
        verdict.log_w[verdict.bonus, block.count[verdict.bonus]] = log_z[at]  # (5)
        verdict.bonus_law = law[at]
        return verdict

    def score(self, block: Block, slant: Slant) -> tuple[Tensor, Tensor, Tensor]:
        """One target pass over each slot's last token and its block, (3).

        Returns:
            law (R, V) log p^α m; log_z (R,); and (n, K+1) which of the R rows scores position k, −1 for none.
        """
        slots, start = block.slots, self.slots.length[block.slots] - 1
        fed = block.count + (~block.ended)
        width = torch.arange(block.tokens.shape[1] + 1)
        packed = width < fed[:, None]
        row = (packed.flatten().cumsum(0) - 1).view_as(packed).masked_fill(~packed, -1)
        tokens = torch.cat([self.slots.last(slots)[:, None], block.tokens], 1)[packed]
        positions = (self.slots.position(slots, start)[:, None] + width)[packed]
        batch = self.slots.batch(slots, fed, start + fed)
        logits = self.passes.target(tokens, positions, batch, torch.arange(len(tokens)))
        owner = packed.nonzero()[:, 0]
        masks = [mask.result() for mask in block.masks]
        mask = torch.stack(masks, 1)[packed[:, : len(masks)]] if masks else None
        law, log_z = local_law(logits, slant[owner], mask, self.passes.p.name)
        return law, log_z, row

    def _position(
        self, block: Block, verdict: Verdict, k: int, rows: Tensor, law: Tensor, log_z: Tensor, log_q: Tensor | None,
        columns: Tensor | None, alpha: Tensor,
    ) -> None:  # fmt: skip
        """Decide on drafted token k of the rows still standing, (4) and its strict form."""
        barren = torch.isneginf(log_z)  # no token at all has weight here: the particle dies
        verdict.log_w[rows[barren], k] = -torch.inf
        verdict.refused[rows[barren]] = True
        fertile = (~barren).nonzero()[:, 0]
        rows, law, log_z = rows[fertile], law[fertile], log_z[fertile]
        log_q, columns = (x[fertile] if x is not None else None for x in (log_q, columns))
        if self.strict:
            assert log_q is not None
            log_r = _at(law, columns) - log_z[:, None].float().to(law.device)
            ratio = self._strict(block, verdict, k, rows, log_q, log_r, columns)
        else:
            self._check_support(log_q, law)
            ratio = log_weight(law, block.tokens[rows, k]) - log_z - block.log_q[rows, k]
        log_pa = log_weight(law, block.tokens[rows, k])
        verdict.log_w[rows, k] = ratio + log_z
        verdict.log_p[rows] += log_pa / alpha[rows]
        verdict.kept[rows] = k + 1

    def _strict(
        self, block: Block, verdict: Verdict, k: int, rows: Tensor, log_q: Tensor, log_r: Tensor, columns: Tensor | None
    ) -> Tensor:
        """Accept or redraw token k of some rows: log r − log e of the token emitted, (m,) float64."""
        slots, tokens = block.slots[rows], block.tokens[rows, k]
        if columns is not None:
            tokens = (columns == tokens[:, None]).int().argmax(-1)
        far = log_r.device
        both = overlap(log_q.to(far), log_r, self.slots.strictness[self.slots.lane[slots]].to(far))
        refuse = self.slots.uniform(slots, k, Stream.ACCEPT) >= both.acceptance(tokens.to(far)).cpu()
        self.stats.drafted += len(rows)
        self.stats.accepted += int((~refuse).sum())
        again = refuse.nonzero()[:, 0]
        if len(again):
            u = self.slots.uniform(slots[again], k, Stream.REDRAW)
            drawn, norm = draw(both.redraw_log_weights(again), u)
            tokens[again] = torch.where(torch.isneginf(norm), tokens[again], drawn)  # r = q up to rounding: it stands
            block.tokens[rows, k] = tokens if columns is None else columns.gather(-1, tokens[:, None])[:, 0]
            verdict.refused[rows] = refuse
        return both.log_ratio(tokens.to(far)).cpu()

    def _check_support(self, log_q: Tensor | None, law: Tensor) -> None:
        """The whole draft law is at hand at strictness 0 only where the draft has zeros."""
        if log_q is not None and bool((torch.isneginf(log_q.to(law.device)) & ~torch.isneginf(law)).any()):
            name = self.passes.q.name if self.passes.q else "the draft"
            raise SupportError(
                f"{name} gives probability zero to tokens that the target allows, so reweighting would be wrong: "
                "set strictness > 0 in Draft(…), whose redraw covers them, or use another draft"
            )


def _at(law: Tensor, columns: Tensor | None) -> Tensor:
    """Rows of a law (m, V) at some tokens each, (m, C) int64 with −1 for none; None for all."""
    if columns is None:
        return law
    columns = columns.to(law.device)
    return law.gather(-1, columns.clamp(min=0)).masked_fill(columns < 0, -torch.inf)
