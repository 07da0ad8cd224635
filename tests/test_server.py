"""The server by the official client: answers, streams, constraints, limits, leaving and stopping."""

import asyncio
import json
import re
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
from serving import Typewriter, quiet, served

import smcdecode as smc
from smcdecode.integrations.server.limits import Limits

P, Q = Typewriter(1, "p"), Typewriter(2, "q")
METHOD = smc.SMC(smc.Draft(Q, block=3, strictness=0.3), particles=4)
LIMITS = Limits(lanes=3, queue=6, max_tokens=200, particles=16, block=8, choices=6, body=5000, seconds=20.0)
ASK = {"model": "p", "prompt": "ab", "max_tokens": 12, "seed": 7}
CHAT = {"model": "p", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 12, "seed": 7}
LONG = {"model": "slow", "prompt": "ab", "max_tokens": 400}


def own(**options):
    return {"extra_body": {"smc": options}}


def gauges(client):
    """The numbers of /metrics that have no labels."""
    lines = client.get(f"{str(client.base_url).removesuffix('v1/')}metrics", cast_to=str).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] not in "#")}


def client_of(url, key="none"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server():
    with served(P, METHOD, limits=LIMITS) as (url, runner), client_of(url) as client:
        yield client, runner
        quiet(runner)
        runner.scheduler.audit()


@pytest.fixture(scope="module")
def client(server):
    return server[0]


def locally(target, prompt, method=METHOD, **options):
    return smc.sample(target, prompt, method=method, progress=False, **{"max_tokens": 12, "seed": 7, **options})


# ---- answers


def test_a_completion_is_what_sample_gives(client):
    answer = client.completions.create(**ASK, logprobs=0)
    expected = locally(P, "ab")
    [choice] = answer.choices
    tokens = expected.sample(on="tokens")
    assert (answer.object, answer.model, choice.text) == ("text_completion", "p", expected.text)
    assert choice.finish_reason == ("length" if len(tokens) == 12 and tokens[-1] else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, len(tokens))
    assert choice.smc["log_z"] == pytest.approx(expected.log_z)
    assert choice.smc["ess"] == pytest.approx(expected.ess)
    assert choice.smc["particles"] == 4 and choice.smc["seed"] == 7 and "ESS" in choice.smc["trust"]
    assert "".join(choice.logprobs.tokens) == choice.text
    law, before = P.log_p_next((ord("a") - 31,)), ord("b") - 31
    for token, score in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True):
        assert score == pytest.approx(law((before,))[ord(token) - 31], abs=1e-4)
        before = ord(token) - 31


def test_options_reach_the_target_and_the_method(client):
    answer = client.completions.create(
        **ASK, temperature=0.8, top_p=0.9, **own(alpha=2.0, particles=3, block=2, strictness=1.0, top_k=50)
    )
    method = smc.SMC(smc.Draft(Q, block=2, strictness=1.0), particles=3)
    expected = locally(P.at(temperature=0.8, top_k=50, top_p=0.9) ** 2, "ab", method)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].smc["log_z"] == pytest.approx(expected.log_z)


def test_a_chat_and_its_log_probabilities(client):
    answer = client.chat.completions.create(**CHAT, logprobs=True)
    [choice] = answer.choices
    expected = locally(P, [{"role": "user", "content": "ab"}])
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert answer.usage.prompt_tokens == 3
    assert "".join(bytes(t.bytes).decode() for t in choice.logprobs.content) == expected.text
    assert all(t.logprob <= 0 for t in choice.logprobs.content)


def test_one_seed_one_answer_and_none_draws_one(client):
    ask = lambda seed: client.completions.create(**{**ASK, "seed": seed}).choices[0]  # noqa: E731
    assert ask(3).text == ask(3).text != ask(4).text
    first, second = ask(None), ask(None)
    assert first.smc["seed"] != second.smc["seed"]
    assert ask(first.smc["seed"]).text == first.text


