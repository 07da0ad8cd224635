"""What Prometheus reads of one server. Knows counters; the engine's are read when asked for."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from smcdecode.integrations.server.runner import Runner

__all__ = ["Metrics"]

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, runner: Runner) -> None:
        self._registry = own = CollectorRegistry()
        self.responses = Counter("smcdecode_responses", "Responses begun", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "smcdecode_request_seconds", "From request to last byte", buckets=_SECONDS, registry=own
        )
        self.tokens = Counter("smcdecode_answer_tokens", "Tokens of answers", registry=own)
        self.prompt_tokens = Counter("smcdecode_prompt_tokens", "Tokens of prompts", registry=own)
        self.cancelled = Counter("smcdecode_cancelled", "Requests whose client went away", registry=own)
        scheduler, stats = runner.scheduler, runner.scheduler.stats
        for name, help_text, read in (
            ("live", "Requests that run or wait", lambda: runner.live),
            ("running", "Requests that run", lambda: scheduler.running),
            ("pages", "Pages of keys and values", lambda: scheduler.budget.pages),
            ("pages_used", "Pages in use", lambda: scheduler.stores.pool.used),
            ("pages_kept", "Free pages that are kept, for prompts to come", lambda: scheduler.stores.prefixes.idle),
            ("prompt_tokens_begun", "Tokens of prompts that have begun", lambda: stats.prompt_tokens),
            ("prompt_tokens_read", "Of those, the ones that no other had left", lambda: stats.prompt_tokens_read),
            ("cycles", "Cycles of the engine so far", lambda: stats.cycles),
            ("target_passes", "Passes of the target so far", lambda: stats.target_passes),
            ("draft_passes", "Passes of the draft so far", lambda: stats.draft_passes),
            ("particle_tokens", "Tokens written by all particles of finished requests", lambda: stats.particle_tokens),
        ):
            Gauge(f"smcdecode_{name}", help_text, registry=own).set_function(read)

    def text(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self._registry)
