"""Chains verified together down a tree: the tokens have the target's law."""

import dataclasses
import itertools

import pytest
import torch
from coupling_cases import random_pairs
from stats import assert_frequencies

from smcdecode.infer.coupling.global_resolution import GlobalResolution
from smcdecode.infer.coupling.greedy import Greedy
from smcdecode.infer.coupling.kseq import KSeq
from smcdecode.infer.coupling.recursive import RecursiveRejection, RecursiveRejectionWithoutReplacement
from smcdecode.infer.descent import descend

V, K = 3, 2
ROWS = 20_000


@dataclasses.dataclass(frozen=True)
class RowLaws:
    """Laws held as one row of logarithms for every position of every chain; each is normalised when it is asked for."""

    log_p: torch.Tensor  # (B, N, K+1, V) floating
    log_q: torch.Tensor  # (B, N, K, V) floating

    def target(self, rows: torch.Tensor, chain: torch.Tensor, depth: int) -> torch.Tensor:
        """See :class:`TreeLaws`."""
        return self.log_p[rows, chain, depth].double().softmax(-1)

    def draft(self, rows: torch.Tensor, chain: torch.Tensor, depth: int) -> torch.Tensor:
        """See :class:`TreeLaws`."""
        return self.log_q[rows, chain, depth].double().softmax(-1)


class Markov:
    """A target and a draft whose next-token laws depend on the last token; the first ones on none."""

    def __init__(self, seed: int) -> None:
        self.p, self.q = random_pairs(V, V + 1, seed)
        self.p[1] = torch.tensor([0.0, 0.5, 0.5])
        self.q[2] = torch.tensor([0.9, 0.0, 0.1])

    def draw(self, law: torch.Tensor, before: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.multinomial(law[before + 1], 1, replacement=True, generator=generator)[:, 0]

    def joint(self, length: int) -> torch.Tensor:
        law = []
        for x in itertools.product(range(V), repeat=length):
            chance = 1.0
            for before, token in itertools.pairwise((-1, *x)):
                chance *= float(self.p[before + 1, token])
            law.append(chance)
        return torch.tensor(law, dtype=torch.float64)

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-laws behind each prefix of tokens (…, K): (…, K+1, V) of p, (…, K, V) of q."""
        before = torch.cat([torch.full_like(tokens[..., :1], -1), tokens], -1) + 1
        return self.p[before].log(), self.q[before[..., :-1]].log()


def complete(model: Markov, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill what a path left open (−1) with tokens of the target, and number the sequences."""
    for k in range(tokens.shape[1]):
        before = tokens[:, k - 1] if k else torch.full_like(tokens[:, 0], -1)
        tokens[:, k] = torch.where(tokens[:, k] < 0, model.draw(model.p, before, generator), tokens[:, k])
    return (tokens * V ** torch.arange(tokens.shape[1]).flip(0)).sum(-1)


COUPLINGS = [
    (RecursiveRejection(), ROWS),
    (RecursiveRejectionWithoutReplacement(), ROWS),
    (KSeq(), ROWS),
    (Greedy(), ROWS),
    (GlobalResolution(), 3000),
]


@pytest.mark.parametrize(("coupling", "count"), COUPLINGS, ids=[c.name for c, _ in COUPLINGS])
def test_a_path_down_the_tree_has_the_joint_law_of_the_target(coupling, count):
    model, generator = Markov(seed=4), torch.Generator().manual_seed(2)
    n = 3 if coupling.drafting.name == "independent" else 2
    first = coupling.drafting.draw(model.q[:1].expand(count, -1), _uniforms(generator, count, n))
    second = torch.stack([model.draw(model.q, first[:, i], generator) for i in range(n)], 1)
    drafts = torch.stack([first, second], -1)
    full = torch.full((count, n), K)
    path = descend(coupling, RowLaws(*model.rows(drafts)), drafts, full, _uniforms(generator, count, K + 1, 2))
    follows = drafts[torch.arange(count), path.chain]
    within = torch.arange(K) < path.accepted[:, None]
    assert (follows == path.tokens[:, :K])[within].all()
    assert torch.equal(path.length, path.accepted + 1)
    assert ((path.tokens >= 0) == (torch.arange(K + 1) < path.length[:, None])).all()
    law = model.joint(K + 1)
    assert_frequencies(torch.bincount(complete(model, path.tokens.clone(), generator), minlength=len(law)), law)


def test_a_final_token_ends_the_path():
    model, generator = Markov(seed=4), torch.Generator().manual_seed(3)
    drafts = torch.tensor([[[2, 0]], [[2, 0]], [[1, 2]], [[1, 1]]])
    log_p, _ = model.rows(drafts)
    laws = RowLaws(log_p, log_p[:, :, :K])  # every draft is accepted
    final, counts = torch.tensor([False, False, True]), torch.tensor([[2], [0], [2], [1]])
    path = descend(KSeq(), laws, drafts, counts, _uniforms(generator, 4, K + 1, 2), lambda rows, x: final[x[:, -1]])
    assert path.accepted.tolist() == [1, 0, 2, 1]
    assert path.length.tolist() == [1, 1, 2, 2]
    assert path.tokens[0].tolist() == [2, -1, -1]
    assert path.tokens[2].tolist() == [1, 2, -1]


def _uniforms(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=generator).clamp_(2.0**-53)
