"""Constraints that strangers wrote: read, and asked about texts, in processes of their own, under limits.

What reads a grammar, pattern or schema (Lark, ``re``, ``jsonschema``) can be made to take for ever. So a process per
constraint does it; this one holds llguidance's grammar only, whose work is bounded a step. A constraint that is not
read in time is refused; a finished text that is not judged in time gets weight zero.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from smcdecode.errors import InvalidOption, SMCDecodeError, UnsupportedGrammar
from smcdecode.integrations.server.limits import Limits
from smcdecode.potentials.grammar import Grammar
from smcdecode.potentials.llg import Constraint
from smcdecode.potentials.regex import Regex
from smcdecode.potentials.schema import JsonSchema

__all__ = ["Sandbox"]

Kind = Literal["grammar", "earley", "regex", "schema"]
_READERS: dict[str, Callable[[Any], Constraint]] = {
    "grammar": Grammar,
    "earley": functools.partial(Grammar, parser="earley"),
    "regex": Regex,
    "schema": JsonSchema,
}
_RELATIVE = re.compile(r"%import\s*\.")
_STARTING = 300.0  # seconds until the first process has imported what it needs
_PR_SET_PDEATHSIG = 1  # of Linux: a signal to this process when its parent ends
_KEPT = 16  # constraints kept for the next request that has the same


class Sandbox:
    """Makes constraints of strangers' texts; equal ones are shared."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:  # it imports once, and each process is a fork of it
            self._context.set_forkserver_preload(["__main__", __name__])
        self._kept: OrderedDict[tuple[str, str], _Sandboxed] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start what every later constraint starts from; takes some seconds."""
        _Process(self._context, "regex", "a", self.limits, _STARTING).stop()

    def constraint(self, kind: Kind, text: str, held: Any = None) -> Constraint:
        """The constraint that a text describes; blocks for at most ``limits.compiling`` seconds.

        Args:
            kind: what it is.
            text: the constraint, or what tells it from others.
            held: the constraint where it is not text: a schema.

        Raises:
            UnsupportedGrammar: it cannot be enforced, or not be read within the limits.
            InvalidOption: it is longer than the limit, or no text.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidOption(f"the {kind} holds half a surrogate pair, which no text can") from error
        if size > self.limits.constraint:
            raise InvalidOption(f"the {kind} has {size} bytes; at most {self.limits.constraint} are read here")
        if kind in ("grammar", "earley") and _RELATIVE.search(text):
            raise UnsupportedGrammar("a grammar of a request imports from Lark's own library only, from no file")
        with self._lock:
            found = self._kept.pop((kind, text), None)
        if found is None or not found.process.alive:
            found = _Sandboxed(_Process(self._context, kind, text if held is None else held, self.limits))
        with self._lock:
            self._kept[kind, text] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)  # its process ends with the last request that uses it
        return found

    def close(self) -> None:
        """End all processes that no request uses."""
        self._kept.clear()


class _Sandboxed(Constraint):
    """A constraint whose finished texts are judged by a process."""

    def __init__(self, process: "_Process") -> None:
        self.process = process
        super().__init__(process.source, process.judge, process.name)


class _Process:
    """One process that has read one constraint."""

    def __init__(self, context: Any, kind: Kind, text: Any, limits: Limits, seconds: float | None = None) -> None:
        self.limits = limits
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, kind, text, limits), daemon=True)
        self._process.start()
        far.close()
        answer = self._ask(limits.compiling if seconds is None else seconds)
        if answer is None or isinstance(answer, str):
            self.stop()
            raise UnsupportedGrammar(answer or f"the {kind} was not read within {limits.compiling:g} s and its memory")
        self.source, self.name = answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return bool(self._process.is_alive())

    def judge(self, text: str) -> str | None:
        """Why a finished text is not in the language; None where it is."""
        with contextlib.suppress(OSError):
            self._pipe.send(text)
            answer = self._ask(self.limits.judging)
            if answer is not None:
                return str(answer[0]) if answer[0] is not None else None
        self.stop()
        return f"the text was not judged within {self.limits.judging:g} s"

    def _ask(self, seconds: float) -> Any:
        """The next answer; None where there is none in time."""
        with contextlib.suppress(OSError, EOFError):
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        return None

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._pipe.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.stop()


def _serve(pipe: Connection, kind: Kind, text: Any, limits: Limits) -> None:
    """Read a constraint, then judge texts until the pipe is closed."""
    _confine(limits.memory)
    try:
        constraint = _READERS[kind](text)
    except SMCDecodeError as error:
        pipe.send(str(error))
        return
    except (RecursionError, MemoryError, ValueError, OverflowError) as error:
        pipe.send(f"the {kind} cannot be read: {type(error).__name__}")
        return
    pipe.send((constraint.source, constraint.name))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            pipe.send((constraint.oracle(pipe.recv()),))


def _confine(memory: int) -> None:
    """Let this process take so many bytes more than it has, and not outlive its server, where the platform can.

    It is a fork of a process that ends with the server, however that ends: also in the middle of a judgement.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        most = int(statm.read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
