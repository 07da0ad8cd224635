"""A posterior in a notebook: heaviest texts, facts, ESS and genealogy. Knows records; no model, no script."""

from collections.abc import Iterator
from html import escape

from smcdecode.potentials.text import shorten
from smcdecode.report import diagnostics
from smcdecode.report.genealogy import Node, tree
from smcdecode.report.record import Record

__all__ = ["page"]

SHOWN = 10  # texts
WIDTH, ESS_HEIGHT, BANDS_HEIGHT = 480, 60, 120  # pixels
COLUMNS = 60  # of the bands at most: of a longer run every second cycle is shown, or every third, …
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
        f'<td style="{CELL}"><div style="white-space:pre-wrap;max-height:8.4em;overflow:auto">{escape(value)}</div>'
        "</td></tr>"
    )


def _chart(record: Record) -> str:
    """ESS before resampling over cycles and the texts' weights below it, as SVG; resamplings are marked."""
    steps, low = record.steps, ESS_HEIGHT + 8
    if not steps:
        return ""
    counts = [step.particles for step in steps]
    most, upto = max(counts), "at most " if max(counts) > min(counts) else ""
    at = [
        (WIDTH * (c + 0.5) / len(steps), ESS_HEIGHT * (1 - step.ess / most)) for c, step in enumerate(steps)
    ]  # middle of each cycle's column
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{ORANGE}"/>'
        for (x, y), step in zip(at, steps, strict=True)
        if step.resampled
    )
    return (
        f'<svg viewBox="-4 -4 {WIDTH + 8} {low + BANDS_HEIGHT + 8}" width="{WIDTH}" role="img" style="max-width:100%">'
        f"<title>ESS over {len(steps)} cycles, 0 to {most}, and the weights of texts</title>"
        f'<path d="M0 0V{ESS_HEIGHT}H{WIDTH}" fill="none" stroke="currentColor" stroke-opacity=".3"/>'
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>{marks}'
        f'<g transform="translate(0 {low})">{"".join(_bands(record))}</g></svg>'
        f'<div style="font-size:85%;opacity:.7">ESS of {upto}{most} particles over {len(steps)} cycles, '
        f"before resampling{'; resampled at the dots' if marks else ''}. Below, texts by weight: a band that gained "
        "on the others is blue, one that lost orange; <code>.to_html(path)</code> writes a page to read them in.</div>"
    )


def _bands(record: Record) -> Iterator[str]:
    """One path for every text that did not branch, as high as its weight; those too thin to be seen are left out."""
    stride = -(-len(record.steps) // COLUMNS)
    used = [0.0] * len(record.steps)
    for node in tree(record):
        corners = []
        for c, weight in enumerate(node.weight, node.first):
            if c % stride == 0:
                corners.append((c, used[c], used[c] + weight))
            used[c] += weight
        if corners and max(bottom - top for _, top, bottom in corners) * BANDS_HEIGHT > 0.5:
            yield _band(node, corners, WIDTH / len(record.steps), stride)


def _band(node: Node, corners: list[tuple[int, float, float]], column: float, stride: int) -> str:
    def y(share: float) -> str:
        return f"{share * BANDS_HEIGHT:.1f}"

    def x(cycle: float) -> str:
        return f"{min(cycle * column, WIDTH):.1f}"

    there = "".join(f"V{y(top)}H{x(c + stride)}" for c, top, _ in corners)
    back = "".join(f"V{y(bottom)}H{x(c)}" for c, _, bottom in reversed(corners))
    gain = sum(node.gain)
    colour, strength = (BLUE if gain > 0 else ORANGE), 0.15 + 0.6 * min(1.0, abs(gain))
    first = corners[0]
    return (
        f'<path d="M{x(first[0])} {y(first[2])}{there}{back}Z" fill="{colour}" fill-opacity="{strength:.2f}" '
        f'stroke="currentColor" stroke-opacity=".25" stroke-width=".5"><title>{escape(shorten("".join(node.pieces)))}'
        "</title></path>"
    )


def _facts(record: Record) -> str:
    rows = "".join(
        f'<tr><td style="{CELL}">{escape(name)}</td><td style="{CELL}">{escape(fact)}</td></tr>'
        for name, fact in diagnostics.facts(record)
    )
    table = f'<table style="border-collapse:collapse;color:inherit">{rows}</table>'
    return f"<details><summary>{escape(diagnostics.headline(record))}</summary>{table}</details>"
