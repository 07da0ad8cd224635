"""A potential of one's own, with a state and a mask: English without the letter e. It passes the contract's check."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

import smcdecode as smc


class State(NamedTuple):
    """What the potential remembers of one continuation; never changed in place."""

    fine: bool
    allowed: torch.Tensor  # (V,) bool


class Without(smc.BasePotential):
    """ψ = 1 for texts without a letter, 0 for others, told in advance by a mask."""

    def __init__(self, letter: str) -> None:
        self.letter, self.name = letter, f"without {letter!r}"

    def start(self, vocabulary, prompt) -> State:  # noqa: ANN001, ARG002
        """Look through the vocabulary once."""
        letter = self.letter.encode()
        return State(True, torch.tensor([letter not in token.lower() for token in vocabulary.shown]))

    def advance(self, state: State, tokens: Sequence[int]) -> State:
        """Read a block of tokens."""
        return State(state.fine and bool(state.allowed[list(tokens)].all()), state.allowed)

    def fork(self, state: State) -> State:
        """The same object."""
        return state

    def log_psi(self, states: Sequence[State], complete: Sequence[bool]) -> list[float]:  # noqa: ARG002
        """0 or −inf."""
        return [0.0 if state.fine else float("-inf") for state in states]

    def mask(self, states: Sequence[State]) -> torch.Tensor:
        """The tokens without the letter; EOS spells nothing, so it is among them."""
        return torch.stack([state.allowed for state in states])


def main():
    """Sample under the constraint."""
    p = smc.load("demo")
    psi = Without("e")
    contexts = [p.tokenizer(text)["input_ids"] for text in (" a long way", " the end", "")]
    smc.check_potential(psi, p.vocabulary, contexts)

    out = smc.sample(p * psi, "It was a dark and", method=smc.SMC(smc.Local(), particles=4), max_tokens=16, seed=0)
    print(out.text)
    print(out.summary())
    assert not any("e" in text.lower() for text in out.texts)
    assert not out.deaths  # the mask warned in time
    assert out.log_z < 0  # log Ẑ estimates the log-probability that p writes such a text


if __name__ == "__main__":
    main()