def test_n_answers_are_independent_runs(client):
    answer = client.completions.create(**ASK, n=3)
    runs = locally(P, ["ab"] * 3)
    assert [choice.text for choice in answer.choices] == [run.text for run in runs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == sum(len(run.sample(on="tokens")) for run in runs)


def test_many_prompts_as_texts_or_ids(client):
    answer = client.completions.create(**{**ASK, "prompt": ["ab", "c"]}, n=2)
    ids = client.completions.create(**{**ASK, "prompt": [[66, 67], [68]]}, n=2)
    runs = locally(P, ["ab", "ab", "c", "c"])
    assert [c.text for c in answer.choices] == [c.text for c in ids.choices] == [run.text for run in runs]
    assert answer.usage.prompt_tokens == 3


def test_prompts_that_begin_alike_are_read_once(client):
    read = lambda: gauges(client)["smcdecode_prompt_tokens_read"]  # noqa: E731
    system = "be brief. " * 13  # 130 tokens, two whole pieces of 64
    before = read()
    first = client.completions.create(**{**ASK, "prompt": system + "ab"}, n=2)
    assert read() - before == 132 + 4
    again = client.completions.create(**{**ASK, "prompt": system + "cab"})
    assert read() - before == 132 + 4 + 5
    assert [c.text for c in first.choices] == [run.text for run in locally(P, [system + "ab"] * 2)]
    assert again.choices[0].text == locally(P, system + "cab").text
    assert gauges(client)["smcdecode_pages_kept"] >= 128


def test_a_stop_string_ends_the_text_and_is_not_shown(client):
    whole = client.completions.create(**{**ASK, "max_tokens": 30}).choices[0].text
    stop = whole[4:6]
    choice = client.completions.create(**{**ASK, "max_tokens": 30}, stop=[stop, "never"]).choices[0]
    expected = locally(P, "ab", max_tokens=30, stop=[stop, "never"])
    assert choice.text == expected.text and stop not in choice.text
    assert choice.finish_reason == ("stop" if len(expected.sample(on="tokens")) < 30 else "length")


# ---- streams


def test_a_stream_of_a_chat_is_the_answer_piece_by_piece(client):
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    *told, bill = chunks
    assert bill.choices == [] and bill.usage == whole.usage
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in told) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert told[-1].choices[0].smc == whole.choices[0].smc
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1


def test_a_stream_of_completions_interleaves_its_choices(client):
    whole = client.completions.create(**ASK, n=3)
    texts = ["", "", ""]
    for chunk in client.completions.create(**ASK, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_single_chain_is_streamed_as_it_is_written(client):
    method = smc.SMC(smc.Draft(Q, block=3, strictness=1.0), particles=1)
    seed = next(s for s in range(100) if len(locally(P, "ab", method, seed=s, max_tokens=30).tokens[0]) == 30)
    ask = {**ASK, "max_tokens": 30, "seed": seed, **own(particles=1, strictness=1.0)}
    chunks = list(client.completions.create(**ask, stream=True))
    assert len(chunks) - 1 >= 30 / 4  # a block and a bonus token at most in each


# ---- constraints


def test_json_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": True}}
    ask = {**CHAT, "max_tokens": 150, "response_format": wanted}
    answer = client.chat.completions.create(**ask)
    value = json.loads(answer.choices[0].message.content)
    assert 0 <= value["a"] <= 99 and value["b"] in "xy"
    expected = locally(P * smc.JsonSchema(schema), [{"role": "user", "content": "ab"}], max_tokens=150)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].smc["log_z"] == pytest.approx(expected.log_z, abs=1e-3)


def test_a_pattern_and_a_grammar(client):
    answer = client.completions.create(**ASK, **own(regex="[0-9]{3}-[a-f]{2}"))
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.choices[0].text)
    answer = client.completions.create(**ASK, **own(grammar='start: ("yes" | "no")+ "."'))
    assert re.fullmatch(r"(yes|no)+\.", answer.choices[0].text)
    answer = client.completions.create(**ASK, **own(grammar='start: "a" start "b" | "c"', parser="earley", alpha=2.0))
    assert re.fullmatch("a*cb*", answer.choices[0].text)


