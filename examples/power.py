"""Power sampling: p^α over whole sequences finds likelier texts than p does, and says how sure it is."""

import numpy as np

import smcdecode as smc


def main():
    """Compare log p of continuations under p and under p ** 4."""
    p = smc.load("demo")
    prompt = "The opposite of hot is"

    plain = smc.sample(p, prompt, method=smc.Autoregressive(samples=6), max_tokens=12, seed=0)
    sharp = smc.sample(p**4, prompt, method=smc.SMC(smc.Local(), particles=6), max_tokens=12, seed=0)
    print(sharp.summary())
    for text, weight in sharp.distribution().items():
        print(f"{weight:.3f} {text!r}")

    means = [float(np.dot(out.weights, out.log_p)) for out in (plain, sharp)]
    print("mean log p under p and under p ** 4:", means)
    assert means[1] > means[0]
    assert sharp.best() in sharp.distribution()


if __name__ == "__main__":
    main()
