"""Potentials: how functions become ψ, how products behave, what is refused, and rewards."""

import copy
import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from smcdecode.errors import InvalidOption, InvalidWeight, PotentialError
from smcdecode.potentials import contract
from smcdecode.potentials import potential as potential_module
from smcdecode.potentials import reward as reward_module
from smcdecode.potentials.potential import BasePotential, Potential, Product, Prompt, allowed, allowed_words, evaluate
from smcdecode.potentials.reading import FunctionPotential, potential
from smcdecode.potentials.reward import Reward
from smcdecode.potentials.text import Ids, TextRead
from smcdecode.potentials.vocabulary import Vocabulary

SMILE = "😀".encode()
TOKENS = (b"<eos>", b"a", b"b", b"!", SMILE[:2], SMILE[2:], b"\xff", b" yes", b" no")
WORDS = Vocabulary(len(TOKENS), frozenset({0}), TOKENS, frozenset({0}), "words")
IDS_ONLY = Vocabulary(9, frozenset({0}), None, frozenset(), "ids")
PROMPT = Prompt(tokens=(1, 2), text="Is it?")


def read(psi: Potential, *contexts: tuple[int, ...], vocabulary: Vocabulary = WORDS, prompt: Prompt = PROMPT) -> list:
    return [psi.advance(psi.start(vocabulary, prompt), ids) for ids in contexts]


def value(psi: Potential, ids: tuple[int, ...], complete: bool = False, **options) -> float:
    return evaluate(psi, read(psi, ids, **options), [complete]).item()


def count(text: str) -> float:
    return -2.0 * text.count("!")


class Even(BasePotential):
    """Half the tokens may follow: those of even ids, and EOS."""

    def log_psi(self, states, complete):
        return [0.0 if all(i % 2 == 0 for i in ids) else -math.inf for ids in states]

    def mask(self, states):
        return (torch.arange(9) % 2 == 0).repeat(len(states), 1)


class Plain:
    """The protocol without the base class."""

    name = "plain"

    def start(self, vocabulary, prompt):
        return 0

    def advance(self, state, tokens):
        return state + len(tokens)

    def fork(self, state):
        return state

    def log_psi(self, states, complete):
        return [-float(n) for n in states]

    def mask(self, states):
        return torch.tensor([[True] * 5 + [False] * 4] * len(states))


# The decorator and the call


def test_the_decorator_and_the_call_are_one():
    @potential
    def plain(text):
        return count(text)

    @potential(name="spoken")
    def named(text):
        return count(text)

    for psi, name in ((plain, "plain"), (named, "spoken"), (potential(count), "count")):
        assert isinstance(psi, FunctionPotential)
        assert psi.name == name
        assert psi("Hi!!") == -4.0
        assert value(psi, (1, 3, 3)) == -4.0
    assert repr(plain) == "potential(plain, on='text')"


def test_text_tokens_and_final():
    seen = []

    def fn(reading):
        seen.append(reading)
        return -1.0

    contexts, complete = [(1, 2), (2, 3)], [False, True]
    for on, readings, values in (
        ("text", ["ab", "b!"], [-1.0, -1.0]),
        ("tokens", [(1, 2), (2, 3)], [-1.0, -1.0]),
        ("final", ["b!"], [0.0, -1.0]),
    ):
        seen.clear()
        psi = potential(fn, on=on)
        assert evaluate(psi, read(psi, *contexts), complete).tolist() == values
        assert sorted(seen) == sorted(readings)


def test_tokens_need_no_tokenizer():
    psi = potential(lambda ids, prompt: float(len(ids) + len(prompt)), on="tokens")
    assert value(psi, (1, 2, 3), vocabulary=IDS_ONLY) == 5.0
    with pytest.raises(PotentialError, match='on="tokens"'):
        potential(count).start(IDS_ONLY, PROMPT)


def test_an_unfinished_character_is_shown_only_at_the_end():
    seen = []
    psi = potential(lambda text: float(seen.append(text) or 0), batched=False, name="seen")
    for complete in (False, True):
        evaluate(psi, read(psi, (1, 4)), [complete])
    assert seen == ["a", "a\N{REPLACEMENT CHARACTER}"]


def test_batched_functions_are_called_once_and_in_order():
    calls = []

    @potential(batched=True)
    def lengths(texts):
        calls.append(texts)
        return np.array([float(len(text)) for text in texts])

    states = read(lengths, (1,), (2, 2), (1,))
    assert evaluate(lengths, states, [False, True, False]).tolist() == [1.0, 2.0, 1.0]
    assert calls == [["a", "bb"]]


