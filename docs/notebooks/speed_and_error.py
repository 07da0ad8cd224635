# %% [markdown]
# # How exact: speed against error
#
# A target so small that the truth can be enumerated: four letters, texts of at most five. So the error of an answer
# is not estimated but known, and can be laid beside what it cost.

# %%
from collections import Counter

import numpy as np
import torch

import smcdecode as smc
from smcdecode.declare.target import Algebra, Target
from smcdecode.engine.cache import KVStore, Layout
from smcdecode.infer.exact import enumerate_target
from smcdecode.potentials.vocabulary import Vocabulary


class Chain(Algebra):
    """A Markov chain over a, b, c and a full stop, which ends a text, with a language model's signature."""

    tokenizer, context = None, None
    layout = Layout((), torch.float32, torch.device("cpu"))

    def __init__(self, seed, name):
        self.law = np.random.default_rng(seed).dirichlet(np.full(4, 0.7), size=4) * 0.9 + 0.025
        self.name = name
        self.vocabulary = Vocabulary(4, frozenset([3]), (b"a", b"b", b"c", b"."), frozenset(), name)

    def as_target(self):
        return Target(self)

    def store(self, pages, page_size):
        return KVStore(self.layout, pages, page_size)

    def plan(self, batch, store):
        return None

    def __call__(self, tokens, positions, view, rows):
        return torch.tensor(np.log(self.law), dtype=torch.float32)[tokens[rows]]


p, q = Chain(1, "p"), Chain(2, "q")
alpha = 2.0
truth = enumerate_target(
    lambda x: np.log(p.law[x[-1] if x else 0]),
    lambda x: 0.0,
    vocab_size=4,
    eos=frozenset([3]),
    max_tokens=5,
    alpha=alpha,
)
print(f"{len(truth.sequences)} texts, log Z = {truth.log_z:.3f}")

# %% [markdown]
# ## The dial
#
# Strictness s says how much of a bad guess of the draft you refuse to carry as weight. Strict costs drafted tokens,
# which are refused and written anew; lax costs exactness. Each method answers 600 times; the error is the distance in
# total variation between one drawn text and the truth.

# %%
runs, rows = 600, {}
for s in (0.0, 0.2, 0.5, 1.0):
    for n in (2, 16):
        method = smc.SMC(smc.Draft(q, 3, strictness=s), n)
        answers = smc.sample(p**alpha, [[0]] * runs, method=method, max_tokens=5, seed=0, progress=False)
        error = truth.total_variation(Counter(out.sample(on="tokens") for out in answers))
        rows[s, n] = error, answers[0].stats.acceptance if s else 1.0  # s = 0 refuses nothing
        print(f"s = {s:3} N = {n:2}: error {error:.3f}, {rows[s, n][1]:.0%} of drafted tokens kept")

# %% [markdown]
# More particles help everywhere, and help most where weights are rough. Strictness does more with two particles than
# sixteen do without it, for some of the drafted tokens: where particles are not free it is the cheaper cure.

# %%
assert rows[0.0, 2][0] > rows[0.0, 16][0]
assert rows[0.0, 16][0] > rows[0.5, 2][0]
assert rows[0.0, 2][1] > rows[0.5, 2][1] > rows[1.0, 2][1]

# %% [markdown]
# ## E[Ẑ] = Z, always
#
# The evidence is unbiased at every setting; only its spread differs. This is the library's master test, here in one
# line.

# %%
method = smc.SMC(smc.Draft(q, 3, strictness=0.2), 4)
answers = smc.sample(p**alpha, [[0]] * runs, method=method, max_tokens=5, seed=1, progress=False)
ratio = np.exp([out.log_z - truth.log_z for out in answers])
print(f"mean Ẑ/Z = {ratio.mean():.3f} ± {ratio.std() / runs**0.5:.3f}")
assert abs(ratio.mean() - 1) < 6 * ratio.std() / runs**0.5
