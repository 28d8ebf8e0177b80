"""The figures of the report: functions that draw records as `<svg>`. The page gives the SVG its colours and font, so
that one figure fits both the light and the dark style of the page.

Logged quantities with the same title share a panel, such as `auc_mono` and `auc_para`. A logged name that neither the
objective nor this file knows gets a panel of its own, so a new metric needs no change here.
"""

import io
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..cli import format_number

Records = Sequence[Mapping[str, Any]]
Quantities = Mapping[str, Mapping[str, Any]]  # name -> a quantity of the objective (`objectives.protocol.Quantity`)

_TITLES = {
    "loss": "Joint loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_s": "Tokens per second",
    "flops_per_s": "Achieved FLOP/s",
    "peak_fraction": "Share of a matrix product's rate (1 is all of it)",
    "data_wait": "Reading data (share of a step)",
    "memory_gib": "Largest memory of a process (GiB)",
}
_UNIGRAM = "unigram_nll"  # prefix of the keys of a unigram model's losses, which are dashed lines in the loss's panel
_NOT_DRAWN = {"step", "tokens", "skipped_steps", "seconds_left"}
_MOST_POINTS = 500  # a longer curve is averaged down to this many points

INK, MUTED, GRID, SURFACE = "#1f2430", "#6b7280", "#e3e6eb", "#fefefe"
MONO, PARA, TOTAL = "#2f6fdb", "#d9622b", "#5b5f97"
# Colours of the runs that one page compares, in order.
RUN_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
# Colour in a figure -> CSS variable of the template. Figures use no other colours.
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    MONO: "mono",
    PARA: "para",
    TOTAL: "total",
} | {colour: f"run{number}" for number, colour in enumerate(RUN_COLOURS)}
_COLOURS = {"mono": MONO, "para": PARA, "all": TOTAL}  # by series (see `panel_and_series`)
# Parts to remove from matplotlib's SVG; its <style> would apply to the whole page.
_UNUSED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>| font-family: [^;]*;"
    r'| id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|PathCollection)_\d+"',
    re.S,
)
_WIDE, _NARROW, _HEIGHT = 9.6, 4.6, 2.8  # inches
_STYLE = {
    "svg.fonttype": "none",  # text stays text, in the page's font, so it can be selected and takes few bytes
    "svg.hashsalt": "xlme_ds",  # the same data gives the same bytes
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
}


class Panel(NamedTuple):
    """A figure, and the marks that its legend must explain: `mono`, `para`, `all`, `raw`, `heldout`, `unigram`,
    `chance`, `border`."""

    svg: Markup
    marks: set[str]


def panel_and_series(key: str, quantities: Quantities) -> tuple[str, str]:
    """Returns (title of the panel that shows the logged `key`, the key's series in that panel). The series is `mono`,
    `para`, or `all` for a key without a task."""
    suffix = key.rpartition("_")[2]
    name = key.removesuffix("_" + suffix) if suffix in ("mono", "para") else key
    quantity = quantities.get(key) or quantities.get(name)
    series = suffix if name != key else "all"
    if quantity is None:
        return _TITLES.get(name, name.replace("_", " ")), series
    unit = f" ({quantity['unit']})" if quantity["unit"] else ""
    return quantity["title"] + unit, quantity["task"] or series


def is_drawn(key: str) -> bool:
    """Whether a logged key has a curve of its own."""
    return key not in _NOT_DRAWN and not key.startswith(_UNIGRAM)


