"""Plain sampling, and the same law through a draft at strictness 1: no weight ever moves, so log Ẑ = 0."""

import smcdecode as smc


def main():
    """Sample a few continuations of one prompt in two ways."""
    p = smc.load("demo")
    prompt = "My favourite season is"

    independent = smc.sample(p, prompt, method=smc.Autoregressive(samples=3), max_tokens=12, seed=0)
    print(*independent.texts, sep="\n")
    assert independent.log_z == 0.0 and independent.ess == 3

    # Lossless speculative decoding in every particle; the draft is the model itself, hotter, so some guesses fail.
    draft = smc.Draft(p, block=3, strictness=1.0, temperature=1.2)
    drafted = smc.sample(p, prompt, method=smc.SMC(draft, particles=3), max_tokens=12, seed=0)
    print(drafted.summary())
    assert abs(drafted.log_z) < 1e-9 and drafted.ess == 3
    assert 0 < drafted.stats.acceptance <= 1


if __name__ == "__main__":
    main()
