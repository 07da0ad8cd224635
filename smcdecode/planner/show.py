"""A plan as text, as HTML and as a figure. Knows forecasts and, once asked, matplotlib; measures nothing."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Protocol

import numpy as np

from smcdecode.infer.forecast import Forecast, PassTimes, Positions

__all__ = ["figure", "page", "table"]

BLUE, ORANGE, GREY = "#3b6ea8", "#d1702b", "#8a8a8a"
CELL = "padding:2px 12px 2px 0;text-align:left"
HEADS = ("", "N", "K", "s", "tokens/s", "speed-up", "tokens/cycle", "1 + χ²", "± log Ẑ", "distance")


class Shown(Protocol):
    """What of a plan is shown."""

    @property
    def target(self) -> str:
        """As mathematics."""

    @property
    def max_tokens(self) -> int:
        """Length of texts."""

    @property
    def times(self) -> PassTimes:
        """Measured."""

    @property
    def divergence(self) -> dict[float, Positions]:
        """By strictness."""

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """All of them."""

    @property
    def choices(self) -> Mapping[str, Forecast]:
        """By level."""

    @property
    def alone(self) -> Forecast:
        """Without a draft."""

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Sentences."""


def table(plan: Shown) -> str:
    """What was measured, what is recommended, and why."""
    rows = [HEADS, *_rows(plan)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*_measured(plan), "", *lines, "", *plan.verdicts, *_notes()])


def _rows(plan: Shown) -> Iterable[tuple[str, ...]]:
    for name, f in [*plan.choices.items(), ("no draft", plan.alone)]:
        yield (
            name, str(f.particles), str(f.block), f"{f.strictness:g}" if f.block else "-", f"{f.tokens_per_second:.3g}",
            f"{f.speedup:.2f}", f"{f.tokens_per_cycle:.2f}", _rho(f.chi2), f"{f.error:.2g}", f"{f.distance:.2f}",
        )  # fmt: skip


def _rho(value: float) -> str:
    """1 + χ²; beyond a million it is a few tokens that the draft all but never writes."""
    return f"{value:.3g}" if value < 1e6 else "> 1e6"


def _measured(plan: Shown) -> list[str]:
    any_s = next(iter(plan.divergence.values()))
    texts, places = len(np.unique(any_s.text)), len(any_s.text)
    lines = [f"{plan.target}, texts of {plan.max_tokens} tokens; measured along {places} tokens of {texts} texts"]
    if 1.0 in plan.divergence:
        beta = float(plan.divergence[1.0].acceptance.mean())
        lines.append(f"draft against target: acceptance {beta:.3f}, total variation {1 - beta:.3f} a token")
    if 0.0 in plan.divergence:
        lines[-1] += f", 1 + χ² {_rho(float(plan.divergence[0.0].went_on.mean()))}"
    for name, curve in (("target", plan.times.target), ("draft", plan.times.draft)):
        passes = ", ".join(f"{w:.0f}: {1e3 * s:.3g}" for w, s in zip(curve.widths, curve.seconds, strict=True))
        lines.append(f"{name} pass, positions: milliseconds — {passes}")
    return lines


def _notes() -> list[str]:
    return [
        "threshold 0.5 for all: weights as rough as to fall below it are resampled at once, calm ones are left alone.",
        "distance: at most so far is the law of one drawn text from the target, in total variation.",
    ]


def page(plan: Shown) -> str:
    """For notebooks."""
    head, *rows = [HEADS, *_rows(plan)]
    body = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    lines = "".join(f"<div>{escape(line)}</div>" for line in plan.verdicts)
    small = "".join(f'<div style="font-size:85%;opacity:.7">{escape(x)}</div>' for x in [*_measured(plan), *_notes()])
    return (
        '<div style="max-width:70em;line-height:1.4"><table style="border-collapse:collapse;color:inherit">'
        f"<tr>{_cells(head, 'th')}</tr>{body}</table>{lines}{small}</div>"
    )


def _cells(row: Iterable[str], tag: str) -> str:
    return "".join(f'<{tag} style="{CELL}">{escape(cell)}</{tag}>' for cell in row)


def figure(plan: Shown) -> Any:
    """Every setting by speed and distance, the frontier, and the recommended ones; a matplotlib Figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "smcdecode[plot]"') from error
    made = Figure(figsize=(8, 5), layout="constrained")
    axes = made.subplots()
    points = [(f.tokens_per_second, f.distance) for f in plan.forecasts]
    axes.plot(*zip(*points, strict=True), ".", color=GREY, markersize=4, label="settings (N, K, s)")
    axes.plot(*zip(*frontier(points), strict=True), color=BLUE, drawstyle="steps-pre", label="frontier")
    axes.axvline(plan.alone.tokens_per_second, color=GREY, linewidth=0.8, linestyle=":", label="no draft")
    for level, f in plan.choices.items():
        axes.plot(f.tokens_per_second, f.distance, "o", color=ORANGE)
        setting = f"N={f.particles} K={f.block} s={f.strictness:g}" if f.block else f"no draft, N={f.particles}"
        axes.annotate(
            f"{level}: {setting}", (f.tokens_per_second, f.distance), xytext=(6, 6), textcoords="offset points"
        )
    axes.set(xlabel="tokens a second", ylabel="distance of one text from the target, at most", ylim=(-0.03, 1.03))
    axes.set_title(plan.target, fontsize="medium", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    return made


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (speed, distance) that no other beats in both, fastest first."""
    best: list[tuple[float, float]] = []
    for speed, distance in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or distance < best[-1][1]:
            best.append((speed, distance))
    return best