def curves(
    metrics: Records,
    heldout: Records,
    quantities: Quantities,
    borders: Sequence[int] = (),
    separate: Container[str] = (),
) -> dict[str, Panel]:
    """The panels of all logged quantities, by title. Thin lines are raw values, thick lines are smoothed values, and
    points are values on held-out text.

    The page puts the panels whose titles are in `separate` in another section. A panel that is alone in its section is
    wide. The loss comes first, then the objective's `quantities`, then the keys of `_TITLES`, then all other keys in
    the order of their first record. A vertical line marks each step in `borders`, where the run begins to read other
    data.
    """
    keys_of: dict[str, dict[str, str]] = {  # title of a panel -> its logged keys, by series
        panel_and_series(key, quantities)[0]: {} for key in ("loss", *quantities, *_TITLES)
    }
    for record in [*metrics, *heldout]:
        for key, value in record.items():
            title, series = panel_and_series(key, quantities)
            if is_drawn(key) and isinstance(value, int | float):
                keys_of.setdefault(title, {})[series] = key
    keys_of = {title: keys for title, keys in keys_of.items() if keys}
    panel_counts = Counter(title in separate for title in keys_of)  # whether in `separate` -> number of panels
    widths = {title: _WIDE if panel_counts[title in separate] == 1 else _NARROW for title in keys_of}
    return {
        title: _panel(title, widths[title], keys, metrics, heldout, quantities, borders)
        for title, keys in keys_of.items()
    }


def compared_curves(panels: Mapping[str, tuple[str, Sequence[tuple[Records, Records]]]]) -> dict[str, Markup]:
    """Figures that compare several runs. `panels` has (logged key, runs) by title. A run is (metrics records, held-out
    records); both are empty if the figure does not show the run. Each run has its own colour. A run is drawn by its
    held-out values, or by its smoothed metrics if it has none. A figure that is alone is wide."""
    figures = {}
    for title, (key, runs) in panels.items():
        axes = _new_axes(_WIDE if len(panels) == 1 else _NARROW)
        for colour, (metrics, heldout) in zip(RUN_COLOURS, runs, strict=False):
            steps, values = points(heldout, key)
            if len(steps):
                axes.plot(steps, values, "o-", color=colour, linewidth=1.6, markersize=4, markeredgecolor=SURFACE)
            else:
                steps, values = downsample(*points(metrics, key))
                axes.plot(steps, smooth(values), color=colour, linewidth=1.6)
        figures[title] = _svg_over_steps(axes, title)
    return figures


