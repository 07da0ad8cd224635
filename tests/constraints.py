"""Hard constraints on token ids for tests: one that knows its mask exactly, and one that only sees what went wrong."""

import itertools
import math

import torch

from smcdecode.potentials.potential import BasePotential


class NoStutter(BasePotential):
    """No two equal tokens in a row, and no EOS before ``least`` tokens: 1[x ∈ L], with L's exact mask.

    Attributes:
        given: masks handed out, to show that they are asked for.
    """

    def __init__(self, least=2):
        self.least, self.given = least, 0

    def start(self, vocabulary, prompt):
        self.vocabulary = vocabulary
        return super().start(vocabulary, prompt)

    def log_psi(self, states, complete):
        return [0.0 if self.good(ids, done) else -math.inf for ids, done in zip(states, complete, strict=True)]

    def good(self, ids, done):
        return not (done and len(ids) < self.least) and all(a != b for a, b in itertools.pairwise(ids))

    def mask(self, states):
        self.given += 1
        ends = self.vocabulary.eos
        barred = [{*ids[-1:], *(ends if len(ids) < self.least else ())} for ids in states]
        return torch.tensor([[token not in row for token in range(self.vocabulary.size)] for row in barred])


class DeadEnds(BasePotential):
    """No 1 right behind a 0, and a 2 somewhere by the end; no mask and no foresight, so many particles die late."""

    def log_psi(self, states, complete):
        return [0.0 if self.good(ids, done) else -math.inf for ids, done in zip(states, complete, strict=True)]

    def good(self, ids, done):
        return not (done and 2 not in ids) and (0, 1) not in itertools.pairwise(ids)


def log_psi(constraint):
    """Its Ψ as a function of a complete continuation without EOS, for the oracle."""
    return lambda ids: 0.0 if constraint.good(ids, True) else -math.inf
