"""Many clients of one server at once: short, long, streamed, constrained, cancelled and malformed requests.

Says how many answers there were and how long they took, and what the server held afterwards: no page but those kept of
prompts, no request.

    python benchmarks/soak.py --seconds 120 --clients 32 --target demo
"""

import argparse
import asyncio
import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import openai

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}, "fine": {"type": "boolean"}},
    "required": ["age", "fine"],
    "additionalProperties": False,
}
PROMPTS = ("The sea is", "Once upon a time there was a", "To be or not to be", "I like", "The capital of France is")
SYSTEM = "You answer in one plain sentence, without lists, and you say so where you do not know. " * 4
MALFORMED = (
    (b"{", 400),
    (b'{"model": 1}', 400),
    (b'{"model": "%s", "prompt": "a", "logit_bias": {"1": 2}}', 400),
    (b'{"model": "%s", "prompt": "a", "temperature": -1}', 400),
    (b'{"model": "%s", "prompt": "a", "smc": {"grammar": "start: nothing"}}', 400),
    (b'{"model": "%s", "prompt": "a", "smc": {"particles": 100000}}', 400),
    (b'{"model": "nobody", "prompt": "a"}', 404),
    (b" " * (1 << 21), 413),
)


@dataclasses.dataclass
class Tally:
    """What the clients saw."""

    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    turned_away: int = 0
    wrong: Counter = dataclasses.field(default_factory=Counter)

    def quantile(self, q: float) -> float:
        """Of the seconds of all answers: what was refused or left in the middle is none."""
        every = sorted(x for kind, xs in self.seconds.items() if kind not in ("malformed", "cancelled") for x in xs)
        return every[min(int(q * len(every)), len(every) - 1)] if every else float("nan")

    @property
    def answers(self) -> int:
        """Requests that ended as they should."""
        return sum(map(len, self.seconds.values()))


