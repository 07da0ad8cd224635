"""A reward: π ∝ p · exp(β R). Without resampling the weights are exp(β R) itself: all can be checked by hand."""

import numpy as np

import smcdecode as smc


def shortness(text: str) -> float:
    """R: words that are short are good."""
    return -float(np.mean([len(word) for word in text.split()] or [0]))


def main():
    """Weigh six continuations by their reward."""
    p = smc.load("demo")
    beta = 1.5
    method = smc.SMC(smc.Local(), particles=6, threshold=0.0)
    out = smc.sample(p * smc.Reward(shortness, beta), "Once upon a time", method=method, max_tokens=12, seed=0)
    for text, weight in out.distribution().items():
        print(f"{weight:.3f} R = {shortness(text):.2f} {text!r}")

    rewards = np.array([shortness(text) for text in out.texts])
    assert np.isclose(out.log_z, np.log(np.mean(np.exp(beta * rewards))))
    assert np.allclose(out.weights, np.exp(beta * rewards) / np.exp(beta * rewards).sum())
    assert out.expect(shortness) >= rewards.mean()  # what the reward is for


if __name__ == "__main__":
    main()
