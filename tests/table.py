"""A Markov chain with a language model's signature: the narrow seam through which the engine runs without weights."""

import numpy as np
import torch

from smcdecode.declare.target import Algebra, Target
from smcdecode.engine.cache import KVStore, Layout
from smcdecode.potentials.vocabulary import Vocabulary


class TableLM(Algebra):
    """p(v | …u) = table[u, v]."""

    tokenizer = None
    context = None

    def __init__(self, table, eos=(), name="table"):
        self.table = np.asarray(table, dtype=np.float64)
        self.name = name
        V = self.table.shape[1]
        letters = tuple(chr(ord("a") + v).encode() for v in range(V))  # token v reads as the v-th letter
        self.vocabulary = Vocabulary(V, frozenset(eos), letters, frozenset(), name)
        self.layout = Layout((), torch.float32, torch.device("cpu"))
        with np.errstate(divide="ignore"):
            self.logits = torch.tensor(np.log(self.table), dtype=torch.float32)

    def as_target(self):
        return Target(self)

    def store(self, pages, page_size):
        return KVStore(self.layout, pages, page_size)

    def plan(self, batch, store):
        assert int(batch.q_len.sum()) > 0
        return

    def __call__(self, tokens, positions, view, rows):
        return self.logits[tokens[rows]]

    def log_p_next(self, prompt, temperature=1.0):
        """The oracle's view: from a continuation of ``prompt`` to log-probabilities."""
        with np.errstate(divide="ignore"):
            scaled = np.log(self.table) / temperature
        law = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
        return lambda x: law[(*prompt, *x)[-1]]


def random_table(seed, V, concentration=1.0, floor=0.05):
    """Rows drawn from a Dirichlet, mixed with the uniform law so that ratios of two tables are bounded."""
    rows = np.random.default_rng(seed).dirichlet(np.full(V, concentration), size=V)
    return (1 - floor) * rows + floor / V
