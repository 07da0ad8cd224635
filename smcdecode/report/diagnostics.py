"""How good a run was, in numbers and in words: section 4 of the mathematics. Knows records; no model."""

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from smcdecode.engine.scheduler import Cycle
from smcdecode.infer import variance
from smcdecode.potentials.text import shorten
from smcdecode.report.record import Obituary, Record

__all__ = ["advice", "epitaph", "ess", "headline", "log_z_variance", "saturated", "summary", "unique_ancestors"]

CALM = 2.0  # 1 + χ² of a cycle that halves an even ESS
EXACT = 1e-9  # relative: weights that moved less moved by rounding


def _genealogy(record: Record) -> tuple[Tensor, Tensor]:
    """Final weights and first ancestors, (1, N) each."""
    return torch.from_numpy(record.weights.copy())[None], torch.tensor([record.origin])


def ess(record: Record) -> float:
    """ESS of the final weights, copies (the same ids from the same first particle) counted once; 0 if all died."""
    masses = record.merged(list(zip(record.origin, record.tokens, strict=True))).values()
    return 1 / sum(mass * mass for mass in masses) if masses else 0.0


def unique_ancestors(record: Record) -> int:
    """How many first-cycle particles have living descendants."""
    return int(variance.lineages(*_genealogy(record)))


def saturated(record: Record) -> bool:
    """Whether the genealogy has run into one ancestor, so that it says no more about the error of Ẑ."""
    return bool(variance.saturated(*_genealogy(record)))


def log_z_variance(record: Record) -> float:
    """Relative variance of Ẑ from this run's genealogy; NaN for one particle, or where all died."""
    if record.N == 1:
        return math.nan
    resamplings = torch.tensor([record.resamplings], dtype=torch.float64)
    return float(variance.relative_variance(*_genealogy(record), resamplings))


def summary(record: Record) -> str:
    """A short, honest account of a run: a fact a line, its name first."""
    return "\n".join(f"{name:<10} {fact}" for name, fact in facts(record))


def facts(record: Record) -> Iterator[tuple[str, str]]:
    """The lines of the summary, as names and facts."""
    yield "target", record.asked.target
    yield "method", record.asked.method
    yield "log Ẑ", _evidence(record)
    yield "ESS", _ess(record)
    yield "ancestors", _ancestors(record)
    yield "texts", _texts(record)
    if record.steps:
        yield "weights", _chi2(record)
    if record.deaths:
        yield "deaths", "; ".join(_causes(record.deaths))
    yield "cost", _cost(record)


def headline(record: Record) -> str:
    """The three numbers to look at first."""
    left = unique_ancestors(record)
    return f"log Ẑ {record.log_z:.3g}, ESS {ess(record):.3g} of {record.N}, {left} first ancestors left"


def _evidence(record: Record) -> str:
    if not record.alive:
        return "-∞: every particle died"
    error = _error(record)
    truth = "; the truth is 0, because the target is plain" if record.asked.plain else ""
    return f"{record.log_z + 0.0:.3f}{error}{truth}"


def _error(record: Record) -> str:
    V = log_z_variance(record)
    if _even(record):
        return " (no weight ever moved)"
    if math.isnan(V):
        return " (of one particle: no estimate of its error)"
    if saturated(record):
        return f" ± at least {math.sqrt(V):.2g} (all descend from one particle: no more can be said)"
    if V <= 0:
        return " (its error is too small for one run to tell)"
    return f" ± {math.sqrt(V):.2g}"


def _even(record: Record) -> bool:
    """Whether all particles had the same weight throughout."""
    return all(step.ess >= step.particles * (1 - EXACT) for step in record.steps) and record.N > 1


def _ess(record: Record) -> str:
    final = f"{ess(record):.2f} of {record.N} at the end, copies counted once"
    if not record.steps:
        return final
    cycle, lowest = min(enumerate(record.steps, 1), key=lambda pair: pair[1].ess)
    of = f" of {lowest.particles}" if lowest.particles != record.N else ""
    return f"{final}; {lowest.ess:.2f}{of} at its lowest before resampling (cycle {cycle} of {len(record.steps)})"


def _ancestors(record: Record) -> str:
    cycles = [str(cycle) for cycle, step in enumerate(record.steps, 1) if step.resampled]
    listed = ", ".join(cycles[:8]) + (f" and {len(cycles) - 8} more" if len(cycles) > 8 else "")
    resampled = f"resampled in cycle{'s' if len(cycles) > 1 else ''} {listed}" if cycles else "never resampled"
    first = record.steps[0].particles if record.steps else record.N
    return f"{unique_ancestors(record)} of {first} first particles have descendants; {resampled}"


