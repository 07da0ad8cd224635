"""How the target is sampled: which decoder, with which proposal and numbers. Knows no tensors."""

import dataclasses
import inspect
from typing import Literal

from smcdecode.declare.proposal import Draft, Local, Proposal
from smcdecode.declare.target import Target
from smcdecode.errors import InvalidOption, SupportError, UnsupportedTarget
from smcdecode.infer.adapt import AUTO, Population
from smcdecode.infer.resampling import SCHEMES
from smcdecode.potentials.potential import masks
from smcdecode.potentials.vocabulary import check_same

__all__ = ["SMC", "Autoregressive"]


@dataclasses.dataclass(frozen=True)
class SMC:
    """Sequential Monte Carlo: N weighted particles, resampled when their weights degenerate.

    Args:
        proposal: :class:`Draft` or :class:`Local`.
        particles: N. "auto" begins with 8 and lets each resampling leave as many as the weights before it ask for, 4 to
            32, for each prompt by itself; it reserves pages for 32.
        resampling: multinomial, stratified, systematic, residual or ssp.
        threshold: resample when ESS < threshold·N; 0 never (importance sampling), 1 at every uneven weight.
        bridge: for p^α, the number of cycles over which the exponent rises from 1 to α, so that early weights stay
            calm; the final target is the same for every value.
        overlap: whether the draft runs in a process of its own and writes the next blocks while the target scores the
            last, for the outcome without resampling and the likeliest bonus tokens; what was guessed wrong is drafted
            again, so answers are the same, token for token. For a draft of :func:`smcdecode.remote`, or one loaded by
            name, which then gets a process for each call; potentials may not mask tokens.

    Raises:
        InvalidOption: for values that mean nothing.
    """

    proposal: Proposal = Local()  # noqa: RUF009  frozen
    particles: int | Literal["auto"] = 8
    _: dataclasses.KW_ONLY
    resampling: str = "systematic"
    threshold: float = 0.5
    bridge: int = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.proposal, (Local, Draft)):
            raise InvalidOption(f"the proposal must be smc.Draft(model, …) or smc.Local(); got {self.proposal!r}")
        if self.particles != "auto" and (not isinstance(self.particles, int) or self.particles < 1):
            raise InvalidOption(f'particles must be an integer ≥ 1, or "auto"; got {self.particles!r}')
        if self.resampling not in SCHEMES:
            raise InvalidOption(f"resampling must be one of {', '.join(SCHEMES)}; got {self.resampling!r}")
        if self.population and len(inspect.signature(SCHEMES[self.resampling]).parameters) < 3:
            raise InvalidOption(
                f'particles="auto" needs a scheme that takes (W, u, M) and draws M offspring, and {self.resampling!r} '
                "takes (W, u): give particles a number, or another resampling"
            )
        if not 0 <= self.threshold <= 1:
            raise InvalidOption(f"threshold must lie in [0, 1] (a fraction of the particles); got {self.threshold!r}")
        if not isinstance(self.bridge, int) or self.bridge < 0:
            raise InvalidOption(f"bridge must be a number of cycles ≥ 0; got {self.bridge!r}")
        self._check_overlap()

    def _check_overlap(self) -> None:
        if self.overlap and not (isinstance(self.proposal, Draft) and self.proposal.network):
            raise InvalidOption("overlap=True needs a draft that writes beside the target: smc.Draft(model, …)")
        if self.overlap and isinstance(self.proposal, Draft) and self.proposal.block == "auto":
            raise InvalidOption(
                "a draft that writes ahead needs to know how long: give block a number with overlap=True"
            )
        if isinstance(self.proposal, Draft) and not self.overlap and getattr(self.proposal.model, "elsewhere", False):
            raise InvalidOption(
                f"{self.proposal.model.name} lives in a process of its own: use it with smc.Saguaro(…) or "
                "smc.SMC(…, overlap=True), or load the draft with smc.load(…)"
            )

    @property
    def population(self) -> Population | None:
        """How the number of particles moves; None where it does not."""
        return AUTO if self.particles == "auto" else None

    @property
    def slots(self) -> int:
        """The most particles a prompt can have."""
        return AUTO.most if self.particles == "auto" else self.particles

    def check(self, target: Target) -> None:
        """Refuse a target that this proposal cannot serve properly.

        Raises:
            SupportError: a truncated or greedy draft at strictness 0.
            VocabularyMismatch: target and draft disagree on what an id means.
            UnsupportedTarget: a greedy target raised to a power; masks that a draft elsewhere cannot see.
        """
        if target.temperature == 0 and target.alpha != 1:
            raise UnsupportedTarget("a greedy target (temperature 0) has one text; raising it to a power means nothing")
        masked = [psi.name for psi in target.potentials if masks(psi)]
        if self.overlap and masked:
            raise UnsupportedTarget(
                f"{', '.join(masked)} masks tokens, which a draft in another process cannot see: set overlap=False"
            )
        if not isinstance(self.proposal, Draft):
            return
        network = self.proposal.network
        common = check_same(target.model.vocabulary, network.vocabulary) if network else target.model.vocabulary
        if self.proposal.strict:
            return
        if common.size < target.model.vocabulary.size:
            raise SupportError(
                f"{self.proposal.model.name} lacks ids {common.size} to {target.model.vocabulary.size - 1} of "
                f"{target.model.name} and never proposes them: set strictness > 0, whose redraw covers them"
            )
        greedy = self.proposal.temperature is None and target.temperature == 0
        if self.proposal.truncated or greedy:
            raise SupportError(
                "a truncated or greedy draft never proposes some tokens that the target allows, and reweighting cannot "
                "bring them back: set strictness > 0, whose redraw covers what the draft misses, or give the draft a "
                "temperature > 0 and no top_k or top_p"
            )


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Ordinary sampling, token by token, of a plain, tempered or truncated target.

    Args:
        samples: independent samples for each prompt, all of weight 1/samples.
    """

    samples: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or self.samples < 1:
            raise InvalidOption(f"samples must be an integer ≥ 1; got {self.samples!r}")

    def check(self, target: Target) -> None:
        """Refuse targets whose law is not a product of next-token laws.

        Raises:
            UnsupportedTarget: for p^α with α ≠ 1 and for potentials; names SMC.
        """
        if not target.plain:
            raise UnsupportedTarget(
                f"Autoregressive cannot sample {target}: next tokens of a power or of a potential need weights. "
                "Use smc.SMC(smc.Local(), particles=…) or smc.SMC(smc.Draft(…), particles=…)."
            )

    def as_smc(self) -> SMC:
        """The same law as a particle system whose weights never move."""
        return SMC(Local(), self.samples, threshold=0.0)
