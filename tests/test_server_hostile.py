"""Whatever is sent, the server answers with what its OpenAPI document declares, and never with a 500."""

import json
import urllib.error
import urllib.request

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from serving import Typewriter, quiet, served

import smcdecode as smc
from smcdecode.integrations.server.limits import Limits

LIMITS = Limits(lanes=2, queue=50, max_tokens=12, particles=4, block=4, choices=3, constraint=4000, seconds=20.0)
EASY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def url():
    method = smc.SMC(smc.Draft(Typewriter(2, "q"), block=2, strictness=0.3), particles=2)
    with served(Typewriter(1, "p"), method, limits=LIMITS) as (url, runner):
        yield url
        quiet(runner)
        runner.scheduler.audit()


@pytest.fixture(scope="module")
def document(url):
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def declared(document):
    """Of each route that takes a body, the statuses it may answer with, and bodies that its document allows."""
    found = {}
    for path, methods in document["paths"].items():
        if "post" in methods:
            body = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            statuses = {int(status) for status in methods["post"]["responses"]}
            found[path] = (statuses, allowed(body, document["components"]["schemas"]))
    return found


def allowed(schema, named):
    """Values that a schema of the document allows, at the edges of its ranges too; of ``Any``, anything."""
    again = lambda part: allowed(part, named)  # noqa: E731
    if "$ref" in schema:
        return again(named[schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema:
        return st.one_of([again(part) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    low, high = (schema.get(edge, schema.get(f"exclusive{edge.title()}")) for edge in ("minimum", "maximum"))
    match schema.get("type"):
        case "object" if "properties" in schema:
            parts = {name: again(part) for name, part in schema["properties"].items()}
            needed = {name: parts.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=parts)
        case "object":
            inner = schema.get("additionalProperties")
            return st.dictionaries(st.text(max_size=5), again(inner) if isinstance(inner, dict) else ANY, max_size=3)
        case "array":
            return st.lists(again(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=12)
        case "integer":
            return st.integers(low, min(high or 2**64, 2**64)) | st.integers(low if low is not None else -3, 5)
        case "number":
            return st.floats(low, high, exclude_min="exclusiveMinimum" in schema, allow_nan=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.none() | ANY


def test_the_document_declares_the_routes(document):
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(data=st.data(), tame=st.booleans())
@EASY
def test_bodies_made_from_the_openapi_document(url, declared, path, data, tame):
    statuses, bodies = declared[path]
    body = data.draw(bodies)
    if tame:  # so that some are served
        body = {name: value for name, value in body.items() if name in ("prompt", "messages", "seed", "stream", "user")}
        body |= {"model": "p", "max_tokens": 3}
    status, answer = post(url, json.dumps(body).encode(), path)
    event(str(status))
    assert status in statuses and status < 500, (status, answer)


def post(url, body, path="/v1/completions"):
    request = urllib.request.Request(url + path, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


FIELDS = (
    "prompt", "max_tokens", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "logprobs",
    "response_format", "smc", "logit_bias", "best_of", "user", "echo",
)  # fmt: skip
SMC_FIELDS = ("alpha", "top_k", "grammar", "regex", "particles", "block", "strictness", "parser")
bodies = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3) | st.dictionaries(
    st.just("smc"), st.dictionaries(st.sampled_from(SMC_FIELDS), ANY, max_size=2)
)
constraints = st.one_of(
    st.text(max_size=30).map(lambda text: {"smc": {"regex": text}}),
    st.text("()[]{}|*+?.^$\\ab1é", max_size=20).map(lambda text: {"smc": {"regex": text}}),
    st.text('start:ab"|()+* \n%', max_size=30).map(lambda text: {"smc": {"grammar": text}}),
    st.text('ab"|()+* ', max_size=20).map(lambda text: {"smc": {"grammar": f"start: {text}"}}),
    st.dictionaries(
        st.sampled_from(["type", "enum", "pattern", "properties", "items", "$ref", "allOf", "minimum", "format"]),
        ANY,
        max_size=3,
    ).map(lambda made: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": made}}}),
)


@given(bodies | constraints)
@EASY
def test_bodies_of_any_values(url, changed):
    body = {"model": "p", "prompt": "ab", "max_tokens": 3, **changed}
    status, answer = post(url, json.dumps(body).encode())
    assert status in {200, 400, 422}, (status, answer)
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@given(st.binary(max_size=200))
@EASY
def test_bodies_of_any_bytes(url, body):
    status, answer = post(url, body)
    assert status == 400 and json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "p", "prompt": "\\ud800"}',
        b'{"model": "p", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "p", "prompt": "a", "temperature": NaN}',
        b'{"model": "p", "prompt": "a", "temperature": 1e400}',
        b'{"model": "p", "prompt": "a", "smc": {"regex": "\\udfff"}}',
        b'{"model": "p", "prompt": "a", "smc": {"regex": "' + b"(" * 9 + b"a" + b"{99})" * 9 + b'"}}',
        b'{"model": "p", "prompt": "a", "stop": ["", "a"]}',
        b'{"model": "p", "prompt": [[]]}',
        b'{"model": "p", "prompt": []}',
        b'{"model": "p", "prompt": [-1]}',
        b'{"model": "p", "prompt": [true]}',
    ],
)
def test_bodies_made_to_hurt(url, body):
    status, answer = post(url, body)
    assert status in {400, 413} and json.loads(answer)["error"]["message"]


def test_a_schema_of_half_a_character_or_of_the_network_is_refused(url):
    for schema in ({"enum": ["\ud800"]}, {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "file:///etc/hostname"}):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, _ = post(url, json.dumps({"model": "p", "prompt": "a", "response_format": wanted}).encode())
        assert status == 400
