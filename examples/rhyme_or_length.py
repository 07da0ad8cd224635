"""Python predicates: a verse of short words, and one that rhymes. A mask for the same language agrees on log Ẑ."""

import re

import smcdecode as smc

LONGEST = 5


def short_words(text: str) -> bool:
    """Whether no word has more than five letters; a word once too long stays so, hence on="text"."""
    return all(len(word) <= LONGEST for word in re.findall("[A-Za-z]+", text))


def rhymes(text: str) -> bool:
    """Whether the text ends in a word like "day"; nobody can tell before the end."""
    return re.search(r"ay[^A-Za-z]*$", text) is not None


def main():
    """Constrain by functions alone, then compare with a regex that says the same."""
    p = smc.load("demo")
    short = smc.Predicate(short_words, on="text")
    prompt = "I walked along the"

    # Tokens are drawn and checked one at a time; the refused ones tell what the weight is.
    checked = smc.SMC(smc.Local(check="rejection"), particles=16)
    out = smc.sample(p * short, prompt, method=checked, max_tokens=10, seed=0)
    print(out.summary())
    assert all(short_words(text) for text in out.distribution())

    # Written first and judged then, the same predicate costs particles.
    hasty = smc.sample(p * short, prompt, method=smc.SMC(smc.Local(check="mask"), 16), max_tokens=10, seed=0)
    print(len(hasty.deaths), "particles wrote a long word; without checks they die of it")
    assert all(short_words(text) for text in hasty.distribution())

    # The same language as a regex has masks, and log Ẑ estimates the same log-probability.
    word, gap = f"[A-Za-z]{{1,{LONGEST}}}", "[^A-Za-z]"
    pattern = smc.Regex(f"{gap}*(?:{word}(?:{gap}+{word})*{gap}*)?", name="short words")
    masked = smc.sample(p * pattern, prompt, method=smc.SMC(particles=16), max_tokens=10, seed=0)
    print(f"log Ẑ: {out.log_z:.2f} by checks, {hasty.log_z:.2f} by deaths, {masked.log_z:.2f} by masks")
    assert not masked.deaths and all(short_words(text) for text in masked.texts)

    # Final predicates multiply in: the verse ends on a rhyme, as far as sixteen tries can find one.
    verse = "The sun went down at the end of the day,\nThe children were tired and ran off to"
    rhyme = smc.sample(p * smc.Predicate(rhymes), verse, method=smc.SMC(particles=32), max_tokens=3, seed=1)
    print(rhyme.distribution())
    assert rhyme.alive and all(rhymes(text) for text in rhyme.distribution())


if __name__ == "__main__":
    main()
