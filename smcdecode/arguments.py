"""What the commands of the command line take: names, defaults and help. Knows no command's work."""

import argparse
from collections.abc import Callable
from typing import Literal

from smcdecode.infer.resampling import SCHEMES

__all__ = ["ARGUMENTS"]


def _generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_models(parser)
    add("--block", type=_number, default=4, help="K, drafted tokens a cycle, or auto (default: %(default)s)")
    add(
        "--strictness",
        type=float,
        default=0.2,
        help="s in [0, 1]: 0 reweights all, 1 is lossless (default: %(default)s)",
    )
    add("--alpha", type=float, default=1.0, help="α of the target p^α over whole sequences (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="of each token; p is then the tempered law (default: %(default)s)",
    )
    add("--top-k", type=int, help="p keeps the k likeliest tokens")
    add("--top-p", type=float, help="p keeps the smallest set of likeliest tokens of this probability")
    add("--resampling", choices=sorted(SCHEMES), default="systematic", help="the scheme (default: %(default)s)")
    add("--threshold", type=float, default=0.5, help="resample when ESS < threshold·N (default: %(default)s)")
    add("--bridge", type=int, default=0, help="cycles over which the exponent rises to α (default: %(default)s)")
    add("--prompt", required=True, help="the text to continue; - reads it from stdin")
    add("--chat", action="store_true", help="the prompt is a user's message, put into the chat template")
    _add_common(parser, particles=8, max_tokens=256, seed=None)


def _plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_target(parser)
    _add_parallel(parser)
    add("--draft", required=True, help="the draft model q, of the same vocabulary")
    add("--prompts", required=True, help="a file with one prompt a line; - reads them from stdin")
    add("--chat", action="store_true", help="each prompt is a user's message, put into the chat template")
    add("--alpha", type=float, default=1.0, help="α of the target p^α over whole sequences (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="of each token (default: %(default)s)")
    add("--top-k", type=int, help="p keeps the k likeliest tokens")
    add("--top-p", type=float, help="p keeps the smallest set of likeliest tokens of this probability")
    add("--max-tokens", type=int, default=128, help="length of the texts you will ask for (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the texts that are measured on (default: %(default)s)")
    add("--plot", help="draw the frontier of speed and distance into this file")


def _serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_models(parser)
    add("--name", help="what clients call the model (default: the target's name)")
    add("--block", type=int, default=4, help="K where a request says nothing (default: %(default)s)")
    add("--strictness", type=float, default=0.2, help="s where a request says nothing (default: %(default)s)")
    add("--particles", type=int, default=8, help="N where a request says nothing (default: %(default)s)")
    add("--host", default="127.0.0.1", help="the address to bind to (default: %(default)s, this machine alone)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--api-key", help="clients must send it as a bearer token")
    add("--memory", type=float, default=0.5, help="a fraction of what is free, or bytes (default: %(default)s)")
    add("--lanes", type=int, help="requests of one method that run at once")
    add("--queue", type=int, help="requests that run or wait; more are turned away with 429")
    add("--max-tokens", type=int, help="of one answer")
    add("--drain", type=int, default=30, help="seconds that answers may take when stopping (default: %(default)s)")
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help="many replicas: on this machine, or a Ray cluster")
    add("--replicas", default="1:1", help="with --ray: fewest and most, like 1:4 (default: %(default)s)")
    add("--cpus", type=float, default=1.0, help="with --ray: cores of one replica (default: %(default)s)")
    add("--gpus", type=float, default=0.0, help="of one replica (default: %(default)s)")


def _batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_models(parser)
    add("--input", required=True, nargs="+", help=".jsonl or .parquet files; a row has a prompt or messages, and an id")
    add("--output", required=True, help="folder of the answers")
    add("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the answers (default: %(default)s)")
    add("--particles", type=_number, default=8, help="N, or auto (default: %(default)s)")
    add("--block", type=_number, default=4, help="K, drafted tokens a cycle, or auto (default: %(default)s)")
    add("--strictness", type=float, default=0.2, help="s in [0, 1] (default: %(default)s)")
    add("--potential", action="append", default=[], help="weighs every answer: module:name or file.py:name")
    add("--potential-seconds", type=float, default=60.0, help="that one call of it may take (default: %(default)s)")
    add("--alpha", type=float, default=1.0, help="α of rows that do not say (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="of rows that do not say (default: %(default)s)")
    add("--top-k", type=int, help="of rows that do not say")
    add("--top-p", type=float, help="of rows that do not say")
    add("--max-tokens", type=int, default=256, help="of rows that do not say (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the job; a row's own is made of it and its id (default: %(default)s)")
    add("--lanes", type=int, default=16, help="prompts that an engine runs at once (default: %(default)s)")
    add("--memory", type=float, default=0.5, help="a fraction of what is free, or bytes (default: %(default)s)")
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help="many engines: on this machine, or a Ray cluster")
    add("--engines", type=int, default=1, help="with --ray: how many (default: %(default)s)")
    add("--cpus", type=float, default=1.0, help="with --ray: cores of one engine (default: %(default)s)")
    add("--gpus", type=float, default=0.0, help="of one engine (default: %(default)s)")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(chat=False)
    parser.add_argument("--prompt", default="The three primary colours are", help="default: %(default)s")
    parser.add_argument("--alpha", type=float, default=2.0, help="α of p^α over whole sequences (default: %(default)s)")
    _add_common(parser, particles=8, max_tokens=32, seed=0)


def _add_models(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_parallel(parser)
    parser.add_argument(
        "--draft", help="the draft model q, of the same vocabulary; without it the target proposes for itself"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel", action="store_true", help="split the target over the processes that torchrun started, one a GPU"
    )


def _number(text: str) -> int | Literal["auto"]:
    """A whole number, or the word auto."""
    return "auto" if text == "auto" else int(text)


def _distill(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_target(parser)
    add("--out", required=True, help="folder of the draft; its subfolder work keeps what is needed to go on")
    add("--layers", type=int, default=4, help="of the draft, half from either end (default: %(default)s)")
    add("--tokens", type=int, default=1_000_000, help="that the target writes (default: %(default)s)")
    add("--passes", type=int, default=4, help="how often they are learnt from (default: %(default)s)")
    add("--prompts", help="a text file, one prompt a line, for the target to continue (default: prompts of many kinds)")
    add("--chat", action="store_true", help="these prompts are users' messages, put into the chat template")
    add("--seed", type=int, default=0, help="the same seed, the same draft (default: %(default)s)")


def _add_common(parser: argparse.ArgumentParser, *, particles: int, max_tokens: int, seed: int | None) -> None:
    add = parser.add_argument
    add("--particles", type=_number, default=particles, help="N, or auto (default: %(default)s)")
    add("--max-tokens", type=int, default=max_tokens, help="length cap (default: %(default)s)")
    add("--seed", type=int, default=seed, help="the same seed, the same answer (default: %(default)s; None draws one)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer behind this text; may be repeated")
    out = parser.add_mutually_exclusive_group()
    out.add_argument(
        "--json", action="store_true", help="print the whole posterior as JSON, which Posterior.load reads"
    )
    out.add_argument("--stream", action="store_true", help="print the text as it becomes final")


ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "generate": _generate, "plan": _plan, "serve": _serve, "batch": _batch, "demo": _demo, "distill": _distill,
}  # fmt: skip
"""For each command, what adds its arguments to its parser."""