class Clients:
    """Clients of the server at ``url`` that calls its model ``model``."""

    def __init__(self, url: str, model: str, *, longest: int) -> None:
        self.url, self.model, self.longest = url, model, longest
        self.tally = Tally()

    async def run(self, clients: int, seconds: float, seed: int = 0) -> Tally:
        """So many clients, each with one request after the other, for so many seconds."""
        deadline = time.monotonic() + seconds
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(*(self._client(client, random.Random(seed + i), deadline) for i in range(clients)))
        return self.tally

    async def _client(self, client: openai.AsyncOpenAI, rng: random.Random, deadline: float) -> None:
        kinds = (self.short, self.long, self.streamed, self.constrained, self.cancelled, self.malformed)
        while time.monotonic() < deadline:
            kind = rng.choices(kinds, weights=(4, 2, 3, 2, 2, 2))[0]
            start = time.perf_counter()
            try:
                await kind(client, rng)
                self.tally.seconds.setdefault(kind.__name__, []).append(time.perf_counter() - start)
            except openai.RateLimitError as error:
                self.tally.turned_away += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]) * rng.random())
            except Exception as error:  # everything else is a fault of the server
                self.tally.wrong[f"{kind.__name__}: {error!r}"] += 1

    async def short(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        """A few tokens."""
        prompt = rng.choice(PROMPTS)
        answer = await client.completions.create(model=self.model, prompt=prompt, max_tokens=rng.randint(1, 8))
        assert 1 <= answer.usage.completion_tokens <= 8

    async def long(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        """As many as there may be, of a sharpened target."""
        await client.completions.create(
            model=self.model, prompt=rng.choice(PROMPTS), max_tokens=self.longest, extra_body={"smc": {"alpha": 2.0}}
        )

    async def streamed(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        """Read to the end; all of them begin alike."""
        text, finish = "", None
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rng.choice(PROMPTS)}]
        async for chunk in await client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=24, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason
        assert finish in ("stop", "length"), finish

    async def constrained(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        """JSON of a schema, or a pattern; every particle may die at the cap, which is told."""
        try:
            if rng.random() < 0.5:
                wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
                answer = await client.completions.create(
                    model=self.model,
                    prompt="A person: ",
                    max_tokens=self.longest,
                    extra_body={"response_format": wanted},
                )
                json.loads(answer.choices[0].text)
            else:
                answer = await client.completions.create(
                    model=self.model, prompt="Call", max_tokens=16, extra_body={"smc": {"regex": " [0-9]{3}-[0-9]{4}"}}
                )
                assert re.fullmatch(" [0-9]{3}-[0-9]{4}", answer.choices[0].text)
        except openai.UnprocessableEntityError as error:
            assert "no_survivors" in str(error)

    async def cancelled(self, client: openai.AsyncOpenAI, rng: random.Random) -> None:
        """Leave in the middle."""
        ask = {"model": self.model, "prompt": rng.choice(PROMPTS), "max_tokens": self.longest}
        if rng.random() < 0.5:
            async with await client.completions.create(**ask, stream=True) as stream:
                async for _ in stream:
                    break
        else:
            await asyncio.wait({task := asyncio.ensure_future(client.completions.create(**ask))}, timeout=rng.random())
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()

    async def malformed(self, _: openai.AsyncOpenAI, rng: random.Random) -> None:
        """What must be refused, and only refused."""
        body, wanted = rng.choice(MALFORMED)
        body = body.replace(b"%s", self.model.encode())
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        try:
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            status = int((await reader.readline()).split()[1])
        finally:
            writer.close()
        assert status == wanted, f"{status} where {wanted} was due for {body[:60]!r}"


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def gauges(url: str) -> dict[str, float]:
    """What the server tells of itself."""
    client = openai.OpenAI(base_url=url, api_key="none")
    lines = client.get("/metrics", cast_to=str).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def watch(pid: int, seconds: float, every: float, seen: list[int]) -> None:
    """Note the memory of a process now and then."""
    for _ in range(int(seconds / every)):
        await asyncio.sleep(every)
        seen.append(resident(pid))


async def soak(url: str, pid: int, options: argparse.Namespace) -> tuple[Tally, list[int]]:
    """Run the clients, and watch the server's memory."""
    clients, memory = Clients(url, options.target, longest=options.longest), [resident(pid)]
    await asyncio.gather(
        clients.run(options.clients, options.seconds),
        watch(pid, options.seconds, options.seconds / 8, memory),
    )
    return clients.tally, memory


def report(tally: Tally, memory: list[int], left: dict[str, float]) -> str:
    """The figures."""
    kinds = ", ".join(f"{len(seconds)} {kind}" for kind, seconds in sorted(tally.seconds.items()))
    lines = [
        f"ended as they should   {tally.answers} ({kinds})",
        f"turned away with 429   {tally.turned_away}",
        f"anything else          {dict(tally.wrong) or 'nothing'}",
        f"seconds an answer      p50 {tally.quantile(0.5):.2f}, p99 {tally.quantile(0.99):.2f}",
        f"memory, MiB            {', '.join(f'{m / 2**20:.0f}' for m in memory)}",
        f"left behind            {left['smcdecode_pages_used']:.0f} pages, {left['smcdecode_live']:.0f} requests",
        f"kept of prompts        {left['smcdecode_pages_kept']:.0f} pages of {left['smcdecode_pages']:.0f}",
        f"prompt tokens          {left['smcdecode_prompt_tokens_begun']:.0f}",
        f"of which were read     {left['smcdecode_prompt_tokens_read']:.0f}",
    ]
    return "\n".join(lines)


def main() -> int:
    """Start a server, soak it, print the figures; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--particles", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--queue", type=int, default=24)
    parser.add_argument("--memory", type=float, default=1e9)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = f"serve --target {options.target} --port {port} --particles {options.particles} --lanes {options.lanes}"
    asked += f" --queue {options.queue} --memory {options.memory} --max-tokens {options.longest}"
    server = subprocess.Popen(
        [sys.executable, "-c", "import sys; from smcdecode.cli import main; sys.exit(main())", *asked.split()],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(port, server)
        tally, memory = asyncio.run(soak(url, server.pid, options))
        left = settled(url)
    finally:
        server.terminate()
        code = server.wait()
    print(report(tally, memory, left))
    print(f"exit code on SIGTERM   {code}")
    return int(bool(tally.wrong) or left["smcdecode_pages_used"] > 0)


def wait_for(port: int, server: subprocess.Popen) -> None:
    """Until the server answers."""
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server ended with {server.returncode}")


def settled(url: str, seconds: float = 60.0) -> dict[str, float]:
    """The gauges once nothing runs, or when patience ends."""
    deadline = time.monotonic() + seconds
    while (left := gauges(url))["smcdecode_live"] and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


if __name__ == "__main__":
    sys.exit(main())
