"""Small laws p, q for couplings, and what enumeration says about them; knows no engine."""

import copy
import itertools

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linprog

NAMED = {  # kind: (p, q)
    "p = q": ([0.2, 0.5, 0.0, 0.3], [0.2, 0.5, 0.0, 0.3]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    "ties": ([0.25, 0.25, 0.25, 0.25], [0.4, 0.4, 0.1, 0.1]),
    "draft is a point": ([0.3, 0.3, 0.4], [1.0, 0.0, 0.0]),
    "target is a point": ([1.0, 0.0, 0.0], [0.3, 0.3, 0.4]),
    "both the same point": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "target has a zero": ([0.0, 0.1, 0.6, 0.3], [0.4, 0.3, 0.2, 0.1]),
    "draft has zeros": ([0.1, 0.2, 0.3, 0.3, 0.1], [0.0, 0.5, 0.2, 0.0, 0.3]),
    "draft lacks a rare token": ([0.3, 0.7 - 1e-9, 1e-9], [0.5, 0.5, 0.0]),
    "almost all accepted": ([2.64177438e-8, 0.9999999735822562], [1.81119802e-9, 0.99999999818880198]),
    "far apart": ([1e-12, 0.5, 0.5 - 1e-12], [0.5, 1e-12, 0.5 - 1e-12]),
}


def pair(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = (torch.tensor(law, dtype=torch.float64) for law in NAMED[kind])
    return p / p.sum(), q / q.sum()


def random_pairs(V: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dirichlet laws (count, V) of four concentrations: some with zeros, some close to each other, tiny ones cut."""
    rng = np.random.default_rng([seed, V])
    concentration = rng.choice([0.1, 0.3, 1.0, 5.0], count)
    p, q = (np.stack([rng.dirichlet(np.full(V, c)) for c in concentration]) for _ in range(2))
    kind = np.arange(count) % 10
    if V > 2:
        p[kind == 7, 0] = 0.0
        q[kind == 8, 0] = 0.0
    p[kind == 9] = 0.7 * q[kind == 9] + 0.3 * p[kind == 9]
    p[p < 1e-9], q[q < 1e-9] = 0.0, 0.0
    return torch.tensor(p / p.sum(-1, keepdims=True)), torch.tensor(q / q.sum(-1, keepdims=True))


def every_draft(V: int, n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=n)))


def output_law(coupling, p: torch.Tensor, q: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By enumeration of the n drafts, for every row of p, q (B, V): law of the token (B, V); probability that the token
    is one of the drafts (B,); and that a draft was chosen, not met by accident (B,)."""
    plan = coupling.prepare(p, q, n)
    law, hit, chosen = torch.zeros_like(p), torch.zeros(len(p)).double(), torch.zeros(len(p)).double()
    for x in every_draft(p.shape[1], n):
        drafts = x.expand(len(p), -1)
        alive = torch.ones_like(drafts, dtype=torch.bool)
        chance = coupling.drafting.probability(q, drafts)
        given = plan.conditional_law(drafts, alive) * chance[:, None]
        assert not given[chance > 0].isnan().any()
        given = torch.where(chance[:, None] > 0, given, 0.0)
        law += given
        hit += (given * torch.zeros_like(given).scatter(-1, drafts, 1.0)).sum(-1)
        chosen += torch.where(chance > 0, plan.branches(drafts, alive).law.sum(-1) * chance, 0.0)
    return law, hit, chosen


def tiled(plan, rows: int):
    """A plan for one position as a plan for many positions alike."""
    many = copy.copy(plan)
    many.__dict__ = {
        k: v.expand(rows, *v.shape[1:]) if isinstance(v, torch.Tensor) else v for k, v in vars(plan).items()
    }
    return many


def set_law(drafting, q: torch.Tensor, n: int) -> dict[frozenset, float]:
    """P(set of drafts = U)."""
    drafts = every_draft(len(q), n)
    law: dict[frozenset, float] = {}
    for x, chance in zip(
        drafts.tolist(), drafting.probability(q.expand(len(drafts), -1), drafts).tolist(), strict=True
    ):
        if chance > 0:
            law[frozenset(x)] = law.get(frozenset(x), 0.0) + chance
    return law


def brute_force_optimum(p: torch.Tensor, law: dict[frozenset, float]) -> float:
    """1 + min over all subsets H of p(H) − P(set of drafts inside H)."""
    V = len(p)
    subsets = (frozenset(i for i in range(V) if m >> i & 1) for m in range(1 << V))
    return 1 + min(sum(float(p[i]) for i in H) - sum(d for U, d in law.items() if U <= H) for H in subsets)


def linear_program_optimum(p: torch.Tensor, law: dict[frozenset, float]) -> float:
    """Most mass of S ≥ 0 with S_i,U > 0 only for i in U, Σ_U S ≤ p_i, Σ_i S ≤ P(U)."""
    edges = [(i, j) for j, U in enumerate(law) for i in U]
    columns = np.arange(len(edges))
    token, group = np.array(edges).T
    matrix = sparse.coo_matrix(
        (np.ones(2 * len(edges)), (np.r_[token, len(p) + group], np.r_[columns, columns])),
        (len(p) + len(law), len(edges)),
    )
    bound = np.r_[p.numpy(), list(law.values())]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(-np.ones(len(edges)), A_ub=matrix.tocsr(), b_ub=bound, method="highs", options=tight)
    assert answer.status == 0, answer.message
    return -answer.fun
