"""transformers' generate with particles: the tokens of sample(), and every option honoured or refused by name."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from models import tiny
from stats import assert_frequencies
from transformers import AutoTokenizer, GenerationConfig, TextIteratorStreamer, pipeline
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer

import smcdecode as smc
from smcdecode.engine.demo import demo_folder
from smcdecode.integrations import options
from smcdecode.integrations.transformers import padded
from smcdecode.integrations.wrapping import wrapped

V, EOS, PAD = 16, 1, 0
PROMPT = [2, 3, 4]
p, q = tiny("llama", seed=0, spread=0.2), tiny("llama", seed=1, spread=0.2)


def generate(model=p, prompts=(PROMPT,), **given):
    """Prompts padded on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (length - len(x)) + list(x) for x in prompts])
    mask = torch.tensor([[0] * (length - len(x)) + [1] * len(x) for x in prompts])
    given = {"do_sample": True, "max_new_tokens": 8, "pad_token_id": PAD, "seed": 1, "top_k": 0, **given}
    return model.generate(ids, attention_mask=mask, custom_generate=smc.generate, **given)


def answers(prompts, **given):
    """The continuations, without padding."""
    length = max(map(len, prompts))
    rows = generate(prompts=prompts, **given)[:, length:].tolist()
    return [tuple(row[: row.index(EOS) + 1] if EOS in row else row) for row in rows]


def sampled(prompts, target=None, method=None, **given):
    target = smc.load(p) if target is None else target
    method = smc.SMC(smc.Draft(smc.load(q), 4), 8) if method is None else method
    given = {"max_tokens": 8, "seed": 1, **given}
    runs = smc.sample(target, [list(x) for x in prompts], method=method, progress=False, **given)
    return [run.sample(on="tokens") for run in runs]


# ---- honoured

RAGGED = [PROMPT, [5], [2, 3, 4], [9, 8, 7, 6, 5]]


def test_the_tokens_are_those_of_sample():
    assert answers(RAGGED, draft=q) == sampled(RAGGED)
    method = smc.SMC(smc.Draft(smc.load(q), 2, strictness=0.5), 3)
    assert answers(RAGGED, draft=q, num_particles=3, draft_tokens=2, strictness=0.5) == sampled(RAGGED, method=method)
    assert answers(RAGGED) == sampled(RAGGED, method=smc.Autoregressive())
    assert len(set(answers([PROMPT] * 4))) > 1
    assert answers(RAGGED, seed=2) != answers(RAGGED, seed=1)


def test_assistant_model_is_the_draft():
    assert answers([PROMPT], assistant_model=q) == answers([PROMPT], draft=q)
    with pytest.raises(smc.InvalidOption, match="two names of one thing"):
        generate(assistant_model=q, draft=p)


def test_powers_and_potentials():
    few = smc.potential(lambda x: -0.5 * sum(t == 3 for t in x), on="tokens", name="few")
    target = smc.load(p) ** 2 * few
    assert answers([PROMPT], draft=q, alpha=2.0, potential=few) == sampled([PROMPT], target)
    local = smc.SMC(smc.Local(), 4)
    assert answers([PROMPT], num_particles=4, alpha=2.0, potential=few) == sampled([PROMPT], target, local)


def test_greedy_is_greedy_and_the_default():
    greedy = p.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, pad_token_id=PAD)
    for given in ({"do_sample": False}, {"do_sample": None}, {"do_sample": False, "draft": q}):
        assert torch.equal(generate(**given), greedy)


def test_length_caps():
    assert max(map(len, answers(RAGGED, max_new_tokens=3))) == 3
    capped = answers(RAGGED, max_new_tokens=None, max_length=9)
    assert capped == sampled(RAGGED, method=smc.Autoregressive(), max_tokens=4)  # 9 less the longest prompt


