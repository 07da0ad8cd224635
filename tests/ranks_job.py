"""What torchrun starts for test_ranks.py: every rank does all of it, and writes down what it saw."""

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from constraints import NoStutter

import smcdecode as smc
from smcdecode import cli
from smcdecode.engine.ranks import together
from smcdecode.engine.scoring import log_probs
from smcdecode.engine.wire import Wire

DRAFTS = {"llama": "draft", "qwen2": "bare", "gemma3": "bare"}  # of the same vocabulary, words or bare ids
PROMPTS = [[3, 4, 5], [2, 2]]
TOKENS, ALPHA = 8, 2


def load(folder, family, **options):
    return smc.load(folder / family, dtype=torch.float32, **options)


def runs(p, q):
    """Posteriors by method, of the same target however it is held; all methods for one family."""
    methods = {
        "autoregressive": (p, smc.Autoregressive()),
        "drafted": (p**ALPHA, smc.SMC(smc.Draft(q, block=3, strictness=0.3), particles=4)),
        "speculative": (p, smc.Speculative(q, block=3)),
        "masked": (p**ALPHA * NoStutter(), smc.SMC(smc.Local(), particles=4)),
    }
    for name in methods if p.name == "llama" else ("drafted",):
        target, method = methods[name]
        found = smc.sample(target, PROMPTS, method=method, max_tokens=TOKENS, seed=1, page_size=2, progress=False)
        yield name, [posterior.to_json() for posterior in found]


def drafted(p, q):
    found = smc.sample(p, PROMPTS, method=smc.Speculative(q, block=3), max_tokens=TOKENS, seed=1, progress=False)
    return [posterior.tokens for posterior in found]


def refusal(work):
    """The message of the error that some work raises."""
    try:
        work()
    except smc.SMCDecodeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def log_p(p):
    """The log-probabilities of the tokens of a random text."""
    ids = torch.randint(0, 16, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    return together(p, lambda: log_probs(p.as_target(), [2], ids))


def equality(folder, rank):
    found = {}
    for family in DRAFTS:
        p, q = load(folder, family, parallel=True), load(folder, DRAFTS[family])
        heads = [layer.kv_heads for layer in p.layout.layers]
        here = sum(x.to_local().numel() if hasattr(x, "to_local") else x.numel() for x in p._module.parameters())
        found[family] = {
            "runs": dict(runs(p, q)), "log_p": log_p(p), "stores": len(p._shards._stores), "heads": heads, "here": here,
            "whole": p.parameters, "repr": repr(p),
        }  # fmt: skip
    return found


def drafts(folder, rank):
    """Tokens by drafts that are split, or a part of the split target."""
    p = load(folder, "llama", parallel=True)
    models = {"split": load(folder, "draft", parallel=True), "skip": smc.LayerSkip(p, layers=1)}
    return {name: drafted(p, q) for name, q in models.items()}


def other_calls(folder, rank):
    p, q = load(folder, "llama", parallel=True), load(folder, "draft")
    method = smc.SMC(smc.Draft(q, block=2), particles=3)
    drawn = smc.sample(p, [2], max_tokens=4, progress=False)
    exact = smc.exact(p**2, [2, 3], method=method, sweeps=2, max_tokens=6, seed=3, progress=False)
    pieces = list(smc.stream(p, [2, 3], on="tokens", method=method, max_tokens=8, seed=3))
    with smc.stream(p, [2, 3], on="tokens", max_tokens=8, seed=3) as left:
        first = next(left)
        nested = refusal(lambda: smc.sample(p, [2], max_tokens=2, seed=1, progress=False))
    return {
        "seed": drawn.asked.seed, "tokens": drawn.tokens, "exact": repr(exact), "pieces": pieces, "first": first,
        "nested": nested,
    }  # fmt: skip


def refusals(folder, rank):
    p = load(folder, "llama", parallel=True)
    short = {"max_tokens": 4, "progress": False}
    heard = []

    def touchy(text):
        heard.append(text)
        if len(heard) > 3:
            raise ValueError("enough")
        return 0.0

    psi = smc.potential(touchy, on="tokens", name="touchy")
    found = {
        "seeds": refusal(lambda: smc.sample(p, [2], seed=rank, **short)),
        "prompts": refusal(lambda: smc.sample(p, [2, rank + 2], seed=1, **short)),
        "targets": refusal(lambda: smc.sample(p ** (rank + 1), [2], seed=1, **short)),
        "empty": refusal(lambda: smc.sample(p, [], seed=1, **short)),
        "potential": refusal(lambda: smc.sample(p * psi, [2], method=smc.SMC(particles=4), seed=1, **short)),
        "heads": refusal(lambda: load(folder, "heads", parallel=True)),
        "plan": refusal(lambda: load(folder, "gpt2", parallel=True)),
        "device": refusal(lambda: load(folder, "llama", parallel=True, device="cpu")),
        "twice": refusal(lambda: smc.load(p._module)),
        "outside": refusal(lambda: p.store(4, 1)),
    }
    found["heard"] = len(heard)
    found["after"] = smc.sample(p, [2], seed=1, **short).tokens
    wire = Wire()
    long = list(range(50_000))
    if rank == 0:
        wire.send(long)
    found["long"] = rank == 0 or wire.receive() == long
    wire.patience = 0.3
    if rank:
        time.sleep(2.5)
    else:
        found["late"] = refusal(lambda: wire.exchange(0))
    return found


def command_line(folder, rank):
    words = f"--target {folder / 'llama'} --parallel --draft {folder / 'draft'} --particles 3"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(f"generate {words} --prompt w2 --max-tokens 6 --seed 1".split())
        cli.main(f"generate {words} --prompt w2 --max-tokens 6 --seed 1 --stream".split())
        bad = cli.main(f"generate {words} --prompt w2 --max-tokens 1000".split())
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "bad": bad}


