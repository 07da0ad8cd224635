"""The target judges a block: one pass, then each drafted token is kept, redrawn or carried as weight, (3)–(5)."""

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smcdecode.engine.drafting import Block, fates
from smcdecode.engine.draw import Slant, draw, local_law
from smcdecode.engine.feeding import scoring
from smcdecode.engine.passes import Passes
from smcdecode.engine.slots import Slots
from smcdecode.engine.stats import Stats
from smcdecode.errors import SupportError
from smcdecode.infer.strictness import Overlap, overlap
from smcdecode_kernels import reference

__all__ = ["Judge", "Verdict"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


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
            self._drafted(block, verdict, log_z.numpy(), slant.alpha.numpy())
        bonus = np.flatnonzero(~(verdict.refused.numpy() | block.ended.numpy()))
        behind = block.count.numpy()[bonus]
        at = row.numpy()[bonus, behind]
        verdict.log_w.numpy()[bonus, behind] = log_z.numpy()[at]  # (5)
        verdict.bonus, verdict.bonus_law = torch.from_numpy(bonus), law[torch.from_numpy(at)]
        return verdict

    def score(self, block: Block, slant: Slant) -> tuple[Tensor, Tensor, Tensor]:
        """One target pass over each slot's last token and its block, (3), and over prompts that are unread.

        Returns:
            law (R, V) log p^α m; log_z (R,); and (n, K+1) which of the R rows scores position k, −1 for none.
        """
        feed, row, i, k = scoring(block, self.slots)
        logits = self.passes.target(*feed)
        masks = [mask.result() for mask in block.masks]
        owner = torch.from_numpy(i)
        mask = torch.stack(masks, 1)[owner, torch.from_numpy(k)] if masks else None
        law, log_z = local_law(logits, slant[owner], mask, self.passes.p.name)
        return law, log_z, torch.from_numpy(row)

    def _drafted(self, block: Block, verdict: Verdict, log_z: Floats, alpha: Floats) -> None:
        """Decide on all drafted tokens, (4) and its strict form; what lies behind a refusal comes to nothing."""
        i, k = block.drafted.numpy().nonzero()  # (m,) row and place of each
        if not len(i):
            return
        at = verdict.row.numpy()[i, k]
        z = log_z[at]
        barren = np.isneginf(z)  # no token at all has weight here: the particle dies
        tokens = block.tokens.numpy()
        if self.strict:
            ratio, refuse = self._strict(block, verdict.law, at, z, i, k)
        else:
            ratio, refuse = self._log_pa(verdict, at, tokens[i, k]) - z - block.log_q.numpy()[i, k], barren
        if refuse.any():
            stops = np.zeros(tokens.shape, dtype=np.int64)
            stops[i, k] = refuse
            verdict.refused = torch.from_numpy(stops.any(1))
            standing = (stops.cumsum(1) == stops)[i, k]  # nothing before it was refused
            i, k, at, ratio, refuse, barren, z = (x[standing] for x in (i, k, at, ratio, refuse, barren, z))
        verdict.log_w.numpy()[i, k] = np.where(barren, -np.inf, ratio + z)
        np.add.at(verdict.kept.numpy(), i, ~barren)
        log_p = self._log_pa(verdict, at, tokens[i, k]) / alpha[i]
        np.add.at(verdict.log_p.numpy(), i, np.where(barren, 0.0, log_p))
        if self.strict:
            self.stats.drafted += int(np.count_nonzero(~barren))
            self.stats.accepted += int(np.count_nonzero(~refuse))
        else:
            self._check_support(block, verdict.law, *(torch.from_numpy(x) for x in (at, i, k)))

    def _log_pa(self, verdict: Verdict, at: Ints, tokens: Ints) -> Floats:
        """The log (p^α m) of one token at each of some scored rows: (m,) int64 each → (m,)."""
        found = verdict.law[torch.from_numpy(at), torch.from_numpy(tokens)]
        return np.asarray(found.cpu().numpy().astype(np.float64))

    def _strict(self, block: Block, law: Tensor, at: Ints, z: Floats, i: Ints, k: Ints) -> tuple[Floats, Flags]:
        """Accept or redraw some tokens: log r − log e of the tokens emitted, (m,), and which are refused.

        Args:
            block: where redrawn tokens are replaced.
            law: (R, V) float32 of the target.
            at: (m,), its row for each token.
            z: (m,), the log-norms there; where that is −inf the particle dies, which counts as a refusal.
            i: (m,), the tokens' rows in the block.
            k: (m,), their places.
        """
        tokens, barren = block.tokens.numpy(), np.isneginf(z)
        fate = (block.fates if block.fates is not None else fates(self.slots, block.slots, tokens.shape[1])).numpy()
        strictness = self.slots.strictness.numpy()[self.slots.lane.numpy()[block.slots.numpy()]][i]
        z = np.where(barren, 0.0, z)
        where = (torch.from_numpy(x) for x in (at, z, strictness, i, k))
        pairs = _Pairs(block, law, *where)
        accepted, log_ratio = pairs.compare(torch.from_numpy(tokens[i, k]))
        ratio = log_ratio.numpy()
        refuse = (fate[i, k, 0] >= accepted.numpy()) | barren
        again = _firsts(refuse, i)
        again = again[~barren[again]]
        if len(again):
            here, places = i[again], k[again]
            some, u = torch.from_numpy(again), torch.from_numpy(fate[here, places, 1])
            emitted, moved = pairs.redraw(some, torch.from_numpy(tokens[here, places]), u)
            tokens[here, places], ratio[again] = emitted.numpy(), moved.numpy()
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
        self._whole: Overlap | None = None  # of all tokens, where they were compared together

    def compare(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The chance that each token (m,) stands, and log r − log e if it does: (m,) float64 each."""
        chance = self._chance(tokens)
        if self.exact:
            return chance, torch.zeros_like(self.strictness)
        found: list[Tensor] = []
        ratio = torch.zeros_like(self.strictness)
        parts = torch.split(torch.arange(len(tokens)), reference.together(self.law, len(tokens)))
        for part in parts:
            both, near = self._overlap(part), self._place(part, tokens[part]).to(self.law.device)
            found.append(both.acceptance(near).cpu())
            ratio[part] = both.log_ratio(near).cpu()
        self._whole = both if len(parts) == 1 else None
        return torch.where(self.strictness == 1, chance, torch.cat(found)), ratio  # a row's bits are its own affair

    def _chance(self, tokens: Tensor) -> Tensor:
        """The same at strictness 1, where it takes no more than two numbers: min(1, r/q)."""
        place = torch.arange(len(tokens))
        log_q = self.laws[self.i, self.k, self._place(place, tokens)].cpu().double()
        log_r = self.law[self.at.to(self.law.device), tokens.to(self.law.device)].cpu().double()
        return log_r.sub_(self.z).sub_(log_q).clamp_(max=0.0).exp_()

    def redraw(self, some: Tensor, tokens: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """What stands instead of some refused tokens (l,), and log r − log e of it: int64 and float64."""
        both, place = self._whole, self._place(some, tokens)
        rows = some
        if both is None:
            both, rows = self._overlap(some), torch.arange(len(some))
        drawn, norm = draw(both.redraw_log_weights(rows), u)
        place = torch.where(torch.isneginf(norm), place, drawn)  # r = q up to rounding: it stands
        emitted = place if self.columns is None else self.columns[self.i[some], self.k[some], place]
        if self.exact:
            return emitted, torch.zeros_like(u)
        return emitted, both.log_ratio(place.to(self.law.device), rows).cpu()

    def _overlap(self, some: Tensor) -> Overlap:
        """Both laws of some of the tokens, over the draft's columns."""
        at, far = self.at[some], self.law.device
        if self.columns is None:
            law = self.law[at]
        else:
            columns = self.columns[self.i[some], self.k[some]].to(far)
            law = self.law[at[:, None].to(far), columns.clamp(min=0)].masked_fill_(columns < 0, -torch.inf)
        log_q = self.laws[self.i[some], self.k[some]].to(far)
        return overlap(log_q, law.sub_(self.z[some, None].float().to(far)), self.strictness[some].to(far))

    def _place(self, some: Tensor, tokens: Tensor) -> Tensor:
        """In which columns of the laws tokens stand: (l,) int64."""
        if self.columns is None:
            return tokens
        return (self.columns[self.i[some], self.k[some]] == tokens[:, None]).int().argmax(-1)


def _firsts(flags: Flags, row: Ints) -> Ints:
    """The first flagged item of each row: (m,) bool, (m,) int64 ascending → (l,) int64."""
    flagged = np.flatnonzero(flags)
    rows = row[flagged]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = rows[1:] != rows[:-1]
    return flagged[new]
