"""What a run cost: seconds by phase, passes and positions by model. Knows clocks and counters only."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

__all__ = ["Stats"]


@dataclasses.dataclass
class Stats:
    """Counters of one call of :func:`smcdecode.sample`, over all its prompts. Seconds are wall-clock."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    target_passes: int = 0
    draft_passes: int = 0
    target_positions: int = 0
    draft_positions: int = 0
    cycles: int = 0
    recorded: int = 0  # of those, the ones that ran as one function over fixed buffers: a CUDA graph, on a GPU
    tokens: int = 0  # tokens of the surviving continuations, one particle a prompt (the longest)
    particle_tokens: int = 0  # tokens written by all particles
    prompt_tokens: int = 0  # tokens of prompts
    prompt_tokens_read: int = 0  # of those, the ones the target had to read: the others it had from another prompt
    drafted: int = 0  # drafted tokens that were judged
    accepted: int = 0  # of those, the ones kept
    hits: int = 0  # blocks that a draft beside the target had prepared
    misses: int = 0  # blocks that it had not
    attention: str = ""  # how the target attends: "torch" or "flashinfer"
    draft_lost: str | None = None  # why decoding went on without its draft process, if it did
    pages: int = 0  # pages in the pool
    pages_peak: int = 0  # most pages in use at once
    bytes_moved: int = 0  # bytes of keys and values copied because of resampling

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase: prefill, draft, score, potentials, resampling, total."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers (one a prompt) over total wall-clock seconds; NaN before anything ran."""
        total = self.seconds.get("total", 0.0)
        return self.tokens / total if total else float("nan")

    @property
    def hit_rate(self) -> float:
        """Share of blocks that a draft beside the target had prepared; NaN without one."""
        blocks = self.hits + self.misses
        return self.hits / blocks if blocks else float("nan")

    @property
    def acceptance(self) -> float:
        """Share of judged drafted tokens that were kept; NaN without a draft."""
        return self.accepted / self.drafted if self.drafted else float("nan")
