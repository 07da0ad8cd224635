"""A run as one HTML page that needs no network: data as JSON beside a style and a script. Knows records; draws nothing.

Whatever the run holds goes into the JSON block, with ``<`` escaped as JSON escapes it; the script turns it into text
nodes. Nothing of it is ever read as HTML.
"""

import dataclasses
import json
import math
from importlib import resources
from string import Template
from typing import Any

from smcdecode.report import diagnostics
from smcdecode.report.genealogy import Node, tree
from smcdecode.report.record import Record

__all__ = ["document"]

RUN = ("target", "method", "cost")  # facts of the summary that say what was run, not how good it is
DIGITS = 6  # significant digits of what is only drawn


def document(record: Record) -> str:
    """The page."""
    assets = resources.files("smcdecode.report") / "assets"
    parts = {part: (assets / f"report.{part}").read_text(encoding="utf-8") for part in ("html", "css", "js")}
    data = json.dumps(contents(record), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Template(parts["html"]).substitute(style=parts["css"], script=parts["js"], data=data.replace("<", "\\u003c"))


def contents(record: Record) -> dict[str, Any]:
    """What the page shows, ready for JSON: numbers that are not finite are None."""
    asked, facts = record.asked, list(diagnostics.facts(record))
    values = record.decoded or [" ".join(map(str, ids)) for ids in record.tokens]
    counts = {value: values.count(value) for value in set(values)}
    particles = {step.particles for step in record.steps} or {record.N}
    return {
        "target": asked.target,
        "prompt": asked.prompt if asked.prompt is not None else " ".join(map(str, asked.prompt_tokens)),
        "particles": max(particles),
        "threshold": asked.threshold if len(particles) == 1 else 0.0,  # a line only where N does not move
        "max_tokens": asked.max_tokens,
        "numbers": _numbers(record),
        "trust": [(name, fact) for name, fact in facts if name not in RUN],
        "run": [*((name, fact) for name, fact in facts if name in RUN), *_request(record)],
        "epitaph": None if record.alive else diagnostics.epitaph(record),
        "answers": [[value, _short(weight), counts[value]] for value, weight in record.merged(values).items()],
        "cycles": [
            {
                "ess": _short(step.ess),
                "log_z": _short(step.log_z),
                "chi2": _short(step.chi2),
                "resampled": step.resampled,
                "alive": step.alive,
                "survivors": step.survivors,
            }
            for step in record.steps
        ],
        "nodes": [_node(node) for node in tree(record)],
        "deaths": [dataclasses.asdict(death) | {"tokens": None, "text": death.last} for death in record.deaths],
    }


def _numbers(record: Record) -> list[tuple[str, str, str]]:
    """What to look at first: names, numbers and what they are out of."""
    V = diagnostics.log_z_variance(record)
    error = f"± {'at least ' if diagnostics.saturated(record) else ''}{math.sqrt(V):.2g}" if V > 0 else ""
    times = sum(step.resampled for step in record.steps)
    first = record.steps[0].particles if record.steps else record.N
    lowest = f"; {min(step.ess for step in record.steps):.2f} at the lowest" if record.steps else ""
    return [
        ("log Ẑ", f"{record.log_z + 0.0:.3f}".replace("-inf", "−∞"), error),
        ("effective particles", f"{diagnostics.ess(record):.2f}", f"of {record.N}{lowest}"),
        ("distinct texts", str(len(record.merged(record.decoded or record.tokens))), f"from {record.N} particles"),
        ("first ancestors left", str(diagnostics.unique_ancestors(record)), f"of {first}"),
        ("resamplings", str(times), f"in {len(record.steps)} cycles"),
        ("deaths", str(len(record.deaths)), "of weight zero" if record.deaths else "no weight became zero"),
    ]


def _node(node: Node) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "first": node.first,
        "share": _short(node.share),
        "pieces": node.pieces,
        "weight": [_short(w) for w in node.weight],
        "gain": [_short(g) for g in node.gain],
        "particles": node.particles,
        "deaths": node.deaths,
        "end": node.end,
        "mass": _short(node.mass),
        "counts": [len(tokens) for tokens in node.tokens],
    }


def _request(record: Record) -> list[tuple[str, str]]:
    asked = record.asked
    return [
        ("length", f"at most {asked.max_tokens} tokens behind {len(asked.prompt_tokens)} of the prompt"),
        ("seed", f"{asked.seed} of the call, {asked.request_seed} of this prompt"),
    ]


def _short(x: float) -> float | None:
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
