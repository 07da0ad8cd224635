"""A run as a figure: ESS and log-weights over cycles. Knows records and, once asked, matplotlib."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smcdecode.report.record import Record

__all__ = ["figure"]

BLUE, ORANGE, GREY = "#3b6ea8", "#d1702b", "#8a8a8a"


def figure(record: Record) -> Any:
    """A matplotlib Figure of two panels; no global state of matplotlib is touched.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "smcdecode[plot]"') from error
    made = Figure(figsize=(8, 5), layout="constrained")
    above, below = made.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    _draw_ess(above, record)
    _draw_weights(below, record)
    return made


def _draw_ess(axes: Any, record: Record) -> None:
    ess = np.array([step.ess for step in record.steps])
    cycles = np.arange(1, len(ess) + 1)
    resampled = np.array([step.resampled for step in record.steps])
    axes.plot(cycles, ess, color=BLUE, linewidth=1.5, marker=".", label="ESS before resampling")
    axes.plot(
        cycles,
        [s.survivors for s in record.steps],
        color=GREY,
        linewidth=1,
        drawstyle="steps-mid",
        label="first ancestors left",
    )
    axes.plot(cycles[resampled], ess[resampled], "o", color=ORANGE, label="resampled")
    particles = np.array([step.particles for step in record.steps])
    if 0 < record.asked.threshold < 1:
        line = {"color": GREY, "linewidth": 0.8, "linestyle": ":", "drawstyle": "steps-mid"}
        axes.plot(cycles, record.asked.threshold * particles, label="threshold", **line)
    axes.set(ylim=(0, particles.max(initial=record.N) * 1.05), ylabel="particles")
    axes.set_title(f"{record.asked.target}: log Ẑ = {record.log_z:.4g}", fontsize="medium", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)


def _draw_weights(axes: Any, record: Record) -> None:
    """Normalised log-weights, each joined with its ancestor's; a resampling starts them anew at 1/N."""
    from matplotlib.collections import LineCollection

    log_W = _log_weights(record)
    cycles = np.arange(1, len(log_W) + 1)
    axes.plot(np.repeat(cycles, log_W.shape[1]), log_W.flatten(), ".", color=BLUE, markersize=3, alpha=0.7)
    axes.add_collection(LineCollection(list(_joints(record, log_W)), colors=BLUE, linewidths=0.7, alpha=0.4))
    even = [-np.log(step.particles) for step in record.steps]
    axes.plot(cycles, even, color=GREY, linewidth=0.8, linestyle=":", drawstyle="steps-mid", label="1/N")
    axes.set(xlabel="cycle", ylabel="log W", xlim=(0.5, len(log_W) + 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)


def _log_weights(record: Record) -> NDArray[np.float64]:
    """(cycles, N) float64 normalised log-weights before resampling; NaN, which is not drawn, for dead particles."""
    log_w = np.array([step.log_w for step in record.steps])
    total = np.logaddexp.reduce(log_w, axis=1, keepdims=True)
    alive = np.isfinite(log_w)
    return np.where(alive, log_w - np.where(np.isfinite(total), total, 0.0), np.nan)


def _joints(record: Record, log_W: NDArray[np.float64]) -> NDArray[np.float64]:
    """(segments, 2, 2): from each particle's ancestor in one cycle to itself in the next."""
    ancestors = np.array([step.ancestors for step in record.steps[:-1]], dtype=int).reshape(-1, log_W.shape[1])
    even = -np.log([[step.particles] for step in record.steps[1:]])
    resampled = np.array([step.resampled for step in record.steps[:-1]], dtype=bool)[:, None]
    start = np.where(resampled, even.reshape(-1, 1), np.take_along_axis(log_W[:-1], ancestors, 1))
    cycle = np.broadcast_to(np.arange(1, len(log_W))[:, None], start.shape)
    ends = np.stack([np.stack([cycle, start], -1), np.stack([cycle + 1, log_W[1:]], -1)], -2).reshape(-1, 2, 2)
    drawn: NDArray[np.float64] = ends[np.isfinite(ends).all((1, 2))]
    return drawn