def _svg_over_steps(axes: Axes, title: str) -> Markup:
    """The SVG of curves over steps, with ticks on both axes."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}" if abs(value) < 1000 else format_number(value))
    return _svg(axes, title)


def _panel(
    title: str,
    width: float,
    keys: Mapping[str, str],
    metrics: Records,
    heldout: Records,
    quantities: Quantities,
    borders: Sequence[int],
) -> Panel:
    """The panel with this title. `keys`: series -> the logged key whose values it shows."""
    axes, marks = _new_axes(width), set(keys)
    for step in borders:
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=":")
        marks.add("border")
    axes.margins(y=0.08)
    for series, key in sorted(keys.items()):
        colour = _COLOURS[series]
        steps, values = downsample(*points(metrics, key))
        axes.plot(steps, smooth(values), color=colour, linewidth=1.9)
        axes.plot(*points(heldout, key), "o:", color=colour, linewidth=0.9, markersize=5, markeredgecolor=SURFACE)
        if quantities.get(key, {}).get("unigram"):
            unigram_losses = points(heldout, f"{_UNIGRAM}_{series}")[1]
            if len(unigram_losses):
                axes.axhline(unigram_losses[-1], color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
                marks.add("unigram")
        marks |= {name for name, records in (("raw", metrics), ("heldout", heldout)) if len(points(records, key)[0])}
    if any(key.startswith("auc_") for key in keys.values()):
        axes.axhline(0.5, color=MUTED, linewidth=1, linestyle="--")  # the AUC of random guesses
        marks.add("chance")
    axes.set_ylim(axes.get_ylim())  # before the raw values are drawn, so that their noise does not widen the axis
    for series, key in keys.items():
        axes.plot(*downsample(*points(metrics, key)), color=_COLOURS[series], linewidth=0.8, alpha=0.3, zorder=1.5)
    return Panel(_svg_over_steps(axes, title), marks)


def dimensions_by_layer(records: Records) -> Markup:
    """A figure of the number of dimensions in which each layer's token states vary, over the steps. The line of the
    embedding is dashed, the line of the last layer is thick. The figure is wide, because it is alone in its section."""
    axes = _new_axes(_WIDE)
    # A record lacks the layers whose number was not finite.
    layers = [key for key in max(records, key=len) if key != "step"]
    for key in layers:
        line_style, width, colour = ("--", 1.4, PARA) if key == layers[0] else ("-", 0.8, MUTED)
        axes.plot(*points(records, key), line_style, color=colour, linewidth=width)
    axes.plot(*points(records, layers[-1]), "o-", color=MONO, linewidth=2.0, markersize=5, markeredgecolor=SURFACE)
    axes.set(ylim=(0, None), xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    return _svg(axes, "Dimensions of the token states by layer")


def points(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, values), both float64, from the records that have a number under `key`."""
    pairs = [(record["step"], record[key]) for record in records if isinstance(record.get(key), int | float)]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def downsample(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, values) of at most `_MOST_POINTS` points; each is the mean of a group of neighbouring points."""
    group_size = max(1, -(-len(steps) // _MOST_POINTS))  # rounded up
    starts = np.arange(0, len(steps), group_size)
    sizes = np.diff(np.append(starts, len(steps)))  # the last group may be smaller
    return np.add.reduceat(steps, starts) / sizes, np.add.reduceat(values, starts) / sizes


def smooth(values: np.ndarray) -> np.ndarray:
    """Moving average over a 25th of the curve; values that are not finite are left out.

    Near the start, where curves are steep, the window shrinks on both sides and stays centred, so that the average does
    not lag behind the curve. Near the end it shrinks on the right side only.
    """
    finite = np.isfinite(values)
    # Sum and count of the finite values before each index. A window's sum is sums[end] - sums[start].
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    centre = np.arange(len(values))
    reach = np.minimum(len(values) // 50, centre)
    start, end = centre - reach, np.minimum(centre + reach + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[end] - sums[start]) / (counts[end] - counts[start])


def retrieval_by_layer(retrieval: Mapping[str, Any]) -> Markup:
    """A figure of the retrieval accuracy at every layer, in both directions, before and after training; a dashed line
    is the chance level."""
    axes = _new_axes()
    for when, style, width in (("before", ":", 1.6), ("after", "-", 2.0)):
        for direction, colour in (("en_xx", MONO), ("xx_en", PARA)):
            if retrieval.get(when):
                values = retrieval[when]["overall"][direction]
                axes.plot(retrieval["layers"], values, style, color=colour, linewidth=width, marker="o", markersize=4)
    axes.axhline(1 / retrieval["candidates"], color=MUTED, linewidth=1, linestyle="--")
    axes.set(ylim=(0, None), xlabel="layer (0 = embeddings)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    return _svg(axes, "Retrieval accuracy by layer before and after training")


def nats(value: float | None) -> str:
    """A loss, or a difference of losses, as text with two decimals; a dash for None."""
    return "–" if value is None else f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def percent(fraction: float) -> str:
    """A fraction as a percentage with three significant digits."""
    return f"{format_number(100 * fraction)}%"


def _new_axes(width: float = _NARROW) -> Axes:
    """Axes of a new figure in the report's style; `width` in inches."""
    with matplotlib.rc_context(_STYLE):
        return Figure(figsize=(width, _HEIGHT), layout="constrained").add_subplot()


def _svg(axes: Axes, label: str) -> Markup:
    """The figure of `axes` as an `<svg>` element that scales with the page; screen readers say `label`."""
    buffer = io.StringIO()
    figure = axes.get_figure(root=True)
    assert figure is not None
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = _UNUSED.sub("", "<svg" + buffer.getvalue().partition("<svg")[2])
    svg = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', "", svg, count=1)  # a fixed size would not scale
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # Safe without escaping: matplotlib escapes the texts that it draws.
    return Markup(svg.replace("<svg", Markup('<svg role="img" aria-label="{}"').format(label), 1))
