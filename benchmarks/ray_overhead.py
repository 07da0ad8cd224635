"""What Ray costs a job on one node: an engine that is an actor, against the same engine in this process.

    python benchmarks/ray_overhead.py [--target demo] [--prompts 64] [--tokens 32] [--rounds 3] [--json out.json]

Both answer the same rows with equally many threads, in turn; the clock starts when the engine has its weights and gets
its rows, and stops at the last answer. Shown are the medians, their ratio, how long each engine took to begin, and
whether all answers were the same. EOS ends texts as it does in jobs, so both write the same tokens.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from common import PROMPTS

from smcdecode.integrations.batch.answering import Answering, Room
from smcdecode.integrations.batch.checkpoints import Checkpoints
from smcdecode.integrations.batch.rows import Row, rows_of
from smcdecode.integrations.ray.pool import Cluster, Pool


class Timed(Pool):
    """A pool that knows when its engine had begun."""

    begun = 0.0

    def _employ(self, engine: Any) -> None:
        self.begun = self.begun or time.perf_counter()
        super()._employ(engine)


def main() -> None:
    """Run both in turn and print their times."""
    options = read_options()
    torch.set_num_threads(options.threads)
    build = Checkpoints(options.target, particles=options.particles)
    room = Room(options.tokens, lanes=options.lanes, memory=options.memory)
    asked = [(f"prompt {i}", {"prompt": f"{i + 1}. {PROMPTS[i % len(PROMPTS)]}"}) for i in range(options.prompts)]
    rows = rows_of(asked, seed=0, defaults={"max_tokens": options.tokens})
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.threads} threads")
    ray.init("local", num_cpus=options.threads, include_dashboard=False, log_to_driver=False)
    here, actor, same = [], [], True
    for round_ in range(options.rounds):
        here.append(in_process(build, room, rows))
        actor.append(by_ray(build, room, rows, options.threads))
        same = same and here[-1].pop("answers") == actor[-1].pop("answers")
        print(f"round {round_ + 1} of {options.rounds}: here {here[-1]}, by Ray {actor[-1]}", flush=True)
    ray.shutdown()
    seconds = [statistics.median(row["seconds"] for row in side) for side in (here, actor)]
    print(
        f"{len(rows)} prompts: here {seconds[0]:.2f} s, by Ray {seconds[1]:.2f} s, ratio {seconds[1] / seconds[0]:.3f}"
    )
    print(f"the same answers: {same}")
    if options.json:
        found = {"options": vars(options), "here": here, "ray": actor, "same": same}
        Path(options.json).write_text(json.dumps(found, indent=1))


def in_process(build: Checkpoints, room: Room, rows: Sequence[Row]) -> dict[str, Any]:
    """The plain loop."""
    start = time.perf_counter()
    answering = Answering(build, room)
    begun = time.perf_counter()
    answers = {answer["id"]: answer for answer in answering.answers(rows)}
    return {"starting": begun - start, "seconds": time.perf_counter() - begun, "answers": answers}


def by_ray(build: Checkpoints, room: Room, rows: Sequence[Row], threads: int) -> dict[str, Any]:
    """One engine, as an actor of this machine's cluster."""
    start = time.perf_counter()
    pool = Timed(ray, build, room, Cluster(cpus=threads), rows)
    answers = {answer["id"]: answer for answer in pool.answers()}
    return {"starting": pool.begun - start, "seconds": time.perf_counter() - pool.begun, "answers": answers}


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--particles", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--memory", type=float, default=2e9, help="bytes of an engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
