"""The command line: ``generate``, ``plan``, ``serve``, ``batch``, ``demo``, ``distill``: options, no mathematics."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TextIO

from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import Target
from smcdecode.distill.distill import distill as grow_draft
from smcdecode.engine.load import load
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.prompts import PromptLike
from smcdecode.engine.ranks import alone, first, together
from smcdecode.errors import InvalidOption, NoSurvivors, PromptError, RankError, SMCDecodeError
from smcdecode.infer.resampling import SCHEMES
from smcdecode.planner.measure import plan
from smcdecode.report.posterior import Posterior
from smcdecode.sample import sample
from smcdecode.stream import stream

__all__ = ["main"]

FAILED, NO_TEXT = 2, 3  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        Exit code: 0, 2 if the request was refused or failed (the reason is on stderr), 3 if every particle died.
    """
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except SMCDecodeError as error:
        if first() or isinstance(error, RankError):
            print(f"smcdecode: {error}", file=sys.stderr)
        return FAILED


def generate(options: argparse.Namespace) -> int:
    """Sample one continuation of a prompt, and say how good it is."""
    p = _target(options)
    q = load(options.draft) if options.draft else None
    target = p.at(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p) ** options.alpha
    proposal = Draft(q, options.block, strictness=options.strictness) if q else Local()
    method = SMC(
        proposal, options.particles, resampling=options.resampling, threshold=options.threshold, bridge=options.bridge
    )
    return _tell(target, method, options) if options.stream else _show(_run(target, method, options), options.json)


def make_plan(options: argparse.Namespace) -> int:
    """Measure a target and a draft on your prompts, and recommend N, K and s."""
    p, q = _target(options), load(options.draft)
    target = p.at(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p) ** options.alpha
    made = plan(target, q, _prompts(options), max_tokens=options.max_tokens, seed=options.seed)
    _say(made.summary())
    if first() and options.plot:
        made.plot().savefig(options.plot)
    return 0


def _prompts(options: argparse.Namespace) -> list[PromptLike]:
    """One prompt a line; empty lines do not count."""
    try:
        text = sys.stdin.read() if options.prompts == "-" else Path(options.prompts).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read prompts from {options.prompts}: {error.strerror}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    return [[{"role": "user", "content": line}] if options.chat else line for line in lines]


def demo(options: argparse.Namespace) -> int:
    """Power sampling on the embedded model: whole sequences sharpened, with weights and an honest account."""
    target = load("demo") ** options.alpha
    print(f"{target}, {options.particles} particles: {options.prompt}\n", file=sys.stderr)
    method = SMC(Local(), options.particles)
    return _tell(target, method, options) if options.stream else _show(_run(target, method, options), options.json)


def distill(options: argparse.Namespace) -> int:
    """Grow a small draft from a target, on text that it writes itself; made again, a killed command goes on."""
    found = grow_draft(
        options.target,
        options.out,
        layers=options.layers,
        tokens=options.tokens,
        passes=options.passes,
        prompts=_lines(options.prompts, options.chat) if options.prompts else None,
        seed=options.seed,
    )
    print(f"{options.out}: on text held out, {found}")
    return 0


def _lines(path: str, chat: bool) -> list[PromptLike]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidOption(f"--prompts {path}: {error.strerror}; it takes a text file, one prompt a line") from error
    return [[{"role": "user", "content": line}] if chat else line for line in lines if line.strip()]


def _run(target: Target, method: SMC, options: argparse.Namespace) -> Posterior:
    call = {"max_tokens": options.max_tokens, "stop": options.stop, "seed": options.seed}
    return sample(target, _prompt(options), method=method, **call)


def _tell(target: Target, method: SMC, options: argparse.Namespace) -> int:
    """The text on stdout while it is written, each piece when it is final; the summary on stderr behind it."""
    call = {"max_tokens": options.max_tokens, "stop": options.stop, "seed": options.seed}
    try:
        with stream(target, _prompt(options), method=method, **call) as pieces:
            for piece in pieces:
                _say(piece, end="")
    except NoSurvivors as error:
        _say(f"\nsmcdecode: {error}", file=sys.stderr)
        return NO_TEXT
    _say()
    _say(f"\n{pieces.posterior.summary()}", file=sys.stderr)
    return 0


def _prompt(options: argparse.Namespace) -> PromptLike:
    prompt: str = sys.stdin.read() if options.prompt == "-" else options.prompt
    return [{"role": "user", "content": prompt}] if options.chat else prompt