def _texts(record: Record) -> str:
    masses = list(record.merged(record.decoded or record.tokens).values())
    if not masses:
        return "none"
    worth = 1 / sum(mass * mass for mass in masses)
    return f"{len(masses)} distinct, worth {worth:.2f} of equal weight; the heaviest has {max(masses):.2f}"


def _chi2(record: Record) -> str:
    if record.N == 1 and record.alive:
        return "one particle: nothing to compare it with"
    cycle, step = _worst(record)
    relation = "at least " if step.chi2 > step.particles / 2 else ""  # N particles cannot show a heavier tail
    tips = advice(record)
    advised = f". Try: {', '.join(tips)}" if tips else ": calm"
    return f"1 + χ² = {relation}{step.chi2:.3g} in the worst cycle ({cycle}){advised}"


def _worst(record: Record) -> tuple[int, Cycle]:
    return max(enumerate(record.steps, 1), key=lambda pair: pair[1].chi2)


def advice(record: Record) -> list[str]:
    """What would make a rough run better, the most useful first; empty for a calm one.

    A cycle with 1 + χ² = ρ has bias at most 12ρ/N and mean squared error at most 4ρ/N for |f| ≤ 1 (Agapiou et al.
    2017). N particles see no tail much heavier than N, so from N/2 on it says "at least". A guide, not a certificate.
    """
    asked, (_, step) = record.asked, _worst(record)
    if step.chi2 <= CALM:
        return []
    tips = []
    if asked.block and isinstance(asked.strictness, float | int) and asked.strictness < 1:
        tips.append(f"raise strictness (now {asked.strictness:g})")
    if isinstance(asked.block, int) and asked.block > 1:
        tips.append(f"shorter block (now {asked.block})")
    if asked.potentials:
        tips.append("potentials that judge unfinished texts, where they only judge finished ones")
    if asked.alpha > 1:
        tips.append("a bridge of some cycles to the exponent")
    return [*tips, f"more particles (now {step.particles})"]


def epitaph(record: Record) -> str:
    """What died where, and what may help: the message of NoSurvivors."""
    causes = "".join(f"\n  {line}" for line in _causes(record.deaths))
    if _at_one_text(record):
        remedy = (
            "All of them died after the same text, so more particles would die there too: look for constraints that "
            "exclude each other, or that no token of this vocabulary can meet"
        )
    else:
        remedy = (
            "Try more particles, a larger max_tokens, or potentials that forbid less or warn earlier (a mask, a value "
            "of unfinished texts)"
        )
    return (
        f"all {record.N} particles died (log Ẑ = -∞), so there is no text to give. What died where:{causes}\n"
        f"{remedy}; .tokens and .deaths hold what there was."
    )


def _at_one_text(record: Record) -> bool:
    """Whether several died, all of them behind one and the same text, and not because its length was reached."""
    places = {death.tokens for death in record.deaths}
    return len(record.deaths) > 1 and len(places) == 1 and len(next(iter(places))) < record.asked.max_tokens


def _causes(deaths: tuple[Obituary, ...]) -> Iterator[str]:
    """A line for each cause of death, the commonest first, with the last text it met."""
    for cause, count in Counter(death.cause for death in deaths).most_common():
        those = [death for death in deaths if death.cause == cause]
        first, last = those[0].cycle + 1, those[-1].cycle + 1
        cycles = f"cycle {first}" if first == last else f"cycles {first} to {last}"
        why = f" ({shorten(those[-1].why)})" if those[-1].why else ""
        yield f"{cause}: {count} died in {cycles}, the last after {those[-1].last}{why}"


def _cost(record: Record) -> str:
    stats = record.stats
    parts = [f"{stats.tokens} tokens at {stats.tokens_per_second:.3g} tokens/s", f"{stats.target_passes} target passes"]
    if stats.draft_passes:
        parts.append(f"{stats.draft_passes} draft passes")
    if stats.prompt_tokens_read < stats.prompt_tokens:
        parts.append(f"{stats.prompt_tokens_read} of {stats.prompt_tokens} prompt tokens read, the others shared")
    if stats.drafted:
        parts.append(f"{stats.acceptance:.0%} of drafted tokens accepted")
    if stats.hits + stats.misses:
        parts.append(f"{stats.hit_rate:.0%} of blocks prepared beside the target")
    if stats.draft_lost:
        parts.append(f"the draft's process was lost ({stats.draft_lost})")
    parts.append(f"at most {stats.pages_peak} of {stats.pages} pages")
    parts.append(f"{stats.bytes_moved} bytes moved by resampling")
    phases = ", ".join(f"{phase} {seconds:.2g}" for phase, seconds in stats.seconds.items() if phase != "total")
    return ", ".join(parts) + (f"; seconds: {phases}" if phases else "")