def test_equal_texts_of_equal_prompts_are_judged_once():
    calls = []

    @potential
    def judged(text, prompt):
        calls.append((text, prompt))
        return -float(len(prompt))

    (one, also_one), other = read(judged, (1,), (1,)), read(judged, (1,), prompt=Prompt((3,)))
    assert evaluate(judged, [one, also_one, judged.fork(one), other[0]], [False] * 4).tolist() == [
        -6.0,
        -6.0,
        -6.0,
        -1.0,
    ]
    assert calls == [("a", "Is it?"), ("a", "!")]


def test_without_a_prompt_equal_texts_are_judged_once():
    calls = []
    psi = potential(lambda text: float(calls.append(text) or 0))
    evaluate(psi, read(psi, (1,)) + read(psi, (1,), prompt=Prompt((3,))), [False] * 2)
    assert calls == ["a"]


def test_what_the_prompt_is_as_text():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert Prompt((1,), messages=messages).as_text(IDS_ONLY) == "Be kind.\n\nHi"
    assert Prompt((1, 3)).as_text(WORDS) == "a!"
    assert PROMPT.as_text(IDS_ONLY) == "Is it?"


def test_batched_functions_get_the_prompts_in_a_list():
    @potential(batched=True)
    def asked(texts, *, prompt):
        assert prompt == ["Is it?"] * len(texts)
        return [0.0] * len(texts)

    evaluate(asked, read(asked, (1,), (2,)), [False, False])


def test_the_text_comes_before_the_prompt():
    with pytest.raises(PotentialError, match="the text comes first"):
        potential(lambda prompt, text: 0.0)


def test_options_that_mean_nothing_are_refused():
    with pytest.raises(InvalidOption, match="on='tokens'"):
        potential(count, on="words")
    with pytest.raises(PotentialError, match="a function of the text is wanted"):
        potential(3.0)


@given(st.lists(st.lists(st.integers(1, 8), max_size=4), max_size=8))
@settings(max_examples=200, deadline=None)
def test_text_grows_as_the_vocabulary_spells_it(blocks: list[list[int]]):
    state, ids = TextRead("", b"", PROMPT, WORDS.shown), []
    for block in blocks:
        state, ids = state.advance(block), ids + block
        assert state.read(complete=False) == WORDS.text(ids, final=False)
        assert state.read(complete=True) == WORDS.text(ids, final=True)
        assert len(state.pending) <= 3


# What may come back


@pytest.mark.parametrize("returned", [0, 1.5, -math.inf, np.float32(2), torch.tensor(0.5), np.array(1.0)])
def test_any_number_will_do(returned):
    psi = potential(lambda text: returned)
    assert value(psi, (1,)) == float(returned)


@pytest.mark.parametrize("returned", [True, None, "0.5", np.True_, [0.0, 1.0], torch.tensor(True), object()])
def test_what_is_no_number_is_refused(returned):
    with pytest.raises(PotentialError, match=r"'judge' returned .* for the text 'ab'; a number is wanted"):
        value(potential(lambda text: returned, name="judge"), (1, 2))


@pytest.mark.parametrize("returned", [[0.0], 0.0, None, "ab", [0.0] * 3])
def test_a_batched_function_returns_a_number_for_each(returned):
    psi = potential(lambda texts: returned, batched=True, name="judge")
    with pytest.raises(PotentialError, match="'judge' is batched, so it must return a sequence of 2 numbers"):
        evaluate(psi, read(psi, (1,), (2,)), [False, False])


@pytest.mark.parametrize("returned", [math.nan, math.inf])
def test_nan_and_infinity_are_bugs(returned):
    psi = potential(lambda text: returned if "b" in text else 0.0, name="judge")
    with pytest.raises(InvalidWeight, match=f"'judge' gave log ψ = {returned} for the text 'ab'"):
        evaluate(psi, read(psi, (1,), (1, 2)), [False, False])


