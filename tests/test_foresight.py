"""Masks ahead of the slots: one for each distinct text, computed beside the model's passes, with their errors told."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from constraints import NoStutter
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.engine.drafting import Drafter

TABLE = random_table(1, 4, floor=0.5)
p, q = TableLM(TABLE, eos=[3], name="p"), TableLM(TABLE, eos=[3], name="q")
DRAFT = smc.SMC(smc.Draft(q, block=3), particles=16)
LOCAL = smc.SMC(smc.Local(), particles=16)


class Watched(NoStutter):
    """Notes what it is asked for masks of, and on which thread."""

    def __init__(self):
        super().__init__()
        self.asked, self.threads = [], set()

    def mask(self, states):
        self.asked.append(list(states))
        self.threads.add(threading.current_thread())
        return super().mask(states)


@pytest.mark.parametrize("method", [DRAFT, LOCAL], ids=["draft", "local"])
def test_one_mask_for_each_distinct_text(method):
    psi = Watched()
    smc.sample(p * psi, [0], method=method, max_tokens=9, seed=0)
    assert all(len(set(states)) == len(states) for states in psi.asked)
    assert len(psi.threads - {threading.main_thread()}) == 1


def test_equal_texts_behind_different_prompts_are_told_apart():
    class AfterPrompt(NoStutter):
        """Forbids the prompt's last token."""

        def start(self, vocabulary, prompt):
            self.vocabulary = vocabulary
            return (prompt.tokens[-1],)

        def advance(self, state, tokens):
            return (state[0], *tokens)

        def log_psi(self, states, complete):
            return [0.0 if s[0] not in s[1:] else float("-inf") for s in states]

        def mask(self, states):
            return torch.tensor([[t != s[0] for t in range(4)] for s in states])

    for method in (DRAFT, LOCAL):
        runs = smc.sample(p * AfterPrompt(), [[0], [1], [2]], method=method, max_tokens=6, seed=0)
        for last, out in enumerate(runs):
            assert not out.deaths and all(last not in x for x in out.tokens)


@pytest.mark.parametrize("method", [DRAFT, LOCAL], ids=["draft", "local"])
def test_an_error_on_the_thread_reaches_the_caller(method):
    class Broken(NoStutter):
        name = "broken"

        def mask(self, states):
            if any(len(ids) > 1 for ids in states):
                raise KeyError("lost")
            return super().mask(states)

    with pytest.raises(smc.PotentialError, match="'broken' raised KeyError in mask"):
        smc.sample(p * Broken(), [0], method=method, max_tokens=9, seed=0)


def test_the_thread_of_masks_runs_kernels_by_itself_and_no_other_does():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        worker = Drafter.__new__(Drafter).worker
        assert worker.submit(torch.get_num_threads).result() == 1
        with ThreadPoolExecutor(1) as another:
            assert torch.get_num_threads() == another.submit(torch.get_num_threads).result() == 2
        worker.shutdown()
    finally:
        torch.set_num_threads(before)
