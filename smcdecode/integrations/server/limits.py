"""What one server grants its clients: numbers only."""

import dataclasses

from smcdecode.errors import InvalidOption

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that requests may ask for, together or each.

    Raises:
        InvalidOption: a limit is not positive.
    """

    lanes: int = 16  # requests of one method that run at once
    queue: int = 64  # requests that run or wait; more are turned away with 429
    max_tokens: int = 1024  # of one answer
    particles: int = 64
    block: int = 16
    choices: int = 16  # answers to one request, over all its prompts
    body: int = 1 << 20  # bytes of a request
    seconds: float = 600.0  # for one request, waiting included
    constraint: int = 1 << 16  # bytes of a grammar, pattern or schema
    compiling: float = 5.0  # seconds for reading it
    judging: float = 0.5  # seconds for judging one finished text by it
    memory: int = 1 << 30  # bytes that a process which reads a constraint may take

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InvalidOption(f"{field.name} must be positive; got {value!r}")