def serve(options: argparse.Namespace) -> int:
    """Serve a target to OpenAI's clients."""
    if options.ray is not None:
        return _serve_replicas(options)
    try:
        from smcdecode.integrations.server.serving import run
    except ModuleNotFoundError as error:
        raise InvalidOption(f"serve needs {error.name}: install smcdecode[serve]") from error
    p = _target(options)
    proposal = Draft(load(options.draft), options.block, strictness=options.strictness) if options.draft else Local()
    limits = {name: value for name in ("lanes", "queue", "max_tokens") if (value := getattr(options, name)) is not None}
    if not alone():  # rank 0 drains when it is told to stop, and the others stay until it has
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler if first() else signal.SIG_IGN)
    together(
        p, lambda: run(
            p, SMC(proposal, options.particles), name=options.name, limits=limits, memory=options.memory,
            host=options.host, port=options.port, api_key=options.api_key, drain=options.drain,
        ),
    )  # fmt: skip
    return 0


def _serve_replicas(options: argparse.Namespace) -> int:
    if options.parallel:
        raise InvalidOption(
            "--parallel splits one model over torchrun's processes, and --ray gives each replica a whole one"
        )
    try:
        from smcdecode.integrations.ray.online import run
    except ModuleNotFoundError as error:
        raise InvalidOption(f"serve --ray needs {error.name}: install smcdecode[ray]") from error
    names = (
        "target", "draft", "name", "block", "strictness", "particles", "api_key", "memory", "lanes", "queue",
        "max_tokens", "drain", "replicas", "cpus", "gpus",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    run(given, address=options.ray, host=options.host, port=options.port)
    return 0


def batch(options: argparse.Namespace) -> int:
    """Answer the prompts of files into a folder; made again, a killed command goes on."""
    try:
        from smcdecode.integrations.batch.command import batch as answer
    except ModuleNotFoundError as error:
        raise InvalidOption(f"batch needs {error.name}: install smcdecode[batch]") from error
    tally = answer(options)
    _say(f"{options.output}: {tally}", file=sys.stderr)
    return NO_TEXT if tally.refused or tally.without_text else 0


def _target(options: argparse.Namespace) -> LanguageModel:
    return load(options.target, parallel=True) if options.parallel else load(options.target)


def _show(posterior: Posterior, as_json: bool) -> int:
    """The text on stdout and the summary on stderr, or everything as JSON on stdout; from the first rank."""
    if as_json:
        _say(posterior.to_json())
        return 0 if posterior.alive else NO_TEXT
    try:
        _say(_answer(posterior))
    except NoSurvivors as error:
        _say(f"smcdecode: {error}", file=sys.stderr)
        return NO_TEXT
    _say(f"\n{posterior.summary()}", file=sys.stderr)
    return 0


def _say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print, on the rank that speaks for all."""
    if first():
        print(text, end=end, file=file, flush=True)


def _answer(posterior: Posterior) -> str:
    try:
        return posterior.text
    except PromptError:  # a model without a tokenizer
        return " ".join(map(str, posterior.sample(on="tokens")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smcdecode", description="Sequential Monte Carlo decoding of language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help=generate.__doc__, description=generate.__doc__))
    _add_plan(commands.add_parser("plan", help=make_plan.__doc__, description=make_plan.__doc__))
    _add_serve(commands.add_parser("serve", help=serve.__doc__, description=serve.__doc__))
    _add_batch(commands.add_parser("batch", help=batch.__doc__, description=batch.__doc__))
    _add_demo(commands.add_parser("demo", help=demo.__doc__, description=demo.__doc__))
    _add_distill(commands.add_parser("distill", help=distill.__doc__, description=distill.__doc__))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=generate)
    add = parser.add_argument
    add("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')
    _add_parallel(parser)
    add("--draft", help="the draft model q, of the same vocabulary; without it the target proposes for itself")
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


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=make_plan)
    add = parser.add_argument
    add("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')
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


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=serve)
    add = parser.add_argument
    add("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')
    _add_parallel(parser)
    add("--draft", help="the draft model q, of the same vocabulary; without it the target proposes for itself")
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


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=batch)
    add = parser.add_argument
    add("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')
    add("--draft", help="the draft model q, of the same vocabulary; without it the target proposes for itself")
    _add_parallel(parser)
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


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=demo, chat=False)
    parser.add_argument("--prompt", default="The three primary colours are", help="default: %(default)s")
    parser.add_argument("--alpha", type=float, default=2.0, help="α of p^α over whole sequences (default: %(default)s)")
    _add_common(parser, particles=8, max_tokens=32, seed=0)


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel", action="store_true", help="split the target over the processes that torchrun started, one a GPU"
    )


def _number(text: str) -> int | Literal["auto"]:
    """A whole number, or the word auto."""
    return "auto" if text == "auto" else int(text)


def _add_distill(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=distill)
    add = parser.add_argument
    add("--target", required=True, help='the model p: a Hugging Face name, a local folder, or "demo"')
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
