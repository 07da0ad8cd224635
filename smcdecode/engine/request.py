"""One prompt to be decoded: its tokens, its target and method, its seed, its cap. Knows nothing of how."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import cast

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft
from smcdecode.declare.target import Target
from smcdecode.declare.verification import Method
from smcdecode.engine.model import LanguageModel
from smcdecode.potentials.potential import Prompt
from smcdecode.potentials.stops import Stops

__all__ = ["Request", "seeds"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt in the queue."""

    index: int  # what the caller knows it by
    prompt: Prompt
    target: Target
    method: Method
    seed: int  # 64 bits: every draw of this request is a function of it
    max_tokens: int
    stops: Stops = Stops()  # noqa: RUF009  frozen; what ends a text besides EOS and the cap

    @property
    def smc(self) -> SMC:
        """The method as a particle system."""
        return self.method if isinstance(self.method, SMC) else self.method.as_smc()

    @property
    def models(self) -> list[LanguageModel]:
        """The target's model and the draft, where there is one."""
        proposal = self.smc.proposal
        draft = proposal.network if isinstance(proposal, Draft) else None
        models = [self.target.model, draft] if draft else [self.target.model]
        return cast(list[LanguageModel], models)  # what declarations know of a model is less


def seeds(seed: int, prompts: Sequence[Prompt]) -> list[int]:
    """A 64-bit seed for each prompt: a function of the seed and the prompt's tokens, not of its place in the list.

    So a prompt gives the same answer alone, in a batch and in any order, and different prompts draw independently. A
    prompt that occurs again draws anew each time.
    """
    occurrence: Counter[tuple[int, ...]] = Counter()
    result = []
    for prompt in prompts:
        key = repr((seed, occurrence[prompt.tokens], prompt.tokens)).encode()
        occurrence[prompt.tokens] += 1
        digest = hashlib.blake2b(key, digest_size=8).digest()
        result.append(int.from_bytes(digest, "little", signed=True))
    return result
