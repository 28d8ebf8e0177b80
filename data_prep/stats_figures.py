"""The plots of stage `stats`, as image bytes."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from data_prep.stats_lengths import EDGES
from data_prep.stats_losses import LossTable
from data_prep.stats_table import Line

_BEFORE, _AFTER = "#b8c4d6", "#1f5fa8"
_REASONS = ("#1f5fa8", "#e08a3c", "#6aa84f", "#b8548c", "#8a7fc0", "#c9b03c", "#4fa5a5", "#999999")
_SVG_STYLE = {
    "svg.hashsalt": "stats",
    "svg.fonttype": "path",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def share_plot(lines: Sequence[Line], alpha: float, kind: str = "svg") -> bytes:
    """Shares before and after α (log scale), repeats, unknown rate, tokens per character; an `svg` or `png` image."""
    with _figure(_width(len(lines)), 7.2, kind) as (figure, image):
        shares, repeats, unknown, density = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.4, 1, 1.4])
        x = range(len(lines))
        shares.vlines(x, *zip(*[(line.share_before, line.share_after) for line in lines], strict=True), color="#cccccc")
        shares.scatter(x, [line.share_before for line in lines], s=16, color=_BEFORE, label="natural (α = 1)", zorder=2)
        shares.scatter(
            x, [line.share_after for line in lines], s=16, color=_AFTER, label=f"sampled (α = {alpha:g})", zorder=3
        )
        shares.set_yscale("log")
        shares.set_ylabel("share of the data")
        shares.legend(frameon=False, loc="upper right")
        for axes, values, label in (
            (repeats, [line.repeat for line in lines], "repeats"),
            (unknown, [100 * line.unknown_rate for line in lines], "unknown, %"),
            (density, [line.tokens_per_character for line in lines], "tokens / char"),
        ):
            axes.bar(x, values, color=_AFTER, width=0.7)
            axes.set_ylabel(label)
        repeats.axhline(1, color="#888888", linewidth=0.7, linestyle=":")
        _name(density, [line.name for line in lines])
        for axes in (shares, repeats, unknown, density):
            axes.grid(axis="y", color="#eeeeee")
            axes.set_axisbelow(True)
        figure.align_ylabels()
    return image.getvalue()


def length_plot(histograms: dict[str, np.ndarray], kind: str = "svg") -> bytes:
    """Lengths in tokens (log scale): of all records as bars, and the share of each bin in every language as shade."""
    counts = np.stack(list(histograms.values()), axis=1)
    used = np.flatnonzero(counts.sum(1))
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    shares = counts[low:high] / np.maximum(counts.sum(0), 1)
    with _figure(_width(counts.shape[1]), 3.6, kind) as (figure, image):
        each, every = figure.subplots(1, 2, sharey=True, width_ratios=[6, 1])
        each.imshow(shares, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        _name(each, list(histograms))
        octaves = [at for at in range(low, high) if EDGES[at] & (EDGES[at] - 1) == 0]
        each.set_yticks([at - low for at in octaves], [f"{EDGES[at]:,}" for at in octaves])
        each.set_ylabel("tokens, from")
        every.barh(range(high - low), counts[low:high].sum(1), color=_AFTER, height=0.9)
        every.set_xlabel("records")
        every.tick_params(axis="x", rotation=90)
    return image.getvalue()


def loss_plot(table: LossTable, kind: str = "svg") -> bytes:
    """Share of what was read that each reason lost, stacked, by language."""
    losses = table.losses
    with _figure(_width(len(losses)), 3.2, kind) as (figure, image):
        axes = figure.subplots()
        base = np.zeros(len(losses))
        for number, reason in enumerate(table.reasons):
            height = np.array([100 * loss.lost.get(reason, 0) / max(loss.read, 1) for loss in losses])
            color = _REASONS[number % len(_REASONS)]
            axes.bar(range(len(losses)), height, bottom=base, color=color, width=0.7, label=reason)
            base += height
        axes.set_ylabel("lost, %")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderpad=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        _name(axes, [loss.name for loss in losses])
    return image.getvalue()


def _width(columns: int) -> float:
    return max(7.0, 0.155 * columns + 1.6)


def _name(axes: Any, names: Sequence[str]) -> None:
    """Names along the x axis."""
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_xlim(-0.8, len(names) - 0.2)


@contextmanager
def _figure(width: float, height: float, kind: str) -> Iterator[tuple[Any, io.BytesIO]]:
    """A figure in inches to draw into, and where its image will be: the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SVG_STYLE):
        figure, image = Figure(figsize=(width, height), layout="constrained"), io.BytesIO()
        yield figure, image
        figure.savefig(image, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
