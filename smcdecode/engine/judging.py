"""The target judges a block: one pass, then each drafted token is kept, redrawn or carried as weight, (3)–(5)."""

import dataclasses

import torch
from torch import Tensor

from smcdecode.engine.drafting import Block, Stream
from smcdecode.engine.draw import Slant, draw, local_law
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.engine.stats import Stats
from smcdecode.errors import SupportError
from smcdecode.infer.strictness import Overlap, overlap
from smcdecode_kernels import reference

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
        if block.tokens.shape[1]:
            self._drafted(block, verdict, log_z, slant.alpha)
        verdict.bonus = (~(verdict.refused | block.ended)).nonzero()[:, 0]
        behind = block.count[verdict.bonus]
        at = row[verdict.bonus, behind]
        verdict.log_w[verdict.bonus, behind] = log_z[at]  # (5)
        verdict.bonus_law = law[at]
        return verdict

    def score(self, block: Block, slant: Slant) -> tuple[Tensor, Tensor, Tensor]:
        """One target pass over each slot's last token and its block, (3).

        Returns:
            law (R, V) log p^α m; log_z (R,); and (n, K+1) which of the R rows scores position k, −1 for none.
        """
        company = block.company
        fed = block.count + (~block.ended)
        width = torch.arange(block.tokens.shape[1] + 1)
        packed = width < fed[:, None]
        row = (packed.flatten().cumsum(0) - 1).view_as(packed).masked_fill(~packed, -1)
        tokens = torch.cat([self.slots.last(company.slots)[:, None], block.tokens], 1)[packed]
        start = company.length - 1
        positions = ((company.before + start)[:, None] + width)[packed]
        batch = company.batch(fed, start + fed)
        logits = self.passes.target(tokens, positions, batch, torch.arange(len(tokens)))
        owner = packed.nonzero()[:, 0]
        masks = [mask.result() for mask in block.masks]
        mask = torch.stack(masks, 1)[packed[:, : len(masks)]] if masks else None
        law, log_z = local_law(logits, slant[owner], mask, self.passes.p.name)
        return law, log_z, row

    def _drafted(self, block: Block, verdict: Verdict, log_z: Tensor, alpha: Tensor) -> None:
        """Decide on all drafted tokens, (4) and its strict form; what lies behind a refusal comes to nothing."""
        i, k = block.drafted.nonzero(as_tuple=True)  # (m,) row and place of each
        if not len(i):
            return
        at = verdict.row[i, k]
        z = log_z[at]
        barren = torch.isneginf(z)  # no token at all has weight here: the particle dies
        if self.strict:
            ratio, refuse = self._strict(block, verdict.law, at, z, i, k)
        else:
            ratio, refuse = self._log_pa(verdict, at, block.tokens[i, k]) - z - block.log_q[i, k], barren
        if bool(refuse.any()):
            stops = torch.zeros(block.tokens.shape, dtype=torch.int64).index_put_((i, k), refuse.long())
            verdict.refused = stops.any(1)
            standing = (stops.cumsum(1) - stops == 0)[i, k]  # nothing before it was refused
            i, k, at, ratio, refuse, barren, z = (x[standing] for x in (i, k, at, ratio, refuse, barren, z))
        verdict.log_w[i, k] = torch.where(barren, -torch.inf, ratio + z)
        verdict.kept.index_add_(0, i, (~barren).long())
        log_pa = self._log_pa(verdict, at, block.tokens[i, k])
        verdict.log_p.index_add_(0, i, (log_pa / alpha[i]).masked_fill(barren, 0.0))
        if self.strict:
            self.stats.drafted += int((~barren).sum())
            self.stats.accepted += int((~refuse).sum())
        else:
            self._check_support(block, verdict.law, at, i, k)

    def _log_pa(self, verdict: Verdict, at: Tensor, tokens: Tensor) -> Tensor:
        """The log (p^α m) of one token at each of some scored rows: (m,) int64 each → (m,) float64."""
        return verdict.law[at, tokens].cpu().double()

    def _strict(self, block: Block, law: Tensor, at: Tensor, z: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Accept or redraw some tokens: log r − log e of the tokens emitted, (m,) float64, and which are refused.

        Args:
            block: where redrawn tokens are replaced.
            law: (R, V) float32 of the target.
            at: (m,) int64, its row for each token.
            z: (m,) float64, the log-norms there; where that is −inf the particle dies, which counts as a refusal.
            i: (m,) int64, the tokens' rows in the block.
            k: (m,) int64, their places.
        """
        slots, tokens = block.slots, block.tokens[i, k]
        barren = torch.isneginf(z)
        places = torch.arange(block.tokens.shape[1])
        u = self.slots.uniform(slots[:, None], places, Stream.ACCEPT)[i, k]
        strictness = self.slots.strictness[self.slots.lane[slots]][i]
        pairs = _Pairs(block, law, at, z.masked_fill(barren, 0.0), strictness, i, k)
        accepted, ratio = pairs.compare(tokens)
        refuse = (u >= accepted) | barren
        again = _firsts(refuse, i) if bool(refuse.any()) else i[:0]
        again = again[~barren[again]] if len(again) else again
        if len(again):
            u = self.slots.uniform(slots[i[again]], k[again], Stream.REDRAW)
            block.tokens[i[again], k[again]], ratio[again] = pairs.redraw(again, tokens[again], u)
        return ratio, refuse

    def _check_support(self, block: Block, law: Tensor, at: Tensor, i: Tensor, k: Tensor) -> None:
        """The whole draft law is at hand at strictness 0 only where the draft has zeros."""
        if block.laws is not None and bool((torch.isneginf(block.laws[i, k]) & ~torch.isneginf(law[at])).any()):
            name = self.passes.q.name if self.passes.q else "the draft"
            raise SupportError(
                f"{name} gives probability zero to tokens that the target allows, so reweighting would be wrong: "
                "set strictness > 0 in Draft(…), whose redraw covers them, or use another draft"
            )


class _Pairs:
    """The laws that m tokens were drawn from beside the target's, compared a few at a time: fresh memory is dear.

    Args:
        block: the draft's laws.
        law: (R, V) float32 log-weights of the target.
        at: (m,) int64, its row for each token.
        z: (m,) float64, their log-norms.
        strictness: (m,) float64.
        i: (m,) int64, the tokens' rows in the block.
        k: (m,) int64, their places.
    """

    def __init__(
        self, block: Block, law: Tensor, at: Tensor, z: Tensor, strictness: Tensor, i: Tensor, k: Tensor
    ) -> None:
        assert block.laws is not None
        self.laws, self.columns, self.law = block.laws, block.columns, law
        self.at, self.z, self.strictness, self.i, self.k = at, z, strictness, i, k
        self.exact = bool((strictness == 1).all())  # no token emitted has a weight

    def compare(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The chance that each token (m,) stands, and log r − log e if it does: (m,) float64 each."""
        found: list[Tensor] = []
        ratio = torch.zeros_like(self.strictness)
        for part in torch.split(torch.arange(len(tokens)), reference.together(self.law, len(tokens))):
            both, near = self._overlap(part), self._place(part, tokens[part]).to(self.law.device)
            found.append(both.acceptance(near).cpu())
            if not self.exact:
                ratio[part] = both.log_ratio(near).cpu()
        return torch.cat(found), ratio

    def redraw(self, some: Tensor, tokens: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """What stands instead of some refused tokens (l,), and log r − log e of it: int64 and float64."""
        both, place = self._overlap(some), self._place(some, tokens)
        drawn, norm = draw(both.redraw_log_weights(torch.arange(len(some))), u)
        place = torch.where(torch.isneginf(norm), place, drawn)  # r = q up to rounding: it stands
        emitted = place if self.columns is None else self.columns[self.i[some], self.k[some], place]
        ratio = torch.zeros_like(u) if self.exact else both.log_ratio(place.to(self.law.device)).cpu()
        return emitted, ratio

    def _overlap(self, some: Tensor) -> Overlap:
        """Both laws of some of the tokens, over the draft's columns."""
        law, far = self.law[self.at[some]], self.law.device
        if self.columns is not None:
            columns = self.columns[self.i[some], self.k[some]].to(far)
            law = law.gather(-1, columns.clamp(min=0)).masked_fill_(columns < 0, -torch.inf)
        log_q = self.laws[self.i[some], self.k[some]].to(far)
        return overlap(log_q, law.sub_(self.z[some, None].float().to(far)), self.strictness[some].to(far))

    def _place(self, some: Tensor, tokens: Tensor) -> Tensor:
        """In which columns of the laws tokens stand: (l,) int64."""
        if self.columns is None:
            return tokens
        return (self.columns[self.i[some], self.k[some]] == tokens[:, None]).int().argmax(-1)


def _firsts(flags: Tensor, row: Tensor) -> Tensor:
    """The first flagged item of each row: (m,) bool, (m,) int64 ascending → (l,) int64."""
    flagged = flags.nonzero()[:, 0]
    rows = row[flagged]
    new = torch.ones_like(rows, dtype=torch.bool)
    new[1:] = rows[1:] != rows[:-1]
    return flagged[new]
