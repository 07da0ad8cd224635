"""What so many machines serve, how long requests wait, what it costs; and whether a real cluster agrees.

    python benchmarks/capacity.py --target demo --lanes 8 --price 2.5
    python benchmarks/capacity.py --check --seconds 120 --target demo

Records cycles of the real engine on this machine, then simulates up to a thousand of its kind. ``--check`` starts Ray
Serve on a cluster of two nodes in this machine, one replica each, sends requests at random times, and prints their
seconds beside the simulated ones. ``--target paced`` is a model whose passes sleep: two replicas do not share a core.
"""

import argparse
import asyncio
import functools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch

import smcdecode as smc
from smcdecode.integrations.server.app import create_app
from smcdecode.integrations.server.limits import Limits
from smcdecode.planner.capacity import Kind, Machine, simulate
from smcdecode.planner.recording import record

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from common import PROMPTS

MACHINES, LOADS = (1, 4, 16, 64, 256, 1000), (0.5, 0.7, 0.8, 0.9, 0.95)
REPLICAS = 2


def model(name: str) -> Any:
    """A target by name."""
    if name != "paced":
        return smc.load(name)
    from serving import Typewriter

    return Typewriter(1, "paced", pace=0.02)


def application(options: argparse.Namespace) -> Any:
    """The server of one replica."""
    limits = Limits(lanes=options.lanes, queue=1000, max_tokens=options.tokens)
    method = smc.SMC(smc.Local(), options.particles)
    return create_app(model(options.target), method, name="model", limits=limits, memory=options.memory)


def recorded(options: argparse.Namespace) -> tuple[Machine, list[Kind]]:
    """How this machine works, and the mix of requests: the prompts in turn, answers of the longest length."""
    torch.set_num_threads(1)
    p, method = model(options.target), smc.SMC(smc.Local(), options.particles)
    machine = record(p, method, PROMPTS, lanes=options.lanes, max_tokens=options.tokens, memory=options.memory, seed=0)
    lengths = [len(p.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return machine, [Kind(length, options.tokens) for length in lengths]


def table(machine: Machine, mix: list[Kind], options: argparse.Namespace) -> None:
    """Print what machines serve and how long requests wait."""
    cycles = ", ".join(f"{g}: {1e3 * machine.seconds(g):.1f}" for g in machine.cycles)
    print(f"ms a cycle by requests   {cycles}")
    print(f"ms a prompt token        {1e3 * machine.reading:.2f}; tokens a cycle {machine.tokens_per_cycle:.2f}")
    each = machine.answers_per_second(mix)
    print(f"one machine, full        {each:.3g} answers/s, {machine.tokens_per_second(mix):.3g} tokens/s")
    print(f"\n{'machines':>8} {'load':>5} {'answers/s':>10} {'wait p50':>9} {'p99':>8} {'total p50':>10} {'cost':>8}")
    for m in MACHINES:
        for load in LOADS:
            found = simulate(machine, mix, machines=m, rate=load * each * m, requests=max(5000, 20 * m))
            waits, totals = np.quantile(found.waits, (0.5, 0.99)), np.quantile(found.totals, 0.5)
            cost = machine.cost(mix, options.price, load)
            print(
                f"{m:8} {load:5.2f} {load * each * m:10.3g} {waits[0]:9.2f} {waits[1]:8.2f} {totals:10.2f} {cost:8.2f}"
            )
    print(f"\nwaits in seconds; cost of a million tokens at {options.price} an hour of one machine")


def check(machine: Machine, mix: list[Kind], options: argparse.Namespace) -> None:
    """Print seconds measured on a cluster of two nodes beside those simulated."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from smcdecode.integrations.ray.online import deploy

    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **small})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    try:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": path})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        limits = Limits(lanes=options.lanes, queue=1000)
        app = deploy(functools.partial(application, options), replicas=(REPLICAS, REPLICAS), limits=limits)
        serve.run(app, name="smcdecode", route_prefix="/")
        full = REPLICAS * machine.answers_per_second(mix)
        columns = ("measured", "p50", "p90", "simulated", "p50", "p90")
        print(f"\n{'load':>5} {'answers':>8} " + " ".join(f"{column:>9}" for column in columns))
        for load in options.loads:
            seen = asyncio.run(drive(f"http://127.0.0.1:{port}/v1", load * full, options))
            found = simulate(machine, mix, machines=REPLICAS, rate=load * full, requests=20_000).totals
            figures = [(np.mean(x), np.quantile(x, 0.5), np.quantile(x, 0.9)) for x in (seen, found)]
            row = " ".join(f"{figure:9.2f}" for of in figures for figure in of)
            print(f"{load:5.2f} {len(seen):8} {row}", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


async def drive(url: str, rate: float, options: argparse.Namespace) -> list[float]:
    """Requests at random times for so many seconds: what each took."""
    rng, seen = np.random.default_rng(0), []
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:

        async def ask(i: int) -> None:
            start = time.perf_counter()
            prompt = PROMPTS[rng.integers(len(PROMPTS))]
            await client.completions.create(model="model", prompt=prompt, max_tokens=options.tokens, seed=i)
            seen.append(time.perf_counter() - start)

        await asyncio.gather(*(ask(-1 - i) for i in range(2 * REPLICAS)))  # both have begun
        seen.clear()
        tasks, deadline = [], time.monotonic() + options.seconds
        while time.monotonic() < deadline:
            tasks.append(asyncio.ensure_future(ask(len(tasks))))
            await asyncio.sleep(rng.exponential(1 / rate))
        await asyncio.gather(*tasks)
    return seen


def main() -> None:
    """Record, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--particles", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--memory", type=float, default=1e9)
    parser.add_argument("--price", type=float, default=1.0, help="of one machine for an hour")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=120, help="of each load of a check")
    parser.add_argument("--loads", type=float, nargs="+", default=(0.3, 0.6, 0.8), help="of a check")
    options = parser.parse_args()
    machine, mix = recorded(options)
    table(machine, mix, options)
    if options.check:
        check(machine, mix, options)


if __name__ == "__main__":
    main()