def test_an_error_names_the_potential_and_shows_the_end_of_the_text():
    def broken(text):
        raise ZeroDivisionError("no luck")

    with pytest.raises(PotentialError, match=r"'broken' raised ZeroDivisionError: no luck.*'…a{79}!'") as caught:
        value(potential(broken), (1,) * 200 + (3,))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_passes_through():
    def slow(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        value(potential(slow), (1,))


@pytest.mark.parametrize(
    "returned", [None, [None], [0.0, 1.0], [True], torch.zeros(1, 1), torch.zeros(1, dtype=torch.bool), [1j]]
)
def test_any_potential_is_checked(returned):
    class Odd(BasePotential):
        def log_psi(self, states, complete):
            return returned

    with pytest.raises(PotentialError, match="'Odd' must return 1 numbers"):
        value(Odd(), (1,))


def test_values_keep_their_precision():
    class Fine(BasePotential):
        def log_psi(self, states, complete):
            return [0.1] * len(states)

    assert evaluate(Fine(), read(Fine(), (1,)), [False]).dtype == torch.float64
    assert value(Fine(), (1,)) == 0.1
    assert evaluate(Fine(), [], []).shape == (0,)


def test_errors_of_a_class_name_it():
    class Odd(BasePotential):
        name = "odd one"

        def log_psi(self, states, complete):
            raise RuntimeError("x")

        def mask(self, states):
            raise RuntimeError("y")

    with pytest.raises(PotentialError, match=r"'odd one' raised RuntimeError in log_psi: x;.*\(1, 2\)"):
        value(Odd(), (1, 2))
    with pytest.raises(PotentialError, match="'odd one' raised RuntimeError in mask: y"):
        allowed(Odd(), read(Odd(), (1,)), 9)


# The base class


def test_the_state_of_a_base_potential_is_its_ids():
    psi = Even()
    (state,) = read(psi, (2, 4))
    assert state == (2, 4)
    assert psi.fork(state) is state
    assert copy.deepcopy([Ids((1,))]) == [(1,)]
    assert psi.name == "Even"
    assert psi.advance(state, [1]) == (2, 4, 1)


def test_other_states_are_copied_deeply():
    class Nested(BasePotential):
        def start(self, vocabulary, prompt):
            return {"seen": []}

        def advance(self, state, tokens):
            state["seen"].extend(tokens)
            return state

        def log_psi(self, states, complete):
            return [float(len(state["seen"])) for state in states]

    psi = Nested()
    state = psi.start(WORDS, PROMPT)
    other = psi.advance(psi.fork(state), [1, 2])
    assert evaluate(psi, [state, other], [False, False]).tolist() == [0.0, 2.0]


# Products


def test_products_add_and_masks_intersect():
    psi = potential(count) * Even() * Plain()
    assert isinstance(psi, Product)
    assert psi.name == "count * Even * plain"
    assert value(psi, (2, 2)) == -2.0
    mask = allowed(psi, read(psi, (2,), (4,)), 9)
    assert mask is not None
    assert mask.tolist() == [[True, False, True, False, True, False, False, False, False]] * 2


class Words(Even):
    """The same mask, packed."""

    def mask(self, states):
        return torch.tensor([[0b101010101]], dtype=torch.int32).expand(len(states), 1)


def test_packed_masks_mix_with_others():
    psi = Plain() * Words() * Even()
    assert allowed_words(psi, read(psi, (2,), (4,)), 9).tolist() == [[0b10101]] * 2
    assert torch.equal(allowed(Words(), read(Words(), (2,)), 9), allowed(Even(), read(Even(), (2,)), 9))


def test_products_are_flat_whatever_the_order():
    a, b, c, d = potential(count), Even(), Plain(), potential(len)
    assert ((a * b) * (c * d)).factors == (a * (b * (c * d))).factors == (a, b, c, d)
    assert (Plain() * a).factors[1] is a
    assert (a * a).factors == (a, a)
    with pytest.raises(TypeError):
        a * 2


def test_a_product_of_maskless_potentials_has_no_mask():
    psi = potential(count) * potential(len)
    assert allowed(psi, read(psi, (1,)), 9) is None


def test_later_factors_are_not_asked_about_the_dead():
    asked = []
    psi = Even() * potential(lambda text: float(asked.append(text) or 0), name="dear")
    values = evaluate(psi, read(psi, (1,), (2,), (3,)), [True, True, True])
    assert values.tolist() == [-math.inf, 0.0, -math.inf]
    assert asked == ["b"]
    assert evaluate(psi, read(psi, (1,)), [True]).tolist() == [-math.inf]


def test_errors_inside_a_product_name_the_factor():
    psi = Even() * potential(lambda text: math.nan, name="nan")
    with pytest.raises(InvalidWeight, match="potential 'nan' gave"):
        value(psi, (2,))
    with pytest.raises(PotentialError, match="mask of potential 'Even' must be a bool tensor of shape \\(1, 7\\)"):
        small = Vocabulary(7, frozenset(), TOKENS[:7], frozenset(), "small")
        allowed(psi, read(psi, (2,), vocabulary=small), 7)


def test_forks_of_a_product_are_independent():
    psi = Even() * Plain()
    (state,) = read(psi, (2,))
    psi.advance(psi.fork(state), (1, 1, 1))
    assert evaluate(psi, [state], [False]).tolist() == [-1.0]


@pytest.mark.parametrize(
    "mask",
    [torch.ones(1, 9), torch.ones(2, 9, dtype=torch.bool), torch.ones(1, 9, dtype=torch.int32), [[True] * 9]],
)
def test_masks_are_checked(mask):
    class Odd(Even):
        def mask(self, states):
            return mask

    with pytest.raises(PotentialError, match="mask of potential 'Odd' must be a bool tensor of shape"):
        allowed(Odd(), read(Odd(), (2,)), 9)


def test_the_protocol_is_recognised():
    assert isinstance(Plain(), Potential)
    assert isinstance(Even() * Plain(), Potential)
    assert not isinstance(count, Potential)


# Rewards


def test_a_reward_counts_at_the_end_only():
    psi = Reward(lambda text: float(len(text)), beta=0.5)
    assert value(psi, (1, 2), complete=False) == 0.0
    assert value(psi, (1, 2), complete=True) == 1.0


def test_a_prefix_value_steers_before():
    psi = Reward(len, beta=2.0, prefix=lambda text: -1.0, name="long")
    assert psi.name == "long"
    assert evaluate(psi, read(psi, (1, 2), (1,)), [False, True]).tolist() == [-2.0, 2.0]


def test_a_reward_takes_prompts_and_batches():
    psi = Reward(lambda texts, prompt: [len(t) + len(p) for t, p in zip(texts, prompt, strict=True)], batched=True)
    assert value(psi, (1, 2), complete=True) == 2.0 + len("Is it?")


def test_a_reward_of_minus_infinity_forbids():
    assert value(Reward(lambda text: -math.inf, beta=2.0), (1,), complete=True) == -math.inf
    with pytest.raises(InvalidWeight):
        value(Reward(lambda text: -math.inf, beta=-2.0), (1,), complete=True)


@pytest.mark.parametrize("beta", [math.inf, math.nan])
def test_beta_is_finite(beta):
    with pytest.raises(InvalidOption, match="a finite number is wanted"):
        Reward(len, beta=beta)


def word_tokenizer(template: str | None = None, pad: bool = True) -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "a", "b", "!", "yes", "no", "user", "assistant", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]" if pad else None)
    fast.chat_template = template
    return fast


TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
TINY = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def classifier(labels: int) -> BertForSequenceClassification:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(num_labels=labels, **TINY)).eval()


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_classifier_gives_the_log_probability_of_its_label(batch_size: int):
    model, tokenizer = classifier(3), word_tokenizer()
    psi = Reward.from_classifier(model, tokenizer, 2.0, label="LABEL_1", batch_size=batch_size)
    states = read(psi, (7, 8), (7,), (8, 7, 7, 8))
    found = evaluate(psi, states, [True, True, True])
    for i, text in enumerate([" yes no", " yes", " no yes yes no"]):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits.double()
        assert found[i].item() == pytest.approx(2.0 * logits.log_softmax(-1)[0, 1].item(), abs=1e-5)
    assert evaluate(psi, states, [False] * 3).tolist() == [0.0] * 3


def test_a_reward_model_reads_the_conversation():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(LlamaConfig(num_labels=1, **TINY)).eval()
    tokenizer = word_tokenizer(TEMPLATE, pad=False)
    psi = Reward.from_classifier(model, tokenizer, name="judge")
    assert repr(psi) == "Reward(judge, beta=1.0)"
    for prompt in (Prompt((1,), text="a b"), Prompt((1,), messages=[{"role": "user", "content": "a b"}])):
        states = read(psi, (7, 8), (7,), prompt=prompt)
        found = evaluate(psi, states, [True, True])
        for i, text in enumerate(["user : a b assistant :  yes no ", "user : a b assistant :  yes "]):
            with torch.no_grad():
                logit = model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()
            assert found[i].item() == pytest.approx(logit, abs=1e-5)


def test_a_classifier_needs_a_label_that_exists():
    for label in (None, 7, "joy"):
        with pytest.raises(InvalidOption, match=r"one of .*LABEL_2"):
            Reward.from_classifier(classifier(3), word_tokenizer(), label=label)


def test_a_classifier_in_training_mode_is_refused():
    with pytest.raises(InvalidOption, match=r"model\.eval\(\)"):
        Reward.from_classifier(classifier(1).train(), word_tokenizer())
    with pytest.raises(InvalidOption, match="batch_size=0"):
        Reward.from_classifier(classifier(1), word_tokenizer(), batch_size=0)


@pytest.mark.parametrize("module", [contract, potential_module, reward_module])
def test_docstrings_tell_the_truth(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
