"""Which requests a recorded cycle can serve, and how many pages they may come to hold. Knows requests; no device."""

from collections.abc import Sequence

from smcdecode.declare.proposal import Draft
from smcdecode.declare.verification import MultiDraft, Saguaro
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.request import Request

__all__ = ["RESAMPLING", "pages_of", "serves"]

RESAMPLING = {"systematic": False, "stratified": True}


def serves(request: Request) -> bool:
    """Whether a request's cycles can be recorded: no potential or stop string that the host would have to read.

    And nothing that moves shapes or constants from cycle to cycle: numbers found by "auto", a bridge, truncated or
    greedy targets, other schemes of resampling, chains that are verified together, models on other devices or in other
    processes.
    """
    target, method, decoder = request.target, request.smc, request.method
    if target.potentials or request.stops or target.temperature == 0 or target.top_k is not None or target.top_p:
        return False
    if method.particles == "auto" or method.bridge or method.overlap or method.resampling not in RESAMPLING:
        return False
    if isinstance(decoder, (MultiDraft, Saguaro)) or not all(_alone(m) for m in request.models):
        return False
    if len({model.device for model in request.models}) > 1:
        return False
    return not isinstance(method.proposal, Draft) or _drafts(method.proposal, request.models)


def _alone(model: LanguageModel) -> bool:
    """Whether this process holds all of a model; other things may stand for one."""
    return isinstance(model, LanguageModel) and model.ranks is None


def _drafts(draft: Draft, models: Sequence[LanguageModel]) -> bool:
    if draft.network is None or "auto" in (draft.block, draft.strictness) or draft.temperature == 0:
        return False
    p, q = models
    return draft.strict or q.vocabulary.size >= p.vocabulary.size  # else its law has zeros, to be held against p's


def pages_of(request: Request, page_size: int) -> int:
    """Most pages a request can ever hold on the recorded cycle: each particle's own begin inside the prompt's last."""
    n = len(request.prompt.tokens)
    return -(-n // page_size) + request.smc.slots * (-(-(n + request.max_tokens) // page_size) - n // page_size)
