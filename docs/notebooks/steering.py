# %% [markdown]
# # Steering by a reward
#
# π ∝ p · exp(β R): the model, pulled towards texts that score well, as far as β allows. Nothing is trained.

# %%
import numpy as np

import smcdecode as smc

p = smc.load("demo")
prompt = "On the beach we saw"


def letters(text: str) -> float:
    """R: how many words begin with s."""
    return float(sum(word.startswith("s") for word in text.split()))


# %% [markdown]
# ## Without resampling the weights are the reward
#
# With `threshold=0` particles are never resampled: they are plain samples of p, and their weights are exp(β R)
# itself. Everything can be checked by hand.

# %%
beta = 1.0
method = smc.SMC(particles=8, threshold=0.0)
out = smc.sample(p * smc.Reward(letters, beta), prompt, method=method, max_tokens=10, seed=0)
rewards = np.array([letters(text) for text in out.texts])
assert np.allclose(out.weights, np.exp(beta * rewards) / np.exp(beta * rewards).sum())
assert np.isclose(out.log_z, np.log(np.mean(np.exp(beta * rewards))))
print(f"mean R of the samples {rewards.mean():.2f}, under the target {out.expect(letters):.2f}")

# %% [markdown]
# The same particles serve any β: weights are recomputed, nothing is sampled again. As β grows the reward does too,
# and the number of particles that count shrinks. That trade is the whole art.

# %%
for b in (0.0, 0.5, 1.0, 2.0, 4.0):
    w = np.exp(b * rewards)
    W = w / w.sum()
    print(f"β = {b}: mean R {np.dot(W, rewards):.2f}, effective particles {1 / np.dot(W, W):.2f} of {len(W)}")

# %% [markdown]
# ## Guiding on the way
#
# A `prefix` value says early what a beginning is worth, so that resampling can move particles there while they are
# still being written. The target is the same, the evidence is the same; only the particles are better placed.

# %%
guided = smc.Reward(letters, beta=2.0, prefix=letters)
out = smc.sample(p * guided, prompt, method=smc.SMC(particles=8), max_tokens=10, seed=0)
for text, weight in list(out.distribution().items())[:4]:
    print(f"{weight:.3f} R = {letters(text):.0f} {text!r}")
assert all(step.ess <= 8 + 1e-9 for step in out.steps)

# %% [markdown]
# In the report, `out.to_html("run.html")`, bands turn blue where a word begins with s and swell at the next
# resampling.
