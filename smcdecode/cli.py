"""The command line: ``generate``, ``plan``, ``serve``, ``batch``, ``demo``, ``distill``: options, no mathematics."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from smcdecode.arguments import ARGUMENTS
from smcdecode.declare.method import SMC
from smcdecode.declare.proposal import Draft, Local
from smcdecode.declare.target import Target
from smcdecode.distill.distill import distill as grow_draft
from smcdecode.engine.load import load
from smcdecode.engine.model import LanguageModel
from smcdecode.engine.prompts import PromptLike
from smcdecode.engine.ranks import alone, first, together
from smcdecode.errors import InvalidOption, NoSurvivors, PromptError, RankError, SMCDecodeError
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
    places = parser.add_subparsers(required=True, metavar="COMMAND")
    work: dict[str, Callable[[argparse.Namespace], int]] = {
        "generate": generate, "plan": make_plan, "serve": serve, "batch": batch, "demo": demo, "distill": distill,
    }  # fmt: skip
    for name, command in work.items():
        place = places.add_parser(name, help=command.__doc__, description=command.__doc__)
        place.set_defaults(command=command)
        ARGUMENTS[name](place)
    return parser