def test_when_every_particle_dies_the_client_hears_why(client):
    with pytest.raises(openai.UnprocessableEntityError, match="all 4 particles died") as caught:
        client.completions.create(**{**ASK, "max_tokens": 2}, **own(regex="[0-9]{5}"))
    assert caught.value.code == "no_survivors"
    with pytest.raises(openai.APIError, match="all 4 particles died"):
        list(client.completions.create(**{**ASK, "max_tokens": 2}, stream=True, **own(regex="[0-9]{5}")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "("}, "malformed|unterminated|missing"),
        ({"regex": "(?=a)"}, "no token masks|cannot be turned|ookahead"),
        ({"grammar": "start: nothing"}, "Lark refuses the grammar"),
        ({"grammar": "%import .secrets.KEY\nstart: KEY"}, "from no file"),
        ({"grammar": "start: " + "(" * 900 + '"a"' + ")" * 900}, "not read within|cannot be read|too large"),
        ({"regex": "a" * 3000}, "at most 2000 are read here"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused(options, reason, server):
    limits = Limits(lanes=1, constraint=2000)
    with served(P, METHOD, limits=limits) as (url, _), client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match=reason):
            client.completions.create(**ASK, **own(**options))
        assert client.completions.create(**ASK).choices


def test_a_pattern_that_backtracks_for_ever_costs_its_own_client_only(client):
    trap = {"max_tokens": 40, **own(regex="(?:(a|a)*é)|a{40}")}  # re tries 2⁴⁰ ways to the é that no token spells
    start = time.perf_counter()
    with pytest.raises(openai.UnprocessableEntityError, match="not judged within"):
        client.completions.create(**{**ASK, **trap})
    assert client.completions.create(**ASK).choices
    assert time.perf_counter() - start < 30


