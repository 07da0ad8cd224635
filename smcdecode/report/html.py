"""A posterior in a notebook: its heaviest texts, its facts and its ESS. Knows records; no model, no script."""

from html import escape

from smcdecode.report import diagnostics
from smcdecode.report.record import Record

__all__ = ["page"]

SHOWN = 10  # texts
BLUE, ORANGE = "#3b6ea8", "#d1702b"
CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:top"


def page(record: Record) -> str:
    """Self-contained HTML, in the notebook's own colours."""
    return (
        '<div style="max-width:60em;line-height:1.4">'
        f"{_prompt(record)}{_texts(record)}{_chart(record)}{_facts(record)}</div>"
    )


def _prompt(record: Record) -> str:
    prompt = record.asked.prompt or str(list(record.asked.prompt_tokens))
    return f'<div style="opacity:.7;white-space:pre-wrap">{escape(prompt)}</div>'


def _texts(record: Record) -> str:
    heaviest = list(record.merged(record.decoded or [str(list(ids)) for ids in record.tokens]).items())
    if not heaviest:
        return f'<pre style="white-space:pre-wrap">{escape(diagnostics.epitaph(record))}</pre>'
    rows = "".join(_row(value, weight) for value, weight in heaviest[:SHOWN])
    rest = sum(weight for _, weight in heaviest[SHOWN:])
    more = f"<div>and {len(heaviest) - SHOWN} more, of weight {rest:.3f}</div>" if heaviest[SHOWN:] else ""
    return f'<table style="border-collapse:collapse;color:inherit;margin:6px 0">{rows}</table>{more}'


def _row(value: str, weight: float) -> str:
    bar = f'<div style="background:{BLUE};height:3px;width:{100 * weight:.1f}%"></div>'
    return (
        f'<tr><td style="{CELL};min-width:5em">{weight:.3f}{bar}</td>'
        f'<td style="{CELL};white-space:pre-wrap">{escape(value)}</td></tr>'
    )


def _chart(record: Record) -> str:
    """ESS before resampling over cycles, as SVG; resamplings are marked."""
    width, height, steps = 480, 60, record.steps
    if not steps:
        return ""
    at = [
        (width * (c + 0.5) / len(steps), height * (1 - step.ess / record.N)) for c, step in enumerate(steps)
    ]  # middle of each cycle's column
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{ORANGE}"/>'
        for (x, y), step in zip(at, steps, strict=True)
        if step.resampled
    )
    return (
        f'<svg viewBox="-4 -4 {width + 8} {height + 8}" width="{width}" role="img" style="max-width:100%">'
        f"<title>ESS over {len(steps)} cycles, 0 to {record.N}</title>"
        f'<path d="M0 0V{height}H{width}" fill="none" stroke="currentColor" stroke-opacity=".3"/>'
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>{marks}</svg>'
        f'<div style="font-size:85%;opacity:.7">ESS of {record.N} particles over {len(steps)} cycles, before resampling'
        f"{'; resampled at the dots' if marks else ''}</div>"
    )


def _facts(record: Record) -> str:
    rows = "".join(
        f'<tr><td style="{CELL}">{escape(name)}</td><td style="{CELL}">{escape(fact)}</td></tr>'
        for name, fact in diagnostics.facts(record)
    )
    table = f'<table style="border-collapse:collapse;color:inherit">{rows}</table>'
    return f"<details><summary>{escape(diagnostics.headline(record))}</summary>{table}</details>"