@pytest.mark.parametrize("law", [{"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8}])
def test_the_law_of_a_token_is_that_of_transformers(law):
    warpers = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    with torch.inference_mode():
        scores = p(torch.tensor([PROMPT])).logits[:, -1]
    for name, warper in warpers.items():
        scores = warper(law[name])(None, scores) if name in law else scores
    probabilities = scores.softmax(-1)[0].double().numpy()
    for draft in (None, q):
        drawn = generate(num_return_sequences=400, max_new_tokens=1, draft=draft, strictness=1.0, **law)[:, -1]
        assert_frequencies(np.bincount(drawn, minlength=V), probabilities / probabilities.sum())


def test_transformers_own_default_for_top_k_is_kept():
    wide, ids = tiny("llama", vocab=80, spread=0.05), torch.tensor([PROMPT] * 300)
    with torch.inference_mode():
        kept = set(wide(ids[:1]).logits[0, -1].topk(50).indices.tolist())
    given = {"do_sample": True, "max_new_tokens": 1, "custom_generate": smc.generate, "seed": 1}
    assert set(wide.generate(ids, **given)[:, -1].tolist()) <= kept
    assert not set(wide.generate(ids, **given, top_k=0)[:, -1].tolist()) <= kept


def test_several_sequences_of_each_prompt_are_independent():
    rows = answers(RAGGED, num_return_sequences=2, draft=q)
    assert rows == sampled([x for x in RAGGED for _ in range(2)])
    assert rows[0] != rows[1]


@pytest.mark.parametrize("eos", [5, [5, 6]])
def test_eos_ids_of_the_call_end_texts_and_pad(eos):
    ends = {eos} if isinstance(eos, int) else set(eos)
    rows = generate(prompts=[PROMPT] * 20, eos_token_id=eos, max_new_tokens=12)[:, 3:].tolist()
    stopped = [row for row in rows if ends & set(row)]
    assert stopped
    for row in stopped:
        n = min(row.index(e) for e in ends if e in row)
        assert set(row[n + 1 :]) <= {PAD}
    assert any(EOS in row[:-1] and row[row.index(EOS) + 1] != PAD for row in rows)  # no end any more
    padded = generate(prompts=[PROMPT] * 20, eos_token_id=eos, max_new_tokens=12, pad_token_id=7)[:, 3:].tolist()
    assert any(row[-1] == 7 for row in padded)


def test_a_generation_config_is_merged_as_always():
    law = {"do_sample": True, "temperature": 0.6, "top_k": 0}
    config = GenerationConfig(**law, max_new_tokens=5, pad_token_id=PAD, eos_token_id=EOS)
    ids = torch.tensor([PROMPT])
    found = p.generate(ids, generation_config=config, custom_generate=smc.generate, seed=1)
    assert torch.equal(found, generate(max_new_tokens=5, temperature=0.6))


def test_a_dict_holds_sequences_and_posteriors():
    out = generate(draft=q, return_dict_in_generate=True, prompts=RAGGED)
    assert torch.equal(out.sequences, generate(draft=q, prompts=RAGGED))
    assert torch.equal(out["sequences"], out.sequences)
    assert [posterior.N for posterior in out.posteriors] == [8] * 4
    assert out.posteriors[0].sample(on="tokens") == sampled(RAGGED)[0]


class Collecting(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        assert not self.ended
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("given", [{}, {"draft": q}, {"do_sample": False}])
def test_a_streamer_gets_the_settled_tokens(given):
    streamer = Collecting()
    whole = generate(streamer=streamer, **given)
    assert streamer.ended
    assert streamer.pieces[0] == PROMPT
    assert [*itertools.chain(*streamer.pieces)] == whole[0].tolist()
    assert torch.equal(whole, generate(**given))
    if not given:
        assert len(streamer.pieces) == 1 + whole.shape[1] - 3  # a token at a time


def test_a_streamer_takes_one_sequence():
    with pytest.raises(smc.InvalidOption, match="one sequence; this batch has 2"):
        generate(streamer=Collecting(), num_return_sequences=2)


# ---- refused, by name

REFUSED = {
    "repetition_penalty": 1.2,
    "num_beams": 2,
    "min_p": 0.1,
    "typical_p": 0.9,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "min_new_tokens": 3,
    "min_length": 6,
    "max_time": 5.0,
    "output_scores": True,
    "output_logits": True,
    "suppress_tokens": [3],
    "guidance_scale": 1.5,
    "renormalize_logits": True,
    "num_assistant_tokens": 5,
    "prompt_lookup_num_tokens": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_an_error_naming_it(name):
    with pytest.raises(smc.InvalidOption, match=rf"cannot honour .*{name}="):
        generate(**{name: REFUSED[name]})


def test_every_field_of_the_config_is_honoured_or_refused_also_one_of_a_later_version():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | {"of_a_later_version"}
    for name, value in itertools.product(fields - options.HONOURED, (123456, "anything", [3])):
        config = GenerationConfig()
        setattr(config, name, value)
        with pytest.raises(smc.InvalidOption, match=name):
            options.check_config(config)
    options.check_config(GenerationConfig())
    options.check_config(GenerationConfig(**GenerationConfig._get_default_generation_params()))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor function"),
        ({"logits_processor": [TopKLogitsWarper(3)]}, "logits_processor TopKLogitsWarper"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [3]}, "PrefixConstrainedLogitsProcessor"),
        ({"stopping_criteria": [lambda ids, scores: False]}, "stopping_criteria function"),
        ({"stopping_criteria": [EosTokenCriteria(7)]}, "stopping_criteria EosTokenCriteria"),
        ({"negative_prompt_ids": torch.tensor([[3]])}, "negative_prompt_ids"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"draft_tokens": 3}, "draft_tokens needs a draft"),
    ],
)
def test_other_arguments_that_cannot_be_honoured(given, name):
    with pytest.raises(smc.InvalidOption, match=name):
        generate(**given)


def test_inputs_that_would_change_the_model_are_refused():
    ids = torch.tensor([PROMPT])
    with pytest.raises(smc.InvalidOption, match="inputs_embeds"):
        p.generate(ids, inputs_embeds=p.get_input_embeddings()(ids), max_new_tokens=3, custom_generate=smc.generate)
    with pytest.raises(smc.InvalidOption, match="position_ids"):
        p.generate(ids, position_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=3, custom_generate=smc.generate)
    with pytest.raises(smc.InvalidOption, match="padded on the left"):
        p.generate(ids, attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=3, custom_generate=smc.generate)


def test_answers_of_several_lengths_need_something_to_pad_with():
    """A text that stops needs no EOS id, by which transformers pads where nothing else is said."""
    with pytest.raises(smc.InvalidOption, match="set pad_token_id"):
        padded(torch.tensor([[1], [1]]), [(1,), (1, 2)], GenerationConfig())
    assert padded(torch.tensor([[1]]), [(1, 2)], GenerationConfig()).tolist() == [[1, 1, 2]]


# ---- wrapped once, and anew where weights changed


def test_a_model_is_wrapped_once_and_forgotten_with_it():
    model = tiny("llama", seed=7)
    first = wrapped(model)
    assert wrapped(model) is first
    held = weakref.ref(first)
    del model, first
    gc.collect()
    assert held() is None


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()


def _replace(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))


