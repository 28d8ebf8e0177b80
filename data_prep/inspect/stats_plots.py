"""Draws the plots of stage `stats` as SVG images. The same data always give the same bytes."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from data_prep.inspect.stats_tables import EDGES, DroppedTextTable, StatsLine

_BEFORE_COLOR, _AFTER_COLOR = "#b8c4d6", "#1f5fa8"
_REASON_COLORS = ("#1f5fa8", "#e08a3c", "#6aa84f", "#b8548c", "#8a7fc0", "#c9b03c", "#4fa5a5", "#999999")
_STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def share_plot(lines: Sequence[StatsLine], alpha: float) -> bytes:
    """Plot five numbers of each language or pair as an SVG image: its share of the data before and after sampling with
    the exponent α (log scale), its repeats (used / available examples), the percentage of its tokens that are unknown,
    and its number of tokens per character."""
    with svg_figure((_width(len(lines)), 7.2), "stats") as (figure, image):
        shares, repeats, unknown, density = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.4, 1, 1.4])
        x = range(len(lines))
        before, after = [line.share_before for line in lines], [line.share_after for line in lines]
        shares.vlines(x, before, after, color="#cccccc")
        shares.scatter(x, before, s=16, color=_BEFORE_COLOR, label="natural (α = 1)", zorder=2)
        shares.scatter(x, after, s=16, color=_AFTER_COLOR, label=f"sampled (α = {alpha:g})", zorder=3)
        shares.set(yscale="log", ylabel="share of the data")
        shares.legend(frameon=False, loc="upper right")
        for axes, values, label in (
            (repeats, [line.used / max(line.available, 1) for line in lines], "repeats"),
            (unknown, [100 * line.unknown / max(line.tokens, 1) for line in lines], "unknown, %"),
            (density, [line.tokens / max(line.characters, 1) for line in lines], "tokens / char"),
        ):
            axes.bar(x, values, color=_AFTER_COLOR, width=0.7)
            axes.set_ylabel(label)
        repeats.axhline(1, color="#888888", linewidth=0.7, linestyle=":")
        _name_columns(density, [line.name for line in lines])
        for axes in (shares, repeats, unknown, density):
            _draw_grid(axes)
        figure.align_ylabels()
    return image.getvalue()


def length_plot(histograms: dict[str, np.ndarray]) -> bytes:
    """Plot the lengths of records in tokens (log scale) as an SVG image. Each column is a language or pair; its shades
    show the share of its records in each bin of lengths. The bars at the right show how many records of all languages
    or pairs are in each bin.

    `histograms` maps a language or pair to the number of its records in each bin, int64 [len(EDGES)].
    """
    counts = np.stack(list(histograms.values()), axis=1)
    filled_bins = np.flatnonzero(counts.sum(1))
    low, high = (int(filled_bins[0]), int(filled_bins[-1]) + 1) if len(filled_bins) else (0, 1)
    shares = counts[low:high] / np.maximum(counts.sum(0), 1)
    with svg_figure((_width(counts.shape[1]), 3.6), "stats") as (figure, image):
        by_name, overall = figure.subplots(1, 2, sharey=True, width_ratios=[6, 1])
        by_name.imshow(shares, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        _name_columns(by_name, list(histograms))
        powers_of_two = [i for i in range(low, high) if EDGES[i].bit_count() == 1]
        by_name.set_yticks([i - low for i in powers_of_two], [f"{EDGES[i]:,}" for i in powers_of_two])
        by_name.set_ylabel("tokens, from")
        overall.barh(range(high - low), counts[low:high].sum(1), color=_AFTER_COLOR, height=0.9)
        overall.set_xlabel("records")
        overall.tick_params(axis="x", rotation=90)
    return image.getvalue()


def dropped_text_plot(table: DroppedTextTable) -> bytes:
    """For each language or language pair, plot the percentage of its documents, paragraphs or sentence pairs that were
    lost, stacked by reason, as an SVG image."""
    with svg_figure((_width(len(table.names)), 3.2), "stats") as (figure, image):
        axes = figure.subplots()
        base = np.zeros(len(table.names))
        for i, (reason, heights) in enumerate(table.percents.items()):
            color = _REASON_COLORS[i % len(_REASON_COLORS)]
            axes.bar(range(len(heights)), heights, bottom=base, color=color, width=0.7, label=reason)
            base += heights
        axes.set_ylabel("lost, %")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, borderpad=0)
        _draw_grid(axes)
        _name_columns(axes, table.names)
    return image.getvalue()


def _draw_grid(axes: Any) -> None:
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _name_columns(axes: Any, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_xlim(-0.8, len(names) - 0.2)


def _width(columns: int) -> float:
    return max(7.0, 0.155 * columns + 1.6)  # in inches: the columns, and 1.6 for the axis


@contextmanager
def svg_figure(size: tuple[float, float], salt: str, fonttype: str = "path") -> Iterator[tuple[Any, io.BytesIO]]:
    """Yield (figure of this size in inches, buffer). At the end of the `with` block, the figure is written to the
    buffer as an SVG image.

    The image's ids are derived from `salt`, so that its bytes are the same each time.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": salt, "svg.fonttype": fonttype}):
        figure, image = Figure(figsize=size, layout="constrained"), io.BytesIO()
        yield figure, image
        figure.savefig(image, format="svg", dpi=110, metadata={"Date": None})
