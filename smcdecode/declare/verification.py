"""Decoders that verify drafted chains instead of weighing them: the text has exactly the law p. Knows no tensors."""

import dataclasses
from typing import Literal

from smcdecode.declare.method import SMC, Autoregressive
from smcdecode.declare.proposal import Draft, Guess
from smcdecode.declare.target import Target, check_truncation
from smcdecode.errors import InvalidOption, UnsupportedTarget
from smcdecode.infer.coupling.catalogue import COUPLINGS, Preference
from smcdecode.infer.coupling.protocol import Coupling

__all__ = ["Method", "MultiDraft", "Saguaro", "Speculative"]


@dataclasses.dataclass(frozen=True)
class _Verification:
    """One drafted block a chain, verified by the target; for plain, tempered and truncated targets.

    Args:
        model: the draft, as for :class:`~smcdecode.declare.proposal.Draft`.
        block: K, drafted tokens a cycle.
        temperature: of the draft; None means the target's.
        top_k, top_p: truncate the draft's law; the text's law stays p.
    """

    model: Guess
    block: int = 4
    _: dataclasses.KW_ONLY
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_truncation(self.temperature, self.top_k, self.top_p)
        self.draft()

    def draft(self) -> Draft:
        """The drafts as a proposal: at strictness 1 a particle is one verified chain."""
        return Draft(
            self.model, self.block, strictness=1.0, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )

    def as_smc(self) -> SMC:
        """The decoder as a particle system whose weights never move."""
        raise NotImplementedError

    def check(self, target: Target) -> None:
        """Refuse targets that verification cannot serve.

        Raises:
            UnsupportedTarget: for p^α with α ≠ 1 and for potentials, whose normalising constants are unknown.
            VocabularyMismatch: target and draft disagree on what an id means.
        """
        if not target.plain:
            name = type(self).__name__
            raise UnsupportedTarget(
                f"{name} verifies tokens against p itself and cannot sample {target}, whose normalising constant is "
                "unknown. Use smc.SMC(smc.Draft(…, strictness=1)), which proposes losslessly and weighs the rest, or "
                "smc.exact(…) for exact answers from repeated runs."
            )
        self.as_smc().check(target)


@dataclasses.dataclass(frozen=True)
class Speculative(_Verification):
    """Lossless speculative decoding: one drafted chain a prompt (Leviathan et al. 2023; Chen et al. 2023).

    A drafted token is kept with probability min(1, p/q) and redrawn from (p − q)+ otherwise: strictness 1 with one
    particle.
    """

    def as_smc(self) -> SMC:
        """The same decoder as a particle system of one."""
        return SMC(self.draft(), 1, threshold=0.0)


@dataclasses.dataclass(frozen=True)
class Saguaro(_Verification):
    """Lossless speculative decoding whose draft does not wait: it prepares for outcomes while the target verifies.

    The draft lives in a process of its own. While the target judges a block, the draft writes continuations of the B
    likeliest outcomes (k tokens kept, and the token behind them); where the outcome was among them the next block is
    there at once (Kumar, Dao & May 2026, "Speculative speculative decoding", arXiv 2603.03251). With ``share=1`` and
    ``backup="redraft"`` the text is that of :class:`Speculative`, token for token; otherwise it has the same law.

    Args:
        model: the draft: of :func:`smcdecode.remote`, or a model loaded by name, which then gets a process for each
            call.
        block, temperature, top_k, top_p: as for :class:`Speculative`.
        budget: B, outcomes prepared for each sequence. They are shared out over k by what was measured.
        backup: what is verified where the outcome was not prepared. "redraft": the draft writes then, and the target
            waits; "lookup": what followed the same tokens before; "uniform": uniform tokens; "auto": the first or the
            second, whichever is faster by what was measured, so that texts depend on clocks, though their law does not.
        share: C in (0, 1]: the draft's likeliest tokens, an even share of the budget at each k, get C times their
            weight. A smaller one makes refusals easier to foresee, and more frequent. "auto": the one with the best
            predicted speed; texts depend on clocks then too.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    _: dataclasses.KW_ONLY
    budget: int = 16
    backup: Literal["redraft", "lookup", "uniform", "auto"] = "redraft"
    share: float | Literal["auto"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.budget, int) or self.budget < 1:
            raise InvalidOption(f"budget must be an integer ≥ 1; got {self.budget!r}")
        if self.backup not in ("redraft", "lookup", "uniform", "auto"):
            raise InvalidOption(f'backup must be "redraft", "lookup", "uniform" or "auto"; got {self.backup!r}')
        if self.share != "auto" and not (isinstance(self.share, (int, float)) and 0 < self.share <= 1):
            raise InvalidOption(f'share must lie in (0, 1], or be "auto"; got {self.share!r}')

    def as_smc(self) -> SMC:
        """The same decoder as a particle system of one."""
        return SMC(self.draft(), 1, threshold=0.0, overlap=True)


@dataclasses.dataclass(frozen=True)
class MultiDraft(_Verification):
    """n drafted chains a prompt, verified together: more drafted tokens survive, and the text still has law p.

    Args:
        model, block, temperature, top_k, top_p: as for :class:`Speculative`.
        chains: n.
        coupling: how n drafts become one token: "global resolution" (optimal for independent drafts; Thomas & Pal
            2025), "greedy" (the likeliest n − 1 and one more; Hu et al. 2025), "k-seq" (SpecTr; Sun et al. 2023),
            "recursive", "recursive without replacement"; "auto" takes global resolution or greedy, whichever would
            have accepted more of this prompt's tokens so far. Or an object that satisfies
            :class:`~smcdecode.infer.coupling.protocol.Coupling`; the text's law is then as exact as that coupling.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    _: dataclasses.KW_ONLY
    chains: int = 4
    coupling: str | Coupling = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.chains, int) or self.chains < 1:
            raise InvalidOption(f"chains must be an integer ≥ 1; got {self.chains!r}")
        known = self.coupling in ("auto", *COUPLINGS) if isinstance(self.coupling, str) else self._is_coupling()
        if not known:
            raise InvalidOption(f"coupling must be auto or one of {', '.join(COUPLINGS)}; got {self.coupling!r}")

    def _is_coupling(self) -> bool:
        return callable(getattr(self.coupling, "prepare", None)) and hasattr(self.coupling, "drafting")

    def couplings(self) -> tuple[Coupling, ...]:
        """The couplings to choose from, in the order of :class:`~smcdecode.infer.coupling.catalogue.Preference`."""
        if not isinstance(self.coupling, str):
            return (self.coupling,)
        names = Preference.CHOICES if self.coupling == "auto" else (self.coupling,)
        return tuple(COUPLINGS[name] for name in names)

    def as_smc(self) -> SMC:
        """The chains as particles whose weights never move."""
        return SMC(self.draft(), self.chains, threshold=0.0)


Method = SMC | Autoregressive | Speculative | MultiDraft | Saguaro