def batching(folder, rank):
    words = f"--target {folder / 'llama'} --draft {folder / 'draft'} --particles 2 --block 2 --max-tokens 6"
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(f"batch {words} --parallel --input {folder / 'in.jsonl'} --output {folder / 'answers'}".split())
        bad = cli.main(f"batch {words} --parallel --ray --input {folder / 'in.jsonl'} --output {folder / 'no'}".split())
    return {"codes": [code, bad], "err": err.getvalue()}


def serving(folder, rank):
    """A client on rank 0 asks twice, one of them what nobody can satisfy, and stops the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    heard = {}

    def ask(body):
        body = {"model": "split", "prompt": "w2", "max_tokens": 6, "seed": 1, **body}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]
        except urllib.error.HTTPError as error:
            return error.code

    def client():
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        heard["answer"], heard["refused"], heard["scored"] = ask({}), ask({"max_tokens": 10**6}), ask({"logprobs": 0})
        os.kill(os.getpid(), 15)

    if rank == 0:
        threading.Thread(target=client).start()
    words = f"--target {folder / 'llama'} --draft {folder / 'draft'} --name split --particles 2 --block 2"
    heard["code"] = cli.main(f"serve {words} --parallel --port {port} --memory 100000000 --max-tokens 16".split())
    return heard


def loss(folder, rank):
    """Rank 1 is killed in the middle of a run; rank 0 hears of it, and cannot go on."""
    p = load(folder, "llama", parallel=True)

    def slow(ids):
        time.sleep(0.02)
        return 0.0

    if rank:
        threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()
    start = time.monotonic()
    psi = smc.potential(slow, on="tokens")
    long = {"method": smc.SMC(particles=2, threshold=0), "max_tokens": 200, "seed": 1, "progress": False}
    found = {"during": refusal(lambda: smc.sample(p * NoStutter(200) * psi, [2], **long))}
    found["after"] = refusal(lambda: smc.sample(p, [2], max_tokens=2, seed=1, progress=False))
    return found | {"seconds": time.monotonic() - start}


PARTS = [equality, drafts, other_calls, refusals, command_line, batching, serving, loss]


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for part in PARTS:
        found = part(folder, rank)
        (folder / f"{part.__name__}{rank}.json").write_text(json.dumps(found, default=list))
    # rank 1 never comes so far


if __name__ == "__main__":
    main()
