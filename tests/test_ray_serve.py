"""Replicas on a real Ray Serve of this machine: the answers of one server, whatever is killed or taken away."""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import sys
import time
from types import SimpleNamespace

import openai
import pytest
import serving
from serving import Typewriter

import smcdecode as smc
from smcdecode import cli
from smcdecode.integrations.server.app import create_app
from smcdecode.integrations.server.limits import Limits

ray = pytest.importorskip("ray", reason="the tests of replicas need the extra ray")
serve = pytest.importorskip("ray.serve")
cloudpickle = pytest.importorskip("ray.cloudpickle")
online = pytest.importorskip("smcdecode.integrations.ray.online")
router = pytest.importorskip("smcdecode.integrations.ray.router")
front = pytest.importorskip("smcdecode.integrations.ray.front")
Call = pytest.importorskip("smcdecode.integrations.ray.replica").Call

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
LIMITS = Limits(lanes=16, queue=40, max_tokens=400, body=5000)
ASK = {"model": "p", "prompt": "ab", "max_tokens": 12}
NAMES = tuple("abcdefghijklmnop")
LONG = 200  # tokens of a stream that is still written when the next thing is done, on a slow machine too


def method(q):
    return smc.SMC(smc.Draft(q, block=3, strictness=0.3), particles=2)


def make():
    p, q = Typewriter(1, "p", pace=0.02), Typewriter(2, "q")
    return create_app(p, method(q), limits=LIMITS, memory=1 << 26, name="p")


P, Q = Typewriter(1, "p"), Typewriter(2, "q")


def locally(prompt, seed, max_tokens=12):
    return smc.sample(P, prompt, method=method(Q), max_tokens=max_tokens, seed=seed, progress=False).text