# ---- refusals


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 2}, "logprobs"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": float("nan")}, "temperature|JSON compliant|parsing"),
        ({"n": 7}, "at most 6 answers"),
        ({"max_tokens": 300}, "max_tokens is at most 200"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [1, 999]}, "999 in the prompt is outside"),
        ({"prompt": "a" * 400, "max_tokens": 200}, "more than the 512 positions"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        (own(particles=17), "particles are at most 16"),
        (own(block=9), "block is at most 8"),
        (own(strictness=2.0), "strictness must lie in"),
        (own(strictness=0.0) | {"top_p": 0.5, "temperature": 0}, "greedy"),
        (own(alpha=2.0) | {"temperature": 0}, "greedy"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(client, options, named):
    with pytest.raises((openai.BadRequestError, ValueError), match=named):
        client.completions.create(**{**ASK, **options})


def test_chats_refuse_tools_and_alternatives_by_name(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for options, named in (({"tools": tools}, "tools"), ({"logprobs": True, "top_logprobs": 3}, "top_logprobs")):
        with pytest.raises(openai.BadRequestError, match=f"{named}: this server does not support it"):
            client.chat.completions.create(**CHAT, **options)
    with pytest.raises(openai.BadRequestError, match="nobody may speak"):
        client.chat.completions.create(**{**CHAT, "messages": [{"role": "nobody", "content": "a"}]})
    with pytest.raises(openai.BadRequestError, match="without stream"):
        client.chat.completions.create(**CHAT, logprobs=True, stream=True)


def test_harmless_fields_are_taken(client):
    harmless = {"frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "user": "me", "logprobs": None}
    texts = [client.completions.create(**ASK, **options).choices[0].text for options in (harmless, {})]
    assert texts[0] == texts[1]
    client.chat.completions.create(**CHAT, tools=[], tool_choice="none", top_logprobs=0, store=False)


def test_models_health_and_metrics(client):
    assert [model.id for model in client.models.list()] == ["p"]
    with pytest.raises(openai.NotFoundError, match="has the model p"):
        client.completions.create(**{**ASK, "model": "gpt"})
    root = str(client.base_url).removesuffix("v1/")
    assert client.get(f"{root}health", cast_to=object) == {"status": "ok"}
    text = client.get(f"{root}metrics", cast_to=str)
    assert 'smcdecode_responses_total{path="/v1/completions",status="200"}' in text
    assert "smcdecode_pages_used 0.0" in text


def test_a_body_that_is_too_long(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{**ASK, "prompt": "a" * 6000})
    assert caught.value.status_code == 413


def test_a_key_is_asked_for():
    with served(P, METHOD, api_key="sesame", limits=LIMITS) as (url, _):
        with client_of(url, "sesame") as client:
            assert client.completions.create(**ASK).choices
        with client_of(url, "sesam") as client, pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            client.models.list()


# ---- many at once, leaving, stopping


SLOW = Typewriter(1, "slow", pace=0.005)


@pytest.fixture
def slow():
    limits = Limits(lanes=2, queue=4, max_tokens=400, seconds=30.0)
    with served(SLOW, smc.SMC(smc.Local(), 2), limits=limits) as (url, runner), client_of(url) as client:
        yield client, runner
        quiet(runner)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages_at_once(slow, stream):
    client, runner = slow
    pool = runner.scheduler.stores.pool

    async def leave():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as own:
            ask = asyncio.ensure_future(own.completions.create(**LONG, stream=stream))
            if stream:
                await (await ask).close()
                return
            while not pool.used:
                await asyncio.sleep(0.005)
            ask.cancel()

    asyncio.run(leave())
    wait_until(lambda: runner.live == 0)
    assert pool.used == 0
    assert runner.scheduler.stats.tokens == 0, "it ran to its end"
    assert client.completions.create(**{**LONG, "max_tokens": 3}).choices


def test_more_than_the_queue_holds_are_turned_away(slow):
    client, runner = slow
    streams = [client.completions.create(**LONG, stream=True) for _ in range(4)]
    wait_until(lambda: runner.live == 4)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**LONG)
    assert caught.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    wait_until(lambda: runner.live == 0)
    assert client.completions.create(**{**LONG, "max_tokens": 3}).choices


def test_an_answer_that_takes_too_long_is_ended():
    limits = Limits(max_tokens=400, seconds=0.3)
    with served(SLOW, smc.SMC(smc.Local(), 2), limits=limits) as (url, runner), client_of(url) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**LONG)
        assert caught.value.status_code == 504
        quiet(runner)


def test_stopping_lets_answers_finish():
    got = []

    def ask(url):
        with client_of(url) as client:
            got.append(client.completions.create(**{**LONG, "max_tokens": 60}))

    with served(SLOW, smc.SMC(smc.Local(), 2)) as (url, runner):
        thread = threading.Thread(target=ask, args=[url])
        thread.start()
        wait_until(lambda: runner.live == 1)
    thread.join()  # leaving served() asked the server to stop
    assert got[0].choices[0].text
    assert not runner.alive and runner.scheduler.stores.pool.used == 0


def test_a_short_soak():
    """A few seconds of what benchmarks/soak.py does for minutes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        from soak import Clients
    finally:
        sys.path.pop(0)
    limits = Limits(lanes=4, queue=8, max_tokens=120)
    p = Typewriter(1, "soaked", pace=0.001)
    with served(p, smc.SMC(smc.Draft(Q, block=3), particles=4), limits=limits) as (url, runner):
        tally = asyncio.run(Clients(url, "soaked", longest=120).run(16, 6.0))
        quiet(runner)
        runner.scheduler.audit()
    assert not tally.wrong, tally.wrong
    assert tally.turned_away > 0
    assert {"short", "long", "streamed", "constrained", "cancelled", "malformed"} <= set(tally.seconds)
