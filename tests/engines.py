"""Runs of the real engine on tiny random transformers, and their exact answers by the models' own logits."""

import functools

import numpy as np
import torch
from models import tiny

import smcdecode as smc
from smcdecode.engine.request import Request, seeds
from smcdecode.engine.scheduler import Scheduler
from smcdecode.engine.stats import Stats
from smcdecode.infer.exact import enumerate_target
from smcdecode.potentials.text import Prompt

EOS = 1  # of every tiny model


@functools.cache
def lm(family, *, vocab=5, seed=0, spread=0.15, ends=True):
    """A tiny model and what the engine makes of it; ``ends=False``: one without an EOS."""
    module = tiny(family, vocab=vocab, seed=seed, spread=spread)
    if not ends:
        module.config.eos_token_id = module.generation_config.eos_token_id = None
    return module, smc.load(module, name=f"{family} {seed}")


def law_of(module, prompt, *, temperature=1.0, top_k=None):
    """From a continuation of ``prompt`` to the log-law of the next token, by the module's own pass."""

    @functools.cache
    def log_p_next(prefix):
        with torch.inference_mode():
            logits = module(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double().numpy() / temperature
        if top_k is not None:
            logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
        return logits - np.logaddexp.reduce(logits)

    return log_p_next


def exact_answer(module, prompt, log_psi, *, vocab, max_tokens, alpha=1.0, **law):
    """The target written out; ``log_psi`` reads a complete continuation without its EOS."""
    return enumerate_target(
        law_of(module, prompt, **law),
        lambda x: log_psi(x[:-1] if x[-1] == EOS else x),
        vocab_size=vocab, eos=frozenset([EOS]), max_tokens=max_tokens, alpha=alpha,
    )  # fmt: skip


def scheduler_of(target, method, prompts, *, max_tokens, seed=0, memory=1 << 28, page_size=1):
    """A scheduler that has not begun, so that a test sees its pool, and its counters."""
    read = [Prompt(tuple(prompt)) for prompt in prompts]
    requests = [
        Request(i, p, target.as_target(), method, s, max_tokens)
        for i, (p, s) in enumerate(zip(read, seeds(seed, read), strict=True))
    ]
    return Scheduler.of(requests, memory=memory, page_size=page_size, stats=Stats())


def finish(scheduler):
    """Outcomes in the order of the requests; afterwards no page is held."""
    outcomes = {}
    for done in scheduler.run():
        scheduler.audit()
        outcomes |= {outcome.request.index: outcome for outcome in done}
    assert_empty(scheduler)
    return [outcomes[i] for i in range(len(outcomes))]


def assert_empty(scheduler):
    scheduler.audit()
    assert scheduler.stores.pool.used == 0
    assert (scheduler._pages, scheduler._workspace, scheduler.running) == (0, 0, 0)


def outcomes_of(target, method, prompts, **options):
    return finish(scheduler_of(target, method, prompts, **options))