@contextlib.contextmanager
def two_replicas():
    """The official client of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for module in (sys.modules[__name__], serving, sys.modules["table"]):
        cloudpickle.register_pickle_by_value(module)
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        app = online.deploy(make, replicas=(2, 2), limits=LIMITS, cpus=0.2, drain=30.0)
        serve.run(app, name="smcdecode", route_prefix="/")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()
        for module in (sys.modules[__name__], serving, sys.modules["table"]):
            cloudpickle.unregister_pickle_by_value(module)


def gauges(client, name):
    """A number of each replica."""
    text = client.get(f"{str(client.base_url).removesuffix('v1/')}metrics", cast_to=str)
    return [float(value) for value in re.findall(rf'^smcdecode_{name}{{replica="\d+"}} (\S+)', text, re.M)]


def answers_streams_and_refusals_are_those_of_one_server(client):
    for seed in range(3):
        answer = client.completions.create(**ASK, seed=seed)
        assert answer.choices[0].text == locally("ab", seed)
    parts = [chunk.choices[0].text for chunk in client.completions.create(**ASK, seed=5, stream=True)]
    assert "".join(parts) == locally("ab", 5)
    assert [model.id for model in client.models.list()] == ["p"]
    with pytest.raises(openai.BadRequestError, match="max_tokens is at most 400 here"):
        client.completions.create(**{**ASK, "max_tokens": 1000})
    with pytest.raises(openai.NotFoundError, match="has the model p"):
        client.completions.create(**{**ASK, "model": "x"})
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{**ASK, "prompt": "a" * 6000})
    assert caught.value.status_code == 413


def prompts_that_begin_alike_go_to_the_replica_that_has_read_them(client):
    before = sum(gauges(client, "prompt_tokens_read"))
    systems = ["be brief. " * 30, "be long and dull. " * 17]
    for i in range(4):
        for system in systems:
            client.completions.create(**{**ASK, "prompt": system + NAMES[i], "max_tokens": 2}, seed=i)
    lengths = [len(system) + 1 for system in systems]
    assert sum(gauges(client, "prompt_tokens_read")) - before == sum(n + 3 * (n - 256) for n in lengths)
    assert sum(n > 0 for n in gauges(client, "pages_kept")) >= 1


def stream(client, prompt, seed, begun):
    """What a stream said, and how it ended."""
    text = ""
    try:
        ask = {**ASK, "prompt": prompt, "max_tokens": LONG}
        for chunk in client.completions.create(**ask, seed=seed, stream=True, extra_body={"smc": {"particles": 1}}):
            text += chunk.choices[0].text
            begun.add(prompt)
    except openai.APIError as error:
        return text, error
    return text, None


def expected(prompt, seed):
    chain = smc.SMC(smc.Draft(Q, block=3, strictness=0.3), particles=1)
    return smc.sample(P, prompt, method=chain, max_tokens=LONG, seed=seed, progress=False).text


def wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def clients_that_leave_free_what_they_held(client):
    chain = {"smc": {"particles": 1}}
    with client.completions.create(**{**ASK, "max_tokens": 400}, stream=True, seed=1, extra_body=chain) as chunks:
        next(chunks)
        assert sum(gauges(client, "live")) == 1
    wait(lambda: sum(gauges(client, "live")) == 0)
    assert sum(gauges(client, "cancelled_total")) == 1


def streaming(client, pool):
    """Sixteen streams that have begun."""
    begun = set()
    found = [pool.submit(stream, client, name, i, begun) for i, name in enumerate(NAMES)]
    wait(lambda: len(begun) == len(NAMES))
    return found


def replicas():
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in a["name"]]
    return [ray.get_actor(name, namespace="serve") for name in sorted(names)]


def a_replica_that_is_killed_ends_its_own_streams_and_no_others(client):
    with concurrent.futures.ThreadPoolExecutor(len(NAMES)) as pool:
        found = streaming(client, pool)
        live = gauges(client, "live")
        assert len(live) == 2 and min(live) > 0
        ray.kill(replicas()[0])
        ends = [future.result() for future in found]
    lost = [error for _, error in ends if error is not None]
    assert len(lost) in live and sum(live) == len(NAMES)
    assert all("the replica that wrote this answer is gone" in str(error) for error in lost)
    for i, (text, error) in enumerate(ends):
        whole = expected(NAMES[i], i)
        assert whole.startswith(text) if error else text == whole
    assert client.completions.create(**ASK, seed=1).choices[0].text == locally("ab", 1), "the other one serves on"


def replicas_that_are_taken_away_finish_their_answers(client):
    with concurrent.futures.ThreadPoolExecutor(len(NAMES)) as pool:
        found = streaming(client, pool)
        serve.delete("smcdecode")
        ends = [future.result() for future in found]
    assert [end for end in ends if end[1] is not None] == []
    assert [text for text, _ in ends] == [expected(name, i) for i, name in enumerate(NAMES)]
    assert replicas() == []


def test_replicas_serve_as_one_server_whatever_is_killed_or_taken_away(monkeypatch):
    """One test, for one cluster."""
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # of Ray Serve, for a machine with other work
    monkeypatch.setenv("RAY_worker_niceness", "0")  # the same
    with two_replicas() as client:
        answers_streams_and_refusals_are_those_of_one_server(client)
        prompts_that_begin_alike_go_to_the_replica_that_has_read_them(client)
        clients_that_leave_free_what_they_held(client)
        a_replica_that_is_killed_ends_its_own_streams_and_no_others(client)
        replicas_that_are_taken_away_finish_their_answers(client)


# ---- without a cluster


class Handle:
    """Replicas that do what they are told, one call after the other."""

    def __init__(self, *does):
        self.does, self.calls, self.cancelled = list(does), [], 0

    def options(self, **_):
        return self

    def broadcast(self, name):
        async def results_async():
            return [f"# TYPE {name} gauge\n{name} {i}.0\n" for i in range(2)]

        return SimpleNamespace(results_async=results_async)

    def remote(self, call):
        self.calls.append(call)
        return Found(self, self.does.pop(0)())


class Found:
    def __init__(self, handle, messages):
        self.handle, self.messages = handle, messages

    def __aiter__(self):
        return self.messages

    def cancel(self):
        self.handle.cancelled += 1


async def dead():
    raise ray.exceptions.ActorDiedError
    yield


async def busy():
    raise ray.serve.exceptions.BackPressureError(1, 2)
    yield


def says(*parts, kind="application/json", then=None, status=200):
    async def messages():
        yield {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}
        for i, part in enumerate(parts):
            yield {"type": "http.response.body", "body": part, "more_body": then is not None or i + 1 < len(parts)}
        if then is not None:
            raise then

    return messages


def forwarded(*does, body=b'{"prompt": "ab"}', path="/v1/completions"):
    """Status, headers and body of the response to a request of replicas that do one thing after the other; those."""
    handle, said = Handle(*does), []
    app = front.Front(handle, most=1000).__serve_build_asgi_app__()
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    call = Call("POST" if path.startswith("/v1") else "GET", path, b"x=1", [(b"authorization", b"Bearer k")], body, ())

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message):
        said.append(message)

    asyncio.run(app(call.scope(), receive, send))
    headers = {name.decode(): value.decode() for name, value in said[0]["headers"]}
    return said[0]["status"], headers, b"".join(message["body"] for message in said[1:]), handle


def code(body):
    return json.loads(body)["error"]["code"]


def test_a_request_is_forwarded_whole_and_asked_again_where_a_replica_dies_before_a_word():
    asked = b'{"prompt": "' + b"a" * 300 + b'"}'
    status, _, body, handle = forwarded(dead, dead, says(b"{", b"}"), body=asked)
    assert (status, body, handle.cancelled, len(handle.calls)) == (200, b"{}", 0, 3)
    for call in handle.calls:
        assert (call.method, call.path, call.query, call.body) == ("POST", "/v1/completions", b"x=1", asked)
        assert call.keys == router.beginnings("a" * 300) != ()
        assert call.headers == [(b"authorization", b"Bearer k")]


def test_what_no_replica_answers_is_told():
    status, headers, body, handle = forwarded(dead, dead, dead, says(b"{}"))
    assert (status, code(body), len(handle.calls)) == (503, "replica_lost", 3) and "retry-after" in headers
    status, _, body, _ = forwarded(busy)
    assert (status, code(body)) == (429, "queue_full")
    status, _, _, handle = forwarded(body=b"a" * 1001)
    assert (status, handle.calls) == (413, [])
    lost = ray.exceptions.ActorDiedError()
    _, _, body, _ = forwarded(says(b"data: 1\n\n", kind="text/event-stream", then=lost))
    assert body.startswith(b"data: 1\n\ndata: {") and code(body[15:]) == "replica_lost"
    with pytest.raises(ray.exceptions.ActorDiedError):  # half an answer that is no stream: the connection breaks
        forwarded(says(b"{", then=lost))


def test_the_numbers_of_all_replicas_are_for_those_whom_one_lets_in():
    status, _, body, _ = forwarded(says(b"one"), path="/metrics")
    assert (status, body.count(b"metrics{replica=")) == (200, 2)
    status, _, body, _ = forwarded(says(b"no", status=401), path="/metrics")
    assert (status, body) == (401, b"no")


def test_bodies_that_are_nothing_have_no_beginning():
    for body in (b"", b"{", b"[]", b"3", b'{"prompt": null}', b'{"messages": 4}', b"[" * 100_000):
        assert front._prompt(body) in ("", "null", "4")


def test_beginnings_are_alike_as_far_as_texts_are():
    text = "x" * 3000
    keys = router.beginnings(text)
    assert len(keys) == 6 and len(set(keys)) == 6  # 256, 512, 1024, …, 2560
    assert router.beginnings(text[:1500] + "y" * 1500)[:3] == keys[:3]
    assert not set(router.beginnings("y" + text)) & set(keys)
    assert router.beginnings("x" * 255) == ()


def choose(queue, sent, keys):
    made = object.__new__(router.PrefixRouter)
    made.initialize_state(slack=3)
    made._replica_queue_len_cache = queue
    for replica, text in sent:
        made.memory.note(router.beginnings(text), replica)
    pending = SimpleNamespace(args=[SimpleNamespace(keys=keys)], routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(made.choose_replicas([SimpleNamespace(replica_id=i) for i in queue], pending))
    return [[replica.replica_id for replica in rank] for rank in ranks]


def test_the_holder_of_the_longest_beginning_comes_first_unless_it_is_busy():
    one, two = "a" * 600, "a" * 300 + "b" * 300
    sent = [("A", one), ("B", two), ("C", "c" * 600)]
    assert choose({"A": 2, "B": 0, "C": 0}, sent, router.beginnings(one)) == [["A"], ["B", "C"]]
    assert choose({"A": 9, "B": 0, "C": 0}, sent, router.beginnings(one)) == [["A", "B", "C"]]
    assert choose({"A": 0, "B": 0, "C": 0}, sent, router.beginnings("a" * 300)) == [["A", "B"], ["C"]]
    assert choose({"B": 0, "C": 0}, sent, router.beginnings(one)) == [["B"], ["C"]], "A is gone"
    assert choose({"A": 0, "B": 0}, sent, router.beginnings("z" * 600)) == [["A", "B"]]
    memory = router.Memory(most=2)
    memory.note([b"1", b"2", b"3"], "A")
    assert memory.holders([b"1"], ["A"]) == set() and memory.holders([b"3"], ["A"]) == {"A"}


def test_numbers_of_many_replicas_are_one_text():
    text = '# HELP a_total What.\n# TYPE a_total counter\na_total{path="x"} 2.0\n'
    told = front.merged([text, text]).decode()
    assert told.count("# TYPE") == 1
    assert 'a_total{path="x",replica="1"} 2.0' in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "demo"}, "give target, memory"),
        ({"target": "demo", "memory": 0.5}, "memory must be bytes for each replica"),
        ({"target": "demo", "memory": "much"}, "memory must be a number"),
        ({"target": "demo", "memory": 1e9, "lanse": 3}, "give target.*got lanse"),
        ({"target": "demo", "memory": 1e9, "replicas": "4:1"}, "with 1 ≤ least ≤ most"),
        ({"target": "demo", "memory": 1e9, "replicas": "many"}, "numbers like 2, or 1:4"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(smc.InvalidOption, match=message):
        online.build(options)


def test_the_command_hands_its_options_over(monkeypatch):
    told = {}
    monkeypatch.setattr(online, "run", lambda options, **place: told.update(options=options, **place))
    asked = "serve --target demo --memory 1e9 --lanes 3 --ray --replicas 1:4 --cpus 2 --port 7"
    assert cli.main(asked.split()) == 0
    assert (told["address"], told["host"], told["port"]) == ("local", "127.0.0.1", 7)
    assert told["options"]["replicas"] == "1:4" and told["options"]["lanes"] == 3 and "draft" not in told["options"]
    assert online.build(told["options"]) is not None
    assert cli.main(["serve", "--target", "demo", "--ray"]) == 0, "half of what is free"
    with pytest.raises(smc.InvalidOption, match="memory must be bytes for each replica"):
        online.build(told["options"])
