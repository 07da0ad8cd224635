"""A particle engine whose draft runs beside the target: Saguaro, and SMC with overlap. Knows what is declared."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smcdecode.declare.method import SMC
from smcdecode.declare.verification import Saguaro
from smcdecode.engine.drafting import Block, Drafter
from smcdecode.engine.draw import Slant
from smcdecode.engine.judging import Judge
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.particles import ParticleEngine
from smcdecode.engine.passes import Stores
from smcdecode.engine.remote.drafter import RemoteDrafter
from smcdecode.engine.remote.messages import Backup, Setup
from smcdecode.engine.remote.process import RemoteModel, remote
from smcdecode.engine.remote.tuning import Tuning
from smcdecode.engine.request import Request
from smcdecode.engine.stats import Stats
from smcdecode.errors import InvalidOption

__all__ = ["RemoteEngine"]

OVERLAP_BUDGET = 4  # bonus tokens guessed for each particle
OVERLAP_ANCESTORS = 2  # particles of the greatest weights that each of the others may be replaced by


class RemoteEngine(ParticleEngine):
    """Runs :class:`~smcdecode.declare.verification.Saguaro`, and SMC whose draft does not wait for the target."""

    def __init__(self, decoder: Saguaro | SMC, stores: Stores, *, lanes: int, max_tokens: int, stats: Stats) -> None:
        method = decoder if isinstance(decoder, SMC) else decoder.as_smc()
        super().__init__(method, stores, lanes=lanes, max_tokens=max_tokens, stats=stats)
        assert self.spec is not None
        own = not isinstance(self.spec.model, RemoteModel)
        self._own = start_beside(self.spec.model) if own else None
        plain = self.drafter
        assert isinstance(plain, Drafter)  # there is a draft model
        setup = Setup.of(
            self.spec, decoder.budget if isinstance(decoder, Saguaro) else OVERLAP_BUDGET,
            0 if isinstance(decoder, Saguaro) else min(OVERLAP_ANCESTORS, method.slots - 1),
            lanes=lanes, particles=method.slots, max_tokens=max_tokens,
            pages=stores.pool.size * stores.page_size, size=stores.p.vocabulary.size, eos=stores.p.vocabulary.eos,
        )  # fmt: skip
        self.tuning = (
            Tuning(self.spec.longest, decoder.backup, decoder.share)
            if isinstance(decoder, Saguaro)
            else Tuning(self.spec.longest, "redraft", 1.0)
        )
        drafting: RemoteModel = self._own or self.spec.model  # type: ignore[assignment]
        alone = Backup.LOOKUP if self.spec.strict else None  # a one-hot law is proper where misses are redrawn
        self.drafter = self._remote = RemoteDrafter(plain, drafting, setup, self.tuning, self._heat, alone, stats)
        if self.tuning.measures:
            self.judge = _Watched(self.judge, self._remote)

    def begin(self, lanes: Sequence[int], requests: Sequence[Request]) -> None:
        """The draft reads prompts beside the target."""
        self._remote.open(lanes, requests)

    def retire(self, lanes: Sequence[int]) -> None:
        """Free everything that some lanes hold, here and there."""
        super().retire(lanes)
        self._remote.close(lanes)

    def extend(self) -> Tensor:
        """See :meth:`ParticleEngine.extend`; the draft hears of weights with the next request."""
        increments = super().extend()
        self._remote.log_w += increments
        return increments

    def select(self, ancestors: Tensor) -> None:
        """Every slot becomes a copy of slot ``ancestors[slot]``; the draft hears of it with the next request."""
        super().select(ancestors)
        self._remote.select(torch.where(ancestors < 0, torch.arange(len(ancestors)), ancestors))

    def append(self) -> None:
        """See :meth:`ParticleEngine.append`; the draft hears of it and answers beside what follows."""
        super().append()
        self._remote.bonus[:] = np.nan
        self._remote.ask(self.writing)

    def _bonus_uniform(self, slots: Tensor) -> Tensor:
        """Made while the draft found its answer, except where a particle begins or took another's place."""
        u = self._remote.bonus[slots.numpy()]
        return super()._bonus_uniform(slots) if np.isnan(u).any() else torch.from_numpy(u)

    def close(self) -> None:
        """End the run, and the process if it was started for it."""
        self._remote.stop()
        if self._own is not None:
            self._own.close()

    def _heat(self, slots: Tensor, ahead: int) -> Tensor:
        """The draft's temperature in some slots so many cycles from now: (n,) float64."""
        self.slots.cycle += ahead
        temperature = self._temperature(slots)
        self.slots.cycle -= ahead
        return temperature


class _Watched(Judge):
    """A judge whose laws are looked at, for the choices of :class:`~smcdecode.engine.remote.tuning.Tuning`."""

    def __init__(self, plain: Judge, drafter: RemoteDrafter) -> None:
        super().__init__(plain.strict, plain.slots, plain.passes, plain.stats)
        self.drafter = drafter

    def score(self, block: Block, slant: Slant) -> tuple[Tensor, Tensor, Tensor]:
        law, log_z, row = super().score(block, slant)
        self.drafter.watch(block, law, row)
        return law, log_z, row


def start_beside(model: Any) -> RemoteModel:
    """The same model in a process of its own.

    Raises:
        InvalidOption: the model was not loaded from a name or folder.
    """
    recipe = getattr(model, "recipe", None)
    if recipe is not None:
        return remote(recipe.source, **recipe.options)
    if isinstance(model, LanguageModel):
        raise InvalidOption(
            f"{model.name} was made of an object, which this process cannot give away: make the draft with "
            "smc.remote((model, tokenizer)) instead"
        )
    return remote(model)