CHANGES = {
    "a training step": _train,
    "data in place": lambda m: m.model.layers[0].mlp.up_proj.weight.data.neg_(),
    "data replaced": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.flip(0)),
    "a parameter replaced": _replace,
    "a state loaded": lambda m: m.load_state_dict(tiny("llama", seed=9).state_dict()),
    "one number": lambda m: m.model.norm.weight.data[3].mul_(-4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change):
    model = tiny("llama", seed=8)
    before, first = generate(model, prompts=[PROMPT] * 4), wrapped(model)
    CHANGES[change](model)
    after = generate(model, prompts=[PROMPT] * 4)
    assert wrapped(model) is not first
    runs = smc.sample(smc.load(model), [PROMPT] * 4, max_tokens=8, seed=1, progress=False)
    for row, run in zip(after[:, 3:].tolist(), runs, strict=True):
        assert tuple(row[: len(run.tokens[0])]) == run.tokens[0]
    assert before.shape != after.shape or not torch.equal(before, after)


# ---- with a tokenizer

TEXTS = ["The sea", "A"]


@pytest.fixture(scope="module")
def worded():
    """A tiny model that speaks the demo model's vocabulary, and the tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(demo_folder(), padding_side="left")
    except smc.UnsupportedModel as error:
        pytest.skip(f"needs the demo model: {error}")
    model = tiny("llama", vocab=len(tokenizer), spread=0.05)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def test_stop_strings_end_a_text(worded):
    model, tokenizer = worded
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    given = {"max_new_tokens": 24, "do_sample": True, "custom_generate": smc.generate, "seed": 3}
    rows = model.generate(**inputs, **given, stop=["e"], processing_class=tokenizer)
    assert rows.shape[1] < model.generate(**inputs, **given).shape[1]
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    law = smc.load((model, tokenizer)).at(top_k=50)
    runs = smc.sample(law, prompts, max_tokens=24, stop=["e"], seed=3, progress=False)
    start = inputs["input_ids"].shape[1]
    for row, run in zip(rows[:, start:].tolist(), runs, strict=True):
        assert tuple(row[: len(run.tokens[0])]) == run.tokens[0]
        assert "e" in tokenizer.decode(row) and "e" not in tokenizer.decode(row[: len(run.tokens[0]) - 1])
    with pytest.raises(smc.PromptError, match="no tokenizer"):
        model.generate(**inputs, **given, stop=["e"])
    with pytest.raises(ValueError, match="tokenizer"):  # transformers itself: it loses the tokenizer on the way
        model.generate(**inputs, **given, stop_strings=["e"], tokenizer=tokenizer)


def test_a_text_streamer_in_a_thread(worded):
    model, tokenizer = worded
    inputs = tokenizer("The sea", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    given = {"max_new_tokens": 12, "do_sample": True, "custom_generate": smc.generate, "seed": 3}
    worker = threading.Thread(target=model.generate, kwargs={**inputs, **given, "streamer": streamer})
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == tokenizer.decode(model.generate(**inputs, **given)[0, inputs["input_ids"].shape[1] :])


def test_a_real_pipeline(worded):
    model, tokenizer = worded
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    given = {"max_new_tokens": 8, "do_sample": True, "return_full_text": False}
    draft = tiny("llama", vocab=len(tokenizer), seed=1, spread=0.05)
    own = {"custom_generate": smc.generate, "draft": draft, "seed": 4}
    [found], [other] = writer(TEXTS, **given, **own)
    assert [found["generated_text"]] == [writer("The sea", **given, **own)[0]["generated_text"]]
    assert found["generated_text"] != other["generated_text"]
    with pytest.raises(smc.InvalidOption, match="repetition_penalty"):
        writer("The sea", **given, **own, repetition_penalty=1.3)
