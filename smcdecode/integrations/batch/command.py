"""``smcdecode batch``: its options → a job, on this process's engine or on many by Ray."""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from smcdecode.engine.ranks import together
from smcdecode.errors import InvalidOption
from smcdecode.integrations.batch.answering import Build, Room, here
from smcdecode.integrations.batch.checkpoints import Checkpoints
from smcdecode.integrations.batch.job import Source, Tally, run
from smcdecode.integrations.batch.rows import Row, digest, longest, read, rows_of
from smcdecode.integrations.batch.shards import Shards
from smcdecode.integrations.ray.pool import Cluster, pool

__all__ = ["batch"]


def batch(options: argparse.Namespace) -> Tally:
    """Answer the prompts of files into a folder.

    Raises:
        SMCDecodeError: a child of it, with the reason: before anything runs, or with all that was written whole.
    """
    if options.parallel and options.ray is not None:
        raise InvalidOption(
            "--parallel splits one model over torchrun's processes, and --ray gives each engine a whole one"
        )
    build = Checkpoints(
        options.target, options.draft, options.particles, options.block, options.strictness,
        tuple(options.potential), "cuda" if options.gpus else None if options.ray is None else "cpu", options.parallel,
    )  # fmt: skip
    if not options.parallel:
        return _batch(options, build, build)
    parts = build()  # on every rank; the job is rank 0's
    return together(parts.p, lambda: _batch(options, build, lambda: parts), input=options.input, output=options.output)


def _batch(options: argparse.Namespace, checkpoints: Checkpoints, build: Build) -> Tally:
    defaults = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "smc": {"alpha": options.alpha, "top_k": options.top_k},
    }
    rows = rows_of(read(options.input), seed=options.seed, defaults=defaults)
    shards = Shards(options.output, _identity(checkpoints, defaults, options.seed, rows), options.format)
    try:
        for line in shards.repairs:
            print(f"smcdecode: {line}", file=sys.stderr)
        return run(rows, _source(options, build, rows), shards)
    finally:
        shards.close()


def _source(options: argparse.Namespace, build: Build, rows: Sequence[Row]) -> Source:
    room = Room(longest(rows), options.lanes, options.memory, options.potential_seconds)
    if options.ray is None:
        return functools.partial(here, build, room)
    cluster = Cluster(options.ray, options.engines, options.cpus, options.gpus)
    return functools.partial(pool, build, room, cluster)


def _identity(build: Checkpoints, defaults: dict[str, Any], seed: int, rows: Sequence[Row]) -> dict[str, Any]:
    """What the answers are a function of."""
    return {
        "target": build.target, "draft": build.draft, "particles": build.particles, "block": build.block,
        "strictness": build.strictness, "potentials": list(build.potentials), "defaults": defaults, "seed": seed,
        "input": digest(rows),
    }  # fmt: skip
